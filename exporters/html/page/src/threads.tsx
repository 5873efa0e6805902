// SPDX-License-Identifier: Apache-2.0
// What the scheduler did with the compute threads, and which pages were missing.
import { ABSENT, count, figure, percent, time } from "./format";
import type { Doc, Threads } from "./types";
import { type Column, Note, Section, SortTable, Stack } from "./ui";

const TONES = ["--s-preempted", "--k-movement", "--s-throttled", "--s-runnable", "--s-blocked", "--k-matmul", "--k-recurrent", "--k-norm", "--k-other", "--s-gap"];
const PARTS = ["--k-matmul", "--s-blocked", "--k-norm", "--k-attention", "--k-position", "--k-elementwise", "--k-recurrent", "--k-movement", "--k-other"];
const seconds = (value: number | null): string => time(value === null ? null : value * 1e9);

const titled = (cause: string): string => cause.charAt(0).toUpperCase() + cause.slice(1);

type ThreadRow = Threads["rows"][number];

export const ThreadsPanel = ({ doc }: { doc: Doc }) => {
  const { threads } = doc;
  return (
    <Section id="threads" title="Threads and page faults" lead="While graphs ran: running, ready without a core, or blocked (in brackets how often); and pages that were not there.">
      {threads.rows.length ? <Table threads={threads} /> : <Note>{threads.note ?? "Threads were not watched."}</Note>}
      <div class="columns">
        {threads.takers.length ? <Takers threads={threads} /> : null}
        {threads.stalled.length ? <Stalls threads={threads} /> : null}
        {threads.barriers.length ? <Barriers threads={threads} /> : null}
        {threads.faults.length ? <Faults threads={threads} /> : null}
        {threads.cpu.length ? <Cpu threads={threads} /> : null}
        {threads.counters.length ? <Counters threads={threads} /> : null}
      </div>
      {threads.quota ? <Note>{threads.quota}</Note> : null}
      {threads.rows.length && threads.note ? <Note>{threads.note}</Note> : null}
      {threads.faults_note ? <Note>{threads.faults_note}</Note> : null}
    </Section>
  );
};

const Table = ({ threads }: { threads: Threads }) => {
  const used = threads.causes.map((cause, i) => ({ cause, i })).filter(({ i }) => threads.rows.some((r) => (r.waits[i] ?? 0) > 0));
  const columns: Column<ThreadRow>[] = [
    { id: "tid", title: "Thread", sort: (r) => r.tid, cell: (r) => <span title={r.facts}>{r.tid} {r.leader ? "(calls)" : ""}</span> },
    { id: "running", title: "Running", numeric: true, sort: (r) => r.running, cell: (r) => seconds(r.running) },
    ...used.map(
      ({ cause, i }): Column<ThreadRow> => ({
        id: cause,
        title: titled(cause),
        numeric: true,
        help: `${i < threads.ready ? "ready, not running" : "blocked"}: time and how often`,
        sort: (r) => r.waits[i] ?? 0,
        cell: (r) => ((r.waits[i] ?? 0) > 0 ? `${seconds(r.waits[i] ?? 0)} (${count(r.counts[i] ?? 0)})` : ABSENT),
      }),
    ),
    { id: "migrations", title: "Migrations", numeric: true, sort: (r) => r.migrations, cell: (r) => count(r.migrations) },
    { id: "idle", title: "At barriers", numeric: true, help: "Share of the operators' time that it waited for its peers", sort: (r) => r.idle, cell: (r) => percent(r.idle) },
  ];
  return (
    <div class="card">
      <SortTable id="threads-table" caption="Threads" rows={threads.rows} columns={columns} first="running" rowKey={(r) => String(r.tid)} />
      {threads.rows.map((row) => (
        <div key={row.tid} style={{ marginTop: "10px" }}>
          <div class="bar-title">
            Thread {row.tid} {row.leader ? "(calls)" : ""}
          </div>
          <Stack
            label={`Thread ${row.tid}`}
            legend={false}
            parts={[
              { key: "running", label: "running", value: row.running, colour: "var(--s-running)", text: seconds(row.running) },
              ...used
                .filter(({ i }) => (row.waits[i] ?? 0) > 0)
                .map(({ cause, i }) => ({ key: cause, label: cause, value: row.waits[i] ?? 0, colour: `var(${TONES[i % TONES.length]})`, text: seconds(row.waits[i] ?? 0) })),
            ]}
          />
        </div>
      ))}
      <ul class="legend">
        <li>
          <i style={{ background: "var(--s-running)" }} />
          running
        </li>
        {used.map(({ cause, i }) => (
          <li key={cause}>
            <i style={{ background: `var(${TONES[i % TONES.length]})` }} />
            {cause}
          </li>
        ))}
      </ul>
    </div>
  );
};

const Takers = ({ threads }: { threads: Threads }) => (
  <div class="card">
    <h3 style={{ marginTop: 0 }}>Who took the cores</h3>
    <SortTable
      id="takers-table"
      caption="Who took the cores"
      rows={threads.takers}
      first="seconds"
      limit={8}
      rowKey={(r) => `${r.comm} ${r.pid}`}
      columns={[
        { id: "comm", title: "Program", sort: (r) => r.comm, cell: (r) => `${r.comm}${r.own ? " (its own)" : ""}` },
        { id: "pid", title: "pid", numeric: true, sort: (r) => r.pid, cell: (r) => r.pid },
        { id: "times", title: "Times", numeric: true, sort: (r) => r.times, cell: (r) => count(r.times) },
        { id: "seconds", title: "Waited", numeric: true, sort: (r) => r.seconds, cell: (r) => seconds(r.seconds) },
      ]}
    />
  </div>
);

