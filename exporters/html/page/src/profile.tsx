// SPDX-License-Identifier: Apache-2.0
// Where the time goes: operators grouped as the reader wants, filtered, sorted.
import { useMemo, useState } from "preact/hooks";
import { KINDS, KIND_LABEL, type Kind, kindOf, kindVar } from "./colour";
import { ABSENT, bytes, count, percent, rate, time } from "./format";
import type { Doc, Profile } from "./types";
import { Choice, type Column, Note, Section, Segments, SortTable, Stack, usePhone } from "./ui";

const FIELDS = ["op", "dtype", "role", "layer", "kernel", "backend"] as const;
type Field = (typeof FIELDS)[number];
type Filter = Partial<Record<Field, string>>;

const TITLES: Record<Field, string> = { op: "Operator", dtype: "Type", role: "Role", layer: "Layer", kernel: "Kernel", backend: "Backend" };

/** What rows are put together by; the first is the finest without layers. */
const GROUPS: Record<string, Field[]> = {
  kind: ["op", "dtype", "role", "kernel", "backend"],
  op: ["op"],
  role: ["role"],
  layer: ["layer"],
  dtype: ["dtype"],
  each: ["op", "dtype", "role", "layer", "kernel", "backend"],
};

interface Row {
  key: string;
  op: string;
  dtype: string;
  role: string;
  layer: string;
  kernel: string;
  backend: string;
  kind: Kind;
  calls: number;
  untimed: number;
  ns: number;
  stderr: number | null;
  flops: number | null;
  bytes: number | null;
  wasted: number | null;
}

const nameAt = (profile: Profile, field: Field, row: number): string => {
  if (field === "layer") {
    const layer = profile.rows.layer[row] ?? -1;
    return layer < 0 ? "none" : String(layer);
  }
  return profile.names[field][profile.rows[field][row] ?? -1] ?? "";
};

const plus = (a: number | null, b: number | null | undefined): number | null => (a === null || b === null || b === undefined ? null : a + b);

/** Rows of one phase that pass the filter, put together by some fields. */
export const grouped = (profile: Profile, phase: number, by: string, filter: Filter, words: string): Row[] => {
  const fields = GROUPS[by] ?? FIELDS;
  const found = new Map<string, Row>();
  const wanted = words.trim().toLowerCase();
  const { rows } = profile;
  for (let i = 0; i < rows.ns.length; i += 1) {
    if (phase >= 0 && rows.phase[i] !== phase) continue;
    const name = (field: Field) => nameAt(profile, field, i);
    if (FIELDS.some((f) => filter[f] !== undefined && filter[f] !== name(f))) continue;
    if (wanted && !FIELDS.some((f) => name(f).toLowerCase().includes(wanted))) continue;
    const key = fields.map(name).join("\u0000");
    const op = name("op");
    const row = found.get(key);
    if (!row) {
      const shown = (f: Field) => (fields.includes(f) ? name(f) : "");
      found.set(key, {
        key,
        op: shown("op"),
        dtype: shown("dtype"),
        role: shown("role"),
        layer: shown("layer"),
        kernel: shown("kernel"),
        backend: shown("backend"),
        kind: kindOf(op, name("role")),
        calls: rows.calls[i] ?? 0,
        untimed: rows.untimed[i] ?? 0,
        ns: rows.ns[i] ?? 0,
        stderr: rows.stderr[i] ?? null,
        flops: rows.flops[i] ?? null,
        bytes: rows.bytes[i] ?? null,
        wasted: rows.wasted[i] ?? null,
      });
      continue;
    }
    row.calls += rows.calls[i] ?? 0;
    row.untimed += rows.untimed[i] ?? 0;
    row.ns += rows.ns[i] ?? 0;
    const error = rows.stderr[i] ?? null;
    row.stderr = row.stderr === null || error === null ? null : Math.hypot(row.stderr, error);
    row.flops = plus(row.flops, rows.flops[i]);
    row.bytes = plus(row.bytes, rows.bytes[i]);
    row.wasted = plus(row.wasted, rows.wasted[i]);
  }
  return [...found.values()];
};

