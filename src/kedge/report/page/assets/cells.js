// The cells of the heat-map: which sites, which values, which colour.

import { BROKEN, ABSENT } from "./recording.js";
import { quantileOf } from "./numbers.js";
import { parsed, pixelsOf, scaleTable, topLevel } from "./colours.js";
import { sitesOf } from "./quantities.js";

function finite(levels) {
  const known = new Float32Array(levels.length * (levels[0]?.length || 0));
  let count = 0;
  for (const row of levels) for (const value of row) if (Number.isFinite(value)) known[count++] = value;
  return known.subarray(0, count);
}

export class Cells {
  constructor(recording, quantity, { relative, lets }) {
    this.recording = recording;
    this.quantity = quantity;
    this.relative = (relative || Boolean(quantity.middle)) && quantity.scale === "log";
    this.sites = sitesOf(recording, quantity).filter((site) => lets(site));
    this.rows = new Map(this.sites.map((site, row) => [site.id, row]));
    this.width = recording.width;
    this.levels = this.sites.map((site) => this.measured(site));
    this.domain = this.spread();
  }

  value(row, column) {
    const series = this.recording.series(this.sites[row].id, this.quantity.series);
    return series ? series[column] : NaN;
  }

  state(row, column) {
    return this.recording.state(this.sites[row].id, column);
  }

  // What is coloured: the value itself, its logarithm, or how far it is from a middle, the site's own if the quantity
  // has none, in powers of two.
  measured(site) {
    const series = this.recording.series(site.id, this.quantity.series);
    if (!series) return new Float32Array(this.width).fill(NaN);
    if (this.quantity.scale === "share") return series;
    const logs = Float32Array.from(series, (value) => (value > 0 ? Math.log10(value) : NaN));
    if (!this.relative) return logs;
    const { middle: given } = this.quantity;
    const middle = given ? Math.log10(given) : quantileOf(logs.filter(Number.isFinite).sort(), 0.5);
    return logs.map((value) => (value - middle) / Math.log10(2));
  }

  // The ends of the colour scale; the last half percent on either side shares the end's colour, so that one site that
  // explodes leaves the others some contrast.
  spread() {
    const known = finite(this.levels).sort();
    this.known = known.length;
    if (this.quantity.scale === "share" || !known.length) return [0, 1];
    const [low, high] = [quantileOf(known, 0.005), quantileOf(known, 0.995)];
    if (this.relative) {
      const most = Math.max(Math.abs(low), Math.abs(high), this.quantity.least ?? 1);
      return [-most, most];
    }
    const wider = Math.max(1 - (high - low), 0) / 2;
    return [low - wider, high + wider];
  }

  // A cell a pixel; the canvas scales it up without smoothing.
  picture(theme, colours) {
    const image = new ImageData(Math.max(this.width, 1), Math.max(this.sites.length, 1));
    const pixels = new Uint32Array(image.data.buffer);
    const table = pixelsOf(scaleTable(this.relative, theme));
    const [low, high] = this.domain;
    const [broken, zero] = pixelsOf([...parsed(colours.broken), ...parsed(colours.zero)]);
    this.sites.forEach((site, row) => {
      const states = this.recording.states(site.id);
      const series = this.recording.series(site.id, this.quantity.series);
      const levels = this.levels[row];
      const start = row * this.width;
      for (let column = 0; column < this.width; column++) {
        const measured = levels[column];
        if (states[column] === BROKEN) pixels[start + column] = broken;
        else if (states[column] === ABSENT || !series || Number.isNaN(series[column])) continue;
        else if (!Number.isFinite(measured)) pixels[start + column] = zero;
        else pixels[start + column] = table[Math.round(Math.min(Math.max((measured - low) / (high - low), 0), 1) * topLevel)];
      }
    });
    return image;
  }

  anyBroken() {
    return this.sites.some((site) => this.recording.states(site.id).includes(BROKEN));
  }
}
