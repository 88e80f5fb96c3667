// The bytes held over a step, as an area; a moment of it is chosen by a click, by dragging, or with the arrow keys.

import { fill, make, typeScale } from "./elements.js";
import { bytes, whole } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";
const [LEAST_HIGH, MOST_HIGH, FLATTEST] = [132, 240, 12];
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 16, 18];

export class Timeline {
  constructor(host, choose) {
    this.host = host;
    this.choose = choose;
    this.place = make("div", { class: "over-step", tabindex: 0, role: "slider", "aria-label": "moment of the step", "aria-valuemin": 0 });
    fill(host, this.place);
    this.place.addEventListener("pointerdown", (event) => {
      this.place.setPointerCapture?.(event.pointerId);
      this.pick(event);
    });
    this.place.addEventListener("pointermove", (event) => event.buttons & 1 && this.pick(event));
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.held && this.draw()).observe(host);
  }

  // `part` are the bytes of what is looked at, one for each moment; null for all.
  show(held, moment, part) {
    Object.assign(this, { held, moment, part });
    this.draw();
  }

  draw() {
    const { held, moment, part } = this;
    if (!this.host.clientWidth) return;
    this.scale = typeScale(); // the picture is drawn in units of the usual type
    const wide = this.host.clientWidth / this.scale;
    const high = Math.min(Math.max(LEAST_HIGH, wide / FLATTEST), MOST_HIGH);
    const [last, top] = [held.at.at(-1), held.peak || 1];
    const x = (at) => LEFT + ((wide - LEFT - RIGHT) * at) / last;
    const y = (size) => TOP + (high - TOP - BOTTOM) * (1 - size / top);
    this.moments = held.at.map((at) => x(at));
    const area = (sizes) => {
      const steps = sizes.map((size, place) => `H${x(held.at[place] - 1).toFixed(1)}V${y(size).toFixed(1)}`);
      return `M${LEFT},${y(0)}${steps.join("")}H${x(last)}V${y(0)}Z`;
    };
    const text = (content, px, py, anchor, kind = "") => svg("text", { x: px, y: py, "text-anchor": anchor, class: kind }, content);
    const ticks = [0, top / 2, top].flatMap((size) => [svg("line", { x1: LEFT, x2: wide - RIGHT, y1: y(size), y2: y(size), class: "grid" }), text(size ? bytes(size) : "0", LEFT - 6, y(size) + 4, "end")]);
    const now = this.moments[moment];
    const peak = x(held.peak_at);
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${wide} ${high}`, height: high * this.scale, "aria-hidden": "true" },
      ...ticks,
      svg("path", { d: area(held.bytes), class: part ? "held faded" : "held" }),
      part && svg("path", { d: area(part), class: "held part-of-it" }),
      held.backward && svg("line", { x1: x(held.backward - 1), x2: x(held.backward - 1), y1: TOP, y2: high - BOTTOM, class: "backward" }),
      held.backward && text("backward →", x(held.backward - 1) + (x(held.backward) > wide - 80 ? -4 : 4), high - BOTTOM - 5, x(held.backward) > wide - 80 ? "end" : "start"),
      svg("circle", { cx: peak, cy: y(held.peak), r: 3.5, class: "peak" }),
      text(`peak ${bytes(held.peak)}`, peak, TOP - 6, peak > wide - 90 ? "end" : peak < LEFT + 60 ? "start" : "middle", "peak"),
      svg("line", { x1: now, x2: now, y1: TOP, y2: high - BOTTOM, class: "now" }),
      svg("circle", { cx: now, cy: y(held.bytes[moment]), r: 4.5, class: "now" }),
      text("1", LEFT, high - 4, "start"),
      text(`${whole(last)} saves and releases`, wide - RIGHT, high - 4, "end"),
    );
    fill(this.place, picture);
    this.place.setAttribute("aria-valuemax", held.at.length - 1);
    this.place.setAttribute("aria-valuenow", moment);
    this.place.setAttribute("aria-valuetext", `${bytes(held.bytes[moment])} after save or release ${whole(held.at[moment])} of ${whole(last)}`);
  }

  pick(event) {
    const at = (event.clientX - this.place.getBoundingClientRect().left) / this.scale;
    let nearest = 0;
    this.moments.forEach((place, moment) => {
      if (Math.abs(place - at) < Math.abs(this.moments[nearest] - at)) nearest = moment;
    });
    this.choose(nearest);
  }

  key(event) {
    const far = Math.max(Math.round(this.held.at.length / 10), 1);
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far, PageDown: -far }[event.key];
    const last = this.held.at.length - 1;
    const to = { Home: 0, End: last, p: this.held.peakAt }[event.key] ?? (by === undefined ? null : this.moment + by);
    if (to === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.choose(Math.min(Math.max(to, 0), last));
  }
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(Boolean));
  return element;
}
