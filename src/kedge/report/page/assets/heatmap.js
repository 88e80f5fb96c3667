// The heat-map: depth downwards, steps to the right, one statistic as colour, findings pinned on it.

import { colour, fill, make, MARKS, sized, cut, typeScale } from "./elements.js";
import { compact, counted, power, stepsText, whole } from "./numbers.js";
import { css, scaleTable, topLevel } from "./colours.js";
import { BROKEN } from "./recording.js";
import { Cells } from "./cells.js";
import { edgesOf, gapAfter, measuredEnds, roundSteps, shareOf } from "./steps.js";
import { offered, telling } from "./quantities.js";
import { change, listen, state } from "./state.js";

const LEAST_ROW = 1;
const MOST_ROW = 18;
// The height of all rows: so much, or this share of a tall screen.
const [TALLEST, TALLEST_SHARE] = [600, 0.6];
// Rows lower than this are named by block.
const LEAST_NAMED = 7;
const WIDEST = 320;
const LABEL_HEIGHT = 11;
// A mark stands at the beginning of a wide column, which is its step; and so many pixels of the axis have one number.
const [FROM_EDGE, TICK_ROOM] = [9, 70];
const STRIPE = 5;

// What has no value is striped, as in the legend: no colour of a scale can be mistaken for it.
function striped(context) {
  const dense = window.devicePixelRatio || 1;
  const tile = document.createElement("canvas");
  const brush = sized(tile, STRIPE, STRIPE);
  brush.fillStyle = colour("panel");
  brush.fillRect(0, 0, STRIPE, STRIPE);
  brush.strokeStyle = colour("absent");
  brush.lineWidth = 1.5;
  for (const at of [-STRIPE, 0, STRIPE]) {
    brush.moveTo(at - 1, STRIPE + 1);
    brush.lineTo(at + STRIPE + 1, -1);
  }
  brush.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / dense));
  return pattern;
}

export class HeatMap {
  constructor(host, filter) {
    this.filter = filter;
    this.cursor = null;
    this.select = make("select", { id: "quantity", onchange: () => change({ quantity: this.select.value }) });
    this.relative = make("input", { type: "checkbox", id: "relative", onchange: () => change({ relative: this.relative.checked }) });
    this.count = make("span", { class: "faint" });
    this.legend = make("div", { class: "legend" });
    this.canvas = make("canvas", { tabindex: 0, id: "cells", role: "application", "aria-label": "heat-map; arrow keys move, Enter opens the site" });
    this.axis = make("canvas", { class: "axis", "aria-hidden": "true" });
    this.scroll = make("div", { class: "heat-scroll" }, this.canvas, this.axis);
    this.tip = make("div", { class: "tip", role: "status", "aria-live": "polite" });
    this.empty = make("p", { class: "empty" });
    const toolbar = make(
      "div",
      { class: "toolbar" },
      make("label", { for: "quantity" }, "colour is"),
      this.select,
      make("label", { class: "check", title: "colour says how far a site is from its own median" }, this.relative, "relative to each site's median"),
      this.count,
      this.legend,
    );
    fill(host, toolbar, make("div", { class: "heat" }, this.scroll, this.tip), this.empty);
    this.connect(host);
  }

