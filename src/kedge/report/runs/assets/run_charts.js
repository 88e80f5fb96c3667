// A chart with a line for each run, over common axes.

import { byId, fill, make } from "./elements.js";
import { drawCrosses } from "./crosses.js";
import { chart, plottable, wantsLog } from "./charts.js";
import { compact, counted, seconds, whole } from "./numbers.js";
import { dashOfRun, inFront, inkOf, isShown, sample } from "./run_choices.js";
import { listen, state } from "./state.js";

const FAINT = "50";
const FAINTER = "22";
const FEW_RUNS = 8;
const BAND = "1c";
const MOST_ROWS = 6;

export const smoothing = () => Math.min(Math.max(Number(state.smoothing) || 0, 0), 0.99);

// As kedge.report.runs.smoothing: an average of each value and those before, whose weights add up to 1 from the first on.
function smoothed(values, kept) {
  let [total, weight] = [0, 0];
  return Array.from(values, (value) => {
    if (!Number.isFinite(value)) return value;
    total = total * kept + value * (1 - kept);
    weight = weight * kept + (1 - kept);
    return total / weight;
  });
}

// One figure: its title, its chart, a switch for the axis, and in words what is not finite. Lines are smoothed if `evened`.
export class RunChart {
  constructor(title, runs, { height = 240, evened = false } = {}) {
    Object.assign(this, { runs, height, evened, range: null, lines: [], drawn: [], log: null, plot: null });
    this.host = make("div", { class: "chart" });
    this.tip = make("div", { class: "tip run-tip", "aria-hidden": "true" });
    this.box = make("input", { type: "checkbox", onchange: () => this.draw({ log: this.box.checked }) });
    this.broken = make("ul", { class: "flow broken" });
    this.title = make("span", {}, title);
    this.frame = make("figure", { class: "run-frame" }, make("figcaption", {}, this.title, make("label", {}, this.box, "logarithmic")), this.host, this.tip, this.broken);
    this.host.addEventListener("pointerleave", () => this.tip.classList.remove("shown"));
    listen((changed) => (changed.has("pointed") || changed.has("front")) && this.plot?.redraw(false));
  }

  get kept() {
    return this.evened ? smoothing() : 0;
  }

  // The run in front, if it has a line here.
  get front() {
    const front = inFront();
    return this.drawn.some(({ place }) => place === front) ? front : null;
  }

  // lines: [{place, step, values, most, least, broken}]; most and least where several steps share a value.
  show(lines) {
    this.lines = lines;
    this.draw();
  }

  draw({ log } = {}) {
    if (log !== undefined) this.log = log;
    const timed = state.by === "time";
    const lines = this.lines.filter(({ place }) => isShown(place) && (!timed || this.runs[place].pace));
    const logged = this.log ?? (!this.range && wantsLog(...lines.flatMap(({ values, least }) => (least ? [values, least] : [values]))));
    this.box.checked = logged;
    this.drawn = lines.map((line) => ({ ...line, x: timed ? Array.from(line.step, (step) => step * this.runs[line.place].pace) : Array.from(line.step), even: smoothed(line.values, this.kept) }));
    const x = [...new Set(this.drawn.flatMap((line) => line.x))].sort((a, b) => a - b);
    const spec = { x, series: [], bands: [], log: logged, height: this.height, legend: false, yRange: this.range, empty: "no run that is shown has values here", hooks: { draw: [(plot) => this.drawBroken(plot)], setCursor: [(plot) => this.tell(plot)] } };
    if (timed) Object.assign(spec, { xLabel: "time", xAxis: { values: (_, ticks) => ticks.map((tick) => (tick ? seconds(tick) : "0")) } });
    const places = new Map(x.map((value, at) => [value, at]));
    for (const line of this.drawn) line.at = line.x.map((value) => places.get(value));
    for (const line of this.drawn) this.addRaw(spec, line);
    for (const line of this.drawn) spec.series.push(this.lineOf(spec, line, line.even, 2, ""));
    this.plot = chart(this.host, spec);
    this.tellBroken();
  }

  addRaw(spec, line) {
    const faint = this.drawn.length > FEW_RUNS ? FAINTER : FAINT;
    if (line.most) {
      const pair = [spec.series.length + 1, spec.series.length + 2];
      pair.tint = () => inkOf(line.place, this.front, BAND);
      spec.series.push(this.lineOf(spec, line, line.most, 0.5, faint), this.lineOf(spec, line, line.least, 0.5, faint));
      spec.bands.push(pair);
    } else if (this.kept > 0) spec.series.push(this.lineOf(spec, line, line.values, 1, faint));
  }

