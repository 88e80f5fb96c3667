// The memory of a step: the bytes held over it, and a flame graph of the chosen moment.

import { fill, make } from "./elements.js";
import { bytes, counted, percent, seconds, whole } from "./numbers.js";
import { HeldOverStep, keyOf, pathOf, boxesAround } from "./held.js";
import { Timeline } from "./timeline.js";
import { FlameGraph, nameOf } from "./flame.js";

const MOST_LINES = 3;
const MOST_ROWS = 200;
const LEAST_SHARE = 0.005;
const LEGEND = [["module", "module"], ["operation", "operation that needs it"], ["tensor", "tensor"], ["tensor input", "input of the model"], ["tensor recomputed", "recomputed by a checkpoint"]];

// A line of a library, without the place where libraries are.
const shortPath = (line) => line.replace(/^.*[/\\]site-packages[/\\]/, "");

export class MemoryPicture {
  // `lets` says whether a module is to be shown, `siteOf` gives the site of a module if there is one, `open` opens it.
  constructor(host, { lets, siteOf = () => null, open = () => {} }) {
    Object.assign(this, { lets, siteOf });
    this.zoomed = "";
    this.opened = new Set();
    this.folding = true;
    this.moment = null;
    this.told = make("b", {});
    this.peak = make("button", { onclick: () => this.go({ moment: this.held.peakAt }) }, "to the peak");
    this.whole = make("button", { onclick: () => this.go({ zoomed: "" }) }, "zoom out");
    this.unfold = make("button", { onclick: () => this.toggleFold() });
    this.site = make("button", { onclick: () => open(siteOf(pathOf(this.looked))) }, "open its site");
    this.fold = make("input", { type: "checkbox", checked: true, onchange: () => this.go({ folding: this.fold.checked }) });
    this.foldLabel = make("label", { class: "check" }, this.fold, "fold alike blocks");
    this.tip = make("div", { class: "held-tip" });
    this.legend = make("span", { class: "legend" });
    this.note = make("p", { class: "faint" });
    this.rows = make("div", { class: "ledger", tabindex: 0, role: "region", "aria-label": "held at this moment, as a table" });
    this.table = make("details", { class: "held-table", ontoggle: () => this.listRows() }, make("summary", {}, "as a table"), this.rows);
    const [over, flame] = [make("div", {}), make("div", {})];
    this.flamePart = make("div", {}, make("div", { class: "toolbar" }, this.told, this.peak, this.whole, this.unfold, this.site, this.foldLabel), flame, this.legend, this.note, this.table);
    this.place = make("div", { class: "memory" }, over, this.flamePart, this.tip);
    fill(host, this.place);
    this.timeline = new Timeline(over, (moment) => this.go({ moment }));
    this.flame = new FlameGraph(flame, { zoom: (zoomed) => this.go({ zoomed }), look: (box, event) => this.look(box, event) });
    this.printPeak();
  }

  show(described) {
    this.held = new HeldOverStep(described);
    if (this.moment === null || this.moment >= this.held.at.length) this.moment = this.held.peakAt;
    this.flamePart.hidden = !this.held.spans.length;
    this.foldLabel.hidden = this.unfold.hidden = !this.held.folds;
    this.site.hidden = !this.held.kinds.some(({ path }) => this.siteOf(path));
    const origins = new Set(this.held.kinds.map((kind) => kind.origin));
    const keys = LEGEND.filter(([kind]) => !kind.includes(" ") || origins.has(kind.split(" ")[1]));
    fill(this.legend, keys.map(([kind, title]) => make("span", { class: "key" }, make("i", { class: `box ${kind}` }), title)));
    const { resident } = this.held;
    fill(this.note, "Each storage counts once, for the first tensor held on it. ", resident > 0 && `Saved parameters and buffers, ${bytes(resident)}, are in memory in any case and not drawn.`);
    this.draw();
  }

  go(patch) {
    Object.assign(this, patch);
    this.draw();
  }

  isOpened(key) {
    return !this.folding || this.opened.has(key);
  }

  draw() {
    const { held } = this;
    if (!held) return;
    const opened = (key) => this.isOpened(key);
    const root = held.tree(this.moment, this.lets, opened);
    const within = (kind) => {
      const key = keyOf(boxesAround(kind, opened));
      return this.lets(kind.path) && (!this.zoomed || key === this.zoomed || key.startsWith(`${this.zoomed}/`));
    };
    const some = held.spans.length > 0 && !held.spans.every(({ kind }) => within(kind));
    this.timeline.show(held, this.moment, some ? held.heights(({ kind }) => within(kind)) : null);
    const atPeak = this.moment === held.peakAt;
    const passed = held.seconds?.[this.moment];
    const time = passed === undefined ? "" : `, ${passed < 1 ? `${(passed * 1e3).toFixed(1)} ms` : seconds(passed)} after the first`;
    this.peak.disabled = atPeak;
    this.flame.show(root, this.zoomed, `${bytes(root.size)} held ${atPeak ? "at the peak" : "here"}`);
    fill(this.told, atPeak ? "At the peak" : "Here", make("span", { class: "faint" }, `, after save or release ${whole(held.at[this.moment])} of ${whole(held.at.at(-1))}${time}`));
    this.offer(this.flame.chosen());
    this.listRows();
  }