  connect(host) {
    this.canvas.addEventListener("mousemove", (event) => this.point(this.cellAt(event)));
    this.canvas.addEventListener("mouseleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.open(this.cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.recording && this.draw()).observe(host);
    listen((changed) => {
      if (["quantity", "relative", "filter", "theme"].some((key) => changed.has(key))) this.show(this.recording);
      else if (changed.has("site") || changed.has("finding")) this.draw();
    });
  }

  show(recording) {
    this.recording = recording;
    const known = offered(recording);
    this.empty.textContent = known.length ? "" : "Nothing to draw: no site has a statistic in this recording.";
    this.empty.hidden = known.length > 0;
    this.canvas.parentElement.parentElement.hidden = !known.length;
    this.canvas.closest("section").classList.toggle("bare", !known.length);
    if (!known.length) return;
    const quantity = known.find((one) => one.id === state.quantity) || telling(recording, known);
    fill(this.select, known.map((one) => make("option", { value: one.id }, one.label)));
    this.select.value = quantity.id;
    this.relative.checked = state.relative;
    this.relative.disabled = quantity.scale !== "log";
    this.relative.parentElement.hidden = Boolean(quantity.middle);
    this.cells = new Cells(recording, quantity, { relative: state.relative, lets: this.filter().lets });
    const paint = { broken: colour("broken"), zero: colour("zero") };
    this.picture = document.createElement("canvas");
    const image = this.cells.picture(state.theme, paint);
    [this.picture.width, this.picture.height] = [image.width, image.height];
    this.picture.getContext("2d").putImageData(image, 0, 0);
    this.cursor = null;
    this.empty.hidden = this.cells.sites.length > 0;
    if (!this.cells.sites.length) this.empty.textContent = "No site here passes the filter.";
    this.count.textContent = `${counted(this.cells.sites.length, "site")} × ${counted(recording.columns.steps, "step")}`;
    this.drawLegend();
    this.draw();
  }

  draw() {
    const { cells, scroll } = this;
    if (!cells || !scroll.clientWidth) return;
    const count = cells.sites.length;
    this.row = Math.max(LEAST_ROW, Math.min(MOST_ROW, Math.floor(Math.max(TALLEST, innerHeight * TALLEST_SHARE) / Math.max(count, 1))));
    const shown = scroll.clientWidth;
    this.left = Math.min(Math.max(...cells.sites.map((site) => this.label(site).length), 6) * 6.2 * typeScale() + 26, shown * 0.3);
    // A column gets a pixel at least: a spike that shares one would be lost.
    this.plot = Math.max(Math.min(shown - this.left - 10, cells.width * WIDEST), cells.width);
    this.edges = edgesOf(this.recording, this.plot);
    this.ends = measuredEnds(this.recording, this.edges);
    const [width, height] = [this.left + this.plot + 10, count * this.row + 12];
    const context = sized(this.canvas, width, height);
    context.clearRect(0, 0, width, height);
    this.top = 6;
    this.drawCells(context);
    this.drawLabels(context);
    this.drawPins(context);
    this.drawCursor(context);
    this.drawAxis(width);
    Object.assign(this.canvas.dataset, { left: this.left, top: this.top, plot: this.plot, row: this.row, rows: count, columns: cells.width });
  }

  label(site) {
    return site.kind.includes("[") ? site.site : site.path || `(${this.recording.roots[site.root]?.name ?? "root"})`;
  }

  drawCells(context) {
    const { cells } = this;
    if (!cells.sites.length || !cells.width) return;
    const dense = window.devicePixelRatio || 1;
    context.imageSmoothingEnabled = false;
    context.fillStyle = striped(context);
    const height = cells.sites.length * this.row;
    for (const [start, end] of this.alikeColumns()) {
      // On whole pixels: else the ground would show between two runs.
      const [from, to] = [this.edges[start], this.ends[end - 1]].map((at) => Math.round((this.left + at) * dense) / dense);
      context.fillRect(from, this.top, to - from, height);
      context.drawImage(this.picture, start, 0, end - start, cells.sites.length, from, this.top, to - from, height);
    }
    if (this.row >= 7) this.drawCrosses(context);
    if (this.row >= 7) {
      context.fillStyle = colour("panel");
      for (let row = 1; row < cells.sites.length; row++) context.fillRect(this.left, this.top + row * this.row - 0.5, this.plot, 1);
    }
  }

  // Runs of columns of one width without a gap, which are drawn at once.
  alikeColumns() {
    const wide = (column) => this.ends[column] - this.edges[column];
    const runs = [];
    for (let column = 0; column < this.cells.width; column++) {
      const touches = runs.length && this.edges[column] - this.ends[column - 1] < 1e-6;
      if (touches && Math.abs(wide(column) - wide(column - 1)) < 1e-6) runs.at(-1)[1] = column + 1;
      else runs.push([column, column + 1]);
    }
    return runs;
  }

  middle(column) {
    return this.left + (this.edges[column] + this.ends[column]) / 2;
  }

  // Where a column's mark is drawn.
  markAt(column) {
    return Math.min(this.middle(column), this.left + this.edges[column] + FROM_EDGE);
  }

  // Where a step is: in its column, as far as it is from the column's first step.
  placeOf(step) {
    const column = this.recording.columnOf(step);
    const [start, end] = [this.edges[column], this.edges[column + 1]];
    return this.left + start + shareOf(this.recording, step, column) * (end - start);
  }

  // Colour alone must not tell a broken cell.
  drawCrosses(context) {
    context.strokeStyle = "#fff";
    context.lineWidth = 1.2;
    context.beginPath();
    this.cells.sites.forEach((site, row) => {
      this.recording.states(site.id).forEach((held, column) => {
        const wide = this.ends[column] - this.edges[column];
        if (held !== BROKEN || wide < 4) return;
        const reach = Math.min(this.row, wide, 12) / 4;
        const [x, y] = [this.middle(column), this.top + (row + 0.5) * this.row];
        context.moveTo(x - reach, y - reach);
        context.lineTo(x + reach, y + reach);
        context.moveTo(x + reach, y - reach);
        context.lineTo(x - reach, y + reach);
      });
    });
    context.stroke();
  }

  drawLabels(context) {
    context.font = `${11 * typeScale()}px ${colour("sans")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const most = Math.floor((this.left - 18) / (5.6 * typeScale()));
    for (const [row, label] of this.labels()) {
      const chosen = this.cells.sites[row].site === state.site;
      context.fillStyle = colour(chosen ? "accent" : "faint");
      context.fillText(cut(label, most), this.left - 8, this.top + (row + 0.5) * this.row, this.left - 14);
    }
    const row = this.cells.rows.get(this.recording.site(state.site)?.id);
    if (row === undefined) return;
    context.fillStyle = colour("accent");
    context.fillRect(this.left - 4, this.top + row * this.row, 3, this.row);
  }

  // The rows that have a name: of low rows the first of each block, as far as there is room.
  labels() {
    const { sites } = this.cells;
    const low = this.row < LEAST_NAMED;
    const high = LABEL_HEIGHT * typeScale();
    const every = low ? 1 : Math.ceil(high / this.row);
    const chosen = sites.findIndex((site) => site.site === state.site);
    const found = chosen < 0 ? [] : [[chosen, this.label(sites[chosen])]];
    let [free, before] = [-Infinity, null];
    sites.forEach((site, row) => {
      const name = low ? site.block || this.label(site) : this.label(site);
      if (row % every || (low && name === before)) return;
      before = name;
      if (row * this.row < free || (chosen >= 0 && Math.abs(row - chosen) * this.row < high && low)) return;
      if (row !== chosen) found.push([row, name]);
      free = low ? row * this.row + high : free;
    });
    return found;
  }

  // A finding at a site that is not shown is pinned on the row of the same module, with an open mark.
  pins() {
    const owners = new Map(this.cells.sites.map((site, row) => [site.owner, row]));
    return this.recording.findings.flatMap((finding) => {
      const site = this.recording.site(finding.site);
      if (!site || finding.step < 0) return [];
      const exact = this.cells.rows.get(site.id);
      const row = exact ?? owners.get(site.owner);
      return row === undefined ? [] : [{ finding, row, column: this.recording.columnOf(finding.step), open: exact === undefined }];
    });
  }

  drawPins(context) {
    context.textAlign = "center";
    context.font = `bold 10px ${colour("sans")}`;
    for (const { finding, row, column, open } of this.pins()) {
      const [x, y] = [this.markAt(column), this.top + (row + 0.5) * this.row];
      const focus = finding.number === state.finding;
      context.beginPath();
      context.arc(x, y, focus ? 9 : 7, 0, 2 * Math.PI);
      context.fillStyle = open ? colour("panel") : colour(finding.severity);
      context.fill();
      context.lineWidth = focus ? 3 : 1.5;
      context.strokeStyle = open ? colour(finding.severity) : colour("panel");
      context.stroke();
      context.fillStyle = open ? colour(finding.severity) : colour("on-mark");
      context.fillText(MARKS[finding.severity], x, y + 0.5);
    }
  }

  drawCursor(context) {
    if (!this.cursor) return;
    const [start, end] = [this.edges[this.cursor.column], this.ends[this.cursor.column]];
    const wide = end - start;
    context.lineWidth = 1.5;
    context.strokeStyle = colour("text");
    const [x, y] = [this.left + start, this.top + this.cursor.row * this.row];
    context.strokeRect(x - 0.5, y - 0.5, Math.max(wide, 2) + 1, this.row + 1);
  }

  drawAxis(width) {
    const context = sized(this.axis, width, 22 * typeScale());
    context.font = `${11 * typeScale()}px ${colour("sans")}`;
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const step of roundSteps(this.recording, this.plot / (TICK_ROOM * typeScale()))) {
      const x = this.placeOf(step);
      context.fillStyle = colour("faint");
      context.fillRect(x, 0, 1, 4);
      context.fillText(whole(step), x, 6);
    }
    context.textAlign = "right";
    context.fillText("step", this.left - 12, 6);
  }

  drawLegend() {
    const { relative, domain, quantity } = this.cells;
    const table = scaleTable(relative, state.theme);
    const bar = make("canvas", { "aria-hidden": "true" });
    const context = sized(bar, 160, 10);
    for (let x = 0; x < 160; x++) {
      context.fillStyle = css(table, Math.round((x / 159) * topLevel));
      context.fillRect(x, 0, 1, 10);
    }
    const end = (value) => {
      if (quantity.scale === "share") return `${value * 100} %`;
      return relative ? `${value < 0 ? "÷" : "×"}${compact(2 ** Math.abs(value))}` : compact(10 ** value);
    };
    const swatch = (name, text) => make("span", { class: "key" }, make("i", { class: `swatch ${name}` }), text);
    fill(
      this.legend,
      this.cells.known && make("span", { class: "key" }, end(domain[0]), bar, end(domain[1])),
      quantity.scale !== "share" && swatch("zero", quantity.zero || (quantity.scale === "count" ? "none" : "all zero")),
      this.cells.anyBroken() && swatch("broken", "not finite"),
      swatch("absent", "no value"),
      this.recording.first.some((_, column) => gapAfter(this.recording, column)) && swatch("gap", "not measured"),
    );
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - this.left;
    const column = x < 0 ? -1 : x >= this.plot ? this.cells.width : this.edges.findIndex((edge) => x < edge) - 1;
    const row = Math.floor((event.clientY - box.top - this.top) / this.row);
    if (row < 0 || row >= this.cells.sites.length || column >= this.cells.width) return null;
    return column < 0 ? { row, column: 0, label: true } : { row, column };
  }

  point(cell) {
    const shown = cell && !cell.label ? cell : null;
    if (this.cursor?.row === shown?.row && this.cursor?.column === shown?.column) return;
    this.cursor = shown;
    this.draw();
    this.tell(shown);
  }

  tell(cell) {
    this.tip.classList.toggle("shown", Boolean(cell));
    if (!cell) return;
    fill(this.tip, this.words(cell));
    const wide = this.edges[cell.column + 1] - this.edges[cell.column];
    const x = this.left + this.edges[cell.column + 1] - this.scroll.scrollLeft;
    const y = this.top + (cell.row + 1) * this.row - this.scroll.scrollTop;
    const over = x + this.tip.offsetWidth + 12 > this.scroll.clientWidth;
    this.tip.style.left = `${Math.max(over ? x - wide - this.tip.offsetWidth - 8 : x + 8, 0)}px`;
    this.tip.style.top = `${y + 6}px`;
  }

  words({ row, column }) {
    const { cells, recording } = this;
    const site = cells.sites[row];
    const held = cells.state(row, column);
    const broken = recording.series(site.id, "nonfinite")?.[column];
    const nan = recording.series(site.id, "nan")?.[column];
    const apart = nan === broken ? "NaN" : nan > 0 ? `not finite, ${whole(nan)} of them NaN` : "not finite";
    const value = cells.value(row, column);
    const text = cells.quantity.scale === "share" ? `${(value * 100).toFixed(1)} %` : compact(value);
    const gap = gapAfter(recording, column);
    const pinned = this.pins().filter((pin) => pin.row === row && pin.column === column);
    return [
      make("b", {}, site.site),
      make("div", { class: "faint" }, [stepsText(recording.first[column], recording.last[column]), site.type, site.shape.join("×")].filter(Boolean).join(" · ")),
      make("div", {}, `${cells.quantity.label.split(" of ")[0]} `, make("b", {}, held ? text : "no value")),
      cells.relative && !cells.quantity.middle && Number.isFinite(cells.levels[row][column]) && make("div", {}, `${power("2", Math.round(cells.levels[row][column]))} of its median`),
      held === BROKEN && make("div", { class: "bad" }, broken > 0 ? `✗ ${whole(broken)} ${apart}` : "✗ not finite"),
      gap && make("div", { class: "faint" }, `then ${stepsText(...gap)} not measured`),
      pinned.map(({ finding }) => make("div", { class: finding.severity }, `${MARKS[finding.severity]} ${finding.code}`)),
    ];
  }

  open(cell) {
    if (cell) change({ site: this.cells.sites[cell.row].site });
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { sites, width } = this.cells;
    const at = this.cursor || { row: 0, column: -1 };
    if (moves[event.key]) {
      const [down, right] = moves[event.key];
      const within = (value, most) => Math.min(Math.max(value, 0), most - 1);
      this.point({ row: within(at.row + down, sites.length), column: within(at.column + right, width) });
      this.scrollTo();
    } else if (event.key === "Home" || event.key === "End") {
      this.point({ row: at.row, column: event.key === "Home" ? 0 : width - 1 });
    } else if (event.key === "Enter" && this.cursor) this.open(this.cursor);
    else return;
    event.preventDefault();
  }

  scrollTo() {
    const y = this.top + this.cursor.row * this.row;
    const { scrollTop, clientHeight } = this.scroll;
    if (y < scrollTop || y + this.row > scrollTop + clientHeight) this.scroll.scrollTop = y - clientHeight / 2;
  }
}
