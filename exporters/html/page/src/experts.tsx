// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: how many distinct experts each execution needed.
import { plain, time } from "./format";
import type { Doc, Experts } from "./types";
import { Note, Section, SortTable } from "./ui";

// Counts have no decimals; what was not observed is no number.
const whole = (n: number | null) => (n === null ? plain(n) : n.toLocaleString("en"));

export const ExpertsPanel = ({ experts }: { doc: Doc; experts: Experts }) => (
  <Section id="experts" title="Experts" lead="Distinct experts that one product needed: each must be read once.">
    <div class="card">
      <SortTable
        id="experts-table"
        caption="Experts"
        rows={experts.rows}
        first="layer"
        limit={40}
        rowKey={(r) => `${r.phase} ${r.layer} ${r.role}`}
        columns={[
          { id: "layer", title: "Layer", numeric: true, sort: (r) => -r.layer, cell: (r) => (r.layer < 0 ? "none" : r.layer) },
          { id: "role", title: "Role", sort: (r) => r.role, cell: (r) => r.role },
          { id: "phase", title: "Phase", sort: (r) => r.phase, cell: (r) => r.phase },
          { id: "available", title: "Experts", numeric: true, sort: (r) => r.available, cell: (r) => whole(r.available) },
          { id: "mean", title: "Used, mean", numeric: true, sort: (r) => r.mean, cell: (r) => plain(r.mean) },
          { id: "max", title: "Most", numeric: true, sort: (r) => r.max, cell: (r) => whole(r.max) },
          { id: "runs", title: "Products", numeric: true, sort: (r) => r.runs, cell: (r) => whole(r.runs) },
          { id: "ns", title: "Time", numeric: true, sort: (r) => r.ns, cell: (r) => time(r.ns) },
        ]}
      />
    </div>
    {experts.note ? <Note>{experts.note}</Note> : null}
  </Section>
);
