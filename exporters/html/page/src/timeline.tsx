// SPDX-License-Identifier: Apache-2.0
// One call from inside: graphs, kernels, and what every thread did meanwhile.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { KINDS, KIND_LABEL, kindVar } from "./colour";
import { percent, plural, time } from "./format";
import { GUTTER, type Lane, type Slice, type View, draw, laneAt, lanesOf } from "./lanes";
import { describe } from "./tokens";
import type { Doc, Spot, Timeline } from "./types";
import { STATES } from "./types";
import { timelineOf } from "./unpack";
import { Note, Section, useTheme, useWidth } from "./ui";

interface Props {
  doc: Doc;
  call: number;
  choose: (call: number) => void;
  show: (spot: Spot) => void;
}

export const TimelinePanel = ({ doc, call, choose, show }: Props) => {
  const [timeline, setTimeline] = useState<Timeline | null | undefined>(undefined);
  useEffect(() => {
    let current = true;
    timelineOf(doc, call).then(
      (found) => current && setTimeline(found),
      () => current && setTimeline(null),
    );
    return () => {
      current = false;
    };
  }, [doc, call]);
  const near = nearest(doc, call);
  return (
    <Section
      id="timeline"
      title="Timeline of one call"
      lead="Drag to move, + and − or Ctrl and the wheel to zoom. With the keyboard: ← and → go from kernel to kernel, + and − zoom, 0 shows all."
    >
      <div class="card">
        <div class="row tight">
          <b id="timeline-call">{describe(doc, call)}</b>
        </div>
        {timeline ? (
          <Lanes key={timeline.call} doc={doc} timeline={timeline} show={show} />
        ) : timeline === null ? (
          <p class="note">
            {doc.timelines.count ? "No timeline is kept for this call. " : (doc.timelines.note ?? "No timeline was recorded.")}
            {near >= 0 ? (
              <button type="button" class="btn link" onClick={() => choose(near)}>
                Show the nearest call that has one
              </button>
            ) : null}
          </p>
        ) : null}
      </div>
      {doc.timelines.count && doc.timelines.note ? <Note>{doc.timelines.note}</Note> : null}
    </Section>
  );
};

const nearest = (doc: Doc, call: number): number => {
  let best = -1;
  doc.tokens.timeline.forEach((index, i) => {
    if (index >= 0 && (best < 0 || Math.abs(i - call) < Math.abs(best - call))) best = i;
  });
  return best;
};

