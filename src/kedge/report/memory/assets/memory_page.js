// A page with the memory of one step alone: in a file, or in a frame of a notebook.

import { byId } from "./elements.js";
import { filterOf } from "./filters.js";
import { MemoryPicture } from "./memory.js";
import { startTheme } from "./theme.js";

function startMemory() {
  const { memory } = JSON.parse(byId("document").textContent);
  const held = (memory.tensors?.path || []).filter((path) => path !== null);
  const paths = new Set(held.flatMap((path) => path.split(".").map((_, place, parts) => parts.slice(0, place + 1).join("."))));
  const named = { sites: [...paths].map((path) => ({ site: path, path, owner: path, kind: "out", type: "" })) };
  const chosen = () => filterOf(byId("filter").value, named);
  startTheme();
  const picture = new MemoryPicture(byId("memory"), { lets: (path) => chosen().letsIn(path) });
  byId("filter").addEventListener("input", () => {
    const { problem } = chosen();
    byId("filter-problem").textContent = problem;
    byId("filter-problem").hidden = !problem;
    picture.draw();
  });
  picture.show(memory);
  document.documentElement.dataset.ready = "yes";
}

startMemory();
