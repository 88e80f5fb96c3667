// Line charts by uPlot: logarithmic where the values call for it, with marks for what is no number.

import { colour, cut, fill, make, typeScale } from "./elements.js";
import { drawCrosses } from "./crosses.js";
import { compact, round, whole } from "./numbers.js";

// Lines differ in their dashes and not in colour alone.
const LINES = [
  { name: "line-1", dash: [] },
  { name: "line-2", dash: [6, 3] },
  { name: "line-3", dash: [2, 2] },
  { name: "line-4", dash: [8, 3, 2, 3] },
];
const FEW_POINTS = 40;

const drawn = new Map();

// Put a chart in the place of the one before.
//   x: steps; series: [{label, values, line?, width?}]; bands: [[upper, lower]] as numbers of series from 1, each with a tint of its own or none
//   named: [{at, value, name}]; broken, zeros: places in x where something was not finite, or where a logarithmic axis cannot show a zero; bars: [{name, value}]; mark: a step to be marked
export function chart(host, spec) {
  drop(host);
  const width = host.clientWidth;
  if (!width || !spec.x.length) {
    fill(host, spec.x.length ? [] : make("p", { class: "empty" }, spec.empty || "no values"));
    return null;
  }
  fill(host);
  const plot = new uPlot(options(spec, width), [spec.x, ...spec.series.map((one) => one.values)], host);
  const observer = new ResizeObserver(() => {
    if (host.clientWidth && host.clientWidth !== plot.width) plot.setSize({ width: host.clientWidth, height: heightOf(spec) });
  });
  observer.observe(host);
  drawn.set(host, { plot, observer });
  return plot;
}

export function drop(host) {
  const old = drawn.get(host);
  if (!old) return;
  old.observer.disconnect();
  old.plot.destroy();
  drawn.delete(host);
}

// Charts of panels that are gone.
export function dropGone() {
  for (const host of drawn.keys()) if (!host.isConnected) drop(host);
}

// A logarithmic axis has no place for zeros and less; they become gaps. What is undefined was not measured: a line goes on
// over it, as it does not over what was not finite.
export function plottable(values, log) {
  return Array.from(values, (value) => (Number.isFinite(value) && (!log || value > 0) ? value : value === undefined ? undefined : null));
}

export const zerosOf = (values) => Array.from(values).flatMap((value, place) => (value === 0 ? [place] : []));

// Logarithmic where positive values span more than a factor of thirty.
export function wantsLog(...lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (!Number.isFinite(value)) continue;
      if (value < 0) return false;
      if (value === 0) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return high / low > 30;
}

// Larger type stands on a larger screen, where a chart that is wider should be higher, too.
const heightOf = (spec) => Math.round((spec.height || 150) * typeScale() ** 2);

function options(spec, width) {
  const scale = typeScale();
  const axis = {
    stroke: colour("faint"),
    font: `${11 * scale}px ${colour("sans")}`,
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { stroke: colour("grid"), width: 1, size: 4 },
  };
  return {
    width,
    height: heightOf(spec),
    padding: [8, 14 * scale, 0, 0],
    legend: { show: spec.legend !== false, markers: { width: 2, dash: (_, place) => dashOf(spec.series[place - 1], place - 1) } },
    cursor: { points: { size: 6 }, drag: { x: true, y: false }, ...spec.cursor },
    scales: { x: { time: false, range: spec.xRange || ((_, low, high) => (low === high ? [low - 1, high + 1] : [low, high])) }, y: scaleOf(spec) },
    axes: [
      { ...axis, size: 30 * scale, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? whole(tick) : "")), ...spec.xAxis },
      { ...axis, size: 54 * scale, ...(spec.log && { splits: (_, __, low, high) => decades(low, high), filter: (_, ticks) => ticks }), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : round(tick))), ...spec.yAxis },
    ],
    series: [
      { label: spec.xLabel || "step", value: (_, at) => (spec.xValue || whole)(at ?? spec.x[spec.x.length - 1]) },
      ...spec.series.map((one, place) => lineOf(one, place, spec)),
    ],
    bands: (spec.bands || []).map((pair) => ({ series: pair, fill: pair.tint || colour("band") })),
    hooks: { ...spec.hooks, drawClear: [(plot) => drawUnder(plot, spec)], draw: [(plot) => drawOver(plot, spec), ...(spec.hooks?.draw || [])] },
  };
}

// Few lines: every so many decades, or 1, 2 and 5 where there is hardly more than one.
function decades(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / 5));
  const found = [];
  for (let at = Math.ceil(first / every) * every; at <= last; at += every) {
    for (const times of last - first <= 2 ? [1, 2, 5] : [1]) {
      const tick = Number(`${times}e${at}`);
      if (tick >= low && tick <= high) found.push(tick);
    }
  }
  return found;
}

function scaleOf(spec) {
  if (spec.log) return { distr: 3, log: 10, range: (_, low, high) => spread(low, high, spec.bars || []) };
  if (spec.yRange) return { range: spec.yRange };
  return { range: (_, low, high) => padded(low, high, spec.bars || []) };
}

