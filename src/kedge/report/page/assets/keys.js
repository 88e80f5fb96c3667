// The keyboard: every key that the help names.

import { byId } from "./elements.js";
import { change, state } from "./state.js";
import { toggleTheme } from "./theme.js";

const typing = (target) => target instanceof HTMLInputElement ? target.type !== "checkbox" && target.type !== "range" : target instanceof HTMLSelectElement;

export function listenToKeys({ recording, panel }) {
  connectSections();
  const actions = {
    j: () => step(recording(), 1),
    k: () => step(recording(), -1),
    Enter: () => openFinding(recording()),
    "/": () => byId("filter").focus(),
    t: toggleTheme,
    "?": () => byId("help").showModal(),
    h: () => byId("cells")?.focus(),
    n: () => panel.go(1),
    p: () => panel.go(-1),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return leave();
    if (typing(event.target) || byId("help").open) return;
    // Buttons and the heat-map answer to Enter themselves.
    if (event.key === "Enter" && event.target.closest("button, canvas, summary")) return;
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}

// The links to the sections move the page themselves: in a page inside another one they would lead to that one's
// address, and elsewhere they would take the place of the chosen site in it.
function connectSections() {
  for (const link of document.querySelectorAll(".bar nav a")) {
    link.addEventListener("click", (event) => {
      const section = byId(link.getAttribute("href").slice(1));
      event.preventDefault();
      section.tabIndex = -1;
      section.focus({ preventScroll: true });
      section.scrollIntoView();
    });
  }
}

function step(recording, by) {
  const { findings } = recording;
  if (!findings.length) return;
  const at = state.finding === null ? (by > 0 ? -1 : findings.length) : state.finding;
  change({ finding: Math.min(Math.max(at + by, 0), findings.length - 1) });
}

function openFinding(recording) {
  const finding = recording.findings[state.finding];
  if (finding && recording.site(finding.site)) change({ site: finding.site });
}

// From the innermost to the outermost: the help closes by itself, then the filter, then the panel, then the finding.
function leave() {
  const filter = byId("filter");
  if (byId("help").open) return;
  if (document.activeElement === filter) {
    filter.value = "";
    filter.blur();
    change({ filter: "" });
  } else if (state.site) change({ site: null });
  else change({ finding: null });
}