const Stalls = ({ threads }: { threads: Threads }) => (
  <div class="card">
    <h3 style={{ marginTop: 0 }}>What it cost the calls</h3>
    <SortTable
      id="stalls-table"
      caption="Stalls by phase"
      rows={threads.stalled}
      first="seconds"
      rowKey={(r) => r.phase}
      columns={[
        { id: "phase", title: "Phase", sort: (r) => r.phase, cell: (r) => r.phase },
        { id: "seconds", title: "In calls", numeric: true, sort: (r) => r.seconds, cell: (r) => seconds(r.seconds) },
        ...threads.causes
          .map((cause, i) => ({ cause, i }))
          .filter(({ i }) => threads.stalled.some((r) => (r.by[i] ?? 0) > 0))
          .map(({ cause, i }) => ({ id: cause, title: titled(cause), numeric: true, sort: (r: Threads["stalled"][number]) => r.by[i] ?? 0, cell: (r: Threads["stalled"][number]) => seconds(r.by[i] ?? 0) })),
        { id: "worst", title: "Worst call", numeric: true, sort: (r) => r.worst, cell: (r) => seconds(r.worst) },
      ]}
    />
  </div>
);

const Barriers = ({ threads }: { threads: Threads }) => (
  <div class="card">
    <h3 style={{ marginTop: 0 }}>Barriers</h3>
    <SortTable
      id="barriers-table"
      caption="Barriers by operator"
      rows={threads.barriers}
      first="wall"
      limit={8}
      rowKey={(r) => `${r.op} ${r.dtype} ${r.role} ${r.phase}`}
      columns={[
        { id: "op", title: "Operator", sort: (r) => r.op, cell: (r) => <span class="wraps">{`${r.op} ${r.role}`}</span> },
        { id: "phase", title: "Phase", sort: (r) => r.phase, cell: (r) => r.phase },
        { id: "wall", title: "Time", numeric: true, sort: (r) => r.wall, cell: (r) => seconds(r.wall) },
        { id: "idle", title: "Threads idle", numeric: true, sort: (r) => r.idle, cell: (r) => percent(r.idle) },
        { id: "late", title: "Late because", cell: (r) => <span class="wraps">{r.late || ABSENT}</span> },
      ]}
    />
  </div>
);

const Cpu = ({ threads }: { threads: Threads }) => (
  <div class="card" id="cpu-time">
    <h3 style={{ marginTop: 0 }}>CPU time by part of the program</h3>
    <Stack
      label="CPU time"
      parts={threads.cpu.map(([part, spent, share], i) => ({ key: part, label: part, value: spent, colour: `var(${PARTS[i % PARTS.length]})`, text: `${seconds(spent)}, ${percent(share)}` }))}
    />
    {threads.cpu_note ? <Note>{threads.cpu_note}</Note> : null}
  </div>
);

type Counter = Threads["counters"][number];

const Counters = ({ threads }: { threads: Threads }) => (
  <div class="card">
    <h3 style={{ marginTop: 0 }}>Performance events</h3>
    <SortTable
      id="counters-table"
      caption="Performance events"
      rows={threads.counters}
      first="value"
      rowKey={(r: Counter) => r[0]}
      columns={[
        { id: "event", title: "Event", sort: (r: Counter) => r[0], cell: (r: Counter) => r[0] },
        { id: "value", title: "Count", numeric: true, sort: (r: Counter) => r[1], cell: (r: Counter) => (r[1] === null ? ABSENT : count(r[1])) },
        { id: "ratio", title: "Counted", numeric: true, help: "Share of the time in which it really counted", sort: (r: Counter) => r[2], cell: (r: Counter) => percent(r[2]) },
      ]}
    />
    {threads.counters.map((r) => (r[1] === null && r[3] ? <Note key={r[0]}>{`${r[0]}: ${r[3]}`}</Note> : null))}
    {threads.derived.length ? <Note>{threads.derived.map(([what, value, unit]) => `${what}: ${unit === "1" ? value.toFixed(2) : figure(value, unit)}`).join(" · ")}</Note> : null}
  </div>
);

const Faults = ({ threads }: { threads: Threads }) => (
  <div class="card">
    <h3 style={{ marginTop: 0 }}>Page faults</h3>
    <SortTable
      id="faults-table"
      caption="Page faults"
      rows={threads.faults}
      first="count"
      limit={12}
      rowKey={(r) => `${r[0]} ${r[1]}`}
      columns={[
        { id: "kind", title: "Kind", sort: (r) => r[0], cell: (r) => r[0] },
        { id: "mapping", title: "Where", sort: (r) => r[1], cell: (r) => r[1] },
        { id: "count", title: "Faults", numeric: true, sort: (r) => r[2], cell: (r) => count(r[2]) },
        { id: "seconds", title: "Waited", numeric: true, sort: (r) => r[3], cell: (r) => seconds(r[3]) },
      ]}
    />
    {threads.tensors.length ? (
      <SortTable
        id="fault-tensors-table"
        caption="Page faults by tensor"
        rows={threads.tensors}
        first="majors"
        limit={8}
        rowKey={(r) => `${r.name} ${r.mapping}`}
        columns={[
          { id: "name", title: "Tensor", sort: (r) => r.name, cell: (r) => r.name },
          { id: "majors", title: "Major", numeric: true, sort: (r) => r.majors, cell: (r) => count(r.majors) },
          { id: "minors", title: "Minor", numeric: true, sort: (r) => r.minors, cell: (r) => count(r.minors) },
          { id: "seconds", title: "Waited", numeric: true, sort: (r) => r.seconds, cell: (r) => seconds(r.seconds) },
        ]}
      />
    ) : null}
  </div>
);
