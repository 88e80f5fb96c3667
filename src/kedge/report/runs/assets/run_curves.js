// The losses, gradient norms and learning rates of all runs, and what their programs logged.

import { fill, make } from "./elements.js";
import { RunChart } from "./run_charts.js";

const ORDER = ["loss", "norm", "rate", "logged"];

// The first loss of each run is drawn in one chart, the second in another: they are matched by their places. What is
// logged is matched by its name.
export class RunCurves {
  constructor(host, recordings, runs) {
    const groups = new Map();
    recordings.forEach((recording, place) => {
      const counts = new Map();
      for (const entry of recording.curves) {
        const number = counts.get(entry.title) || 0;
        counts.set(entry.title, number + 1);
        const key = `${entry.kind} ${entry.title}${number ? ` ${number + 1}` : ""}`;
        groups.set(key, [...(groups.get(key) || []), { entry, place, recording }]);
      }
    });
    this.charts = [...groups].map(([key, own]) => {
      const kind = own[0].entry.kind;
      const labels = new Set(own.map(({ entry }) => [entry.label, entry.part].filter(Boolean).join(", ")));
      const title = [make("b", {}, key.slice(kind.length + 1)), " ", make("span", { class: "faint" }, labels.size === 1 ? [...labels][0] : `of ${own.length} runs`)];
      const lines = own.map(({ entry, place, recording }) => {
        const { step, last, most, least } = recording.curve(entry);
        return { place, step, values: last, most, least, broken: entry.broken };
      });
      return { chart: new RunChart(title, runs, { evened: true }), lines, kind };
    });
    this.charts.sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
    fill(host, this.charts.map(({ chart }) => chart.frame), !this.charts.length && make("p", { class: "empty" }, "No loss is recorded in any run: no backward pass was seen."));
    this.show();
  }

  show() {
    for (const { chart, lines } of this.charts) chart.show(lines);
  }
}
