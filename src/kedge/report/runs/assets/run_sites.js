// One site in all runs: a list of the sites that several runs have, and a chart of the chosen one.

import { fill, make } from "./elements.js";
import { brief, compact, counted, percent } from "./numbers.js";
import { BROKEN } from "./recording.js";
import { RunChart } from "./run_charts.js";
import { offered, sitesOf, telling } from "./quantities.js";
import { change, listen, state } from "./state.js";

export class RunSites {
  constructor(host, recordings, { runs, sites, folds, single }, filter) {
    Object.assign(this, { host, recordings, runs, sites, folds, single, filter });
    const known = new Map(recordings.flatMap((recording) => offered(recording).map((quantity) => [quantity.id, quantity])));
    this.quantities = [...known.values()];
    this.open = new Set();
    if (!this.quantities.length) return fill(host, make("p", { class: "empty" }, "The runs have no site in common."));
    this.select = make("select", { id: "quantity", onchange: () => change({ quantity: this.select.value }) }, this.quantities.map(({ id, label }) => make("option", { value: id }, label)));
    this.sorting = make("select", { id: "site-order", onchange: () => this.showList() }, make("option", { value: "" }, "in the order of the data"), make("option", { value: "apart" }, "the furthest apart first"));
    this.list = make("ul", { class: "site-list", "aria-label": "sites" });
    this.title = make("span", { id: "site-title" });
    this.about = make("p", { class: "faint" });
    this.chart = new RunChart(this.title, runs, { height: 260 });
    const bar = make("div", { class: "toolbar" }, make("span", { class: "pair" }, make("label", { for: "quantity" }, "show"), this.select), make("span", { class: "pair" }, make("label", { for: "site-order" }, "list"), this.sorting));
    fill(host, bar, make("div", { class: "site-columns" }, this.list, make("div", {}, this.chart.frame, this.about)));
    listen((changed) => {
      if (changed.has("quantity")) this.show();
      else if (changed.has("filter")) this.showList();
      else if (changed.has("site")) this.choose();
    });
    this.show();
    return undefined;
  }

  get quantity() {
    const judged = this.recordings.find((recording) => recording.findings.some(({ site }) => recording.site(site)));
    return this.quantities.find(({ id }) => id === state.quantity) || telling(judged || this.recordings[0], this.quantities);
  }

  show() {
    const { quantity } = this;
    this.select.value = quantity.id;
    this.known = new Set(this.recordings.flatMap((recording) => sitesOf(recording, quantity).map(({ id }) => id)));
    this.ends = new Map([...this.known].map((id) => [id, this.endsOf(id, quantity)]));
    this.chart.range = quantity.scale === "share" ? [0, 1] : null;
    this.chart.log = null;
    this.showList();
  }

  // The newest values of a site in each run that has any.
  endsOf(id, { series }) {
    return this.recordings.map((recording) => recording.series(id, series)?.findLast(Number.isFinite)).filter((value) => value !== undefined);
  }

  get shown() {
    const { lets } = this.filter();
    return this.folds.map((fold) => ({ ...fold, members: fold.members.filter((id) => this.known.has(id) && lets(this.sites[id])) })).filter(({ members }) => members.length);
  }

  showList() {
    const folds = this.shown;
    if (this.sorting.value) folds.sort((a, b) => this.apart(b.members) - this.apart(a.members));
    fill(this.list, folds.map((fold) => (fold.members.length > 1 ? this.foldItem(fold) : this.item(fold.members[0]))), !folds.length && make("li", { class: "empty" }, "no such site"));
    this.choose();
  }

  apart(ids) {
    return Math.max(...ids.map((id) => distance(this.ends.get(id), this.quantity)));
  }

  item(id) {
    return make("li", {}, make("button", { "data-site": id, onclick: () => change({ site: this.sites[id].site }) }, make("span", { class: "mono" }, pathOf(this.sites[id])), make("span", {}, spreadOf(this.ends.get(id), this.quantity))));
  }

