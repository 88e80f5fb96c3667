// Everything about one site: its series, its neighbours in the data's flow, how far it is from the ends of a format.

import { badge, byId, fill, make } from "./elements.js";
import { compact, thousands, whole } from "./numbers.js";
import { chart, dropGone, plottable, wantsLog, zerosOf } from "./charts.js";
import { BROKEN } from "./recording.js";
import { marked, sourceLine } from "./findings.js";
import { formatName } from "./depth.js";
import { change, listen, state } from "./state.js";

const FIGURES = [["rms", "rms"], ["absmax", "largest |x|"], ["mean", "mean"], ["std", "std"], ["min", "min"], ["max", "max"], ["q05", "5 % of |x| below"], ["q50", "half of |x| below"], ["q95", "95 % of |x| below"], ["zero", "zeros"], ["saturated", "saturated"], ["ratio", "update ratio"], ["milliseconds", "ms"]];
const SHARE_NAMES = new Set(["zero", "saturated"]);

export class Panel {
  constructor(host) {
    this.host = host;
    this.frame = byId("panel");
    byId("panel-close").addEventListener("click", () => change({ site: null }));
    byId("panel-before").addEventListener("click", () => this.go(-1));
    byId("panel-after").addEventListener("click", () => this.go(1));
    listen((changed) => (changed.has("site") || changed.has("theme")) && this.show(this.recording, changed.has("site")));
  }

