// SPDX-License-Identifier: Apache-2.0
// Bundles the page into one file, ../page.html, that fetches nothing: `node build.mjs [OUTPUT [NOTICE]]`.
// What may run in it is named by hash in its Content-Security-Policy, so a name that a hostile
// target chose could not become a script even if it got into the markup. With two arguments, the
// second is where the licences of what was bundled are written.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const output = process.argv[2] ?? join(here, "..", "page.html");

const bundle = async (entry, loader) => {
  const built = await esbuild.build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    write: false,
    minify: true,
    metafile: true,
    legalComments: "none", // whole licences are in the page, see below
    format: "iife",
    target: ["chrome100", "firefox113", "safari16.4"],
    jsx: "automatic",
    jsxImportSource: "preact",
    charset: "utf8",
    loader,
    logLevel: "warning",
  });
  return { text: built.outputFiles[0].text.trimEnd(), inputs: Object.keys(built.metafile.inputs) };
};

const packageOf = (input) => /(?:^|\/)node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input)?.[1];

const licences = (inputs) => {
  const names = [...new Set(inputs.map(packageOf).filter(Boolean))].sort();
  return names.map((name) => {
    const folder = join(here, "node_modules", name);
    const file = ["LICENSE", "LICENSE.md", "LICENSE.txt", "license"].find((f) => existsSync(join(folder, f)));
    if (!file) throw new Error(`${name} has no licence file`);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    return { name, version, license, text: readFileSync(join(folder, file), "utf8").trim() };
  });
};

const hash = (text) => `'sha256-${createHash("sha256").update(text, "utf8").digest("base64")}'`;
const script = await bundle("src/main.tsx");
const style = await bundle("src/style.css");
const parts = licences([...script.inputs, ...style.inputs]);
const code = script.text; // esbuild writes no closing tag into a script
if (/<\/script|<!--/i.test(code)) throw new Error("the bundle would end its own script element");
const policy = [
  "default-src 'none'",
  `script-src ${hash(code)}`,
  `style-src ${hash(style.text)}`,
  "img-src data:",
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");
const about = JSON.stringify(parts).replaceAll("<", "\\u003c");

const page = readFileSync(join(here, "src", "page.html"), "utf8")
  .replace("{{policy}}", () => policy)
  .replace("{{style}}", () => style.text)
  .replace("{{licences}}", () => about)
  .replace("{{script}}", () => code);
writeFileSync(`${output}.part`, page);
renameSync(`${output}.part`, output);

const notice = parts.map((p) => `${p.name} ${p.version} (${p.license})\n\n${p.text}\n`).join(`\n${"-".repeat(72)}\n\n`);
if (process.argv[3]) writeFileSync(process.argv[3], notice);
