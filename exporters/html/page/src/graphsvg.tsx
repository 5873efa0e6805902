// SPDX-License-Identifier: Apache-2.0
// The stack of groups as one SVG: closed ones as bars, open ones with their nodes.
import { useMemo } from "preact/hooks";
import { heat, kindOf, kindVar } from "./colour";
import { percent, plural, time } from "./format";
import { type Group, type Inside, PORT, type Shown, isView, layoutInside, type links } from "./groups";
import type { Graph } from "./types";

const CLOSED = { wide: 430, narrow: 300, height: 52 };
const HEAD = 36;
const GAP = 26;
const MARGIN = { wide: 46, narrow: 10 };

interface Props {
  graph: Graph;
  groups: Group[];
  open: ReadonlySet<string>;
  toggle: (key: string) => void;
  shown: Shown;
  all: ReturnType<typeof links>;
  node: number | null;
  choose: (node: number) => void;
  phone: boolean;
}

interface Placed {
  group: Group;
  inside: Inside | null;
  x: number;
  y: number;
  width: number;
  height: number;
}

export const Stacked = (p: Props) => {
  const insides = useMemo(() => {
    const made = new Map<string, Inside>();
    for (const group of p.groups) if (p.open.has(group.key)) made.set(group.key, layoutInside(p.graph, group, p.shown, p.all));
    return made;
  }, [p.graph, p.groups, p.open, p.shown, p.all]);
  const { placed, width, height } = stack(p.groups, insides, p.phone ? "narrow" : "wide");
  // An LM head can take half of the time: layers are tinted against each other, and it as if it was the hottest.
  const inLayers = (values: (number | null)[], has: (i: number) => boolean): number => {
    const own = values.filter((v, i) => v !== null && has(i));
    return Math.max(1, ...((own.length ? own : values) as number[]).map((v) => v ?? 0));
  };
  const most = inLayers(p.groups.map((g) => g.ns), (i) => p.groups[i]?.key.startsWith("layer ") ?? false);
  const hottest = inLayers(p.graph.nodes.ns, (i) => (p.graph.nodes.layer[i] ?? -1) >= 0);
  return (
    <svg width={width} height={height} role="group" aria-label="Graph">
      <defs>
        <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
          <path class="g-head" d="M0,0 L8,4 L0,8z" />
        </marker>
      </defs>
      <Between {...p} placed={placed} width={width} />
      {placed.map((place) => (
        <g key={place.group.key} transform={`translate(${place.x},${place.y})`}>
          <GroupBox place={place} most={most} graph={p.graph} toggle={p.toggle} />
          {place.inside ? <Nodes {...p} inside={place.inside} hottest={hottest} left={(place.width - place.inside.width) / 2} /> : null}
        </g>
      ))}
    </svg>
  );
};

const stack = (groups: Group[], insides: Map<string, Inside>, size: "wide" | "narrow"): { placed: Placed[]; width: number; height: number } => {
  const widths = groups.map((g) => Math.max(CLOSED[size], (insides.get(g.key)?.width ?? 0) + 16));
  const width = Math.max(...widths, CLOSED[size]) + 2 * MARGIN[size];
  let y = 14;
  const placed = groups.map((group, i) => {
    const inside = insides.get(group.key) ?? null;
    const own = widths[i] ?? CLOSED[size];
    const height = inside ? HEAD + inside.height + 8 : CLOSED.height;
    const place = { group, inside, x: size === "narrow" ? MARGIN.narrow : (width - own) / 2, y, width: own, height };
    y += height + GAP;
    return place;
  });
  return { placed, width, height: y - GAP + 14 };
};

