// SPDX-License-Identifier: Apache-2.0
// A timeline as lanes of slices, and drawing them on a canvas.
import { kindOf, resolve } from "./colour";
import { time } from "./format";
import type { Doc, Graph, Timeline } from "./types";
import { STATES } from "./types";

export interface Slice {
  at: number;
  ns: number;
  label: string;
  /** Name of a CSS variable. */
  colour: string;
  /** Pairs of what and how much, for the detail. */
  facts: [string, string][];
  /** Node in its graph, or -1. */
  node: number;
  graph: number;
}

export interface Lane {
  title: string;
  /** Where there is little room for it. */
  short: string;
  height: number;
  slices: Slice[];
  /** Moments: page faults. */
  marks: { at: number; major: boolean; text: string }[];
}

/** Order entries hold the node, and this much more for a fused pair. */
export const FUSED = 1 << 20;

const nodeSlice = (graph: Graph | undefined, index: number, entry: number, at: number, ns: number, call: number): Slice => {
  const node = entry % FUSED;
  const fused = entry >= FUSED;
  const op = graph?.nodes.op[node] ?? "kernel";
  const role = graph?.nodes.role[node] ?? "";
  const next = fused ? ` + ${graph?.nodes.op[node + 1] ?? "next"}` : "";
  const facts: [string, string][] = [
    ["time", time(ns)],
    ["of the call", `${((100 * ns) / Math.max(1, call)).toFixed(1)} %`],
    ["begins", `+${time(at)}`],
  ];
  if (graph) {
    facts.unshift(["tensor", graph.nodes.name[node] ?? ""]);
    facts.push(["role", role], ["shape", graph.nodes.shape[node] ?? ""], ["type", graph.nodes.dtype[node] ?? ""]);
    const layer = graph.nodes.layer[node] ?? -1;
    if (layer >= 0) facts.push(["layer", String(layer)]);
    const moved = graph.nodes.bytes[node] ?? null;
    if (moved !== null && ns > 0) facts.push(["nominal", `${(moved / ns).toFixed(2)} GB/s`]);
  }
  return { at, ns, label: `${op}${next}${role ? ` ${role}` : ""}`, colour: `--k-${kindOf(op, role)}`, facts, node, graph: index };
};

export const lanesOf = (doc: Doc, timeline: Timeline): Lane[] => {
  const graphs: Slice[] = [];
  const ops: Slice[] = [];
  for (const run of timeline.graphs) {
    const graph = run.graph >= 0 ? doc.graphs[run.graph] : undefined;
    const title = graph ? `${graph.label}` : "graph";
    graphs.push({
      at: run.at,
      ns: run.ns,
      label: `${title} · ${run.backend}`,
      colour: "--accent",
      facts: [["time", time(run.ns)], ["begins", `+${time(run.at)}`], ["backend", run.backend], ["before the first kernel", time(run.setup)]],
      node: -1,
      graph: run.graph,
    });
    const order = doc.timelines.orders[run.order] ?? [];
    let at = run.at + (run.setup ?? 0);
    run.ops.forEach((ns, i) => {
      const entry = order[i];
      // A negative time is a stretch in which kernels were not seen.
      const length = Math.abs(ns);
      const slice = nodeSlice(graph, run.graph, entry ?? -1, at, length, timeline.ns);
      ops.push(ns >= 0 ? slice : { ...slice, label: `${slice.label} and kernels not seen`, colour: "--s-gap" });
      at += length;
    });
  }
  const lanes: Lane[] = [
    { title: "Graphs", short: "Graphs", height: 24, slices: graphs, marks: [] },
    { title: "Kernels", short: "Kernels", height: 44, slices: ops, marks: [] },
  ];
  for (const lane of timeline.lanes) {
    const [tid, name] = doc.timelines.threads[lane.thread] ?? [0, ""];
    lanes.push({
      title: name || `thread ${tid}`,
      short: name === "calling thread" ? "caller" : String(tid),
      height: 22,
      slices: lane.slices.map(([at, ns, state, who]) => ({
        at,
        ns,
        label: `${STATES[state] ?? "?"}${who ? `: ${who}` : ""}`,
        colour: `--s-${STATES[state] ?? "gap"}`,
        facts: [["time", time(ns)], ["begins", `+${time(at)}`], ["thread", String(tid)], ...(who ? [["why", who] as [string, string]] : [])],
        node: -1,
        graph: -1,
      })),
      marks: timeline.faults
        .filter(([, thread]) => thread === lane.thread)
        .map(([at, , major, ns, , what]) => ({ at, major: major === 1, text: `${major ? "major" : "minor"} fault${what ? ` in ${what}` : ""}${ns === null ? "" : `, ${time(ns)}`}` })),
    });
  }
  return lanes;
};

