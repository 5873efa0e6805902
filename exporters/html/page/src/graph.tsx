// SPDX-License-Identifier: Apache-2.0
// The engine's own graph: layers closed until asked for, heat by time, edges by data.
import { useEffect, useMemo, useState } from "preact/hooks";
import { ABSENT, bytes, count, percent, plural, rate, time } from "./format";
import { type Group, type Shown, groupsOf, links } from "./groups";
import { Stacked } from "./graphsvg";
import type { Doc, Graph, Spot } from "./types";
import { Choice, Note, Section, usePhone } from "./ui";

const STATE: Record<string, string> = {
  e: "ran as its own kernel",
  f: "ran fused with the node before it",
  s: "not run by the engine",
  u: "should have run and was not seen",
  "?": "not known",
};
const MEMORY: Record<string, string> = { n: "its own", v: "a view, nothing is computed", i: "in place: writes into its source" };

export const GraphPanel = ({ doc, spot }: { doc: Doc; spot: Spot | null }) => {
  const [which, setWhich] = useState(0);
  useEffect(() => {
    if (spot) setWhich(spot.graph);
  }, [spot]);
  const graph = doc.graphs[which];
  return (
    <Section
      id="graph"
      title="Graph"
      lead="As the engine built it. Open a layer by a click or by Enter; the stronger the tint, the more time."
    >
      {graph ? (
        <div class="card">
          <GraphView key={which} doc={doc} graph={graph} which={which} setWhich={setWhich} spot={spot?.graph === which ? spot : null} />
        </div>
      ) : (
        <Note>{doc.graphs_note ?? "No graph was described."}</Note>
      )}
      {graph && doc.graphs_note ? <Note>{doc.graphs_note}</Note> : null}
    </Section>
  );
};

interface ViewProps {
  doc: Doc;
  graph: Graph;
  which: number;
  setWhich: (n: number) => void;
  spot: Spot | null;
}

const GraphView = ({ doc, graph, which, setWhich, spot }: ViewProps) => {
  const groups = useMemo(() => groupsOf(graph), [graph]);
  const [open, setOpen] = useState<ReadonlySet<string>>(() => new Set(groups.length === 1 ? [groups[0]?.key ?? ""] : []));
  const [shown, setShown] = useState<Shown>({ views: true, weights: false });
  const [node, setNode] = useState<number | null>(null);
  const phone = usePhone();
  const all = useMemo(() => links(graph, shown), [graph, shown]);
  useEffect(() => {
    const group = spot ? groups.find((g) => g.nodes.includes(spot.node)) : undefined;
    if (!spot || !group) return;
    setOpen(new Set([...open, group.key]));
    setNode(spot.node);
    // The node is drawn only after this: then it gets the eyes and the focus.
    const timer = setTimeout(() => {
      const drawn = document.querySelector<SVGGElement>(`[data-node="${spot.node}"]`);
      drawn?.focus();
      drawn?.scrollIntoView({ block: "center", inline: "center" });
    });
    return () => clearTimeout(timer);
  }, [spot]);
  const toggle = (key: string) => {
    const next = new Set(open);
    if (!next.delete(key)) next.add(key);
    setOpen(next);
  };
  const check = (id: keyof Shown, label: string) => (
    <label class="row tight">
      <input type="checkbox" id={`graph-${id}`} checked={shown[id]} onChange={(e) => setShown({ ...shown, [id]: e.currentTarget.checked })} />
      {label}
    </label>
  );
  return (
    <>
      <div class="row">
        <Choice
          id="graph-choice"
          label="Graph"
          value={String(which)}
          options={doc.graphs.map((g, i): [string, string] => [String(i), g.label])}
          onChange={(v) => setWhich(Number(v))}
        />
        {check("weights", "weights, caches and inputs")}
        {check("views", "views")}
        <button type="button" class="btn push" id="graph-close" disabled={!open.size} onClick={() => setOpen(new Set())}>
          Close all
        </button>
      </div>
      <p class="note" id="graph-facts">
        {plural(graph.nodes.op.length, "node")}, {plural(graph.edges.length, "edge")}: {states(graph)}. Ran {graph.count === 1 ? "once" : `${count(graph.count)} times`},{" "}
        {time(graph.ns)}{graph.count === 1 ? "" : " each"}{graph.setup === null ? "" : `, of which ${time(graph.setup)} outside timed kernels`}. Topology{" "}
        <code>{graph.topology}</code>.
      </p>
      <div class="graph-view" tabIndex={0} role="region" aria-label="Graph, layer by layer">
        <Stacked graph={graph} groups={groups} open={open} toggle={toggle} shown={shown} all={all} node={node} choose={setNode} phone={phone} />
      </div>
      <NodeDetail graph={graph} node={node} groups={groups} />
      <ul class="legend">
        <li>
          <i style={{ background: "rgba(var(--heat), .75)" }} />
          much of the time
        </li>
        <li>
          <i style={{ border: "1.5px dashed var(--soft)" }} />
          in place
        </li>
        <li>
          <i style={{ border: "1.5px dotted var(--faint)" }} />
          view
        </li>
        <li>
          <i style={{ background: "var(--k-norm)", height: "4px", borderRadius: 0, verticalAlign: "middle" }} />
          fused into one kernel
        </li>
        <li>
          <i style={{ background: "var(--accent-soft)" }} />
          weight, cache or input
        </li>
      </ul>
      {graph.note ? <Note>{graph.note}</Note> : null}
    </>
  );
};

