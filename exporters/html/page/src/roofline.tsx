// SPDX-License-Identifier: Apache-2.0
// Operations per byte against operations per second, under the roof that the machine measured.
import { scaleLog } from "d3-scale";
import { useMemo, useState } from "preact/hooks";
import { KINDS, KIND_LABEL, kindOf, kindVar } from "./colour";
import { ABSENT, bytes, count, percent, rate, time } from "./format";
import type { Doc, Roofline } from "./types";
import { Choice, Note, Section, useWidth } from "./ui";

type Point = Roofline["points"][number];

const nameOf = (p: Point) => [p.op, p.role, p.dtype].filter(Boolean).join(" · ");

export const RooflinePanel = ({ doc }: { doc: Doc }) => {
  const { roofline } = doc;
  const phases = useMemo(() => [...new Set(roofline.points.map((p) => p.phase))], [roofline]);
  const [phase, setPhase] = useState("");
  const [on, setOn] = useState<Point | null>(null);
  const points = roofline.points.filter((p) => phase === "" || String(p.phase) === phase);
  return (
    <Section
      id="roofline"
      title="Roofline"
      lead="Each dot is a kind of operator; its area is its time. Under the slope memory is the limit, under the flat part arithmetic."
    >
      <div class="card">
        {points.length ? (
          <>
            <Choice
              id="roofline-phase"
              label="Phase"
              value={phase}
              options={[["", "all"], ...phases.map((i): [string, string] => [String(i), doc.phases[i] ?? "other"])]}
              onChange={(v) => {
                setPhase(v);
                setOn(null);
              }}
            />
            <Plot doc={doc} points={points} on={on} setOn={setOn} />
            <Detail doc={doc} point={on} />
            <ul class="legend">
              {KINDS.filter((kind) => points.some((p) => kindOf(p.op, p.role) === kind)).map((kind) => (
                <li key={kind}>
                  <i style={{ background: kindVar(kind), borderRadius: "50%" }} />
                  {KIND_LABEL[kind]}
                </li>
              ))}
            </ul>
          </>
        ) : (
          <Note>No operator with both known operations and known bytes was recorded.</Note>
        )}
      </div>
      {roofline.why ? <Note>No roof is drawn: {roofline.why}</Note> : null}
      {roofline.left_out ? <Note>{roofline.left_out}</Note> : null}
    </Section>
  );
};

const decades = (low: number, high: number): number[] => {
  const out: number[] = [];
  for (let e = Math.ceil(Math.log10(low) - 1e-9); 10 ** e <= high * 1.000001; e += 1) out.push(10 ** e);
  return out;
};

interface PlotProps {
  doc: Doc;
  points: Point[];
  on: Point | null;
  setOn: (p: Point | null) => void;
}

const Plot = ({ doc, points, on, setOn }: PlotProps) => {
  const { ref, width } = useWidth();
  const height = width < 520 ? 320 : 430;
  const margin = { left: 52, right: 14, top: 26, bottom: 42 };
  const peaks = doc.roofline.peaks;
  const frame = useMemo(() => extent(points, peaks), [points, peaks]);
  const x = scaleLog(frame.x, [margin.left, Math.max(margin.left + 10, width - margin.right)]);
  const y = scaleLog(frame.y, [height - margin.bottom, margin.top]);
  const labels = labelHeights(peaks.map((peak) => y(roofAt(peak, frame.x[1]))));
  const most = Math.max(1, ...points.map((p) => p.ns));
  const biggest = width < 520 ? 20 : 28;
  return (
    <div class="plot" ref={ref}>
      {width ? (
        <svg class="roof" width={width} height={height} role="group" aria-label="Roofline plot">
          {decades(...frame.x).map((v) => (
            <g key={`x${v}`}>
              <line class="grid" x1={x(v)} x2={x(v)} y1={margin.top} y2={height - margin.bottom} />
              <text x={x(v)} y={height - margin.bottom + 17} text-anchor="middle">
                {v >= 0.01 && v < 1e5 ? String(Number(v.toPrecision(2))) : v.toExponential(0)}
              </text>
            </g>
          ))}
          {decades(...frame.y).map((v) => (
            <g key={`y${v}`}>
              <line class="grid" x1={margin.left} x2={width - margin.right} y1={y(v)} y2={y(v)} />
              <text x={margin.left - 8} y={y(v) + 4} text-anchor="end">
                {rate(v, "").replace(/\.0+(?= |$)/, "")}
              </text>
            </g>
          ))}
          <text x={(margin.left + width - margin.right) / 2} y={height - 6} text-anchor="middle">
            operations per byte
          </text>
          <text x="4" y="13">
            operations per second
          </text>
          {peaks.map((peak, i) => (
            <Roof key={peak.label} peak={peak} x={x} y={y} frame={frame} first={i === 0} short={width < 520} label={labels[i] ?? 0} />
          ))}
          {[...points]
            .sort((a, b) => b.ns - a.ns)
            .map((p) => (
              <circle
                key={`${nameOf(p)}${p.kernel}${p.phase}`}
                data-point={`${p.op}|${p.dtype}|${p.role}|${p.phase}`}
                cx={x(p.flops / p.bytes)}
                cy={y((p.flops / p.ns) * 1e9)}
                r={Math.max(4, biggest * Math.sqrt(p.ns / most))}
                fill={kindVar(kindOf(p.op, p.role))}
                class={on === p ? "on" : undefined}
                tabindex={0}
                role="img"
                aria-label={`${nameOf(p)}, ${time(p.ns)}, ${rate((p.flops / p.ns) * 1e9, "FLOP/s")}, ${rate((p.bytes / p.ns) * 1e9, "B/s")}`}
                onPointerEnter={() => setOn(p)}
                onClick={() => setOn(p)}
                onFocus={() => setOn(p)}
              />
            ))}
        </svg>
      ) : null}
    </div>
  );
};

