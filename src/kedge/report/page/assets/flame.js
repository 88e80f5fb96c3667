// A flame graph of what is held at one moment: a box for each module, operation and tensor, as wide as its bytes. A click
// makes a box as wide as the picture. It is a tree for the keyboard and for screen readers.

import { cut, fill, make, typeScale } from "./elements.js";
import { bytes, percent } from "./numbers.js";
import { joined, pathOf } from "./held.js";

const ROOM = 7; // pixels of a box without its text
const LEAST = 1.5; // pixels of a box that is drawn
const LEAST_LETTERS = 5; // of a name that is cut: fewer name nothing

export class FlameGraph {
  // `zoom` is told the key of the box that was chosen, `look` the box that is pointed at or has the focus: null for none.
  constructor(host, { zoom, look }) {
    this.host = host;
    this.zoom = zoom;
    this.look = look;
    this.boxes = new Map();
    this.ruler = make("canvas").getContext("2d");
    this.place = make("div", { class: "flame", role: "tree", "aria-label": "tensors held at this moment" });
    fill(host, this.place);
    this.place.addEventListener("mousedown", (event) => event.preventDefault()); // the focus stays where it is
    this.place.addEventListener("click", (event) => this.at(event, (one) => this.choose(one)));
    this.place.addEventListener("pointermove", (event) => this.at(event, (one) => this.look(one, event), () => this.look(null)));
    this.place.addEventListener("pointerleave", () => this.look(null));
    this.place.addEventListener("focusin", (event) => this.at(event, (one) => this.look(one)));
    this.place.addEventListener("focusout", () => this.look(null));
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      this.look(null);
      if (this.root) this.draw();
    }).observe(host);
  }

  show(root, zoomed, title) {
    Object.assign(this, { root, zoomed, title });
    this.draw();
  }

  draw() {
    const wide = this.host.clientWidth;
    if (!wide) return;
    const focused = this.place.contains(document.activeElement) && document.activeElement.dataset.key;
    this.ruler.font = getComputedStyle(this.place).font;
    this.row = 21 * typeScale();
    this.boxes.clear();
    fill(this.place);
    let deepest = 0;
    const chosen = this.chosen();
    const outside = new Set();
    for (let one = chosen; one; one = one.parent) outside.add(one);
    const put = (outer, depth, left, share, parent) => {
      const { box, label } = joined(outer);
      if (share * wide < LEAST) return;
      deepest = Math.max(deepest, depth);
      const shown = this.element(box, label, { depth, left, share, wide, around: box !== chosen && outside.has(box) });
      const entry = { box, label, element: shown, parent, inside: [], depth };
      parent?.inside.push(entry);
      this.boxes.set(box.key, entry);
      this.place.append(shown);
      const reached = [...box.inside.values()];
      const onWay = box !== chosen && outside.has(box) && reached.find((one) => outside.has(one));
      let at = left;
      for (const inner of onWay ? [onWay] : reached) {
        const part = onWay ? share : (share * inner.size) / (box.size || 1);
        put(inner, depth + 1, at, part, entry);
        at += part;
      }
    };
    put(this.root, 0, 0, 1, null);
    this.place.style.height = `${(deepest + 1) * this.row}px`;
    const first = this.boxes.get(focused) || this.boxes.get(chosen.key) || this.boxes.get("");
    if (first) first.element.tabIndex = 0;
    if (focused !== false && focused !== undefined) first?.element.focus({ preventScroll: true });
  }

  // The box that is as wide as the picture: the wanted one, or what is left of its way.
  chosen() {
    let found = this.root;
    for (;;) {
      const next = [...found.inside.values()].find((one) => this.zoomed === one.key || this.zoomed.startsWith(`${one.key}/`));
      if (!next) return found;
      found = next;
    }
  }

  element(box, label, { depth, left, share, wide, around }) {
    const name = box.level === "root" ? this.title : label;
    const blocks = box.blocks.size > 0 ? ` ×${box.blocks.size}` : "";
    const text = this.fitting(box, name + blocks, share * wide - ROOM);
    const element = make(
      "div",
      {
        class: `box ${box.level}${depth % 2 ? " odd" : ""}${kindOfBox(box)}${around ? " around" : ""}`,
        role: "treeitem",
        tabindex: -1,
        "data-key": box.key,
        "data-bytes": box.size,
        "aria-level": depth + 1,
        "aria-selected": "false",
        "aria-label": `${name}: ${bytes(box.size)}, ${percent(box.size / (this.root.size || 1))}`,
      },
      text && make("span", {}, text),
    );
    element.style.left = `${100 * left}%`;
    element.style.width = `${100 * share}%`;
    element.style.top = `${depth * this.row}px`;
    return element;
  }

  // The longest of a box's texts that has room in it: with its bytes, in full, in short, cut in the middle, or none.
  fitting(box, name, room) {
    const wide = (text) => this.ruler.measureText(text).width;
    const short = box.level === "operation" ? name.replace(/Backward\d*$/, "") : box.level === "tensor" ? name.split(" ").at(-1) : name;
    const whole = [box.level !== "root" && `${name}  ${bytes(box.size)}`, name, short].filter(Boolean);
    const found = whole.find((text) => wide(text) <= room);
    if (found) return found;
    if (box.level === "tensor") return ""; // a cut shape is another shape
    for (let letters = Math.min(short.length - 1, Math.ceil(room / 4)); letters >= LEAST_LETTERS; letters--) if (wide(cut(short, letters)) <= room) return cut(short, letters);
    return "";
  }

  at(event, then, otherwise = () => {}) {
    const entry = this.boxes.get(event.target.closest?.(".box")?.dataset.key);
    if (entry) then(entry.box);
    else otherwise();
  }

  // The box that fills the picture leads back to the one around it.
  choose(box) {
    const outer = this.boxes.get(box.key)?.parent?.box;
    this.zoom(box === this.chosen() && outer ? outer.key : box.key);
  }

  key(event) {
    const entry = this.boxes.get(document.activeElement.dataset?.key);
    if (!entry || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = entry.parent?.inside || [entry];
    const beside = (by) => row[row.indexOf(entry) + by];
    const moves = { ArrowDown: () => entry.inside[0], ArrowUp: () => entry.parent, ArrowRight: () => beside(1), ArrowLeft: () => beside(-1), Home: () => this.boxes.get("") };
    const acts = { Enter: () => this.choose(entry.box), " ": () => this.choose(entry.box), Escape: this.zoomed && (() => this.zoom("")) };
    const act = acts[event.key] || (moves[event.key] && (() => this.focus(moves[event.key]())));
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  focus(entry) {
    if (!entry) return;
    for (const one of this.place.children) one.tabIndex = -1;
    entry.element.tabIndex = 0;
    entry.element.focus();
  }
}

function kindOfBox(box) {
  if (box.level !== "tensor" || box.origins.size !== 1) return "";
  return box.origins.has("input") ? " input" : box.origins.has("recomputed") ? " recomputed" : "";
}

// The full name of a box.
export function nameOf(box) {
  const parts = [];
  for (let one = box; one && one.level !== "root" && one.level !== "module"; one = one.parent) parts.unshift(one.name);
  return [pathOf(box) || (parts.length ? "(the model)" : ""), ...parts].filter(Boolean);
}
