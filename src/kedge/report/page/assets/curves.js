// The loss, the norm of all gradients, and what the program logged.

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
    const hosts = recording.curves.map((entry) => {
      const host = make("div", { class: "chart" });
      return { entry, host, frame: make("figure", {}, make("figcaption", {}, make("b", {}, entry.title), " ", make("span", { class: "faint" }, entry.label)), host) };
    });
    const loss = recording.curves.some((entry) => entry.kind === "loss");
    fill(
      this.host,
      hosts.map(({ frame }) => frame),
      recording.run.early && make("p", { class: "faint" }, recording.run.early),
      !loss && make("p", { class: "empty" }, "No loss is recorded: no backward pass was seen."),
    );
    for (const { entry, host } of hosts) this.draw(host, entry);
    byId("curves").classList.toggle("bare", !hosts.length);
  }

  draw(host, entry) {
    const { step, last, most, least } = this.recording.curve(entry);
    const log = wantsLog(last, ...(least ? [least] : []));
    const series = [{ label: entry.title, values: plottable(last, log) }];
    const bands = [];
    if (most) {
      series.push({ label: "most", values: plottable(most, log), width: 0.5, line: 0, dash: [] });
      series.push({ label: "least", values: plottable(least, log), width: 0.5, line: 0, dash: [] });
      bands.push([2, 3]);
    }
    chart(host, { x: step, series, bands, log, broken: entry.broken, height: 170 });
  }
}
