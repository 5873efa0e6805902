// SPDX-License-Identifier: Apache-2.0
import { render } from "preact";
import { App } from "./app";
import { startTheme } from "./theme";
import type { Doc } from "./types";

const FORMAT = 1;

const embedded = (id: string): unknown => JSON.parse(document.getElementById(id)?.textContent ?? "null");

const start = () => {
  const root = document.getElementById("app");
  if (!root) return;
  startTheme();
  let doc: Doc | null = null;
  try {
    doc = embedded("recording") as Doc | null;
  } catch {
    doc = null;
  }
  if (!doc || doc.format !== FORMAT) {
    root.dataset.ready = "false";
    root.textContent = "This page holds no recording that it can read: make it again with profinferd report --html.";
    return;
  }
  document.title = `${doc.about.title} · profinferd`;
  render(<App doc={doc} licences={embedded("licences") as Licence[]} />, root);
  // Drawn things come one frame after their size is known.
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      root.dataset.ready = "true";
    }),
  );
};

export interface Licence {
  name: string;
  version: string;
  license: string;
  text: string;
}

start();