const GroupBox = (p: { place: Placed; most: number; graph: Graph; toggle: (key: string) => void }) => {
  const { group, inside, width, height } = p.place;
  const share = p.graph.ns && group.ns !== null ? group.ns / p.graph.ns : null;
  const kernels = width < 400 ? "" : `${plural(group.kernels, "kernel")} · `;
  const said = `${kernels}${time(group.ns)}${share === null ? "" : ` · ${percent(share)}`}`;
  const bar = width - 24;
  let at = 12;
  return (
    <g
      class="g-group"
      data-group={group.key}
      role="button"
      tabindex={0}
      aria-expanded={inside !== null}
      aria-label={`${group.title}: ${said}`}
      onClick={() => p.toggle(group.key)}
      onKeyDown={(e) => {
        if (e.key !== "Enter" && e.key !== " ") return;
        e.preventDefault();
        p.toggle(group.key);
      }}
    >
      <rect class="box" width={width} height={inside ? HEAD : height} rx="9" />
      {group.ns === null ? null : <rect class="heat" x="1" y="1" width={width - 2} height={(inside ? HEAD : height) - 2} rx="8" fill={tint(group.ns / p.most)} />}
      <text class="g-title" x="14" y="22">
        {inside ? "▾" : "▸"} {group.title}
      </text>
      <text class="g-small" x={width - 14} y="22" text-anchor="end">
        {said}
      </text>
      {inside ? (
        <rect class="g-open" y={HEAD - 1} width={width} height={height - HEAD + 1} rx="9" />
      ) : (
        group.kinds.map(([kind, ns]) => {
          const wide = group.ns ? (bar * ns) / group.ns : 0;
          const x = at;
          at += wide;
          return <rect key={kind} x={x} y="33" width={Math.max(0, wide - 0.5)} height="9" rx="1.5" fill={kindVar(kind)} />;
        })
      )}
    </g>
  );
};

const line = (points: [number, number][]): string => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

const Nodes = (p: Props & { inside: Inside; hottest: number; left: number }) => {
  const { graph, inside, node } = p;
  const chosen = (id: number) => id === node;
  return (
    <g transform={`translate(${p.left},${HEAD})`}>
      {inside.edges.map((e) => {
        const fused = e.to === e.from + 1 && graph.nodes.state[e.to] === "f";
        return (
          <path
            key={`${e.from}-${e.to}`}
            class={`g-edge${fused ? " fusedline" : ""}${chosen(e.from) || chosen(e.to) ? " on" : ""}`}
            d={line(e.points)}
            marker-end={fused ? undefined : "url(#head)"}
          />
        );
      })}
      {[...inside.boxes.values()]
        .filter((box) => box.id >= PORT)
        .map((box) => (
          <circle key={box.id} class="g-port" cx={box.x + 5} cy={box.y + 5} r="4" />
        ))}
      {[...inside.boxes.values()].filter((box) => box.id < PORT).map((box) => (
        <g
          key={box.id}
          class={`${classOf(graph, box.id)}${chosen(box.id) ? " on" : ""}`}
          data-node={box.id}
          transform={`translate(${box.x},${box.y})`}
          role="button"
          tabindex={0}
          aria-label={labelOf(graph, box.id)}
          onClick={() => p.choose(box.id)}
          onFocus={() => p.choose(box.id)}
        >
          {box.id < 0 ? <LeafBox graph={graph} leaf={-1 - box.id} width={box.width} height={box.height} /> : <NodeBox graph={graph} node={box.id} width={box.width} height={box.height} hottest={p.hottest} />}
        </g>
      ))}
    </g>
  );
};

const classOf = (graph: Graph, id: number): string => {
  if (id < 0) return "g-node g-leaf";
  const memory = graph.nodes.memory[id];
  return `g-node${memory === "v" ? " view" : memory === "i" ? " inplace" : ""}${graph.nodes.state[id] === "u" ? " uncovered" : ""}`;
};

const labelOf = (graph: Graph, id: number): string =>
  id < 0 ? `${graph.leaves.kind[-1 - id]} ${graph.leaves.name[-1 - id]}` : `${graph.nodes.op[id]} ${graph.nodes.name[id]}, ${time(graph.nodes.ns[id] ?? null)}`;

const tint = (share: number): string => `rgba(var(--heat), ${(0.5 * heat(share)).toFixed(3)})`;

const cut = (text: string, most: number): string => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

const LeafBox = (p: { graph: Graph; leaf: number; width: number; height: number }) => (
  <>
    <rect class="box" width={p.width} height={p.height} rx={p.height / 2} />
    <text class="g-small" x={p.width / 2} y={p.height / 2 + 4} text-anchor="middle">
      {cut(`${p.graph.leaves.role[p.leaf]} ${p.graph.leaves.type[p.leaf]}`, 21)}
    </text>
  </>
);

