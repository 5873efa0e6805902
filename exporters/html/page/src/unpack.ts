// SPDX-License-Identifier: Apache-2.0
// Timelines are unpacked part by part, when one is looked at.
import type { Doc, Timeline } from "./types";

const parts = new Map<number, Promise<Timeline[]>>();

const inflate = async (base64: string): Promise<string> => {
  const packed = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).text();
};

/** The timeline of a call; null where none was kept. */
export const timelineOf = async (doc: Doc, call: number): Promise<Timeline | null> => {
  const index = doc.tokens.timeline[call] ?? -1;
  if (index < 0) return null;
  const part = Math.floor(index / doc.timelines.per);
  let found = parts.get(part);
  if (!found) {
    found = inflate(doc.timelines.parts[part] ?? "").then((text) => JSON.parse(text) as Timeline[]);
    parts.set(part, found);
  }
  return (await found)[index % doc.timelines.per] ?? null;
};
