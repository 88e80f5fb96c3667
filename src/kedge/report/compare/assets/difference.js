// Two runs compared: why and where they part, the map of it, and the course of one site in both.

import { byId, cut, fill, make } from "./elements.js";
import { brief, compact, counted, whole } from "./numbers.js";
import { filterOf } from "./filters.js";
import { Recording } from "./recording.js";
import { change, listen, recall, state } from "./state.js";
import { chart, dropGone, plottable, wantsLog, zerosOf } from "./charts.js";
import { HeatMap } from "./heatmap.js";
import { connectFilter } from "./filter_field.js";
import { startTheme } from "./theme.js";
import { listenToKeys } from "./keys.js";

function showDifference(recording) {
  const { told, run, commands } = recording;
  fill(byId("name"), cut(run.name, 60));
  byId("name").title = run.name;
  document.title = `${run.name} · Kedge`;
  fill(byId("status"), make("span", { class: `pill ${told.parted ? "error" : "fine"}` }, told.parted ? "✗ they part" : "✓ no difference"));
  const differs = Object.entries(told.differs).map(([name, { a, b }]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, a || "–", " → ", b || "–")));
  const side = (name, key) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "mono" }, told[key], "  ", make("span", { class: "faint" }, commands[key])));
  fill(byId("sides"), side("A", "a"), side("B", "b"), differs);
  showVerdict(recording);
  showAlignment(told);
}

function showVerdict({ told, findings }) {
  fill(byId("headline"), make("span", { class: told.parted ? "bad" : "" }, `${told.parted ? "✗" : "✓"} ${told.headline}`));
  const [pin] = findings;
  const departs = told.departures.map(({ message }) => make("p", {}, `· ${message}`));
  fill(
    byId("told"),
    departs,
    pin && make("p", {}, "First apart at step ", make("b", {}, whole(pin.step)), ", ", siteLink(told.first.site.a, named(told.first.site)), `: ${pin.message}`),
    make("p", { class: "faint" }, told.cause.evidence),
    told.operation && operationLines(told.operation),
  );
}

// What second runs say of the first difference: the operation, and its line in either program.
function operationLines({ headline, evidence, a, b, written }) {
  const line = (side) => ({ name, module, file, line: number, text }) => make("p", { class: "mono" }, `${side}  ${number ? `${file}:${number}` : "no line"}: ${name || module}  ${text}`);
  return [
    make("p", {}, "Operation: ", make("b", {}, headline)),
    ...a.map(line("A")),
    ...b.map(line("B")),
    make("p", { class: "faint" }, evidence),
    written.length ? make("p", { class: "faint" }, `the second runs have written: ${written.join(", ")}`) : "",
  ];
}

const named = ({ a, b }) => (a === b ? a : `${a} = ${b}`);

const siteLink = (site, text) => make("button", { class: "link mono", onclick: () => change({ site }) }, text);

function showParted({ told, parted }, { letsModule }) {
  const chosen = parted.map((one) => ({ ...one, members: one.members.filter((place) => letsModule(told.modules[place].module.a)) })).filter((one) => one.members.length);
  const many = chosen.reduce((sum, one) => sum + one.members.length, 0);
  byId("parted-count").textContent = many < told.modules.length ? `${whole(many)} of ${whole(told.modules.length)}` : many ? whole(many) : "none";
  const row = ({ module, type, first, last }) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, siteLink(first.site.a, named(module) || `(${type})`)),
      [type, whole(first.step), `${first.site.a.slice(module.a.length).replace(/^[.:]/, "")} ${first.statistic}`, number(first.a), number(first.b), number(first.apart), number(last)].map((text) => make("td", {}, text)),
    );
  const rows = chosen.flatMap(({ label, members }) => {
    const own = members.map((place) => told.modules[place]);
    return own.length > 1 ? foldedRows(label, own, own.map(row)) : own.map(row);
  });
  const titles = ["module", "type", "first at step", "in", "A", "B", "apart", "at end"].map((text) => make("th", { scope: "col" }, text));
  fill(byId("parted-body"), chosen.length ? make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "modules that part" }, make("table", { class: "room" }, make("caption", { class: "unseen" }, "the modules that part, in the order in which they do"), make("thead", {}, make("tr", {}, titles)), make("tbody", {}, rows))) : make("p", { class: "empty" }, told.modules.length ? "No module that parts passes the filter." : "No module parts."));
  byId("parted").classList.toggle("bare", !told.modules.length);
}

// Modules that part alike: a row for all, which unfolds into those of each.
function foldedRows(label, own, rows) {
  const [{ type, first }] = own;
  const spread = (of) => {
    const values = own.map(of);
    const known = values.filter((value) => typeof value === "number");
    if (known.length < values.length) return number(values.find((value) => typeof value !== "number"));
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return brief(low) === brief(high) ? compact(low) : `${brief(low)}..${brief(high)}`;
  };
  rows.forEach((row) => (row.hidden = true));
  const unfold = (event) => {
    const open = rows[0].hidden;
    rows.forEach((row) => (row.hidden = !open));
    event.currentTarget.setAttribute("aria-expanded", open);
    event.currentTarget.firstChild.textContent = open ? "▾ " : "▸ ";
  };
  const button = make("button", { class: "link mono", "aria-expanded": "false", onclick: unfold }, make("span", { "aria-hidden": "true" }, "▸ "), label);
  const cells = [type, whole(first.step), `${first.site.a.slice(own[0].module.a.length).replace(/^[.:]/, "")} ${first.statistic}`, spread((one) => one.first.a), spread((one) => one.first.b), spread((one) => one.first.apart), spread((one) => one.last)];
  return [make("tr", {}, make("th", { scope: "row" }, button, make("span", { class: "faint" }, ` ×${own.length}`)), cells.map((text) => make("td", {}, text))), ...rows];
}