// A bar that is near is inside; one far away would press the values into a line.
function spread(low, high, bars) {
  if (low === null) return [0.1, 10];
  const near = bars.map(({ value }) => value).filter((value) => value > low / 1e3 && value < high * 1e3);
  return uPlot.rangeLog(Math.min(low, ...near), Math.max(high, ...near), 10, false);
}

function padded(low, high, bars) {
  if (low === null) return [0, 1];
  for (const { value } of bars) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function lineOf(one, place, spec) {
  const line = LINES[(one.line ?? place) % LINES.length];
  const alone = one.line === undefined ? aloneIn(one.values) : [];
  return {
    label: cut(one.label, 44),
    stroke: one.stroke || colour(one.colour || line.name),
    width: one.width || 1.5,
    dash: one.dash || line.dash,
    spanGaps: Boolean(one.spanGaps),
    points: { show: one.points ?? spec.x.length <= FEW_POINTS, size: 4, filter: (_, __, shown) => (shown ? null : alone) },
    // While nobody points at the chart, its legend gives the newest values.
    value: (_, __, ___, at) => told(one, at ?? newest(one.values), spec),
  };
}

// Values between two that are not finite: no line leads to them, so that they need a point to be seen.
function aloneIn(values) {
  const known = Array.from(values, (value, place) => ({ value, place })).filter(({ value }) => value !== undefined);
  const isGap = (at) => (known[at]?.value ?? null) === null;
  return known.flatMap(({ value, place }, at) => (value !== null && isGap(at - 1) && isGap(at + 1) ? [place] : []));
}

// What was not measured is passed over, what was not finite is not.
function newest(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== undefined) return at;
  return -1;
}

function told(one, at, spec) {
  const value = one.values[at];
  if (value !== null || !spec.broken?.includes(at)) return value === null && spec.zeros?.includes(at) ? "0" : (one.value || compact)(value);
  return "not finite";
}

function dashOf(one, place) {
  const { dash } = LINES[(one?.line ?? Math.max(place, 0)) % LINES.length];
  return dash.length === 0 ? "solid" : dash[0] <= 2 ? "dotted" : "dashed";
}

function drawUnder(plot, spec) {
  if (spec.mark === null || spec.mark === undefined) return;
  const { ctx, bbox } = plot;
  const x = plot.valToPos(spec.mark, "x", true);
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.fillStyle = colour("mark");
  ctx.fillRect(x - 1, bbox.top, 2, bbox.height);
  ctx.restore();
}

// A ring and a name for a value by itself; a name that would cover another is left to the list below the chart.
function drawNames(plot, spec, dense) {
  const { ctx, bbox } = plot;
  let free = -Infinity;
  ctx.lineWidth = 1.5 * dense;
  ctx.strokeStyle = ctx.fillStyle = colour("error");
  for (const { at, value, name } of spec.named || []) {
    const [x, y] = [plot.valToPos(at, "x", true), plot.valToPos(value, "y", true)];
    ctx.beginPath();
    ctx.arc(x, y, 3.5 * dense, 0, 2 * Math.PI);
    ctx.stroke();
    const half = ctx.measureText(name).width / 2;
    const middle = Math.min(Math.max(x, bbox.left + half), bbox.left + bbox.width - half);
    if (middle - half < free) continue;
    ctx.fillText(name, middle, y - 5 * dense);
    free = middle + half + 8 * dense;
  }
  ctx.fillStyle = colour("faint");
}

// Zeros that a logarithmic axis cannot show, at its foot; one that would touch the zero before it is left out.
function drawZeros({ ctx, bbox, valToPos }, values) {
  const room = 1.5 * ctx.measureText("0").width;
  let before = -Infinity;
  for (const value of values) {
    const x = valToPos(value, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width || x - before < room) continue;
    before = x;
    ctx.fillText("0", x, bbox.top + bbox.height);
  }
}

// A cross at the top for each step with something that is no number, and a line for each bar.
function drawOver(plot, spec) {
  const { ctx, bbox } = plot;
  const dense = window.devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = 1.5 * dense;
  ctx.strokeStyle = colour("broken");
  const reach = 3 * dense;
  drawCrosses(plot, (spec.broken || []).map((place) => spec.x[place]), bbox.top + reach + 2 * dense, reach);
  ctx.textBaseline = "bottom";
  ctx.textAlign = "center";
  ctx.font = `${10 * dense * typeScale()}px ${colour("sans")}`;
  ctx.fillStyle = colour("faint");
  drawZeros(plot, (spec.zeros || []).map((place) => spec.x[place]));
  drawNames(plot, spec, dense);
  ctx.setLineDash([4 * dense, 3 * dense]);
  for (const { name, value, tone } of spec.bars || []) {
    const y = plot.valToPos(value, "y", true);
    if (!(y >= bbox.top - 1 && y <= bbox.top + bbox.height + 1)) continue;
    ctx.strokeStyle = ctx.fillStyle = colour(tone || "warning");
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.textAlign = "right";
    ctx.fillText(name, bbox.left + bbox.width - 4 * dense, y - 2 * dense);
  }
  ctx.restore();
}
