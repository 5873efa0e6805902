// SPDX-License-Identifier: Apache-2.0
// A graph as a stack of groups, one per layer, each laid out by itself when it is open.
import { type Kind, kindOf } from "./colour";
import { ABSENT } from "./format";
import type { Graph } from "./types";
import * as dagre from "@dagrejs/dagre";

export interface Group {
  key: string;
  title: string;
  nodes: number[];
  /** Mean ns of one execution; null where nothing was timed. */
  ns: number | null;
  kernels: number;
  kinds: [Kind, number][];
}

const groupKey = (graph: Graph, i: number, first: number, last: number, before: string): string => {
  const layer = graph.nodes.layer[i] ?? -1;
  if (layer >= 0) return `layer ${layer}`;
  if (i < first || first < 0) return "input";
  return i > last ? "output" : before;
};

/** Nodes by layer, in the order of the graph; what has no layer is before, after, or with its neighbours. */
export const groupsOf = (graph: Graph): Group[] => {
  const { layer, op, role, ns, state } = graph.nodes;
  const first = layer.findIndex((l) => l >= 0);
  const last = layer.findLastIndex((l) => l >= 0);
  const found = new Map<string, number[]>();
  let key = "input";
  for (let i = 0; i < op.length; i += 1) {
    key = groupKey(graph, i, first, last, key);
    const members = found.get(key);
    if (members) members.push(i);
    else found.set(key, [i]);
  }
  return [...found].map(([name, nodes]) => {
    const sums = new Map<Kind, number>();
    let whole: number | null = null;
    let kernels = 0;
    for (const i of nodes) {
      const own = ns[i] ?? null;
      if (state[i] === "e") kernels += 1;
      if (own === null) continue;
      whole = (whole ?? 0) + own;
      const kind = kindOf(op[i] ?? "", role[i] ?? "");
      sums.set(kind, (sums.get(kind) ?? 0) + own);
    }
    return { key: name, title: titleOf(name, first < 0), nodes, ns: whole, kernels, kinds: [...sums].sort((a, b) => b[1] - a[1]) };
  });
};

const titleOf = (key: string, only: boolean): string =>
  key.startsWith("layer ") ? `Layer ${key.slice(6)}` : only ? "All nodes" : key === "input" ? "Before the layers" : "After the layers";

/** Where data enters an open group from the outside: PORT + the node that made it. */
export const PORT = 1 << 22;

export interface Box {
  /** Node index, -1 - leaf index, or a port. */
  id: number;
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Inside {
  boxes: Map<number, Box>;
  edges: { from: number; to: number; points: [number, number][] }[];
  width: number;
  height: number;
}

export const NODE = { width: 164, height: 44 };
const VIEW = { width: 118, height: 26 };
const LEAF = { width: 138, height: 24 };
const DOOR = { width: 10, height: 10 };

export interface Shown {
  views: boolean;
  weights: boolean;
}

const sizeOf = (graph: Graph, id: number) => (id < 0 ? LEAF : isView(graph, id) ? VIEW : NODE);

export const isView = (graph: Graph, node: number): boolean => graph.nodes.memory[node] === "v";

/** Sources of each node; views that are not shown are passed through. */
export const links = (graph: Graph, shown: Shown): { edges: [number, number][]; inputs: [number, number][] } => {
  if (shown.views) return { edges: graph.edges, inputs: shown.weights ? graph.inputs : [] };
  const nodesTo = new Map<number, number[]>();
  const leavesTo = new Map<number, number[]>();
  const push = (map: Map<number, number[]>, key: number, value: number) => map.set(key, [...(map.get(key) ?? []), value]);
  for (const [from, to] of graph.edges) push(nodesTo, to, from);
  for (const [leaf, to] of graph.inputs) push(leavesTo, to, leaf);
  const seen = new Map<number, { nodes: Set<number>; leaves: Set<number> }>();
  // Sources come before their nodes, so each view has been resolved when it is needed.
  const resolve = (node: number) => {
    const nodes = new Set<number>();
    const leaves = new Set<number>(leavesTo.get(node));
    for (const source of nodesTo.get(node) ?? []) {
      const through = isView(graph, source) ? seen.get(source) : undefined;
      if (!through) nodes.add(source);
      through?.nodes.forEach((n) => nodes.add(n));
      through?.leaves.forEach((l) => leaves.add(l));
    }
    return { nodes, leaves };
  };
  const edges: [number, number][] = [];
  const inputs: [number, number][] = [];
  for (let i = 0; i < graph.nodes.op.length; i += 1) {
    const sources = resolve(i);
    seen.set(i, sources);
    if (isView(graph, i)) continue;
    sources.nodes.forEach((n) => edges.push([n, i]));
    if (shown.weights) sources.leaves.forEach((l) => inputs.push([l, i]));
  }
  return { edges, inputs };
};

/** Lays out the nodes of one group; what comes from outside comes through ports. */
export const layoutInside = (graph: Graph, group: Group, shown: Shown, all: ReturnType<typeof links>): Inside => {
  const g = new dagre.graphlib.Graph();
  g.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 24, marginx: 14, marginy: 10, ranker: "tight-tree" });
  g.setDefaultEdgeLabel(() => ({}));
  const members = new Set(group.nodes.filter((i) => shown.views || !isView(graph, i)));
  for (const i of members) g.setNode(String(i), { ...sizeOf(graph, i) });
  for (const [from, to] of all.edges) {
    if (!members.has(to)) continue;
    const source = members.has(from) ? from : PORT + from;
    if (!g.hasNode(String(source))) g.setNode(String(source), { ...DOOR });
    g.setEdge(String(source), String(to));
  }
  for (const [leaf, to] of all.inputs) {
    if (!members.has(to)) continue;
    const id = -1 - leaf;
    if (!g.hasNode(String(id))) g.setNode(String(id), { ...LEAF });
    g.setEdge(String(id), String(to));
  }
  dagre.layout(g);
  const boxes = new Map<number, Box>();
  for (const name of g.nodes()) {
    const at = g.node(name) as unknown as { x: number; y: number; width: number; height: number };
    const id = Number(name);
    boxes.set(id, { id, x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width, height: at.height });
  }
  const edges = g.edges().map((e) => {
    const points = (g.edge(e) as unknown as { points: { x: number; y: number }[] }).points;
    return { from: Number(e.v), to: Number(e.w), points: points.map((p): [number, number] => [p.x, p.y]) };
  });
  const size = g.graph() as unknown as { width: number; height: number };
  return { boxes, edges, width: Math.max(NODE.width, size.width || 0), height: Math.max(NODE.height, size.height || 0) };
};

export const shapeText = (graph: Graph, node: number): string => graph.nodes.shape[node] || ABSENT;