const choices = (profile: Profile, field: Field): [string, string][] => {
  const names = new Set<string>();
  for (let i = 0; i < profile.rows.ns.length; i += 1) names.add(nameAt(profile, field, i));
  const order = [...names].sort((a, b) => (field === "layer" ? (a === "none" ? -1 : Number(a)) - (b === "none" ? -1 : Number(b)) : a < b ? -1 : 1));
  return [["", "all"], ...order.map((n): [string, string] => [n, n])];
};

export const ProfilePanel = ({ doc }: { doc: Doc }) => {
  const { profile } = doc;
  const [phase, setPhase] = useState(profile.phases[0]?.phase ?? -1);
  const [by, setBy] = useState("kind");
  const [filter, setFilter] = useState<Filter>({});
  const [words, setWords] = useState("");
  const phone = usePhone();
  const rows = useMemo(() => grouped(profile, phase, by, filter, words), [profile, phase, by, filter, words]);
  const all = useMemo(() => grouped(profile, phase, "each", {}, ""), [profile, phase]);
  if (!profile.rows.ns.length) {
    return (
      <Section id="ops" title="Operators">
        <Note>{profile.note ?? "No operator was recorded."}</Note>
      </Section>
    );
  }
  const facts = profile.phases.find((f) => f.phase === phase);
  const whole = facts?.whole ?? all.reduce((sum, row) => sum + row.ns, 0);
  const shown = rows.reduce((sum, row) => sum + row.ns, 0);
  const filtered = words.trim() !== "" || Object.keys(filter).length > 0;
  const pick = (field: Field) => (
    <Choice
      id={`filter-${field}`}
      label={TITLES[field]}
      value={filter[field] ?? ""}
      options={choices(profile, field)}
      onChange={(value) => {
        const { [field]: _gone, ...rest } = filter;
        setFilter(value ? { ...rest, [field]: value } : rest);
      }}
    />
  );
  return (
    <Section
      id="ops"
      title="Operators"
      lead="Time on the critical path: from one kernel's entry to the next one's, barrier included."
    >
      <div class="card">
        <div class="row">
          <Segments
            label="Phase"
            value={String(phase)}
            options={profile.phases.map((f): [string, string] => [String(f.phase), doc.phases[f.phase] ?? "other"])}
            onChange={(v) => setPhase(Number(v))}
          />
          <span class="note" id="ops-whole">
            {time(whole)} in graphs{facts ? ` · ${time(whole / Math.max(1, facts.units))} a ${facts.per}` : ""}
          </span>
        </div>
        <KindBar rows={all} setup={facts?.setup ?? 0} untimed={facts?.untimed ?? 0} whole={whole} />
      </div>
      <div class="card">
        <div class="row">
          <Segments
            label="Group by"
            value={by}
            options={[
              ["kind", "Kind"],
              ["op", "Operator"],
              ["role", "Role"],
              ["layer", "Layer"],
              ["dtype", "Type"],
              ["each", "Each"],
            ]}
            onChange={setBy}
          />
        </div>
        <div class="row" style={{ marginTop: "10px" }}>
          {pick("op")}
          {pick("role")}
          {pick("layer")}
          {pick("dtype")}
          <label class="choice search" for="filter-words">
            <span>Containing</span>
            <input id="filter-words" type="search" value={words} onInput={(e) => setWords(e.currentTarget.value)} placeholder="ffn, q4_K …" />
          </label>
          <button
            type="button"
            class="btn"
            id="filter-clear"
            disabled={!filtered}
            onClick={() => {
              setFilter({});
              setWords("");
            }}
          >
            Clear
          </button>
        </div>
        <p class="note" id="ops-shown" aria-live="polite">
          {rows.length} rows, {time(shown)}, {percent(whole ? shown / whole : null)} of the phase
        </p>
        <SortTable
          id="ops-table"
          caption="Operators"
          rows={rows}
          columns={columns(by, whole, facts?.units ?? 1, facts?.per ?? "graph", phone)}
          first="time"
          rowKey={(row) => row.key}
        />
      </div>
      {profile.note ? <Note>{profile.note}</Note> : null}
      {profile.wasted_note ? <Note>{profile.wasted_note}</Note> : null}
    </Section>
  );
};

