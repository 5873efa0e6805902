// SPDX-License-Identifier: Apache-2.0
// The whole page: a head with the figures, and one section per question.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { AboutPanel } from "./about";
import { ExpertsPanel } from "./experts";
import { PlacementPanel } from "./placement";
import { GraphPanel } from "./graph";
import type { Licence } from "./main";
import { MemoryPanel } from "./memory";
import { Overview } from "./overview";
import { ProfilePanel } from "./profile";
import { RooflinePanel } from "./roofline";
import { type Theme, setTheme } from "./theme";
import { ThreadsPanel } from "./threads";
import { TimelinePanel } from "./timeline";
import { TokensPanel, firstChoice } from "./tokens";
import type { Doc, Spot } from "./types";

interface Place {
  id: string;
  title: string;
  body: ComponentChildren;
}

export const App = ({ doc, licences }: { doc: Doc; licences: Licence[] }) => {
  const [call, setCall] = useState(() => firstChoice(doc));
  const [spot, setSpot] = useState<Spot | null>(null);
  const places: Place[] = [
    { id: "overview", title: "Overview", body: <Overview doc={doc} /> },
    { id: "tokens", title: "Tokens", body: <TokensPanel doc={doc} call={call} choose={setCall} /> },
    { id: "timeline", title: "Timeline", body: <TimelinePanel doc={doc} call={call} choose={setCall} show={setSpot} /> },
    { id: "ops", title: "Operators", body: <ProfilePanel doc={doc} /> },
    { id: "roofline", title: "Roofline", body: <RooflinePanel doc={doc} /> },
    { id: "graph", title: "Graph", body: <GraphPanel doc={doc} spot={spot} /> },
    { id: "threads", title: "Threads", body: <ThreadsPanel doc={doc} /> },
    { id: "memory", title: "Memory", body: <MemoryPanel doc={doc} /> },
    ...(doc.experts ? [{ id: "experts", title: "Experts", body: <ExpertsPanel doc={doc} experts={doc.experts} /> }] : []),
    ...(doc.placement
      ? [{ id: "placement", title: "Backends", body: <PlacementPanel doc={doc} placement={doc.placement} /> }]
      : []),
    { id: "about", title: "About", body: <AboutPanel doc={doc} licences={licences} /> },
  ];
  return (
    <>
      <Head doc={doc} />
      <Nav places={places} />
      <main>{places.map((place) => place.body)}</main>
      <footer>
        Made by {doc.about.made_by} from {doc.about.file}. This file is complete: it fetches nothing and sends nothing.
      </footer>
    </>
  );
};

const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

const Head = ({ doc }: { doc: Doc }) => {
  const [theme, choose] = useState<Theme>("auto");
  const turn = () => {
    const next = NEXT[theme];
    choose(next);
    setTheme(next);
  };
  const { about } = doc;
  return (
    <header class="top">
      <div class="brand">
        <Mark />
        <b>profinferd</b>
        <span>report</span>
        <span class="spacer" />
        <button type="button" class="btn" id="theme" onClick={turn} title="Colours: as the system, light, dark">
          {theme === "auto" ? "Auto" : theme === "light" ? "Light" : "Dark"}
          <span class="hidden"> colours</span>
        </button>
      </div>
      <h1>{about.title}</h1>
      <p class="sub">
        {about.level}
        {about.recorded ? ` · recorded ${about.recorded}` : ""}
      </p>
    </header>
  );
};

const Mark = () => (
  <svg width="20" height="20" viewBox="0 0 16 16" aria-hidden="true">
    <rect width="16" height="16" rx="3.5" fill="var(--accent)" />
    <path d="M3 11.5V8m3.3 3.5V4.5m3.4 7V7m3.3 4.5V3" stroke="var(--card)" stroke-width="1.9" stroke-linecap="round" />
  </svg>
);

const Nav = ({ places }: { places: Place[] }) => {
  const here = useHere(places.map((p) => p.id));
  return (
    <nav class="nav" aria-label="Sections">
      <ul>
        {places.map((place) => (
          <li key={place.id}>
            <a href={`#${place.id}`} aria-current={here === place.id ? "true" : undefined}>
              {place.title}
            </a>
          </li>
        ))}
      </ul>
    </nav>
  );
};

/** The section under the reader's eyes. */
const useHere = (ids: string[]): string => {
  const [here, setHere] = useState(ids[0] ?? "");
  useEffect(() => {
    let waiting = false;
    const look = () => {
      waiting = false;
      const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
      const reached = ids.filter((id) => (document.getElementById(id)?.getBoundingClientRect().top ?? 1e9) < 140);
      setHere((atEnd ? ids.at(-1) : reached.at(-1)) ?? ids[0] ?? "");
    };
    const onScroll = () => {
      if (!waiting) requestAnimationFrame(look);
      waiting = true;
    };
    addEventListener("scroll", onScroll, { passive: true });
    look();
    return () => removeEventListener("scroll", onScroll);
  }, [ids.join()]);
  return here;
};
