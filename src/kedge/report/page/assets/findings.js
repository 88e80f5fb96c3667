// The findings, the worst first, each with what it rests on.

import { badge, fill, make, cut } from "./elements.js";
import { compact, counted, percent, whole } from "./numbers.js";
import { chart, drop, plottable, wantsLog, zerosOf } from "./charts.js";
import { change, listen, state } from "./state.js";

const SHOWN = 6;

export class Findings {
  constructor(host) {
    this.host = host;
    this.all = false;
    listen((changed) => {
      if (changed.has("theme")) this.show(this.recording);
      else if (changed.has("finding")) this.focus();
    });
  }

  show(recording) {
    this.recording = recording;
    const { findings } = recording;
    if (!findings.length) {
      fill(this.host, this.unjudged());
      return;
    }
    const shown = this.all ? findings : findings.slice(0, Math.max(SHOWN, (state.finding ?? 0) + 1));
    this.host.querySelectorAll(".figure").forEach(drop);
    fill(this.host, shown.map((finding) => this.card(finding)), this.rest(findings.length - shown.length), this.unjudged());
    for (const finding of shown) drawFigure(this.cardOf(finding.number).querySelector(".figure"), finding);
    this.focus(false);
  }

  // The rules that had too little to judge, and what to type so that they have enough.
  unjudged() {
    const { unjudged, unseen, advice, run, verdict } = this.recording;
    if (!run.sampled) return null;
    const named = unjudged.map((lack) => `${lack.code} (${lack.said})`).join(", ");
    const said = unjudged.length && make("p", {}, `${counted(unjudged.length, "rule")} could not judge: ${named}.`);
    const missed = unseen.length && make("p", {}, `Not watched: ${unseen.join(", ")}.`);
    const idle = verdict.idle && make("p", { class: "faint" }, `${verdict.idle}.`);
    return make("div", { class: "unjudged" }, idle || null, missed || null, said || null, advice.map((line) => make("p", { class: "mono" }, line)));
  }

  card(finding) {
    const site = this.recording.site(finding.site);
    const step = finding.step >= 0 && make("span", {}, `step ${whole(finding.step)}`);
    const name = site
      ? make("button", { class: "link mono", onclick: () => change({ site: site.site, finding: finding.number }) }, finding.site)
      : make("span", { class: "mono" }, finding.site);
    const sure = make("span", { class: "faint", title: "how much of what the rule would like to know was recorded" }, `confidence ${percent(finding.confidence).replace(".0", "")}`);
    return make(
      "article",
      { class: `finding ${finding.severity}`, "data-finding": finding.number, tabindex: -1 },
      make(
        "div",
        { class: "told" },
        make("header", {}, badge(finding.severity), make("b", {}, finding.code), make("span", { class: `severity ${finding.severity}` }, finding.severity), name, step, sure),
        finding.line && sourceLine(finding.line),
        make("p", { class: "message" }, marked(finding.message)),
        finding.remedy && make("p", { class: "remedy" }, make("span", { class: "arrow" }, "→ "), marked(finding.remedy)),
        evidence(finding),
        this.page(finding.code),
      ),
      make("div", { class: "figure-frame" }, make("div", { class: "figure-title" }), make("div", { class: "figure" })),
    );
  }

  // The rule's own page: what it looks for, and how it knows.
  page(code) {
    const text = this.recording.explained[code];
    return text && make("details", { class: "rule" }, make("summary", {}, `how ${code} knows`), make("pre", { tabindex: 0 }, marked(text)));
  }

  rest(left) {
    if (left <= 0) return null;
    const show = () => {
      this.all = true;
      this.show(this.recording);
    };
    return make("button", { class: "more", onclick: show }, `show ${whole(left)} more`);
  }

  cardOf(number) {
    return this.host.querySelector(`[data-finding="${number}"]`);
  }

  focus(move = true) {
    if (move && state.finding !== null && !this.cardOf(state.finding)) this.show(this.recording);
    for (const card of this.host.querySelectorAll(".finding")) card.classList.toggle("focus", Number(card.dataset.finding) === state.finding);
    if (move && state.finding !== null) this.cardOf(state.finding)?.scrollIntoView({ block: "nearest" });
  }
}

export function sourceLine({ place, text }) {
  return make("div", { class: "source" }, make("span", { class: "faint" }, place), text && make("code", { tabindex: 0 }, text));
}

// What the finding rests on, in words; what is drawn is left to the figure.
function evidence({ words, evidence: held }) {
  const near = Object.entries(held.near || {}).filter(([, figures]) => figures && typeof figures === "object");
  return make("ul", { class: "evidence" }, words.map((text) => make("li", {}, text)), near.map(([site, figures]) => make("li", {}, make("span", { class: "faint" }, `${site}: `), rangeOf(figures))));
}

// Text with its names and commands, which stand in backticks, as such.
export function marked(text) {
  return text.split("`").map((part, place, all) => (place % 2 && place < all.length - 1 ? make("code", {}, part) : place % 2 ? `\`${part}` : part));
}

function textOf(value) {
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  if (typeof value === "number") return Number.isInteger(value) ? whole(value) : compact(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return String(value);
}

const FIGURE_NAMES = { absmax: "largest |x|", nonfinite: "not finite:", nan: "of them NaN:", zero: "share of zeros" };

function rangeOf(figures) {
  return Object.entries(figures).map(([name, value]) => `${FIGURE_NAMES[name] || name} ${textOf(value)}`).join(", ");
}

function drawFigure(host, finding) {
  const { figure } = finding;
  const title = host.parentElement.querySelector(".figure-title");
  host.parentElement.hidden = !figure;
  if (!figure) return;
  if (figure.form === "profile") drawProfile(host, title, figure);
  else drawSeries(host, title, figure);
}

// Several sites share the axis of steps, though each has steps of its own.
function drawSeries(host, title, figure) {
  const steps = [...new Set(figure.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const log = figure.series[0].statistic !== "zero" && wantsLog(...figure.series.map((one) => one.values));
  const series = figure.series.map((one) => {
    const values = new Array(steps.length).fill(undefined);
    plottable(one.values, log).forEach((value, at) => (values[place.get(one.steps[at])] = value));
    return { label: one.label, values };
  });
  const broken = [...new Set(figure.series.flatMap((one) => one.broken.map((at) => place.get(one.steps[at]))))];
  fill(title, `${figure.series[0].label}${figure.series.length > 1 ? " and what is next to it" : ""}`);
  const yRange = ["zero", "saturated"].includes(figure.series[0].statistic) ? [0, 1] : undefined;
  const bars = figure.bars.map((bar) => ({ ...bar, tone: "warning" }));
  const zeros = log ? figure.series.flatMap((one) => zerosOf(one.values).map((at) => place.get(one.steps[at]))) : [];
  chart(host, { x: steps, series, broken, zeros, log, bars, mark: figure.step, height: 132, yRange });
}

function drawProfile(host, title, figure) {
  const values = figure.values.map((value) => (typeof value === "number" ? value : null));
  const log = wantsLog(values.filter((value) => value !== null));
  fill(title, `${figure.name}, from ${cut(figure.labels[0], 24)} to ${cut(figure.labels.at(-1), 24)}`);
  chart(host, {
    x: values.map((_, at) => at),
    series: [{ label: "value", values: plottable(values, log) }],
    log,
    height: 132,
    xLabel: "at",
    xValue: (at) => cut(figure.labels[at] ?? "", 34),
    xAxis: { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) && figure.labels[tick] ? String(tick + 1) : "")) },
  });
}
