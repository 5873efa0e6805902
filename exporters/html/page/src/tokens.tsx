// SPDX-License-Identifier: Apache-2.0
// Every call over time. A click, the arrow keys or the slider choose one for the timeline.
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { resolve } from "./colour";
import { ABSENT, count, plural, time } from "./format";
import type { Doc, Tokens } from "./types";
import { Note, Section, useTheme, useWidth } from "./ui";

/** The call whose timeline is shown first: the slowest decode that has one. */
export const firstChoice = (doc: Doc): number => {
  const t = doc.tokens;
  const decode = doc.phases.indexOf("decode");
  let best = -1;
  t.ns.forEach((ns, i) => {
    const better = best < 0 || rank(t, decode, i) > rank(t, decode, best) || (rank(t, decode, i) === rank(t, decode, best) && ns > (t.ns[best] ?? 0));
    if (better) best = i;
  });
  return best;
};

const rank = (t: Tokens, decode: number, i: number): number =>
  ((t.timeline[i] ?? -1) >= 0 ? 2 : 0) + (t.phase[i] === decode && t.status[i] === 0 ? 1 : 0);

/** ns per token of a call; of the call itself where tokens are not known. */
const perToken = (t: Tokens, i: number): number => (t.ns[i] ?? 0) / Math.max(1, t.tokens[i] ?? 1);

interface Props {
  doc: Doc;
  call: number;
  choose: (call: number) => void;
}

export const TokensPanel = (p: Props) => {
  const t = p.doc.tokens;
  const n = t.begin.length;
  if (!n) {
    return (
      <Section id="tokens" title="Tokens over time">
        <Note>{t.note ?? "No call was recorded."}</Note>
      </Section>
    );
  }
  return (
    <Section
      id="tokens"
      title="Tokens over time"
      lead="One point per call of the engine: its time divided by the tokens it processed. Choose a call to see inside it; drag over a stretch to enlarge it, double-click to see all."
    >
      <div class="card">
        <Chart {...p} />
        <Legend doc={p.doc} />
        <Picker {...p} />
      </div>
      {t.note ? <Note>{t.note}</Note> : null}
    </Section>
  );
};

const phaseVar = (phase: string): string =>
  phase === "decode" ? "--p-decode" : phase === "prefill" ? "--p-prefill" : "--p-other";

const usedPhases = (doc: Doc): string[] => [...new Set(doc.tokens.phase)].sort((a, b) => a - b).map((i) => doc.phases[i] ?? "other");

const Legend = ({ doc }: { doc: Doc }) => (
  <ul class="legend">
    {usedPhases(doc).map((phase) => (
      <li key={phase}>
        <i style={{ background: `var(${phaseVar(phase)})` }} />
        {phase}
      </li>
    ))}
    {doc.tokens.kv.some((v) => v !== null) ? (
      <li>
        <i class="line" style={{ borderColor: "var(--faint)" }} />
        KV length (right)
      </li>
    ) : null}
    {doc.about.losses.gaps.length ? (
      <li>
        <i style={{ background: "var(--bad)", opacity: 0.35 }} />
        records lost
      </li>
    ) : null}
  </ul>
);

const Chart = ({ doc, call, choose }: Props) => {
  const { ref, width } = useWidth();
  const theme = useTheme();
  const plot = useRef<uPlot | null>(null);
  const chosen = useRef(call);
  chosen.current = call;
  const t = doc.tokens;
  const data = useMemo(() => series(doc), [doc]);

  useEffect(() => {
    if (!ref.current || !width) return;
    const made = new uPlot(options(doc, width, data.names, chosen, choose), data.columns, ref.current);
    plot.current = made;
    return () => {
      made.destroy();
      plot.current = null;
    };
  }, [width, theme, data]);
  useEffect(() => plot.current?.redraw(false), [call]);
  return (
    <div class="plot" ref={ref} role="img" aria-label={`Time per token of ${plural(t.begin.length, "call")} over ${time(doc.about.seconds * 1e9)}`} />
  );
};

const series = (doc: Doc): { names: string[]; columns: uPlot.AlignedData } => {
  const t = doc.tokens;
  const names = usedPhases(doc);
  const x = t.begin.map((ns) => ns / 1e9);
  const kv = t.kv.map((v) => v ?? undefined);
  const by = names.map((name) => t.phase.map((phase, i) => (doc.phases[phase] === name ? perToken(t, i) / 1e6 : null)));
  return { names, columns: [x, ...by, kv] as uPlot.AlignedData };
};

