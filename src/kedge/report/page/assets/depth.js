// Scale against depth at one step: the picture that shows a bad initialisation, and what a narrower format would do.

import { byId, cut, fill, make, typeScale } from "./elements.js";
import { compact, power, quantileOf, signed, stepsText } from "./numbers.js";
import { chart } from "./charts.js";
import { change, listen, state } from "./state.js";
import { baseKind } from "./quantities.js";
import { ABSENT, BROKEN, FINITE } from "./recording.js";

const KINDS = { out: "outputs", "out.grad": "output gradients", param: "parameters", "param.grad": "parameter gradients" };
const NAMES = { float16: "fp16", bfloat16: "bf16", float32: "fp32", float8_e4m3fn: "fp8 e4m3", float8_e5m2: "fp8 e5m2" };
// Limits farther from the data than this are named and not drawn: they would press the data into a line.
const REACH = 22;
const [MOST_LABELS, LABEL_ROOM, LONGEST_TICK] = [30, 24, 16];
// More sites than this are drawn as blocks.
const MOST_POINTS = 60;
// As in kedge.sites.folding: how far an outlier is from the median, as a multiple of the median distance, and at least,
// in powers of two; and how many of a group, or which share of it, are no outliers any more.
const [OUTLYING, LEAST_POWERS, FEW_OUTLIERS, MOST_OUTLIERS] = [5, 2, 3, 1 / 8];

// Less than every power of two: a site of only zeros is the smallest of its block.
const ONLY_ZEROS = -1e6;

export const formatName = (format) => NAMES[format.name] || format.name;

export class Depth {
  constructor(host, filter) {
    this.filter = filter;
    this.kind = make("select", { id: "depth-kind", onchange: () => change({ kind: this.kind.value }) });
    this.format = make("select", { id: "depth-format", onchange: () => change({ format: this.format.value }) });
    this.slider = make("input", { type: "range", id: "depth-step", min: 0, oninput: () => this.slide() });
    this.step = make("output", { for: "depth-step" });
    this.note = make("span", { class: "faint" });
    this.picture = make("div", { class: "chart" });
    this.apart = make("p", { class: "apart" });
    this.table = make("div", { class: "headroom" });
    const controls = [
      [this.kind, "of", "depth-kind"],
      [this.format, "limits of", "depth-format"],
      [this.slider, "at", "depth-step"],
    ].map(([control, text, id]) => [make("label", { for: id }, text), control]);
    this.empty = make("p", { class: "empty" }, "Nothing to draw: no site has a scale in this recording.");
    this.body = make("div", { class: "depth" }, make("div", {}, make("div", { class: "toolbar" }, controls, this.step, this.note), this.picture, this.apart), this.table);
    fill(host, this.body, this.empty);
    listen((changed) => {
      if (["kind", "format", "column", "filter", "theme"].some((key) => changed.has(key))) this.show(this.recording);
    });
  }

  slide() {
    const column = Number(this.slider.value);
    // At the newest finite step the slider stays with a run that goes on.
    change({ column: column === this.newest(this.kind.value) ? null : column });
  }

  show(recording) {
    this.recording = recording;
    const kinds = Object.keys(KINDS).filter((kind) => this.sitesOf(kind).length);
    this.empty.hidden = kinds.length > 0;
    this.body.hidden = !kinds.length;
    byId("depth").classList.toggle("bare", !kinds.length);
    if (!kinds.length) return;
    const kind = [state.kind, tellingKind(recording), kinds[0]].find((one) => kinds.includes(one));
    fill(this.kind, kinds.map((one) => make("option", { value: one }, KINDS[one])));
    fill(this.format, recording.formats.map((format) => make("option", { value: format.name }, formatName(format))));
    this.kind.value = kind;
    this.format.value = state.format;
    this.slider.max = recording.width - 1;
    const column = Math.min(state.column ?? this.newest(kind), recording.width - 1);
    this.slider.value = column;
    this.slider.disabled = recording.width < 2;
    this.step.textContent = stepsText(recording.first[column], recording.last[column]);
    const lets = this.filter().lets;
    const points = this.sitesOf(kind).filter((site) => lets(site)).map((site) => pointOf(recording, site, column));
    const shown = points.filter((point) => point.present);
    const outliers = outliersOf(shown);
    this.draw(blocksOf(shown), outliers);
    this.name(shown, outliers);
    this.tell(points.filter((point) => point.present));
  }

