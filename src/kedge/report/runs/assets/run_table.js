// The table of runs, which sorts by any of its columns.

import { badge, cut, fill, make } from "./elements.js";
import { bytes, compact, seconds, whole } from "./numbers.js";
import { isShown, inFront, pointAt, sample, showRun } from "./run_choices.js";
import { listen } from "./state.js";

const LONGEST = 40;
const LOWEST_IS_BEST = new Set(["loss", "best"]);
const SEVERITIES = ["error", "warning", "info"];
const TOLD = {
  count: whole,
  seconds,
  bytes,
  number: (value) => (typeof value === "string" ? value : compact(value)),
  moment: (value) => value.replace("T", " ").slice(5, 16),
  option: (value) => value,
};

export class RunTable {
  constructor(host, { runs, columns }) {
    Object.assign(this, { host, runs, columns });
    this.sorted = null;
    this.falling = false;
    listen((changed) => ["pointed", "front", "hidden"].some((key) => changed.has(key)) && this.mark());
    this.show();
  }

  show() {
    const order = this.order();
    this.rows = new Map(order.map((place) => [place, this.row(place)]));
    const head = [this.title("run", -2), this.title("findings", -1), ...this.columns.map((column, at) => this.title(column.title, at))];
    const table = make("table", { class: "runs-table" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, [...this.rows.values()]));
    fill(this.host, make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table of runs" }, table));
    this.mark();
  }

  title(text, at) {
    const sorted = this.sorted === at;
    const number = at >= 0 && this.columns[at].kind !== "option";
    const sort = () => {
      this.falling = this.sorted === at && !this.falling;
      this.sorted = at;
      this.show();
      this.host.querySelector("thead [aria-sort] button").focus();
    };
    const arrow = sorted && make("span", { "aria-hidden": "true" }, this.falling ? " ↓" : " ↑");
    const order = sorted ? (this.falling ? "descending" : "ascending") : null;
    return make("th", { scope: "col", class: number ? "number" : null, "aria-sort": order }, make("button", { onclick: sort }, text, arrow));
  }

  // Runs in the order of the chosen column; those without a value are last.
  order() {
    const places = this.runs.map((_, place) => place);
    if (this.sorted === null) return places;
    const keys = places.map((place) => this.key(place));
    const compared = (a, b) => {
      if (keys[a] === null || keys[b] === null) return (keys[a] === null) - (keys[b] === null);
      const less = typeof keys[a] === "number" && typeof keys[b] === "number" ? keys[a] - keys[b] : String(keys[a]).localeCompare(String(keys[b]), "en", { numeric: true });
      return this.falling ? -less : less;
    };
    return places.sort((a, b) => compared(a, b) || a - b);
  }

  key(place) {
    const run = this.runs[place];
    if (this.sorted === -2) return run.name;
    if (this.sorted === -1) return SEVERITIES.reduce((sum, severity) => sum * 1000 + run.findings.filter((one) => one.severity === severity).length, 0);
    const value = run.values[this.sorted];
    if (value === null) return null;
    if (this.columns[this.sorted].kind === "moment") return Date.parse(value);
    if (this.columns[this.sorted].kind === "number" && typeof value === "string") return Infinity;
    return value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
  }

  row(place) {
    const run = this.runs[place];
    const box = make("input", { type: "checkbox", checked: isShown(place), "aria-label": `draw ${run.name}`, onchange: (event) => showRun(place, event.target.checked) });
    const name = cut(run.name, LONGEST);
    const link = run.page ? make("a", { href: encodeURIComponent(run.page), title: `the page of ${run.name}` }, name) : make("span", { title: run.name }, name);
    const cells = this.columns.map((column, at) => this.cell(column, run.values[at], at));
    return make("tr", pointAt(place), make("th", { scope: "row", title: run.command }, make("span", { class: "named" }, box, sample(place), link)), make("td", {}, verdict(run)), cells);
  }

  cell({ key, kind }, value, at) {
    const best = LOWEST_IS_BEST.has(key) && typeof value === "number" && value === Math.min(...this.runs.map((run) => run.values[at]).filter((other) => typeof other === "number"));
    const bad = kind === "number" && typeof value === "string";
    const text = value === null ? "–" : TOLD[kind](value);
    return make("td", { class: [kind !== "option" && "number", best && "least", bad && "error"].filter(Boolean).join(" ") || null, title: kind === "moment" ? value : text.length > LONGEST ? text : null }, cut(text, LONGEST));
  }

  mark() {
    const front = inFront();
    for (const [place, row] of this.rows) {
      row.classList.toggle("front", place === front);
      row.classList.toggle("off", !isShown(place));
    }
  }
}

function verdict({ findings, judged, over, ending }) {
  const [worst] = findings;
  const codes = new Set(findings.map(({ code }) => code));
  const others = codes.size > 1 && make("span", { class: "faint", title: [...codes].slice(1).join(", ") }, `and ${codes.size - 1} more`);
  const told = worst ? [badge(worst.severity), make("span", { title: worst.message }, worst.code), others] : judged ? [make("span", { class: "badge fine", "aria-hidden": "true" }, "✓"), "none"] : make("span", { class: "faint", title: "some rules could not judge" }, over ? "none" : "none so far");
  return make("span", { class: "verdict" }, told, ending && make("span", { class: "pill warning" }, ending));
}
