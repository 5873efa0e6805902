// SPDX-License-Identifier: Apache-2.0
// Offloaded work: which operators ran on which backend, and in which shapes.
import { percent, time } from "./format";
import type { Doc, Placement } from "./types";
import { Section, SortTable } from "./ui";

export const PlacementPanel = ({ placement }: { doc: Doc; placement: Placement }) => (
  <Section
    id="placement"
    title="Where operators ran"
    lead="How often each was given to a backend, and the lengths of its sources, fastest first."
  >
    {placement.parts.length ? (
      <div class="card">
        <SortTable
          id="offload-table"
          caption="Where the time of the calls went"
          rows={placement.parts}
          first="share"
          limit={40}
          rowKey={(r) => `${r.part} ${r.backend}`}
          columns={[
            { id: "part", title: "Part", sort: (r) => r.part, cell: (r) => r.part },
            { id: "backend", title: "Backend", sort: (r) => r.backend, cell: (r) => r.backend },
            { id: "share", title: "Share", numeric: true, sort: (r) => r.share, cell: (r) => percent(r.share) },
            { id: "in_calls", title: "In calls", numeric: true, sort: (r) => r.in_calls, cell: (r) => time(r.in_calls) },
            { id: "between", title: "Between", numeric: true, sort: (r) => r.between, cell: (r) => time(r.between) },
            {
              id: "each",
              title: "A call",
              numeric: true,
              sort: (r) => r.in_calls + r.between,
              cell: (r) => time((r.in_calls + r.between) / r.calls),
            },
          ]}
        />
      </div>
    ) : null}
    <div class="card">
      <SortTable
        id="placement-table"
        caption="Operators by backend"
        rows={placement.rows}
        first="count"
        limit={40}
        rowKey={(r) => `${r.backend} ${r.phase} ${r.op} ${r.dtype} ${r.role}`}
        columns={[
          { id: "op", title: "Operator", sort: (r) => r.op, cell: (r) => r.op },
          { id: "role", title: "Role", sort: (r) => r.role, cell: (r) => r.role },
          { id: "dtype", title: "Type", sort: (r) => r.dtype, cell: (r) => r.dtype },
          { id: "backend", title: "Ran on", sort: (r) => r.backend, cell: (r) => r.backend },
          { id: "phase", title: "Phase", sort: (r) => r.phase, cell: (r) => r.phase },
          { id: "count", title: "Times", numeric: true, sort: (r) => r.count, cell: (r) => r.count.toLocaleString("en") },
          { id: "shapes", title: "Shapes", sort: (r) => r.shapes, cell: (r) => r.shapes },
        ]}
      />
    </div>
  </Section>
);
