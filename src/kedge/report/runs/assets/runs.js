// The page of several runs.

import { byId, fill, make } from "./elements.js";
import { filterOf } from "./filters.js";
import { Recording } from "./recording.js";
import { change, listen, recall, state } from "./state.js";
import { connectFilter } from "./filter_field.js";
import { startTheme } from "./theme.js";
import { listenToKeys } from "./keys.js";
import { pointAt } from "./run_choices.js";
import { RunTable } from "./run_table.js";
import { showChips, smoothing } from "./run_charts.js";
import { RunCurves } from "./run_curves.js";
import { RunSites } from "./run_sites.js";

function recordingOf({ sites }, { sheets, columns, curves, findings }, place) {
  return new Recording({ sites, sheets, columns, curves, findings }, (name) => byId(`table-run${place}-${name}`).textContent);
}

function showHead(carried) {
  byId("name").textContent = carried.run.name;
  document.title = `${carried.run.name} · Kedge`;
  fill(byId("equal"), carried.equal.length ? [make("span", { class: "faint" }, "the same in all: "), carried.equal.join(" · ")] : make("span", { class: "faint" }, "The runs have nothing in common."));
  fill(byId("left-out"), carried.left_out.map(({ recording, reason }) => make("p", { class: "trouble" }, `left out: ${recording}: ${reason}`)));
}

function connectControls({ runs }, redraw) {
  const [slider, value, by] = ["smoothing", "smoothing-value", "by"].map(byId);
  const untimed = runs.filter(({ pace }) => !pace).map(({ name }) => name);
  const tell = () => {
    value.textContent = smoothing().toFixed(2);
    byId("by-note").hidden = state.by !== "time" || !untimed.length;
  };
  slider.value = smoothing();
  by.value = state.by || "";
  byId("by-note").textContent = `without a recorded duration, and so not drawn against time: ${untimed.join(", ")}`;
  slider.addEventListener("input", () => change({ smoothing: slider.value }));
  by.addEventListener("change", () => change({ by: by.value }));
  listen((changed) => {
    if (!["smoothing", "by", "hidden", "theme"].some((key) => changed.has(key))) return;
    tell();
    redraw();
  });
  tell();
}

function begin() {
  recall("smoothing", "by", "hidden", "front");
  startTheme((theme) => change({ theme }));
  const carried = JSON.parse(byId("document").textContent);
  if (state.smoothing === undefined) change({ smoothing: String(carried.smoothing) });
  const recordings = carried.runs.map((run, place) => recordingOf(carried, run, place));
  const filter = () => filterOf(state.filter, carried);
  showHead(carried);
  new RunTable(byId("table-body"), carried);
  showChips(carried.runs, change, pointAt);
  const curves = new RunCurves(byId("curves-body"), recordings, carried.runs);
  const sites = new RunSites(byId("sites-body"), recordings, carried, filter);
  connectControls(carried, () => {
    curves.show();
    if (sites.chart) sites.choose();
  });
  connectFilter(filter);
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  listenToKeys({ recording: () => ({ findings: [] }), panel: { go: (by) => sites.go?.(by) } });
  document.documentElement.dataset.ready = "yes";
}

begin();