// Numbers that JSON does not have are written as words.
const number = (value) => (typeof value === "string" ? value : compact(value));

function showAlignment({ alignment, sites, steps }) {
  const modules = (list) => list.map(({ path, type }) => `${path || "(root)"} (${type})`);
  const lines = [
    `${counted(sites, "site")} aligned, ${counted(steps.both.length, "step")} measured in both, ${whole(steps.full)} of them in full`,
    ...alignment.renamed.map(({ a, b, changed }) => `${a || "(root)"} is ${b || "(root)"} in B${changed ? ", changed" : ""}`),
    ...[["A", alignment.only_a, alignment.sites_only_a], ["B", alignment.only_b, alignment.sites_only_b]].flatMap(([side, own, rest]) => [...modules(own), ...rest].map((text) => `only in ${side}: ${text}`)),
  ];
  fill(byId("alignment-body"), lines.map((text) => make("p", {}, text)));
}

class Pair {
  constructor(host) {
    this.host = host;
    byId("panel-close").addEventListener("click", () => change({ site: null }));
    byId("panel-before").addEventListener("click", () => this.go(-1));
    byId("panel-after").addEventListener("click", () => this.go(1));
    listen((changed) => (changed.has("site") || changed.has("theme")) && this.show(this.recording));
  }

  show(recording) {
    this.recording = recording;
    const site = recording.site(state.site);
    document.body.classList.toggle("with-panel", Boolean(site));
    byId("panel").hidden = !site;
    if (!site) return fill(this.host);
    byId("panel-before").disabled = !this.neighbour(site, -1);
    byId("panel-after").disabled = !this.neighbour(site, 1);
    const charts = this.charts(site);
    fill(
      this.host,
      make("h2", { class: "mono", id: "panel-site" }, named({ a: site.site, b: site.b })),
      make("p", { class: "faint" }, [site.type, site.shape.join("×"), site.dtype].filter(Boolean).join(" · ")),
      charts.map(({ title, host }) => make("figure", {}, make("figcaption", {}, title), host)),
      !charts.length && make("p", { class: "empty" }, "No figures were recorded for it in both."),
    );
    for (const { host, spec } of charts) chart(host, spec);
    dropGone();
    return undefined;
  }

  charts(site) {
    const { recording } = this;
    const states = recording.states(site.id);
    const columns = Array.from(states.keys()).filter((column) => states[column]);
    const taken = (name) => recording.series(site.id, name) && columns.map((column) => recording.series(site.id, name)[column]);
    const x = columns.map((column) => recording.last[column]);
    const broken = columns.flatMap((column, at) => (states[column] === 2 ? [at] : []));
    const pictures = [
      ["rms", [["A", taken("rms.a")], ["B", taken("rms.b")]]],
      ["ratio B : A", [["ratio", taken("change")]]],
      ["relative difference", [["apart", taken("apart")]]],
    ];
    return pictures
      .map(([title, pairs]) => [title, pairs.filter(([, values]) => values)])
      .filter(([, pairs]) => pairs.length)
      .map(([title, pairs]) => {
        const log = wantsLog(...pairs.map(([, values]) => values));
        const series = pairs.map(([label, values]) => ({ label, values: plottable(values, log) }));
        const mark = recording.findings[0]?.step ?? null;
        return { title, host: make("div", { class: "chart" }), spec: { x, series, log, broken, zeros: log ? zerosOf(pairs[0][1]) : [], mark, height: 150 } };
      });
  }

  neighbour(site, by) {
    const sites = this.recording.ofKind(site.kind);
    return sites[sites.findIndex((one) => one.id === site.id) + by];
  }

  go(by) {
    const site = this.recording.site(state.site);
    const next = site && this.neighbour(site, by);
    if (next) change({ site: next.site });
  }
}

function begin() {
  recall();
  startTheme((theme) => change({ theme }));
  const recording = new Recording(JSON.parse(byId("document").textContent), (name) => byId(`table-${name}`).textContent);
  const filter = () => filterOf(state.filter, recording);
  const [heatMap, panel] = [new HeatMap(byId("heat-map"), filter), new Pair(byId("panel-body"))];
  showDifference(recording);
  heatMap.show(recording);
  panel.show(recording);
  const showTable = () => showParted(recording, filter());
  listen((changed) => changed.has("filter") && showTable());
  showTable();
  connectFilter(filter);
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  listenToKeys({ recording: () => recording, panel });
  document.documentElement.dataset.ready = "yes";
}

begin();
