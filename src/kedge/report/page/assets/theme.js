// Light or dark, on every page: what the reader chose before, else what surrounds the page, else what the system prefers.

import { byId } from "./elements.js";

const KEPT_THEME = "kedge.theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["light", "dark"];
let surroundings = null;
let picked = null;
let tellTheme = () => {};

// `tell` is called with the theme: at once, and when it changes.
export function startTheme(tell = () => {}) {
  tellTheme = tell;
  picked = keptTheme();
  systemDark.addEventListener("change", showTheme);
  addEventListener("message", hearSurroundings);
  byId("theme").addEventListener("click", toggleTheme);
  printLight();
  showTheme();
}

export function toggleTheme() {
  picked = currentTheme() === "dark" ? "light" : "dark";
  keepTheme(picked);
  showTheme();
}

const currentTheme = () => picked || surroundings || (systemDark.matches ? "dark" : "light");

function showTheme() {
  putTheme(currentTheme());
}

function putTheme(theme) {
  document.documentElement.dataset.theme = theme;
  tellTheme(theme);
}

// A notebook that shows this page in a frame tells the colour of its text: the theme of an editor need not be the system's.
function hearSurroundings({ source, data }) {
  const channels = /^rgba?\((\d+), (\d+), (\d+)/.exec(data?.kedgeTextColour);
  if (source !== parent || source === window || !channels) return;
  const [red, green, blue] = channels.slice(1).map(Number);
  surroundings = red * 0.3 + green * 0.59 + blue * 0.11 > 127 ? "dark" : "light";
  showTheme();
}

// Paper is light, and what is drawn on canvases has to be drawn again for it.
function printLight() {
  addEventListener("beforeprint", () => putTheme("light"));
  addEventListener("afterprint", showTheme);
}

// Pages from disk may not have any storage; then the theme lasts as long as the page.
function keepTheme(theme) {
  try {
    localStorage.setItem(KEPT_THEME, theme);
  } catch (refused) {
    console.debug(`the theme is not kept: ${refused.message}`);
  }
}

function keptTheme() {
  try {
    const kept = localStorage.getItem(KEPT_THEME);
    return THEMES.includes(kept) ? kept : null;
  } catch {
    return null;
  }
}
