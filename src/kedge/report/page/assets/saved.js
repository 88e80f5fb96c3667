// Who holds the memory that autograd saves for backward: over the step, by module and by line, and what would free it.

import { byId, fill, make, cut } from "./elements.js";
import { bytes, whole } from "./numbers.js";
import { MemoryPicture } from "./memory.js";
import { change, listen } from "./state.js";

const PARTS = [
  { name: "rebuild", title: "can be rebuilt" },
  { name: "offload", title: "can be moved" },
  { name: "stays", title: "stays" },
];

export class Saved {
  constructor(host, filter) {
    this.filter = filter;
    this.bars = make("div", { class: "bars" });
    this.tables = make("div", {});
    this.totals = make("dl", { class: "totals" });
    const legend = PARTS.map(({ name, title }) => make("span", { class: "key" }, make("i", { class: `part ${name}` }), title));
    const by = make("figure", {}, make("figcaption", { class: "toolbar" }, make("b", {}, "held at the peak, by module"), make("span", { class: "legend" }, legend)), this.bars);
    const memory = make("div", {});
    fill(host, memory, make("div", { class: "saved-parts" }, by, this.totals), this.tables);
    this.picture = new MemoryPicture(memory, {
      lets: (path) => this.filter().letsIn(path),
      siteOf: (path) => this.siteOf(path)?.site,
      open: (site) => change({ site }),
    });
    listen((changed) => {
      if (changed.has("theme") || changed.has("filter")) this.show(this.recording);
    });
  }

  show(recording) {
    this.recording = recording;
    const { account } = recording;
    byId("saved").hidden = byId("saved-link").hidden = !account;
    if (!account) return;
    const lets = this.filter().letsModule;
    fill(byId("saved-step"), `step ${whole(account.step)}, ${bytes(account.held)}`);
    fill(this.totals, account.totals.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    this.picture.show(account.course);
    this.drawBars(account.bars.filter((bar) => lets(bar.path)));
    const { modules, lines } = account;
    const rows = modules.rows.map((cells, place) => ({ cells, path: modules.paths[place] })).filter((row) => lets(row.path));
    fill(this.tables, this.table(modules, rows), lines.rows.length > 0 && this.table(lines, lines.rows.map((cells) => ({ cells }))));
  }

  drawBars(shown) {
    const most = Math.max(...shown.map((bar) => bar.held), 1);
    fill(
      this.bars,
      shown.map((bar) => make("div", { class: "bar-row" }, this.label(bar.name, bar.path, 24), stack(bar, most), make("span", {}, bytes(bar.held)))),
      !shown.length && make("p", { class: "empty" }, "No module that the filter lets through holds anything."),
    );
  }

  siteOf(path) {
    return this.recording.sites.find((one) => one.owner === path && one.kind === "out");
  }

  label(name, path, most) {
    const site = path !== null && path !== undefined && this.siteOf(path);
    if (!site) return make("span", { class: "mono", title: name }, cut(name, most));
    return make("button", { class: "link mono", title: name, onclick: () => change({ site: site.site }) }, cut(name, most));
  }

  table({ columns, note }, rows) {
    const words = columns.indexOf("source");
    const cell = (text, place) => make("td", { class: place === words ? "words mono" : null, title: place === words ? text : null }, text);
    return make(
      "div",
      { class: "ledger", tabindex: 0, role: "region", "aria-label": `saved for backward by ${columns[0]}` },
      make("table", {}, make("caption", { class: "unseen" }, `saved for backward by ${columns[0]}`), make("thead", {}, make("tr", {}, columns.map((title, place) => make("th", { scope: "col", class: place === words ? "words" : null }, title)))), make("tbody", {}, rows.map(({ cells, path }) => make("tr", {}, make("td", { class: "mono" }, this.label(cells[0], path, 60)), cells.slice(1).map((text, place) => cell(text, place + 1)))))),
      note.trim() && make("p", { class: "faint" }, note),
    );
  }
}

// What can be rebuilt, what else can be moved, and the rest, as parts of one bar.
function stack(bar, most) {
  const sizes = { rebuild: bar.rebuild, offload: Math.max(bar.offload - bar.rebuild, 0) };
  sizes.stays = Math.max(bar.held - sizes.rebuild - sizes.offload, 0);
  const parts = PARTS.filter(({ name }) => sizes[name] > 0).map(({ name, title }) => {
    const part = make("i", { class: `part ${name}`, title: `${title}: ${bytes(sizes[name])}` });
    part.style.width = `${(100 * sizes[name]) / most}%`;
    return part;
  });
  return make("span", { class: "stack" }, parts);
}