  // The newest step in which most sites were measured in full and finite: what came after a NaN has no scale.
  newest(kind) {
    const { recording } = this;
    const held = this.sitesOf(kind).map((site) => [recording.states(site.id), recording.series(site.id, "max")]);
    const whole = (column) => held.filter(([states, most]) => states[column] === FINITE && most && !Number.isNaN(most[column]));
    for (let column = recording.width - 1; column >= 0; column--) if (whole(column).length * 2 > held.length) return column;
    return recording.width - 1;
  }

  // A single number, such as a loss, has no scale to compare.
  sitesOf(kind) {
    const { recording } = this;
    const sites = kind.includes(".grad") ? recording.ofKind(kind) : recording.sites.filter((site) => baseKind(site) === kind);
    const numbers = new Set(recording.sites.filter((site) => site.number).map((site) => site.owner));
    return sites.filter((site) => recording.has(site.id, "rms") && !numbers.has(site.owner));
  }

  // Which sites are far from alike ones in other blocks, with links to them.
  name(points, outliers) {
    const link = ({ point, times }) => ["  ", make("button", { class: "link mono", onclick: () => change({ site: point.site.site }) }, point.site.path || "(root)"), ` ${times >= 1 ? `×${compact(times)}` : times > 0 ? `÷${compact(1 / times)}` : "only zeros"}`];
    const blocks = points.length > MOST_POINTS && `${points.length} sites in ${blocksOf(points).length} blocks: of each block the largest |x|, the median rms and the least quantile. `;
    fill(this.apart, blocks, outliers.length > 0 && ["Far from the same site of other blocks, in rms:", outliers.map(link)]);
    this.apart.hidden = !blocks && !outliers.length;
  }