const roofAt = (peak: Roofline["peaks"][number], intensity: number): number =>
  Math.min(peak.flops ?? Infinity, peak.bytes === null ? Infinity : peak.bytes * intensity);

/** Where labels go: above their line, or below it where another one is in the way. */
const labelHeights = (lines: number[]): number[] => {
  const taken: number[] = [];
  for (const line of lines) {
    const places = [line - 6, line + 14, line + 28, line - 20];
    taken.push(places.find((place) => taken.every((other) => Math.abs(other - place) >= 13)) ?? line - 6);
  }
  return taken;
};

type Scale = (value: number) => number;

const Roof = (p: { peak: Roofline["peaks"][number]; x: Scale; y: Scale; frame: Frame; first: boolean; short: boolean; label: number }) => {
  const { flops, bytes: memory, label } = p.peak;
  const [low, high] = p.frame.x;
  const at = (intensity: number): number => roofAt(p.peak, intensity);
  const knee = flops !== null && memory !== null ? Math.min(high, Math.max(low, flops / memory)) : low;
  const path = [low, knee, high].map((v, i) => `${i ? "L" : "M"}${p.x(v)},${p.y(at(v))}`).join("");
  const side = p.x(high);
  return (
    <g>
      <path class={p.first ? "peak" : "peak other"} d={path} />
      <text x={side - 4} y={p.label} text-anchor="end">
        {p.short && !p.first ? "" : label}
        {p.short || flops === null ? "" : ` · ${rate(flops, "FLOP/s")}`}
        {p.short || memory === null ? "" : ` · ${rate(memory, "B/s")}`}
      </text>
    </g>
  );
};

interface Frame {
  x: [number, number];
  y: [number, number];
}

/** A little more than what is to be seen, in whole thirds of decades. */
const extent = (points: Point[], peaks: Roofline["peaks"]): Frame => {
  const xs = points.map((p) => p.flops / p.bytes);
  const ys = points.map((p) => (p.flops / p.ns) * 1e9);
  for (const { flops, bytes: memory } of peaks) {
    if (flops !== null) ys.push(flops * 1.3);
    if (flops !== null && memory !== null) xs.push((flops / memory) * 3);
  }
  const round = (values: number[]): [number, number] => {
    const low = Math.min(...values);
    const high = Math.max(...values);
    return [low / 2.2, Math.max(high * 1.8, low * 10)];
  };
  return { x: round(xs), y: round(ys) };
};

const Detail = ({ doc, point }: { doc: Doc; point: Point | null }) => (
  <div class="detail" id="roofline-detail" aria-live="polite">
    {point ? (
      <>
        <b>{nameOf(point)}</b>
        <dl>
          {facts(doc, point).map(([what, value]) => (
            <div key={what}>
              <dt>{what}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      </>
    ) : (
      "Point at a dot, or go through them with Tab."
    )}
  </div>
);

const facts = (doc: Doc, p: Point): [string, string][] => [
  ["phase", doc.phases[p.phase] ?? "other"],
  ["kernel", p.kernel],
  ["time", time(p.ns)],
  ["kernels", count(p.calls)],
  ["operations", rate(p.flops, "FLOP")],
  ["bytes", bytes(p.bytes)],
  ["per byte", (p.flops / p.bytes).toPrecision(3)],
  ["reached", `${rate((p.flops / p.ns) * 1e9, "FLOP/s")}, ${rate((p.bytes / p.ns) * 1e9, "B/s")}`],
  ["limit", p.bound ?? ABSENT],
  ["of the roof", percent(p.ratio)],
];