  show(recording, moved = false) {
    this.recording = recording;
    const site = recording.site(state.site);
    document.body.classList.toggle("with-panel", Boolean(site));
    this.frame.hidden = !site;
    if (!site) return fill(this.host);
    const scroll = moved ? 0 : this.frame.scrollTop;
    const [before, after] = [this.neighbour(site, -1), this.neighbour(site, 1)];
    byId("panel-before").disabled = !before;
    byId("panel-after").disabled = !after;
    const charts = this.charts(site);
    fill(
      this.host,
      this.title(site),
      charts.map(({ title, host }) => make("figure", {}, make("figcaption", {}, title), host)),
      !charts.length && make("p", { class: "empty" }, this.recording.states(site.id).includes(BROKEN) ? "It never held a finite value: there is nothing to draw." : "No figures were recorded for it."),
      this.figures(site),
      this.headroom(site),
      this.flow(site),
    );
    for (const { host, spec } of charts) chart(host, spec);
    dropGone();
    this.frame.scrollTop = scroll;
    return undefined;
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

  title(site) {
    const { recording } = this;
    const module = recording.modules.find((one) => one.path === site.owner);
    const shape = site.shape.length ? site.shape.join("×") : "scalar";
    const facts = [site.type, site.kind.startsWith("time.") ? null : shape, site.dtype, module?.own ? `${thousands(module.own)} own parameters` : null];
    const bad = recording.states(site.id).filter((held) => held === BROKEN).length;
    return [
      make("h2", { class: "mono", id: "panel-site" }, site.site),
      make("p", { class: "faint" }, facts.filter(Boolean).join(" · ")),
      site.line && sourceLine(site.line),
      bad > 0 && make("p", { class: "bad" }, `✗ not finite in ${whole(bad)} of ${whole(recording.width)} columns, first at step ${whole(this.firstBad(site))}`),
      recording.findingsOf(site).map((finding) => make("p", { class: "panel-finding" }, badge(finding.severity), " ", make("b", {}, finding.code), " ", marked(finding.message))),
    ];
  }

  firstBad(site) {
    return this.recording.first[this.recording.states(site.id).indexOf(BROKEN)];
  }

  // The columns in which the site fired; others would tear its lines.
  charts(site) {
    const { recording } = this;
    const states = recording.states(site.id);
    const columns = Array.from(states.keys()).filter((column) => states[column]);
    const x = columns.map((column) => recording.last[column]);
    const broken = columns.flatMap((column, at) => (states[column] === BROKEN ? [at] : []));
    const taken = (name) => {
      const series = recording.series(site.id, name);
      return series && columns.some((column) => !Number.isNaN(series[column])) ? columns.map((column) => (Number.isNaN(series[column]) && states[column] !== BROKEN ? undefined : series[column])) : null;
    };
    return chartsOf(taken, site.kind === "update")
      .filter(({ series }) => series.length)
      .map(({ title, series, log, range, bands }) => {
        const logged = log ?? wantsLog(...series.map((one) => one.values));
        const lines = series.map((one) => ({ ...one, values: plottable(one.values, logged) }));
        return { title, host: make("div", { class: "chart" }), spec: { x, series: lines, log: logged, broken, zeros: logged ? zerosOf(series[0].values) : [], yRange: range, bands, height: 138 } };
      });
  }

  figures(site) {
    const { recording } = this;
    const states = recording.states(site.id);
    const newest = states.findLastIndex((held) => held > 0);
    if (newest < 0) return null;
    const told = FIGURES.map(([name, label]) => [name, label, name === "ratio" && site.kind !== "update" ? null : recording.series(site.id, name)])
      .filter(([, , series]) => series && !Number.isNaN(series[newest]))
      .map(([name, label, series]) => make("div", {}, make("dt", {}, label), make("dd", {}, SHARE_NAMES.has(name) ? `${(series[newest] * 100).toFixed(1)} %` : compact(series[newest]))));
    return told.length > 0 && [make("h3", {}, `Newest figures, step ${whole(recording.last[newest])}`), make("dl", { class: "figures" }, told)];
  }

  headroom(site) {
    const { recording } = this;
    const states = recording.states(site.id);
    const newest = states.findLastIndex((held) => held === 1);
    const [most, least] = [recording.series(site.id, "absmax")?.[newest], (recording.series(site.id, "q05") || recording.least(site.id))?.[newest]];
    if (!(most > 0) || !(least > 0)) return null;
    const row = (format) => {
      const [above, below] = [Math.log2(format.largest / most), Math.log2(least / format.smallest_normal)];
      const cell = (room) => make("td", { class: room < 0 ? "bad" : "" }, `${room < 0 ? "✗ " : ""}${room.toFixed(1)}`);
      return make("tr", {}, make("th", { scope: "row" }, formatName(format)), cell(above), cell(below));
    };
    return [
      make("h3", {}, "Room in other formats, in powers of two"),
      make("table", { class: "room" }, make("caption", { class: "unseen" }, "the distance of this site from the limits of number formats, in powers of two"), make("thead", {}, make("tr", {}, ["format", "to overflow", "to subnormal"].map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, recording.formats.map(row))),
    ];
  }

  flow(site) {
    const { recording } = this;
    const link = (one) => make("li", {}, make("button", { class: "link mono", onclick: () => change({ site: one.site }) }, one.site), make("span", { class: "faint" }, ` ${one.type}`));
    const list = (title, sites) => sites.length > 0 && [make("h3", {}, title), make("ul", { class: "flow" }, sites.slice(0, 24).map(link))];
    return [
      list("Its data comes from", recording.sourcesOf(site)),
      list("It goes to", recording.goesTo(site)),
      list("The same module", recording.siblings(site)),
    ];
  }
}

function chartsOf(taken, update) {
  const lines = (...pairs) => pairs.map(([name, label, more]) => ({ label, values: taken(name), ...more })).filter((one) => one.values);
  const quantiles = lines(["absmax", "largest", { line: 1, width: 1 }], ["q95", "95 %", { line: 0, width: 1 }], ["q50", "50 %", { line: 0, width: 2 }], ["q05", "5 %", { line: 2, width: 1 }]);
  return [
    update && { title: "update ratio: rms of the change over rms of the parameter", series: lines(["ratio", "ratio"]) },
    { title: "milliseconds, of all calls in the step", series: lines(["milliseconds", "ms", { width: 2 }]), log: false },
    { title: "scale", series: lines(["rms", "rms", { width: 2 }], ["absmax", "largest |x|"], ["std", "std"]) },
    quantiles.length > 1 && { title: "quantiles of |x|, of the drawn elements", series: quantiles, bands: quantiles.length === 4 ? [[2, 4]] : [] },
    { title: "mean and extremes", series: lines(["max", "max", { line: 1, width: 1 }], ["mean", "mean", { line: 0, width: 2 }], ["min", "min", { line: 2, width: 1 }]), log: false },
    { title: "shares", series: lines(["zero", "zeros"], ["saturated", "saturated"]), log: false, range: [0, 1] },
  ].filter(Boolean);
}
