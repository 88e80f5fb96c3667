// One rank of several by itself: the same sites and steps, with what that rank alone recorded.

import { byId, fill, make } from "./elements.js";
import { Recording } from "./recording.js";
import { change, state } from "./state.js";

// Gives what is to be shown: the chosen rank, or all together.
export function ranked(described, textOf) {
  const whole = new Recording(described, textOf);
  const single = new Map();
  return () => {
    const own = described.ranks.shown.find(({ rank }) => String(rank) === state.rank);
    if (!own) return whole;
    if (!single.has(own.rank)) {
      const { rank, sheets, curves } = own;
      single.set(rank, new Recording({ ...described, sheets, curves }, (name) => textOf(sheets[name] ? `rank${rank}-${name}` : name)));
    }
    return single.get(own.rank);
  };
}

export function offerRanks({ ranks: { shown, left_out: left } }) {
  const select = byId("rank");
  select.hidden = !shown.length && !left.length;
  const ranks = shown.map(({ rank }) => make("option", { value: rank }, `rank ${rank}`));
  const rest = left.length > 0 && make("option", { disabled: true }, `left out, the page would be too large: ${span(left)}`);
  fill(select, make("option", { value: "" }, "all ranks"), ranks, rest);
  select.value = shown.some(({ rank }) => String(rank) === state.rank) ? state.rank : "";
  select.classList.toggle("on", Boolean(select.value));
}

const span = (ranks) => (ranks.length > 1 ? `ranks ${ranks[0]} to ${ranks.at(-1)}` : `rank ${ranks[0]}`);

export function listenToRank() {
  byId("rank").addEventListener("change", () => change({ rank: byId("rank").value || null }));
}
