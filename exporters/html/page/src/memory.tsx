// SPDX-License-Identifier: Apache-2.0
// What is in memory: weights by type and layer, KV, scratch, mapped against resident.
import { useMemo, useState } from "preact/hooks";
import { ABSENT, bytes, count, percent, plural } from "./format";
import { Value } from "./overview";
import type { Doc, Memory } from "./types";
import { type Column, Note, Section, SortTable, Stack } from "./ui";

const TONES = ["--k-matmul", "--k-attention", "--k-norm", "--k-position", "--k-elementwise", "--k-movement", "--k-recurrent", "--k-other"];

const FIRST_LAYERS = 13;

const sums = (rows: Memory["weights"], key: (row: Memory["weights"][number]) => string): [string, number][] => {
  const found = new Map<string, number>();
  for (const row of rows) found.set(key(row), (found.get(key(row)) ?? 0) + row[3]);
  return [...found].sort((a, b) => b[1] - a[1]);
};

export const MemoryPanel = ({ doc }: { doc: Doc }) => {
  const { memory } = doc;
  const whole = memory.weights.reduce((sum, row) => sum + row[3], 0);
  const types = sums(memory.weights, (row) => row[2]);
  const repacked = memory.weights.filter((row) => row[4]).reduce((sum, row) => sum + row[3], 0);
  return (
    <Section id="memory" title="Memory" lead="From the tensors that the graphs use, and from how the model's file is mapped.">
      <div class="card">
        <dl class="figures" style={{ marginTop: 0 }}>
          {memory.parts.map((part) => (
            <div class="figure" key={part.id} data-memory={part.id}>
              <dt>{part.label}</dt>
              <dd>
                <div class="value">
                  <Value text={bytes(part.bytes)} />
                </div>
                <div class="subline">{part.note}</div>
              </dd>
            </div>
          ))}
        </dl>
        {memory.mapping ? <Mapping mapping={memory.mapping} /> : null}
      </div>
      {whole ? (
        <div class="card">
          <h3 style={{ marginTop: 0 }}>Weights by type</h3>
          <Stack
            label="Weights by type"
            parts={types.map(([name, value], i) => ({ key: name, label: name, value, colour: `var(${TONES[i % TONES.length]})`, text: `${bytes(value)}, ${percent(value / whole)}` }))}
          />
          {repacked ? <Note>{bytes(repacked)} of them were rearranged into anonymous memory for special kernels; the file's copy stays mapped and is not used.</Note> : null}
          <h3>Weights by layer and role</h3>
          <Layers memory={memory} types={types.map(([name]) => name)} />
          <details>
            <summary>Every role and type</summary>
            <Table memory={memory} whole={whole} />
          </details>
        </div>
      ) : (
        <Note>{memory.weights_note ?? "No weights were seen."}</Note>
      )}
      {memory.weights_unknown ? <Note>{plural(memory.weights_unknown, "weight")} could not be sized and are not in the sums.</Note> : null}
      {whole && memory.weights_note ? <Note>{memory.weights_note}</Note> : null}
    </Section>
  );
};

const Mapping = ({ mapping }: { mapping: NonNullable<Memory["mapping"]> }) => {
  const { mapped } = mapping;
  // The page cache may hold more of the file than is mapped (its header).
  const resident = mapping.resident === null || mapped === null ? mapping.resident : Math.min(mapping.resident, mapped);
  return (
    <div style={{ marginTop: "14px" }} id="memory-mapping">
      {mapped !== null && resident !== null && mapped > 0 ? (
        <Stack
          label="The model's file"
          parts={[
            { key: "in", label: "mapped and in memory", value: resident, colour: "var(--s-running)", text: bytes(resident) },
            { key: "out", label: "mapped, not in memory", value: Math.max(0, mapped - resident), colour: "var(--s-blocked)", text: bytes(Math.max(0, mapped - resident)) },
          ]}
        />
      ) : null}
      <Note>{mapping.note}</Note>
    </div>
  );
};

const Layers = ({ memory, types }: { memory: Memory; types: string[] }) => {
  const layers = useMemo(() => {
    const found = new Map<number, Map<string, number>>();
    for (const [layer, , dtype, size] of memory.weights) {
      const row = found.get(layer) ?? new Map<string, number>();
      row.set(dtype, (row.get(dtype) ?? 0) + size);
      found.set(layer, row);
    }
    return [...found].sort((a, b) => a[0] - b[0]);
  }, [memory]);
  const [all, setAll] = useState(false);
  const shown = all ? layers : layers.slice(0, FIRST_LAYERS);
  const most = Math.max(1, ...layers.map(([, row]) => [...row.values()].reduce((a, b) => a + b, 0)));
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Weights by layer">
        <table id="memory-layers">
          <thead>
            <tr>
              <th scope="col">Layer</th>
              <th scope="col" class="num">Size</th>
              <th scope="col" style={{ width: "70%" }}>Types</th>
            </tr>
          </thead>
          <tbody>
            {shown.map(([layer, row]) => {
              const size = [...row.values()].reduce((a, b) => a + b, 0);
              return (
                <tr key={layer}>
                  <td>{layer < 0 ? "outside" : layer}</td>
                  <td class="num">{bytes(size)}</td>
                  <td>
                    <span style={{ display: "flex", width: `${(100 * size) / most}%`, height: "12px", borderRadius: "3px", overflow: "hidden" }}>
                      {types.map((name, i) => {
                        const part = row.get(name) ?? 0;
                        return part ? <i key={name} title={`${name}: ${bytes(part)}`} style={{ width: `${(100 * part) / size}%`, background: `var(${TONES[i % TONES.length]})` }} /> : null;
                      })}
                    </span>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {layers.length > FIRST_LAYERS ? (
        <button type="button" class="more" onClick={() => setAll(!all)}>
          {all ? `Show the first ${FIRST_LAYERS}` : `Show all ${layers.length} rows`}
        </button>
      ) : null}
    </>
  );
};

interface RoleRow {
  role: string;
  dtype: string;
  size: number;
  tensors: number;
  repacked: number;
}

const Table = ({ memory, whole }: { memory: Memory; whole: number }) => {
  const rows = useMemo(() => {
    const found = new Map<string, RoleRow>();
    for (const [, role, dtype, size, repacked, tensors] of memory.weights) {
      const key = `${role}\u0000${dtype}`;
      const row = found.get(key) ?? { role, dtype, size: 0, tensors: 0, repacked: 0 };
      row.size += size;
      row.tensors += tensors;
      row.repacked += repacked ? size : 0;
      found.set(key, row);
    }
    return [...found.values()];
  }, [memory]);
  const columns: Column<RoleRow>[] = [
    { id: "role", title: "Role", sort: (r) => r.role, cell: (r) => r.role },
    { id: "dtype", title: "Type", sort: (r) => r.dtype, cell: (r) => r.dtype },
    { id: "tensors", title: "Tensors", numeric: true, sort: (r) => r.tensors, cell: (r) => count(r.tensors) },
    { id: "size", title: "Size", numeric: true, sort: (r) => r.size, cell: (r) => bytes(r.size) },
    { id: "share", title: "Share", numeric: true, sort: (r) => r.size, cell: (r) => percent(r.size / whole) },
    { id: "repacked", title: "Rearranged", numeric: true, sort: (r) => r.repacked, cell: (r) => (r.repacked ? bytes(r.repacked) : ABSENT) },
  ];
  return <SortTable id="memory-table" caption="Weights" rows={rows} columns={columns} first="size" rowKey={(r) => `${r.role} ${r.dtype}`} />;
};