  foldItem({ name, members }) {
    const inside = make("ul", { hidden: !this.open.has(name) }, members.map((id) => this.item(id)));
    const sign = make("span", { "aria-hidden": "true" }, this.open.has(name) ? "▾ " : "▸ ");
    const unfold = (event) => {
      inside.hidden = !inside.hidden;
      if (inside.hidden) this.open.delete(name);
      else this.open.add(name);
      sign.textContent = inside.hidden ? "▸ " : "▾ ";
      event.currentTarget.setAttribute("aria-expanded", String(!inside.hidden));
    };
    const ends = members.flatMap((id) => this.ends.get(id));
    return make("li", {}, make("button", { "aria-expanded": String(this.open.has(name)), onclick: unfold }, make("span", { class: "mono" }, sign, name.split(":")[0], make("span", { class: "faint" }, ` ×${members.length}`)), make("span", {}, spreadOf(ends, this.quantity))), inside);
  }

  // The chosen site, or the same place for another quantity, or that of the first finding.
  get site() {
    const ids = this.shown.flatMap(({ members }) => members);
    const wanted = this.sites.find(({ site }) => site === state.site);
    const same = wanted && ids.find((id) => id === wanted.id);
    const beside = wanted && ids.find((id) => this.sites[id].owner === wanted.owner);
    const found = this.recordings.flatMap((recording) => recording.findings.map(({ site }) => recording.site(site)?.id));
    const id = same ?? beside ?? found.find((one) => ids.includes(one)) ?? ids[0];
    return id === undefined ? null : this.sites[id];
  }

  choose() {
    const { site, quantity } = this;
    for (const button of this.list.querySelectorAll("[data-site]")) {
      const own = site !== null && button.dataset.site === String(site.id);
      if (own) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
      if (own && state.site) button.scrollIntoView({ block: "nearest" });
    }
    fill(this.title, site ? [make("b", { class: "mono" }, site.site), " ", make("span", { class: "faint" }, quantity.label)] : "no site");
    this.chart.show(site ? site.runs.map((place) => this.line(place, site, quantity)).filter(Boolean) : []);
    this.showAbout(site);
  }

  line(place, site, { series }) {
    const recording = this.recordings[place];
    const values = recording.series(site.id, series);
    const states = recording.states(site.id);
    const columns = Array.from(states.keys()).filter((column) => states[column] && (states[column] === BROKEN || (values && !Number.isNaN(values[column]))));
    if (!columns.length) return null;
    return {
      place,
      step: columns.map((column) => recording.last[column]),
      values: columns.map((column) => (values && states[column] !== BROKEN ? values[column] : NaN)),
      broken: columns.flatMap((column, at) => (states[column] === BROKEN ? [at] : [])),
    };
  }

  showAbout(site) {
    const parts = [];
    const absent = site ? this.runs.flatMap(({ name }, place) => (site.runs.includes(place) ? [] : [name])) : [];
    if (site) parts.push([site.type, site.shape.join("×"), site.dtype].filter(Boolean).join(" · "));
    if (absent.length) parts.push(`not in ${absent.join(", ")}`);
    if (this.single) parts.push(`${counted(this.single, "site")} that only one run has ${this.single === 1 ? "is" : "are"} left out`);
    this.about.textContent = parts.join("; ");
  }

  go(by) {
    const { site } = this;
    const ids = this.shown.flatMap(({ members }) => members);
    const next = site && ids[ids.indexOf(site.id) + by];
    if (next !== undefined && next !== null) change({ site: this.sites[next].site });
  }
}

const pathOf = ({ site }) => site.split(":")[0] || "(root)";

function distance(ends, { scale }) {
  if (ends.length < 2) return 0;
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  if (scale !== "log") return high - low;
  return low > 0 ? high / low : high > 0 ? Infinity : 0;
}

function spreadOf(ends, { scale }) {
  if (!ends.length) return "–";
  const told = scale === "share" ? percent : brief;
  const [low, high] = [told(Math.min(...ends)), told(Math.max(...ends))];
  return low === high ? (scale === "share" ? low : compact(ends[0])) : `${low} – ${high}`;
}
