// What the reader chose. Everything that redraws listens here; what names the place is kept in the address, so that a
// link leads back to it.

const chosen = {
  site: null, // text of the site that the panel shows
  quantity: null, // id of what the heat-map shows
  relative: false, // whether it shows change instead of size
  column: null, // column of the depth picture; null: the newest
  kind: null, // what the depth picture shows
  format: "float16",
  filter: "",
  rank: null, // the rank that is shown by itself, as text; null: all together
  finding: null, // number of the finding in focus
  theme: null,
};
const listeners = [];
const KEPT = ["site", "quantity", "filter", "rank"];

export const state = new Proxy(chosen, {
  set() {
    throw new TypeError("change() sets the state, so that everybody hears of it");
  },
});

export function listen(listener) {
  listeners.push(listener);
}

export function change(patch) {
  const changed = Object.keys(patch).filter((key) => chosen[key] !== patch[key]);
  if (!changed.length) return;
  Object.assign(chosen, patch);
  remember(changed);
  for (const listener of listeners) listener(new Set(changed));
}

function remember(changed) {
  if (changed.some((key) => KEPT.includes(key))) {
    const named = KEPT.filter((key) => chosen[key]);
    const text = new URLSearchParams(named.map((key) => [key, chosen[key]])).toString();
    showAddress(text ? `#${text}` : location.pathname + location.search);
  }
}

// A page inside another one may not have an address of its own, as in the viewers of notebooks and editors.
function showAddress(address) {
  try {
    history.replaceState(null, "", address);
  } catch (refused) {
    console.debug(`the address does not name the place: ${refused.message}`);
  }
}

// Takes up the filter that the page was written with, and what the address kept: also the further choices of a page that has any.
export function recall(...more) {
  KEPT.push(...more);
  chosen.filter = document.documentElement.dataset.filter ?? "";
  const address = new URLSearchParams(location.hash.slice(1));
  for (const key of KEPT) if (address.get(key)) chosen[key] = address.get(key);
}
