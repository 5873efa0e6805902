// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them. Absent is a dash, never zero.

export const ABSENT = "–";

const digits = (value: number): string => {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return Math.round(value).toLocaleString("en");
  if (size >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
};

const scaled = (value: number, unit: string, base: number, prefixes: string[]): string => {
  let step = 0;
  let size = value;
  while (Math.abs(size) >= base * 0.9995 && step < prefixes.length - 1) {
    size /= base;
    step += 1;
  }
  return `${digits(size)} ${prefixes[step]}${unit}`.trimEnd();
};

export const bytes = (value: number | null): string =>
  value === null ? ABSENT : value < 1024 ? `${Math.round(value)} B` : scaled(value, "B", 1024, ["", "Ki", "Mi", "Gi", "Ti"]);

export const rate = (value: number | null, unit: string): string =>
  value === null || !Number.isFinite(value) ? ABSENT : scaled(value, unit, 1000, ["", "k", "M", "G", "T", "P"]);

export const count = (value: number | null): string => {
  if (value === null) return ABSENT;
  return Math.abs(value) < 1e6 ? Math.round(value).toLocaleString("en") : scaled(value, "", 1000, ["", "k", "M", "G", "T", "P"]);
};

export const plain = (value: number | null): string => (value === null ? ABSENT : digits(value));

/** A time in nanoseconds. */
export const time = (ns: number | null): string => {
  if (ns === null || !Number.isFinite(ns)) return ABSENT;
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 0.9995e6) return `${digits(ns / 1e3)} µs`;
  if (size < 0.9995e9) return `${digits(ns / 1e6)} ms`;
  if (size < 600e9) return `${digits(ns / 1e9)} s`;
  return `${digits(ns / 60e9)} min`;
};

export const percent = (part: number | null): string => {
  if (part === null || !Number.isFinite(part)) return ABSENT;
  const value = part * 100;
  if (value === 0) return "0 %";
  if (Math.abs(value) < 0.05) return "< 0.1 %";
  return `${Math.abs(value) < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
};

export const figure = (value: number | null, unit: string): string => {
  if (value === null) return ABSENT;
  switch (unit) {
    case "s":
      return time(value * 1e9);
    case "B":
      return bytes(value);
    case "ratio":
      return percent(value);
    case "1":
      return count(value);
    case "tokens/s":
      return `${digits(value)} tokens/s`;
    default:
      return rate(value, unit);
  }
};

export const plural = (n: number, one: string, many = `${one}s`): string => `${count(n)} ${n === 1 ? one : many}`;