const Lanes = ({ doc, timeline, show }: { doc: Doc; timeline: Timeline; show: Props["show"] }) => {
  const lanes = useMemo(() => lanesOf(doc, timeline), [doc, timeline]);
  const kernels = lanes[1]?.slices ?? [];
  const lost = doc.about.losses.gaps.filter(([begin, end]) => begin < timeline.begin + timeline.ns && end > timeline.begin);
  const whole = useMemo((): View => ({ from: 0, to: Math.max(1, timeline.ns) }), [timeline]);
  const [view, setView] = useState(whole);
  const [chosen, setChosen] = useState<Slice | null>(null);
  const [tip, setTip] = useState<{ x: number; y: number; text: string } | null>(null);
  const { ref, width } = useWidth();
  const theme = useTheme();
  const canvas = useRef<HTMLCanvasElement>(null);
  const drag = useRef<{ x: number; view: View; moved: boolean } | null>(null);
  const gutter = width < 520 ? 66 : GUTTER;

  useEffect(() => {
    if (canvas.current && width) draw(canvas.current, lanes, view, width, gutter, chosen);
  }, [lanes, view, width, theme, chosen]);

  const clamp = (next: View): View => {
    const length = Math.min(whole.to, Math.max(200, next.to - next.from));
    const from = Math.min(whole.to - length, Math.max(0, next.from));
    return { from, to: from + length };
  };
  const zoom = (factor: number, middle = (view.from + view.to) / 2) =>
    setView(clamp({ from: middle - (middle - view.from) * factor, to: middle + (view.to - middle) * factor }));
  const timeAt = (x: number) => view.from + ((x - gutter) / Math.max(1, width - gutter)) * (view.to - view.from);
  const sliceAt = (x: number, y: number): Slice | null => pick(lanes, laneAt(lanes, y), timeAt(x), ((view.to - view.from) / Math.max(1, width - gutter)) * 2);
  const place = (e: PointerEvent | WheelEvent): [number, number] => {
    const box = canvas.current?.getBoundingClientRect();
    return [e.clientX - (box?.left ?? 0), e.clientY - (box?.top ?? 0)];
  };
  const go = (to: number) => {
    const slice = kernels[Math.min(kernels.length - 1, Math.max(0, to))];
    if (!slice) return;
    setChosen(slice);
    if (slice.at < view.from || slice.at + slice.ns > view.to) {
      const half = (view.to - view.from) / 2;
      setView(clamp({ from: slice.at + slice.ns / 2 - half, to: slice.at + slice.ns / 2 + half }));
    }
  };

  useEffect(() => {
    // Not through JSX: a wheel listener must say that it may stop the page from scrolling.
    const element = canvas.current;
    const onWheel = (e: WheelEvent) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      zoom(e.deltaY > 0 ? 1.25 : 0.8, timeAt(place(e)[0]));
    };
    element?.addEventListener("wheel", onWheel, { passive: false });
    return () => element?.removeEventListener("wheel", onWheel);
  });

  const onKey = (e: KeyboardEvent) => {
    const at = chosen ? kernels.indexOf(chosen) : -1;
    const act: Record<string, () => void> = {
      ArrowRight: () => go(at + 1),
      ArrowLeft: () => go(at < 0 ? 0 : at - 1),
      Home: () => go(0),
      End: () => go(kernels.length - 1),
      "+": () => zoom(0.6, chosen ? chosen.at + chosen.ns / 2 : undefined),
      "=": () => zoom(0.6, chosen ? chosen.at + chosen.ns / 2 : undefined),
      "-": () => zoom(1 / 0.6),
      "0": () => setView(whole),
      Escape: () => setChosen(null),
    };
    const action = act[e.key];
    if (!action || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    action();
  };
  const onMove = (e: PointerEvent) => {
    const [x, y] = place(e);
    if (drag.current) {
      const moved = x - drag.current.x;
      if (Math.abs(moved) > 3) drag.current.moved = true;
      const by = (moved / Math.max(1, width - gutter)) * (drag.current.view.to - drag.current.view.from);
      setView(clamp({ from: drag.current.view.from - by, to: drag.current.view.to - by }));
      return;
    }
    const text = tipText(lanes, sliceAt(x, y), laneAt(lanes, y), timeAt(x), view, width);
    setTip(text ? { x, y, text } : null);
  };
  return (
    <>
      <div class="plot" ref={ref} style={{ marginTop: "10px" }}>
        <canvas
          ref={canvas}
          id="timeline-canvas"
          class="canvas"
          tabIndex={0}
          role="application"
          aria-label={`Timeline: ${kernels.length} kernels in ${time(timeline.ns)}`}
          onKeyDown={onKey}
          onPointerDown={(e) => {
            drag.current = { x: place(e)[0], view, moved: false };
            e.currentTarget.setPointerCapture(e.pointerId);
          }}
          onPointerMove={onMove}
          onPointerUp={(e) => {
            if (drag.current && !drag.current.moved) setChosen(sliceAt(...place(e)));
            drag.current = null;
          }}
          onPointerLeave={() => setTip(null)}
        />
        {tip ? (
          <div class="tip" style={{ left: `${Math.min(tip.x + 12, Math.max(0, width - 230))}px`, top: `${tip.y + 16}px` }}>
            {tip.text}
          </div>
        ) : null}
      </div>
      <div class="row tight" style={{ marginTop: "8px" }}>
        <button type="button" class="btn icon" id="zoom-in" onClick={() => zoom(0.5)} aria-label="Zoom in">
          +
        </button>
        <button type="button" class="btn icon" id="zoom-out" onClick={() => zoom(2)} aria-label="Zoom out">
          −
        </button>
        <button type="button" class="btn" id="zoom-all" onClick={() => setView(whole)}>
          All
        </button>
        <span class="note" id="timeline-view" style={{ margin: 0 }}>
          {time(view.from)} to {time(view.to)} of {time(timeline.ns)}
        </span>
      </div>
      <Detail slice={chosen} kernels={kernels} timeline={timeline} show={show} />
      {lost.length ? <Note>Lost around this time, and so not drawn: {lost.map(([, , kind, n]) => plural(n, `record of ${kind}`, `records of ${kind}`)).join(", ")}.</Note> : null}
      <Keys lanes={lanes} />
    </>
  );
};

