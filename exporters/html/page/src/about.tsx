// SPDX-License-Identifier: Apache-2.0
// What was recorded, on what, and what is missing.
import { count, plural, time } from "./format";
import type { Licence } from "./main";
import type { Doc } from "./types";
import { Note, Section } from "./ui";

/** Kinds of records besides those of kernels: losing them takes nothing from operators' times. */
const BESIDES = new Set(["sched_spans", "page_faults", "barriers"]);

const meaning = (kinds: string[]): string =>
  kinds.every((kind) => BESIDES.has(kind))
    ? "They are of waits, barriers or page faults: operators and their times are whole."
    : "Time around kernels that are missing is in no operator.";

export const AboutPanel = ({ doc, licences }: { doc: Doc; licences: Licence[] }) => {
  const { about } = doc;
  const { losses } = about;
  const kinds = Object.entries(losses.by_kind).filter(([, n]) => n > 0);
  return (
    <Section id="about" title="About this recording">
      <div class="grid2">
        <div class="card">
          <h3 style={{ marginTop: 0 }}>Facts</h3>
          <dl class="facts">
            {about.facts.map(([what, value]) => (
              <>
                <dt>{what}</dt>
                <dd>{value}</dd>
              </>
            ))}
          </dl>
        </div>
        <div class="card">
          <h3 style={{ marginTop: 0 }}>Losses</h3>
          <p class={losses.total ? "note bad" : "note"} id="losses">
            {losses.total ? `${plural(losses.total, "record was", "records were")} lost. ${meaning(kinds.map(([kind]) => kind))}` : "Nothing was lost."}
          </p>
          {kinds.length ? (
            <ul class="plain">
              {kinds.map(([kind, n]) => (
                <li key={kind}>
                  {kind}: {count(n)}
                </li>
              ))}
            </ul>
          ) : null}
          {losses.gaps.length ? (
            <ul class="plain" id="gaps">
              {losses.gaps.slice(0, 20).map(([begin, end, kind, n]) => (
                <li key={`${begin}${kind}`}>
                  {time(begin)} to {time(end)}: {count(n)} {kind}
                </li>
              ))}
              {losses.gaps.length > 20 ? <li>and {losses.gaps.length - 20} more</li> : null}
            </ul>
          ) : null}
          <h3>Notes</h3>
          {about.notes.length ? (
            <ul class="plain">
              {about.notes.map((note) => (
                <li key={note}>{note}</li>
              ))}
            </ul>
          ) : (
            <Note>None.</Note>
          )}
        </div>
      </div>
      <details>
        <summary>Libraries of the target</summary>
        <ul class="plain">
          {about.libraries.map(([path, build, role]) => (
            <li key={path}>
              <code>{path}</code> {role ? `(${role})` : ""} {build ? <code>{build}</code> : null}
            </li>
          ))}
        </ul>
      </details>
      <details>
        <summary>Licences of what this page is made with</summary>
        {licences.map((l) => (
          <div key={l.name}>
            <h3>
              {l.name} {l.version} ({l.license})
            </h3>
            <pre>{l.text}</pre>
          </div>
        ))}
      </details>
    </Section>
  );
};