  // The buttons for a box.
  offer(box) {
    this.looked = box;
    const fold = this.foldOf(box);
    this.whole.disabled = !this.zoomed;
    this.unfold.disabled = !fold || !this.folding;
    fill(this.unfold, this.opened.has(fold) ? "fold blocks" : "unfold blocks");
    this.site.disabled = box.level === "root" || !this.siteOf(pathOf(box));
  }

  // The key of the fold that a box is in: the innermost one that can be opened, or that was.
  foldOf(box) {
    for (let one = box; one && one.level !== "root"; one = one.parent) {
      if (one.blocks.size) return one.key;
      const opened = [...this.opened].find((key) => one.parent.key === key.slice(0, Math.max(key.lastIndexOf("/"), 0)) && this.held.blocks.get(key)?.has(pathOf(one)));
      if (opened) return opened;
    }
    return null;
  }

  toggleFold() {
    const fold = this.foldOf(this.looked);
    const outer = fold.slice(0, Math.max(fold.lastIndexOf("/"), 0));
    if (this.opened.has(fold)) this.opened.delete(fold);
    else this.opened.add(fold);
    this.go({ zoomed: outer });
  }

  look(box, event) {
    this.tip.classList.toggle("shown", Boolean(box));
    if (!box) {
      this.tip.style.left = this.tip.style.top = "0"; // it must not make the page wider
      return;
    }
    const [path, ...parts] = nameOf(box);
    const total = this.held.bytes[this.moment] || 1;
    const blocks = this.held.blocks.get(box.key)?.size;
    const lines = [...box.lines].sort((a, b) => b[1] - a[1]);
    const origin = box.level === "tensor" && box.origins.has("input") ? "an input of the model" : box.origins.size === 1 && box.origins.has("recomputed") ? "recomputed by a checkpoint in backward" : null;
    fill(
      this.tip,
      make("div", {}, make("b", { class: "mono" }, path || "all that is held")),
      parts.map((part) => make("div", { class: "mono" }, part)),
      make("div", {}, `${bytes(box.size)}, ${percent(box.size / total)} of what is held here`, box.storages > 0 && `; ${counted(box.storages, "storage")}`),
      box.blocks.size > 0 && make("div", {}, `${box.blocks.size} of ${blocks} alike blocks hold something here`),
      origin && make("div", {}, origin),
      lines.slice(0, MOST_LINES).map(([line, size]) => make("div", { class: "faint" }, lines.length > 1 ? `${shortPath(line)} (${bytes(size)})` : shortPath(line))),
      lines.length > MOST_LINES && make("div", { class: "faint" }, `and ${counted(lines.length - MOST_LINES, "line")} more`),
    );
    const around = this.place.getBoundingClientRect();
    const target = this.flame.boxes.get(box.key).element.getBoundingClientRect();
    const [x, y] = event ? [event.clientX + 14, event.clientY + 16] : [target.left, target.bottom + 4];
    this.tip.style.left = `${Math.max(Math.min(x - around.left, around.width - this.tip.offsetWidth), 0)}px`;
    this.tip.style.top = `${y - around.top}px`;
    if (!event) this.offer(box);
  }

  // The same as a table, made when it is opened.
  listRows() {
    if (!this.table.open) return;
    const root = this.held.tree(this.moment, this.lets, (key) => this.isOpened(key));
    const rows = [];
    const put = (box, depth) => {
      for (const one of box.inside.values()) {
        if (one.size < LEAST_SHARE * root.size || rows.length >= MOST_ROWS) continue;
        rows.push(make("tr", {}, make("td", { class: "mono" }, make("i", { class: `indent d${Math.min(depth, 12)}` }), one.name), make("td", {}, one.level), make("td", {}, bytes(one.size)), make("td", {}, percent(one.size / root.size))));
        put(one, depth + 1);
      }
    };
    put(root, 0);
    const titles = ["held by", "level", "bytes", "share"].map((title) => make("th", { scope: "col" }, title));
    fill(this.rows, make("table", {}, make("thead", {}, make("tr", {}, titles)), make("tbody", {}, rows)), make("p", { class: "faint" }, "Shares of less than 0.5 % are left out."));
  }

  // Paper shows the whole at the peak.
  printPeak() {
    let before = null;
    addEventListener("beforeprint", () => {
      before = { moment: this.moment, zoomed: this.zoomed };
      if (this.held) this.go({ moment: this.held.peakAt, zoomed: "" });
    });
    addEventListener("afterprint", () => before && this.go(before));
  }
}