const KindBar = (p: { rows: Row[]; setup: number; untimed: number; whole: number }) => {
  const sums = new Map<Kind, number>();
  for (const row of p.rows) sums.set(row.kind, (sums.get(row.kind) ?? 0) + row.ns);
  const part = (key: string, label: string, value: number, colour: string) => ({ key, label, value, colour, text: percent(p.whole ? value / p.whole : null) });
  const parts = KINDS.map((kind) => part(kind, KIND_LABEL[kind], sums.get(kind) ?? 0, kindVar(kind)));
  parts.push(part("setup", "before the first kernel", p.setup, "var(--line)"), part("untimed", "around unseen kernels", p.untimed, "var(--bad)"));
  return <div style={{ marginTop: "12px" }}><Stack label="Shares of time" parts={parts.filter((q) => q.value > 0)} /></div>;
};

const columns = (by: string, whole: number, units: number, per: string, phone: boolean): Column<Row>[] => {
  const fields = GROUPS[by] ?? [];
  const dot = (row: Row) => <i class="dot" style={{ background: by === "layer" || by === "dtype" ? "transparent" : kindVar(row.kind) }} />;
  // On a phone there is room for one name: the others are in a second line.
  const rest = (row: Row) => (["role", "dtype", "layer", "kernel"] as const).filter((f) => fields.indexOf(f) > 0).map((f) => (f === "layer" && row.layer !== "none" ? `layer ${row.layer}` : row[f]));
  const text = (id: Field, title: string): Column<Row> => ({
    id,
    title,
    sort: (row) => (id === "layer" ? (row.layer === "none" ? -1 : Number(row.layer)) : row[id]),
    cell: (row) =>
      id !== fields[0] ? (
        row[id]
      ) : (
        <>
          {dot(row)}
          {row[id]}
          {phone && fields.length > 1 ? <div class="second">{rest(row).filter(Boolean).join(" · ")}</div> : null}
        </>
      ),
  });
  const named = fields
    .filter((f) => f !== "backend" && (!phone || f === fields[0]))
    .map((f) => text(f, TITLES[f]));
  return [
    ...named,
    { id: "time", title: "Time", numeric: true, sort: (r) => r.ns, cell: (r) => <span title={r.stderr === null ? undefined : `standard error ${time(r.stderr)}`}>{time(r.ns)}</span> },
    {
      id: "share",
      title: "Share",
      numeric: true,
      sort: (r) => r.ns,
      cell: (r) => (
        <span class="share">
          <span class="track">
            <i style={{ width: `${whole ? (100 * r.ns) / whole : 0}%`, background: by === "layer" || by === "dtype" ? "var(--accent)" : kindVar(r.kind) }} />
          </span>
          {percent(whole ? r.ns / whole : null)}
        </span>
      ),
    },
    {
      id: "wasted",
      title: "Wasted",
      numeric: true,
      help: "Time beyond what the machine's measured peaks would need for these bytes and operations",
      sort: (r) => r.wasted,
      cell: (r) => (r.wasted === null ? ABSENT : time(r.wasted)),
    },
    { id: "per", title: `A ${per}`, numeric: true, help: `Time a ${per}`, sort: (r) => r.ns / units, cell: (r) => time(r.ns / units) },
    { id: "calls", title: "Kernels", numeric: true, help: "Kernels that ran", sort: (r) => r.calls, cell: (r) => (r.untimed ? `${count(r.calls)} + ${count(r.untimed)}` : count(r.calls)) },
    { id: "each", title: "Each", numeric: true, help: "Mean time of one kernel", sort: (r) => (r.calls ? r.ns / r.calls : null), cell: (r) => time(r.calls ? r.ns / r.calls : null) },
    { id: "bandwidth", title: "Bytes/s", numeric: true, help: "Nominal bytes by time", sort: (r) => speed(r.bytes, r.ns), cell: (r) => rate(speed(r.bytes, r.ns), "B/s") },
    { id: "flops", title: "FLOP/s", numeric: true, help: "Nominal operations by time", sort: (r) => speed(r.flops, r.ns), cell: (r) => rate(speed(r.flops, r.ns), "FLOP/s") },
    { id: "bytes", title: "Bytes", numeric: true, sort: (r) => r.bytes, cell: (r) => bytes(r.bytes) },
  ];
};

const speed = (amount: number | null, ns: number): number | null => (amount === null || ns <= 0 ? null : (amount / ns) * 1e9);
