// SPDX-License-Identifier: Apache-2.0
// The few pieces that every panel is made of. Text goes through JSX only: nothing is markup.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { THEME_EVENT } from "./theme";

export const Section = (p: { id: string; title: string; lead?: ComponentChildren; children: ComponentChildren }) => (
  <section id={p.id} class="section" aria-labelledby={`${p.id}-title`}>
    <h2 id={`${p.id}-title`} tabIndex={-1}>
      {p.title}
    </h2>
    {p.lead ? <p class="lead">{p.lead}</p> : null}
    {p.children}
  </section>
);

export const Note = (p: { children: ComponentChildren; tone?: "bad" }) => (
  <p class={p.tone === "bad" ? "note bad" : "note"}>{p.children}</p>
);

export const Choice = (p: {
  label: string;
  value: string;
  options: [string, string][];
  onChange: (value: string) => void;
  id: string;
}) => (
  <label class="choice" for={p.id}>
    <span>{p.label}</span>
    <select id={p.id} value={p.value} onChange={(e) => p.onChange(e.currentTarget.value)}>
      {p.options.map(([value, text]) => (
        <option key={value} value={value} selected={value === p.value}>
          {text}
        </option>
      ))}
    </select>
  </label>
);

/** Buttons of which one is pressed. */
export const Segments = (p: {
  label: string;
  value: string;
  options: [string, string][];
  onChange: (value: string) => void;
}) => (
  <div class="segments" role="group" aria-label={p.label}>
    {p.options.map(([value, text]) => (
      <button
        type="button"
        key={value}
        data-value={value}
        aria-pressed={value === p.value}
        onClick={() => p.onChange(value)}
      >
        {text}
      </button>
    ))}
  </div>
);

export interface Part {
  key: string;
  label: string;
  value: number;
  colour: string;
  text: string;
}

/** A stacked bar with its legend; parts too thin to see are in the legend only. */
export const Stack = (p: { parts: Part[]; label: string; legend?: boolean }) => {
  const whole = p.parts.reduce((sum, part) => sum + part.value, 0);
  if (whole <= 0) return null;
  return (
    <div class="stack">
      <div class="stack-bar" role="img" aria-label={`${p.label}: ${p.parts.map((q) => `${q.label} ${q.text}`).join(", ")}`}>
        {p.parts.map((part) => (
          <span
            key={part.key}
            title={`${part.label}: ${part.text}`}
            style={{ width: `${(100 * part.value) / whole}%`, background: part.colour }}
          />
        ))}
      </div>
      {p.legend === false ? null : (
        <ul class="legend">
          {p.parts.map((part) => (
            <li key={part.key}>
              <i style={{ background: part.colour }} />
              {part.label} <b>{part.text}</b>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
};

export interface Column<Row> {
  id: string;
  title: string;
  /** What the title means, shown on hover. */
  help?: string;
  numeric?: boolean;
  sort?: (row: Row) => number | string | null;
  cell: (row: Row) => ComponentChildren;
}

/** Rows sorted by a column; absent values always last. */
export const sorted = <Row,>(rows: Row[], column: Column<Row> | undefined, down: boolean): Row[] => {
  const by = column?.sort;
  if (!by) return rows;
  const sign = down ? -1 : 1;
  return rows
    .map((row, place) => ({ row, place, key: by(row) }))
    .sort((a, b) => {
      if (a.key === null || b.key === null) return a.key === b.key ? a.place - b.place : a.key === null ? 1 : -1;
      if (a.key === b.key) return a.place - b.place;
      return (a.key < b.key ? -1 : 1) * sign;
    })
    .map((item) => item.row);
};

/** A table whose columns sort by a click or by Enter on their title. */
export function SortTable<Row>(p: {
  id: string;
  caption: string;
  rows: Row[];
  columns: Column<Row>[];
  first: string;
  limit?: number;
  rowKey: (row: Row) => string;
}) {
  const [order, setOrder] = useState({ column: p.first, down: true });
  const [all, setAll] = useState(false);
  const column = p.columns.find((c) => c.id === order.column) ?? p.columns.find((c) => c.id === p.first);
  const rows = sorted(p.rows, column, order.down);
  const limit = p.limit ?? 25;
  const shown = all ? rows : rows.slice(0, limit);
  const turn = (c: Column<Row>) =>
    setOrder(order.column === c.id ? { column: c.id, down: !order.down } : { column: c.id, down: Boolean(c.numeric) });
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label={p.caption}>
        <table id={p.id}>
          <caption class="hidden">{p.caption}</caption>
          <thead>
            <tr>
              {p.columns.map((c) => (
                <th
                  key={c.id}
                  scope="col"
                  class={c.numeric ? "num" : undefined}
                  aria-sort={column?.id === c.id ? (order.down ? "descending" : "ascending") : "none"}
                >
                  {c.sort ? (
                    <button type="button" title={c.help} onClick={() => turn(c)} data-column={c.id}>
                      {c.title}
                      <span class="arrow" aria-hidden="true">
                        {column?.id === c.id ? (order.down ? "▾" : "▴") : ""}
                      </span>
                    </button>
                  ) : (
                    c.title
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={p.rowKey(row)} data-key={p.rowKey(row)}>
                {p.columns.map((c) => (
                  <td key={c.id} class={c.numeric ? "num" : undefined} data-column={c.id}>
                    {c.cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > limit ? (
        <button type="button" class="more" onClick={() => setAll(!all)}>
          {all ? `Show the first ${limit}` : `Show all ${rows.length} rows`}
        </button>
      ) : null}
    </>
  );
}

/** Width of an element, followed while it changes. */
export const useWidth = () => {
  const ref = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const read = () => setWidth(element.clientWidth);
    const observer = new ResizeObserver(read);
    observer.observe(element);
    read();
    return () => observer.disconnect();
  }, []);
  return { ref, width };
};

const narrow = matchMedia("(max-width: 640px)");

/** Whether the page is as narrow as a phone. */
export const usePhone = (): boolean => {
  const [phone, setPhone] = useState(narrow.matches);
  useEffect(() => {
    const look = () => setPhone(narrow.matches);
    narrow.addEventListener("change", look);
    return () => narrow.removeEventListener("change", look);
  }, []);
  return phone;
};

/** Changes whenever light and dark change, for what is drawn and not styled. */
export const useTheme = (): number => {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const next = () => setTurn((n) => n + 1);
    document.addEventListener(THEME_EVENT, next);
    return () => document.removeEventListener(THEME_EVENT, next);
  }, []);
  return turn;
};
