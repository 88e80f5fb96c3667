// The field of the filter: what is typed counts after a pause, and a filter that selects nothing or cannot be read says so.

import { byId } from "./elements.js";
import { change, listen, state } from "./state.js";

const TYPING_PAUSE = 120;

// Returns what shows the state of the filter in force, which `filter` returns.
export function connectFilter(filter) {
  const input = byId("filter");
  const tell = () => {
    const { all, problem } = filter();
    input.classList.toggle("on", !all);
    byId("filter-problem").textContent = problem;
    byId("filter-problem").hidden = !problem;
  };
  input.value = state.filter;
  let pause;
  input.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => change({ filter: input.value }), TYPING_PAUSE);
  });
  listen((changed) => changed.has("filter") && tell());
  tell();
  return tell;
}
