// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system says, unless the reader chose.

export type Theme = "auto" | "light" | "dark";
export const THEME_EVENT = "profinferd-theme";

const media = matchMedia("(prefers-color-scheme: dark)");
let chosen: Theme = "auto";

const apply = () => {
  const dark = chosen === "dark" || (chosen === "auto" && media.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.dispatchEvent(new CustomEvent(THEME_EVENT));
};

export const setTheme = (theme: Theme) => {
  chosen = theme;
  apply();
};

export const startTheme = () => {
  media.addEventListener("change", apply);
  apply();
};
