// SPDX-License-Identifier: Apache-2.0
// One colour per kind of work, the same in every panel. Values are in style.css.

export const KINDS = ["matmul", "attention", "norm", "position", "elementwise", "movement", "recurrent", "other"] as const;
export type Kind = (typeof KINDS)[number];

export const KIND_LABEL: Record<Kind, string> = {
  matmul: "matrix products",
  attention: "attention",
  norm: "norms",
  position: "rotary positions",
  elementwise: "elementwise",
  movement: "copies and gathers",
  recurrent: "recurrent and convolution",
  other: "other",
};

const MOVES = new Set(["CPY", "CONT", "DUP", "GET_ROWS", "SET_ROWS", "CONCAT", "REPEAT", "PAD", "SET", "ROLL", "FILL", "ARANGE"]);
const ELEMENTS = new Set([
  "ADD", "ADD1", "ADD_ID", "ACC", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "SIN", "COS", "SCALE", "CLAMP", "UNARY", "GLU", "SUM",
  "SUM_ROWS", "MEAN", "CUMSUM", "LEAKY_RELU", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "TRI",
]);
const KV = /^(kv_|attn$|kq|kqv)/;

export const kindOf = (named: string, role: string): Kind => {
  const op = named.split(" ", 1)[0] ?? "";
  if (op.startsWith("FLASH_ATTN") || op.startsWith("SOFT_MAX")) return "attention";
  if (op.startsWith("MUL_MAT") || op === "OUT_PROD") return KV.test(role) ? "attention" : "matmul";
  if (op.endsWith("NORM")) return "norm";
  if (op.startsWith("ROPE")) return "position";
  if (MOVES.has(op)) return "movement";
  if (ELEMENTS.has(op)) return "elementwise";
  if (/^(SSM|RWKV|CONV|IM2COL|GATED|POOL)/.test(op)) return "recurrent";
  return "other";
};

export const kindVar = (kind: Kind): string => `var(--k-${kind})`;

/** Heat of a share of time: how strongly to tint, 0 to 1; small shares stay visible. */
export const heat = (share: number): number => Math.min(1, Math.sqrt(Math.max(0, share)));

/** A colour variable as the canvas needs it. */
export const resolve = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888";