export interface View {
  from: number;
  to: number;
}

export const GUTTER = 96;
const GAP = 8;
const AXIS = 22;

export const heightOf = (lanes: Lane[]): number => lanes.reduce((sum, lane) => sum + lane.height + GAP, AXIS);

/** Which lane is at a height, and where it begins. */
export const laneAt = (lanes: Lane[], y: number): number => {
  let top = AXIS;
  for (const [i, lane] of lanes.entries()) {
    if (y >= top && y < top + lane.height) return i;
    top += lane.height + GAP;
  }
  return -1;
};

const ticks = (view: View, width: number): number[] => {
  const rough = (view.to - view.from) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? power * 10;
  const out: number[] = [];
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) out.push(t);
  return out;
};

/** Black or white, whichever can be read better on a colour (of six hexadecimal digits). */
export const inkOn = (background: string): string => {
  const [r = 0, g = 0, b = 0] = [1, 3, 5].map((at) => {
    const part = Number.parseInt(background.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#0e1317" : "#ffffff";
};

export const draw = (canvas: HTMLCanvasElement, lanes: Lane[], view: View, width: number, gutter: number, chosen: Slice | null) => {
  const ratio = devicePixelRatio || 1;
  const height = heightOf(lanes);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  if (!ctx) return;
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = "12px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  const room = width - gutter;
  const x = (t: number) => gutter + ((t - view.from) / (view.to - view.from)) * room;
  const colours = new Map<string, string>();
  const colour = (name: string): string => {
    let value = colours.get(name);
    if (value === undefined) colours.set(name, (value = resolve(name)));
    return value;
  };

  ctx.fillStyle = colour("--faint");
  ctx.strokeStyle = colour("--line");
  for (const t of ticks(view, room)) {
    ctx.beginPath();
    ctx.moveTo(x(t), AXIS - 4);
    ctx.lineTo(x(t), height);
    ctx.stroke();
    const text = time(t);
    const half = ctx.measureText(text).width / 2;
    ctx.fillText(text, Math.min(width - 2 * half, Math.max(gutter, x(t) - half)), 8);
  }

  let top = AXIS;
  for (const lane of lanes) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(gutter, top, room, lane.height);
    ctx.fillStyle = colour("--sunken");
    ctx.fill();
    ctx.clip();
    // What is thinner than a pixel is drawn once for each pixel, in the colour of the longest.
    let drawn = -1;
    for (const slice of lane.slices) {
      if (slice.at + slice.ns < view.from || slice.at > view.to) continue;
      const left = x(slice.at);
      const wide = Math.max(0, x(slice.at + slice.ns) - left);
      if (wide < 0.5 && Math.floor(left * 2) === drawn) continue;
      drawn = Math.floor(left * 2);
      ctx.fillStyle = colour(slice.colour);
      ctx.fillRect(left, top, Math.max(0.6, wide > 3 ? wide - 0.75 : wide), lane.height);
      if (wide > 34) {
        const from = Math.max(left, gutter) + 5;
        ctx.save();
        ctx.beginPath();
        ctx.rect(left, top, wide - 4, lane.height);
        ctx.clip();
        ctx.fillStyle = inkOn(colour(slice.colour));
        ctx.fillText(slice.label, from, top + lane.height / 2);
        ctx.restore();
      }
      if (slice === chosen) {
        ctx.strokeStyle = colour("--text");
        ctx.lineWidth = 2;
        ctx.strokeRect(left + 1, top + 1, Math.max(2, wide - 2), lane.height - 2);
      }
    }
    for (const mark of lane.marks) {
      if (mark.at < view.from || mark.at > view.to) continue;
      ctx.fillStyle = colour(mark.major ? "--bad" : "--warn");
      const left = x(mark.at);
      ctx.beginPath();
      ctx.moveTo(left - 4, top);
      ctx.lineTo(left + 4, top);
      ctx.lineTo(left, top + 8);
      ctx.fill();
    }
    ctx.restore();
    ctx.fillStyle = colour("--soft");
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, top, gutter - 8, lane.height);
    ctx.clip();
    ctx.fillText(ctx.measureText(lane.title).width > gutter - 8 ? lane.short : lane.title, 0, top + lane.height / 2);
    ctx.restore();
    top += lane.height + GAP;
  }
};