  // A step that this run does not have is undefined, and its line goes on over it.
  lineOf(spec, { place, at }, values, width, strength) {
    const own = plottable(values, spec.log);
    const aligned = new Array(spec.x.length);
    at.forEach((where, number) => (aligned[where] = own[number]));
    return { label: this.runs[place].name, values: aligned, width, dash: width > 1 ? dashOfRun(place) : [], stroke: () => inkOf(place, this.front, strength), points: width > 1 && at.length < 3 };
  }

  // A cross at the top for each step in which a run was not finite, a row for each such run.
  drawBroken(plot) {
    const { ctx, bbox } = plot;
    const dense = window.devicePixelRatio || 1;
    const reach = 3 * dense;
    ctx.save();
    ctx.lineWidth = 1.5 * dense;
    ctx.setLineDash([]);
    this.drawn.filter(({ broken }) => broken.length).forEach(({ place, x, broken }, row) => {
      const y = bbox.top + (2 + (row % MOST_ROWS) * 9) * dense + reach;
      ctx.strokeStyle = inkOf(place, this.front);
      drawCrosses(plot, broken.map((number) => x[number]), y, reach);
    });
    ctx.restore();
  }

  tellBroken() {
    const told = this.drawn.filter(({ broken }) => broken.length).map(({ place, step, broken }) => make("li", {}, sample(place), ` ✗ ${this.runs[place].name}: not finite at ${counted(broken.length, "step")}, first at step ${whole(step[broken[0]])}`));
    fill(this.broken, told);
    this.broken.hidden = !told.length;
  }

  // The values of all runs at the pointer, the largest first; that of the nearest line is bold.
  tell(plot) {
    const { idx, left, top } = plot.cursor;
    const rows = idx === null || idx === undefined || left < 0 ? [] : this.valuesAt(plot, idx);
    this.tip.classList.toggle("shown", rows.length > 0);
    if (!rows.length) return;
    const near = rows.reduce((best, row) => (Math.abs(row.y - top) < Math.abs(best.y - top) ? row : best));
    const at = plot.data[0][idx];
    const named = rows.map((row) => make("tr", { class: row === near ? "near" : null }, make("td", {}, sample(row.place)), make("td", {}, this.runs[row.place].name), make("td", {}, row.text)));
    fill(this.tip, make("b", {}, state.by === "time" ? seconds(at) : `step ${whole(at)}`), make("table", {}, make("tbody", {}, named)));
    const over = plot.over.getBoundingClientRect();
    const frame = this.frame.getBoundingClientRect();
    const room = frame.width - this.tip.offsetWidth - 4;
    const beside = over.left - frame.left + left + 14;
    this.tip.style.left = `${Math.max(beside > room ? Math.min(beside - this.tip.offsetWidth - 28, room) : beside, 0)}px`;
    const lowest = innerHeight - frame.top - this.tip.offsetHeight - 6;
    this.tip.style.top = `${Math.min(over.bottom - frame.top + 6, Math.max(lowest, 0))}px`;
  }

  valuesAt(plot, idx) {
    const found = [];
    for (const { place, at, even, values, broken } of this.drawn) {
      const number = at.findLastIndex((where) => where <= idx);
      if (number < 0 || (number === at.length - 1 && at[number] < idx)) continue;
      const bad = broken.includes(number);
      const raw = this.kept > 0 && !bad ? `  (${compact(values[number])})` : "";
      found.push({ place, value: bad ? Infinity : even[number], y: bad ? 0 : plot.valToPos(even[number], "y"), text: bad ? "not finite" : compact(even[number]) + raw });
    }
    return found.sort((a, b) => b.value - a.value);
  }
}

// Runs in front, at the top of all charts: a button for each.
export function showChips(runs, change, pointAt) {
  const chips = runs.map((run, place) => make("button", { class: "chip", title: run.command || run.name, "aria-pressed": "false", onclick: () => change({ front: state.front === String(place) ? null : String(place) }), ...pointAt(place) }, sample(place), run.name));
  fill(byId("chips"), chips);
  const mark = () =>
    chips.forEach((chip, place) => {
      chip.hidden = !isShown(place);
      chip.setAttribute("aria-pressed", String(inFront() === place && state.front === String(place)));
    });
  listen((changed) => (changed.has("front") || changed.has("hidden")) && mark());
  mark();
}
