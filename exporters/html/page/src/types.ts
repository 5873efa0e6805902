// SPDX-License-Identifier: Apache-2.0
// What `exporters/html` embeds in the page. Times are nanoseconds from the start of the
// recording, sizes bytes; null is absent, never zero. Tables are columns of equal length.

export type Num = number | null;

export interface Doc {
  format: number;
  about: About;
  figures: Figure[];
  verdicts: Verdict[];
  phases: string[];
  tokens: Tokens;
  timelines: Timelines;
  profile: Profile;
  roofline: Roofline;
  graphs: Graph[];
  graphs_note: string | null;
  memory: Memory;
  threads: Threads;
  experts: Experts | null;
  placement: Placement | null;
}

export interface About {
  title: string;
  file: string;
  recorded: string | null;
  seconds: number;
  level: string;
  facts: [string, string][];
  libraries: [string, string | null, string | null][];
  losses: { total: number; by_kind: Record<string, number>; gaps: [number, number, string, number][] };
  notes: string[];
  made_by: string;
}

/** `unit`: s, /s, 1, B, B/s, ratio. `tone`: good, bad or none. */
export interface Figure {
  id: string;
  label: string;
  value: Num;
  unit: string;
  sub: string;
  tone: string;
}

export interface Verdict {
  rule: string;
  title: string;
  severity: string;
  confidence: string;
  seconds_per_token: Num;
  evidence: string[];
  try: string[];
}

/** One row per call; `phase` indexes Doc.phases; `timeline` into Timelines.calls or -1. */
export interface Tokens {
  note: string | null;
  begin: number[];
  ns: number[];
  phase: number[];
  tokens: Num[];
  rows: Num[];
  kv: Num[];
  status: number[];
  ops_ns: Num[];
  timeline: number[];
}

/** `parts`: each a base64 of raw deflate of a JSON list of Timeline; timeline i is in part i / per. */
export interface Timelines {
  note: string | null;
  per: number;
  count: number;
  parts: string[];
  /** Node indices in the order in which kernels ran; + FUSED for a fused pair. */
  orders: number[][];
  threads: [number, string][];
}

export interface Timeline {
  call: number;
  begin: number;
  ns: number;
  graphs: TimelineGraph[];
  lanes: TimelineLane[];
  /** [at, thread, major 0/1, ns or null, graph node or -1, what] */
  faults: [number, number, number, Num, number, string][];
}

/** `graph` indexes Doc.graphs or -1; `at`, `ns` relative to the call; `ops`: durations in order. */
export interface TimelineGraph {
  graph: number;
  backend: string;
  at: number;
  ns: number;
  setup: Num;
  order: number;
  ops: number[];
}

/** Slices of one thread: [at, ns, state, who]. States: Doc-wide STATES. */
export interface TimelineLane {
  thread: number;
  slices: [number, number, number, string][];
}

export const STATES = ["running", "runnable", "blocked", "preempted", "throttled", "gap", "barrier"] as const;

export interface Profile {
  note: string | null;
  names: { op: string[]; dtype: string[]; role: string[]; kernel: string[]; backend: string[] };
  rows: {
    op: number[];
    dtype: number[];
    role: number[];
    layer: number[];
    kernel: number[];
    backend: number[];
    phase: number[];
    calls: number[];
    untimed: number[];
    ns: number[];
    stderr: Num[];
    flops: Num[];
    bytes: Num[];
    wasted: Num[];
  };
  /** `whole`: ns of graphs of the phase (kernels + setup + untimed). */
  phases: { phase: number; whole: number; setup: number; untimed: number; per: string; units: number }[];
  wasted_note: string | null;
}

export interface Roofline {
  peaks: { label: string; flops: Num; bytes: Num }[];
  why: string | null;
  points: {
    op: string;
    dtype: string;
    role: string;
    kernel: string;
    phase: number;
    calls: number;
    ns: number;
    flops: number;
    bytes: number;
    bound: string | null;
    ratio: Num;
  }[];
  left_out: string | null;
}

export interface Graph {
  id: string;
  topology: string;
  label: string;
  phase: number;
  count: number;
  ns: Num;
  setup: Num;
  nodes: {
    name: string[];
    op: string[];
    type: string[];
    dtype: string[];
    shape: string[];
    role: string[];
    layer: number[];
    /** executed, fused, skipped, uncovered, unknown: by first letter */
    state: string;
    /** n none, v view, i in place: by letter */
    memory: string;
    repacked: number[];
    /** 1 where dtype is that of a weight */
    weight: number[];
    ns: Num[];
    calls: number[];
    flops: Num[];
    bytes: Num[];
  };
  leaves: { name: string[]; kind: string[]; type: string[]; shape: string[]; role: string[]; bytes: Num[] };
  /** [producer, consumer] */
  edges: [number, number][];
  /** [leaf, consumer] */
  inputs: [number, number][];
  note: string | null;
}

/** A node that is to be shown in its graph. */
export interface Spot {
  graph: number;
  node: number;
}

export interface Memory {
  /** [layer or -1, role, dtype, bytes, repacked 0/1, tensors] */
  weights: [number, string, string, number, number, number][];
  weights_unknown: number;
  weights_note: string | null;
  /** label, bytes or null, explanation */
  parts: { id: string; label: string; bytes: Num; note: string }[];
  kv: { layers: number; k_type: string; v_type: string; bytes: Num; positions: Num } | null;
  mapping: { mapped: Num; resident: Num; note: string } | null;
}

/** Seconds; `waits` and `counts` by Threads.causes, while graphs ran. */
export interface Threads {
  note: string | null;
  causes: string[];
  ready: number;
  work: Num;
  rows: {
    tid: number;
    leader: boolean;
    running: number;
    waits: number[];
    counts: number[];
    migrations: number;
    idle: Num;
    facts: string;
  }[];
  takers: { comm: string; pid: number; times: number; seconds: number; own: boolean }[];
  stalled: { phase: string; calls: number; seconds: number; by: number[]; worst: number }[];
  quota: string | null;
  barriers: { op: string; dtype: string; role: string; phase: string; ops: number; wall: number; idle: Num; late: string }[];
  /** [kind, mapping, how many, seconds] */
  faults: [string, string, number, Num][];
  tensors: { name: string; layer: number; mapping: string; majors: number; minors: number; seconds: Num }[];
  faults_note: string | null;
  /** CPU time by part of the program: [part, seconds, share]. */
  cpu: [string, number, number][];
  cpu_note: string | null;
  /** [event, value or null, share of the time in which it counted, why it is absent] */
  counters: [string, Num, Num, string | null][];
  /** [what, value, unit] that follows from them */
  derived: [string, number, string][];
}

export interface Experts {
  note: string | null;
  rows: { layer: number; role: string; phase: string; available: Num; mean: Num; max: Num; runs: number; ns: Num }[];
}

/** Where operators ran; null: nothing was offloaded. */
export interface Placement {
  /** What the time of `calls` calls is made of: inside them, and between them. */
  parts: { part: string; backend: string; calls: number; in_calls: number; between: number; share: Num }[];
  rows: { op: string; dtype: string; role: string; backend: string; phase: string; count: number; shapes: string }[];
}
