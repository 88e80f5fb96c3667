// Which runs are shown, which one is in front of the others, and how the lines of each look.

import { colour, make } from "./elements.js";
import { change, state } from "./state.js";

const HUES = 8;
const DASHES = [[], [7, 4], [2, 3]];
const FADED = "38";
const FAINTEST = "14";

const dashAt = (place) => Math.floor(place / HUES) % DASHES.length;

export const dashOfRun = (place) => DASHES[dashAt(place)];

// The colour of a run's lines when they are drawn; those behind the one in front are faint.
export function inkOf(place, front, strength = "") {
  const behind = front !== null && front !== place;
  return colour(`run-${(place % HUES) + 1}`) + (behind ? (strength ? FAINTEST : FADED) : strength);
}

export const sample = (place) => make("span", { class: `run-line hue-${(place % HUES) + 1} dash-${dashAt(place)}`, "aria-hidden": "true" });

const hidden = () => new Set((state.hidden || "").split(",").filter(Boolean).map(Number));

export const isShown = (place) => !hidden().has(place);

export function showRun(place, shown) {
  const now = hidden();
  if (shown) now.delete(place);
  else now.add(place);
  change({ hidden: [...now].sort((a, b) => a - b).join(",") });
}

// The run that is pointed at, or else the one that was chosen.
export function inFront() {
  const front = state.pointed ?? state.front ?? "";
  return front !== "" && isShown(Number(front)) ? Number(front) : null;
}

export const pointAt = (place) => ({
  onpointerenter: () => change({ pointed: place === null ? null : String(place) }),
  onpointerleave: () => change({ pointed: null }),
});