  draw(points, outliers) {
    const format = this.recording.formats.find((one) => one.name === state.format);
    const limits = [
      { name: `largest ${formatName(format)}, ${compact(format.largest)}`, value: Math.log2(format.largest), tone: "error" },
      { name: `smallest normal ${formatName(format)}, ${compact(format.smallest_normal)}`, value: Math.log2(format.smallest_normal), tone: "warning" },
    ];
    const known = points.flatMap((point) => [point.absmax, point.q05, point.rms]).filter(Number.isFinite);
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [-1, 1];
    const near = limits.filter(({ value }) => value > low - REACH && value < high + REACH);
    const far = limits.filter((limit) => !near.includes(limit));
    this.note.textContent = far.length ? `far away: ${far.map((limit) => limit.name).join("; ")}` : "";
    const places = new Map(points.flatMap((point, at) => point.sites.map((site) => [site.id, at])));
    const named = outliers.map(({ point }) => ({ at: places.get(point.site.id), value: point.rms, name: cut(point.site.path, 34) })).filter(({ value }) => Number.isFinite(value)).sort((a, b) => a.at - b.at);
    const values = named.map((one) => one.value);
    const ends = [low, high, ...values, ...near.map((limit) => limit.value)];
    const every = Math.ceil(points.length / Math.max(Math.min(MOST_LABELS, Math.floor(this.picture.clientWidth / LABEL_ROOM)), 1));
    const list = (key) => points.map((point) => (Number.isFinite(point[key]) ? point[key] : null));
    const quantiles = points.some((point) => Number.isFinite(point.q05));
    chart(this.picture, {
      x: points.map((_, at) => at),
      xRange: () => [-0.5, Math.max(points.length - 0.5, 0.5)],
      xLabel: "site",
      xValue: (at) => cut(points[at]?.name ?? "", 30),
      xAxis: {
        size: (points.length > 6 ? 26 + Math.min(Math.max(...points.map(({ name }) => name.length), 6), LONGEST_TICK) * 3.9 : 30) * typeScale(),
        rotate: points.length > 6 ? 38 : 0,
        splits: () => points.map((_, at) => at).filter((at) => at % every === 0),
        values: (_, ticks) => ticks.map((at) => cut(points[at]?.name ?? "", LONGEST_TICK)),
        grid: { show: false },
      },
      yAxis: { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? power("2", tick) : "")), size: 66 * typeScale() },
      yRange: () => [Math.min(...ends) - 1.5, Math.max(...ends) + 3],
      series: [
        { label: "largest |x|", values: list("absmax"), width: 1, value: asPower },
        { label: "rms", values: list("rms"), line: 0, width: 2, value: asPower },
        quantiles && { label: "5 % of |x| below", values: list("q05"), line: 2, width: 1, value: asPower },
      ].filter(Boolean).map((one, place) => ({ ...one, line: one.line ?? (place === 0 ? 1 : place) })),
      bands: quantiles ? [[1, 3]] : [[1, 2]],
      broken: points.flatMap((point, at) => (point.broken ? [at] : [])),
      zeros: points.flatMap((point, at) => (point.rms === -Infinity ? [at] : [])),
      bars: near,
      named,
      height: 330,
      empty: "no site has a value in this step",
    });
  }

  tell(points) {
    const rows = this.recording.formats.map((format) => headroomRow(format, points));
    fill(
      this.table,
      make("h3", {}, "What if it were …"),
      make(
        "table",
        {},
        make("caption", { class: "unseen" }, "the distance of all sites from the limits of number formats, in powers of two"),
        make("thead", {}, make("tr", {}, ["format", "doublings to overflow", "halvings to subnormal", "so it"].map((text) => make("th", { scope: "col" }, text)))),
        make("tbody", {}, rows),
      ),
      make("p", { class: "faint" }, "Doublings: from the largest |x| of all sites to the format's largest number. Halvings: from the smallest 5 % quantile of |x| (the smallest rms where none was drawn) to its smallest normal number."),
    );
  }
}

// What the worst finding is about is what is looked at first.
function tellingKind(recording) {
  const site = recording.findings.map((finding) => recording.site(finding.site)).find(Boolean);
  return site?.kind.includes("grad") ? "out.grad" : "out";
}

const asPower = (value) => (value === null || value === undefined ? "" : `${compact(2 ** value)} = 2^${value.toFixed(1)}`);

// Points of few sites as they are; of many, one for each of the innermost blocks that are few enough, in their order.
function blocksOf(points) {
  const single = (point) => ({ ...point, name: point.site.path || "(root)", sites: [point.site] });
  if (points.length <= MOST_POINTS) return points.map(single);
  const deepest = Math.max(...points.map((point) => numbersIn(point.site.path).length), 1);
  for (let level = deepest; level > 0; level--) {
    const runs = runsOf(points, (path) => blockOf(path, level));
    if (runs.length <= 2 * MOST_POINTS || level === 1) return runs.map(together);
  }
  return points.map(single);
}

const numbersIn = (path) => [...path.matchAll(/(?<![^.])\d+(?![^.])/gu)];

function blockOf(path, level) {
  const found = numbersIn(path)[Math.min(level, numbersIn(path).length) - 1];
  return found ? path.slice(0, found.index + found[0].length) : path;
}

function runsOf(points, key) {
  const runs = [];
  for (const point of points) {
    const name = key(point.site.path);
    if (runs.length && runs.at(-1).name === name) runs.at(-1).points.push(point);
    else runs.push({ name, points: [point] });
  }
  return runs;
}