const NodeBox = (p: { graph: Graph; node: number; width: number; height: number; hottest: number }) => {
  const { nodes } = p.graph;
  const op = nodes.op[p.node] ?? "";
  const role = nodes.role[p.node] ?? "";
  const ns = nodes.ns[p.node] ?? null;
  if (isView(p.graph, p.node)) {
    return (
      <>
        <rect class="box" width={p.width} height={p.height} rx="6" />
        <text class="g-small" x={p.width / 2} y={p.height / 2 + 4} text-anchor="middle">
          {cut(op.toLowerCase(), 16)}
        </text>
      </>
    );
  }
  const fused = nodes.state[p.node] === "f";
  return (
    <>
      <rect class="box" width={p.width} height={p.height} rx="7" />
      {ns === null ? null : <rect class="heat" x="1" y="1" width={p.width - 2} height={p.height - 2} rx="6" fill={tint(ns / p.hottest)} />}
      <rect x="0" y="6" width="4" height={p.height - 12} rx="2" fill={kindVar(kindOf(op, role))} />
      <text class="g-title" x="12" y="18">
        {cut(op, 16)}
      </text>
      <text class="g-small" x="12" y="34">
        {cut(role, 14)}
      </text>
      <text class="g-small" x={p.width - 8} y="18" text-anchor="end">
        {nodes.weight[p.node] ? nodes.dtype[p.node] : ""}
      </text>
      <text class="g-small" x={p.width - 8} y="34" text-anchor="end">
        {fused ? "fused" : ns === null ? "" : time(ns)}
      </text>
    </>
  );
};

/** Edges from group to group: between neighbours straight, others along the side. */
const Between = (p: Props & { placed: Placed[]; width: number }) => {
  const at = new Map<number, number>();
  p.placed.forEach((place, i) => place.group.nodes.forEach((node) => at.set(node, i)));
  const end = (node: number, below: boolean, from: number): [number, number] => {
    const place = p.placed[at.get(node) ?? 0];
    if (!place) return [0, 0];
    const box = place.inside?.boxes.get(below ? node : PORT + from);
    if (!place.inside || !box) return [place.x + place.width / 2, place.y + (below ? place.height : 0)];
    const left = place.x + (place.width - place.inside.width) / 2;
    return [left + box.x + box.width / 2, place.y + HEAD + box.y + (below ? box.height : 0)];
  };
  const found = new Map<string, { d: string; far: boolean; on: boolean }>();
  for (const [from, to] of p.all.edges) {
    const a = at.get(from) ?? 0;
    const b = at.get(to) ?? 0;
    if (a === b) continue;
    const start = end(from, true, from);
    const stop = end(to, false, from);
    const far = Math.abs(a - b) > 1;
    const key = [...start, ...stop].map(Math.round).join();
    const on = from === p.node || to === p.node;
    const known = found.get(key);
    if (known) known.on ||= on;
    else found.set(key, { d: far ? around(start, stop, p.width) : bend(start, stop), far, on });
  }
  return (
    <g>
      {[...found].map(([key, e]) => (
        <path key={key} class={`g-edge${e.far ? " far" : ""}${e.on ? " on" : ""}`} d={e.d} marker-end="url(#head)" />
      ))}
    </g>
  );
};

type XY = [number, number];

const bend = ([x1, y1]: XY, [x2, y2]: XY): string => {
  const middle = (y1 + y2) / 2;
  return `M${x1},${y1}C${x1},${middle} ${x2},${middle} ${x2},${y2}`;
};

const around = ([x1, y1]: XY, [x2, y2]: XY, width: number): string => {
  const side = width - 14 - ((y2 - y1) % 23);
  return `M${x1},${y1}C${x1},${y1 + 30} ${side},${y1 - 10} ${side},${y1 + 40}L${side},${y2 - 40}C${side},${y2 + 10} ${x2},${y2 - 30} ${x2},${y2}`;
};
