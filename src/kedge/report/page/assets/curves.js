// The losses, the norms of all gradients, the learning rates, those of one optimizer in one chart, and what the program logged.

import { byId, fill, make } from "./elements.js";
import { chart, plottable, wantsLog } from "./charts.js";
import { listen } from "./state.js";

export class Curves {
  constructor(host) {
    this.host = host;
    listen((changed) => changed.has("theme") && this.show(this.recording));
  }

  show(recording) {
    this.recording = recording;
    const figures = inOneChart(recording.curves).map((entries) => {
      const host = make("div", { class: "chart" });
      const [{ title, label }] = entries;
      return { entries, host, frame: make("figure", {}, make("figcaption", {}, make("b", {}, title), " ", make("span", { class: "faint" }, label)), host) };
    });
    const loss = recording.curves.some((entry) => entry.kind === "loss");
    fill(
      this.host,
      figures.map(({ frame }) => frame),
      recording.run.early && make("p", { class: "faint" }, recording.run.early),
      !loss && make("p", { class: "empty" }, "No loss is recorded: no backward pass was seen."),
    );
    for (const { entries, host } of figures) this.draw(host, entries);
    byId("curves").classList.toggle("bare", !figures.length);
  }

  draw(host, entries) {
    const curves = entries.map((entry) => this.recording.curve(entry));
    const [{ step, most, least }] = curves;
    const log = wantsLog(...curves.flatMap((curve) => [curve.last, ...(curve.least ? [curve.least] : [])]));
    const series = entries.map(({ title, part }, place) => ({ label: part || title, values: plottable(curves[place].last, log) }));
    const bands = [];
    if (most && entries.length === 1) {
      series.push({ label: "most", values: plottable(most, log), width: 0.5, line: 0, dash: [] });
      series.push({ label: "least", values: plottable(least, log), width: 0.5, line: 0, dash: [] });
      bands.push([2, 3]);
    }
    chart(host, { x: step, series, bands, log, broken: entries[0].broken, height: 170 });
  }
}

// Curves that are parts of one: they have the same steps.
function inOneChart(entries) {
  const found = new Map();
  entries.forEach((entry, place) => {
    const key = entry.part ? `${entry.kind} ${entry.label} ${entry.step}` : place;
    found.set(key, [...(found.get(key) || []), entry]);
  });
  return [...found.values()];
}