function together({ name, points }) {
  const known = (key) => points.map((point) => point[key]).filter(Number.isFinite).sort((a, b) => a - b);
  const of = (key, share) => (known(key).length ? quantileOf(known(key), share) : NaN);
  const sites = points.map((point) => point.site);
  const scales = points.map((point) => Math.max(point.rms, ONLY_ZEROS)).filter((rms) => !Number.isNaN(rms));
  const middle = scales.length ? medianOf(scales) : NaN;
  return { name: name || "(root)", site: sites[0], sites, present: true, broken: points.some((point) => point.broken), rms: middle <= ONLY_ZEROS / 2 ? -Infinity : middle, absmax: of("absmax", 1), q05: of("q05", 0) };
}

// Sites whose rms is far from that of alike sites in other blocks.
function outliersOf(points) {
  return [...grouped(points).values()].flatMap((group) => {
    const known = group.filter((point) => Number.isFinite(point.rms));
    if (known.length < 3) return [];
    const few = Math.max(FEW_OUTLIERS, group.length * MOST_OUTLIERS);
    const zeros = group.filter((point) => point.rms === -Infinity);
    const bare = zeros.length <= few && zeros.length * 2 < group.length ? zeros.map((point) => ({ point, times: 0 })) : [];
    const middle = medianOf(known.map((point) => point.rms));
    const far = (point) => Math.abs(point.rms - middle);
    const least = Math.max(OUTLYING * medianOf(known.map(far)), LEAST_POWERS);
    const found = known.filter((point) => far(point) > least);
    if (found.length > few) return bare;
    return [...bare, ...found.sort((a, b) => far(b) - far(a)).map((point) => ({ point, times: 2 ** (point.rms - middle) }))];
  });
}

function grouped(points) {
  const groups = new Map();
  for (const point of points) groups.set(point.site.group, [...(groups.get(point.site.group) || []), point]);
  return groups;
}

const medianOf = (values) => quantileOf(values.sort((a, b) => a - b), 0.5);

function pointOf(recording, site, column) {
  const log = (name) => Math.log2(recording.series(site.id, name)?.[column]);
  const held = recording.state(site.id, column);
  return { site, present: held !== ABSENT, broken: held === BROKEN, rms: log("rms"), absmax: log("absmax"), q05: log("q05") };
}

// How far the sites are from the ends of a format, in powers of two; the tightest site stands for all.
function headroomRow(format, points) {
  const above = tightest(points, (point) => Math.log2(format.largest) - (Number.isFinite(point.absmax) ? point.absmax : point.rms));
  const below = tightest(points, (point) => smallOf(point) - Math.log2(format.smallest_normal));
  const over = points.filter((point) => point.absmax > Math.log2(format.largest)).length;
  const under = points.filter((point) => smallOf(point) > -Infinity && smallOf(point) < Math.log2(format.smallest_normal)).length;
  const said = [over && `${over} overflow${over === 1 ? "s" : ""}`, under && `${under} below normal`].filter(Boolean).join(", ");
  const cell = (found) =>
    make("td", { class: found && found.room < 0 ? "bad" : "" }, found ? [make("b", {}, signed(found.room)), " ", make("span", { class: "faint", title: found.point.site.site }, cut(found.point.site.path || "(root)", 26))] : "–");
  if (!above && !below) return make("tr", {}, make("th", { scope: "row" }, formatName(format)), cell(above), cell(below), make("td", {}, "nothing finite"));
  const tone = over ? "error" : under ? "warning" : "fine";
  return make("tr", {}, make("th", { scope: "row" }, formatName(format)), cell(above), cell(below), make("td", { class: tone }, `${over ? "✗" : under ? "!" : "✓"} ${said || "fits"}`));
}

const smallOf = (point) => (Number.isFinite(point.q05) ? point.q05 : point.rms);

function tightest(points, room) {
  let found = null;
  for (const point of points) {
    const value = room(point);
    if (Number.isFinite(value) && (!found || value < found.room)) found = { point, room: value };
  }
  return found;
}