const options = (
  doc: Doc,
  width: number,
  names: string[],
  chosen: { current: number },
  choose: (call: number) => void,
): uPlot.Options => {
  const t = doc.tokens;
  const grid = { stroke: resolve("--line"), width: 1 };
  const ink = resolve("--soft");
  const dense = t.begin.length > width / 3;
  const values = t.begin.map((_, i) => perToken(t, i)).filter((v) => v > 0);
  const wide = values.length > 0 && Math.max(...values) > 25 * Math.min(...values);
  const phases: uPlot.Series[] = names.map((name) => ({
    label: name,
    stroke: resolve(phaseVar(name)),
    width: name === "decode" ? 1 : 0,
    fill: "transparent",
    points: { show: true, size: dense ? 3 : 6, fill: resolve(phaseVar(name)), width: 0 },
    paths: name === "decode" && uPlot.paths.linear ? uPlot.paths.linear() : () => null,
    scale: "y",
    spanGaps: false,
  }));
  return {
    width,
    height: width < 500 ? 230 : 290,
    scales: { x: { time: false }, y: { distr: wide ? 3 : 1, range: wide ? undefined : (_u, _min, max) => [0, max * 1.08] }, kv: { range: (_u, _min, max) => [0, Math.max(max, 1) * 1.08] } } as uPlot.Scales,
    legend: { show: false },
    cursor: { points: { show: true, size: 9 }, drag: { x: true, y: false, dist: 6 }, y: false, focus: { prox: 30 } },
    axes: [
      { stroke: ink, grid, ticks: grid, size: 30, values: (_u, ticks) => ticks.map((v) => `${v} s`) },
      { stroke: ink, grid, ticks: grid, size: 64, values: (_u, ticks) => ticks.map((v) => (v === null ? "" : time(v * 1e6))) },
      { scale: "kv", side: 1, stroke: resolve("--faint"), grid: { show: false }, ticks: { show: false }, size: 50, values: (_u, ticks) => ticks.map((v) => count(v)) },
    ],
    series: [{}, ...phases, { label: "KV length", scale: "kv", stroke: resolve("--faint"), width: 1, dash: [4, 4], points: { show: false } }],
    hooks: {
      drawClear: [(u) => gaps(u, doc)],
      draw: [(u) => mark(u, t, chosen.current)],
      ready: [(u) => onClick(u, choose)],
    },
  };
};

/** A click chooses; the end of a drag, which enlarges what it went over, is none. */
const onClick = (u: uPlot, choose: (call: number) => void) => {
  let from = 0;
  u.over.addEventListener("mousedown", (e) => {
    from = e.clientX;
  });
  u.over.addEventListener("click", (e) => {
    if (Math.abs(e.clientX - from) < 6 && typeof u.cursor.idx === "number") choose(u.cursor.idx);
  });
};

/** Where records were lost. */
const gaps = (u: uPlot, doc: Doc) => {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.fillStyle = resolve("--bad");
  ctx.globalAlpha = 0.22;
  for (const [begin, end] of doc.about.losses.gaps) {
    const left = Math.max(bbox.left, u.valToPos(begin / 1e9, "x", true));
    const right = Math.min(bbox.left + bbox.width, u.valToPos(end / 1e9, "x", true));
    if (right >= bbox.left && left <= bbox.left + bbox.width) ctx.fillRect(left, bbox.top, Math.max(2, right - left), bbox.height);
  }
  ctx.restore();
};

const mark = (u: uPlot, t: Tokens, call: number) => {
  const at = t.begin[call];
  if (at === undefined) return;
  const x = u.valToPos(at / 1e9, "x", true);
  const y = u.valToPos(perToken(t, call) / 1e6, "y", true);
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = resolve("--text");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.beginPath();
  ctx.arc(x, y, 6 * devicePixelRatio, 0, 2 * Math.PI);
  ctx.stroke();
  ctx.restore();
};

const Picker = ({ doc, call, choose }: Props) => {
  const t = doc.tokens;
  const last = t.begin.length - 1;
  const step = (by: number) => choose(Math.min(last, Math.max(0, call + by)));
  const decode = doc.phases.indexOf("decode");
  const decodes = t.ns.map((_, i) => i).filter((i) => t.phase[i] === decode && t.status[i] === 0);
  const byTime = [...decodes].sort((a, b) => perToken(t, a) - perToken(t, b));
  return (
    <div class="picker">
      <label class="hidden" for="call-slider">
        Call
      </label>
      <input
        id="call-slider"
        type="range"
        min={0}
        max={last}
        value={call}
        onInput={(e) => choose(Number(e.currentTarget.value))}
        aria-valuetext={describe(doc, call)}
      />
      <div class="row tight">
        <button type="button" class="btn icon" id="call-previous" disabled={call <= 0} onClick={() => step(-1)} aria-label="Previous call">
          ◀
        </button>
        <button type="button" class="btn icon" id="call-next" disabled={call >= last} onClick={() => step(1)} aria-label="Next call">
          ▶
        </button>
        <button type="button" class="btn" id="call-slowest" disabled={!byTime.length} onClick={() => choose(byTime.at(-1) ?? call)}>
          Slowest token
        </button>
        <button type="button" class="btn" id="call-median" disabled={!byTime.length} onClick={() => choose(byTime[byTime.length >> 1] ?? call)}>
          Median token
        </button>
        <span id="call-chosen">{describe(doc, call)}</span>
      </div>
    </div>
  );
};

export const describe = (doc: Doc, call: number): string => {
  const t = doc.tokens;
  if (t.begin[call] === undefined) return "";
  const tokens = t.tokens[call] ?? null;
  const parts = [
    `call ${call + 1} of ${t.begin.length}`,
    doc.phases[t.phase[call] ?? -1] ?? "other",
    tokens === null ? `${ABSENT} tokens` : plural(tokens, "token"),
    time(t.ns[call] ?? null),
    `at ${((t.begin[call] ?? 0) / 1e9).toFixed(3)} s`,
  ];
  if (t.status[call] !== 0) parts.push(`returned ${t.status[call]}`);
  return parts.join(" · ");
};