/** The slice at a moment, or one no further than `near` from it. */
const pick = (lanes: Lane[], lane: number, at: number, near: number): Slice | null => {
  let best: Slice | null = null;
  let distance = near;
  for (const slice of lanes[lane]?.slices ?? []) {
    const off = at < slice.at ? slice.at - at : at > slice.at + slice.ns ? at - slice.at - slice.ns : 0;
    if (off === 0) return slice;
    if (off < distance) {
      best = slice;
      distance = off;
    }
  }
  return best;
};

const tipText = (lanes: Lane[], slice: Slice | null, lane: number, at: number, view: View, width: number): string => {
  const near = ((view.to - view.from) / Math.max(1, width)) * 5;
  const mark = lanes[lane]?.marks.find((m) => Math.abs(m.at - at) < near);
  return [mark?.text, slice ? `${slice.label} · ${time(slice.ns)}` : null].filter(Boolean).join(" · ");
};

const Detail = (p: { slice: Slice | null; kernels: Slice[]; timeline: Timeline; show: Props["show"] }) => {
  const { slice, timeline } = p;
  if (!slice) {
    const spent = p.kernels.reduce((sum, k) => sum + k.ns, 0);
    return (
      <div class="detail" id="timeline-detail" aria-live="polite">
        {p.kernels.length
          ? `${plural(p.kernels.length, "kernel takes", "kernels take")} ${time(spent)} of ${time(timeline.ns)} (${percent(timeline.ns ? spent / timeline.ns : null)}).`
          : "Single kernels of this call were not recorded."}
        {timeline.faults.length ? ` ${plural(timeline.faults.length, "page fault")}.` : ""}
      </div>
    );
  }
  return (
    <div class="detail" id="timeline-detail" aria-live="polite">
      <b>{slice.label}</b>{" "}
      {slice.node >= 0 && slice.graph >= 0 ? (
        <button type="button" class="btn link" id="show-in-graph" onClick={() => p.show({ graph: slice.graph, node: slice.node })}>
          show in the graph
        </button>
      ) : null}
      <dl>
        {slice.facts.map(([what, value]) => (
          <div key={what}>
            <dt>{what}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
};

const Keys = ({ lanes }: { lanes: Lane[] }) => {
  const used = new Set(lanes.flatMap((lane) => lane.slices.map((s) => s.colour)));
  const marks = lanes.flatMap((lane) => lane.marks);
  return (
    <ul class="legend">
      {KINDS.filter((kind) => used.has(`--k-${kind}`)).map((kind) => (
        <li key={kind}>
          <i style={{ background: kindVar(kind) }} />
          {KIND_LABEL[kind]}
        </li>
      ))}
      {STATES.filter((state) => used.has(`--s-${state}`)).map((state) => (
        <li key={state}>
          <i style={{ background: `var(--s-${state})` }} />
          {state === "gap" ? "not seen" : state === "barrier" ? "waiting at a barrier" : state}
        </li>
      ))}
      {marks.some((m) => m.major) ? <li><i style={{ background: "var(--bad)" }} />major fault</li> : null}
      {marks.some((m) => !m.major) ? <li><i style={{ background: "var(--warn)" }} />minor fault</li> : null}
    </ul>
  );
};