const states = (graph: Graph): string => {
  const n = (letter: string) => [...graph.nodes.state].filter((s) => s === letter).length;
  const parts: [number, string][] = [
    [n("e"), "run"],
    [n("f"), "fused into the one before"],
    [n("s"), "skipped"],
    [n("u"), "not seen"],
    [n("?"), "not known"],
  ];
  return parts
    .filter(([many]) => many > 0)
    .map(([many, what]) => `${many} ${what}`)
    .join(", ");
};

const NodeDetail = ({ graph, node, groups }: { graph: Graph; node: number | null; groups: Group[] }) => {
  if (node === null) {
    const hottest = [...groups].filter((g) => g.ns !== null).sort((a, b) => (b.ns ?? 0) - (a.ns ?? 0))[0];
    return (
      <div class="detail" id="graph-detail" aria-live="polite">
        {hottest ? `Most time is in: ${hottest.title.toLowerCase()}, ${time(hottest.ns)} each time the graph runs.` : "No node was timed."}
      </div>
    );
  }
  if (node < 0) {
    const leaf = -1 - node;
    const { leaves } = graph;
    const rows: [string, string][] = [
      ["kind", leaves.kind[leaf] ?? ""],
      ["role", leaves.role[leaf] ?? ""],
      ["type", leaves.type[leaf] ?? ""],
      ["shape", leaves.shape[leaf] ?? ABSENT],
      ["size", bytes(leaves.bytes[leaf] ?? null)],
    ];
    return <Facts title={leaves.name[leaf] ?? ""} rows={rows} />;
  }
  const { nodes } = graph;
  const ns = nodes.ns[node] ?? null;
  const moved = nodes.bytes[node] ?? null;
  const work = nodes.flops[node] ?? null;
  const rows: [string, string][] = [
    ["operator", nodes.op[node] ?? ""],
    ["role", nodes.role[node] ?? ""],
    ["shape", nodes.shape[node] ?? ABSENT],
    ["result", nodes.type[node] ?? ""],
    ["weight type", nodes.dtype[node] ?? ""],
    ["kernel", nodes.repacked[node] ? "repacked" : "native"],
    ["state", STATE[nodes.state[node] ?? "?"] ?? ""],
    ["memory", MEMORY[nodes.memory[node] ?? "n"] ?? ""],
    ["time", time(ns)],
    ["of the graph", percent(ns !== null && graph.ns ? ns / graph.ns : null)],
    ["operations", rate(work, "FLOP")],
    ["bytes", bytes(moved)],
  ];
  if (ns && moved !== null) rows.push(["reached", rate((moved / ns) * 1e9, "B/s")]);
  return <Facts title={nodes.name[node] ?? ""} rows={rows} />;
};

const Facts = (p: { title: string; rows: [string, string][] }) => (
  <div class="detail" id="graph-detail" aria-live="polite">
    <b>{p.title || "(no name)"}</b>
    <dl>
      {p.rows.map(([what, value]) => (
        <div key={what}>
          <dt>{what}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  </div>
);
