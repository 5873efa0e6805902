// SPDX-License-Identifier: Apache-2.0
// The figures that are asked for first, and what the rules say of them.
import { figure, percent, time } from "./format";
import type { Doc, Verdict } from "./types";
import { Note, Section } from "./ui";

export const Overview = ({ doc }: { doc: Doc }) => (
  <Section id="overview" title="Overview">
    <dl class="figures">
      {doc.figures.map((f) => (
        <div class="figure" key={f.id} data-figure={f.id}>
          <dt>{f.label}</dt>
          <dd>
            <div class={`value ${f.tone}`}>
              <Value text={figure(f.value, f.unit)} />
            </div>
            <div class="subline">{f.sub}</div>
          </dd>
        </div>
      ))}
    </dl>
    <Verdicts doc={doc} />
  </Section>
);

/** The unit smaller than its number. */
export const Value = ({ text }: { text: string }) => {
  const at = text.indexOf(" ");
  if (at < 0) return <>{text}</>;
  return (
    <>
      {text.slice(0, at)}
      <small> {text.slice(at + 1)}</small>
    </>
  );
};

const Verdicts = ({ doc }: { doc: Doc }) => {
  return (
    <>
      <h3>Why tokens take their time</h3>
      {doc.verdicts.length ? (
        <ol class="verdicts">
          {doc.verdicts.map((v) => (
            <Card key={v.rule} verdict={v} />
          ))}
        </ol>
      ) : (
        <Note>Too little was seen to say what limits it.</Note>
      )}
    </>
  );
};

const Card = ({ verdict }: { verdict: Verdict }) => (
  <li class={`verdict ${verdict.severity}`} data-rule={verdict.rule}>
    <h3>
      <span class="what">{verdict.title}</span>
      <span class="cost">
        {verdict.seconds_per_token === null ? "" : `up to ${time(verdict.seconds_per_token * 1e9)} a token · `}
        confidence {confidence(verdict.confidence)}
      </span>
    </h3>
    {verdict.evidence.map((text) => (
      <p key={text}>{text}</p>
    ))}
    {verdict.try.map((text) => (
      <p class="try" key={text}>
        <b>Try:</b> {text}
      </p>
    ))}
  </li>
);

const confidence = (said: string): string => {
  const value = Number(said);
  return said !== "" && Number.isFinite(value) ? percent(value) : said;
};
