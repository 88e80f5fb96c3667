// Elements of the page. Text enters as text nodes alone, never as markup: see Note [Nothing from outside] in render.py.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

export const byId = (id) => document.getElementById(id);

// Colours live in the style sheet alone, so that both themes stand in one place.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// How much larger than usual the type is: on a wall-sized screen, or because the reader wants it so. Canvases have to be told.
export const typeScale = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;

export const MARKS = { error: "✗", warning: "!", info: "i", fine: "✓" };

export function badge(severity) {
  return make("span", { class: `badge ${severity}`, title: severity }, MARKS[severity]);
}

// A canvas that is as sharp as the screen; gives the context in CSS pixels.
export function sized(canvas, width, height) {
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  return context;
}

// Names are cut in their middle: see Note [Cut names] in fitted_text.py.
export function cut(text, most) {
  if (text.length <= most) return text;
  const before = text.slice(0, text.lastIndexOf(" ") + 1);
  const path = text.slice(before.length);
  const shorter = PATH.test(path) ? before + withoutWords(path, most - before.length) : text;
  if (shorter.length <= most) return shorter;
  const last = shorter.lastIndexOf("…") + 1;
  const room = most - last;
  if (shorter !== text && last > 1 && room >= LEAST_LAST) return shorter.slice(0, last) + shorter.slice(shorter.length - room);
  const start = Math.min(Math.max(Math.floor(most / 5), 4), Math.floor(most / 2));
  return `${text.slice(0, start)}…${text.slice(text.length - (most - start - 1))}`;
}

const LEAST_LAST = 6;
const PATH = /^[\p{L}\p{N}_,…-]+(?:\.[\p{L}\p{N}_,…-]+)+(?:[#:/[].*)?$/su;
const WORD = /^[\p{L}_][\p{L}\p{N}_]*$/u;

function withoutWords(path, most) {
  const words = path.split(".").slice(0, -1);
  const shown = path.split(".");
  let text = path;
  for (const [place, word] of words.entries()) {
    if (!WORD.test(word)) continue;
    shown[place] = "\0";
    text = shown.join(".").replace(/\.?\0(?:\.\0)*\.?/gu, "…");
    if (text.length <= most) return shown[0] === "\0" ? `${words[0].slice(0, most - text.length)}${text}` : text;
  }
  return text;
}
