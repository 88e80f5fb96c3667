// Reads what the page carries, draws its parts, and follows a run that goes on.

import { byId, fill } from "./elements.js";
import { filterOf } from "./filters.js";
import { change, listen, recall, state } from "./state.js";
import { listenToRank, offerRanks, ranked } from "./ranks.js";
import { showHead } from "./head.js";
import { Findings } from "./findings.js";
import { HeatMap } from "./heatmap.js";
import { Depth } from "./depth.js";
import { Curves } from "./curves.js";
import { Saved } from "./saved.js";
import { Tree } from "./tree.js";
import { Panel } from "./panel.js";
import { connectFilter } from "./filter_field.js";
import { startTheme } from "./theme.js";
import { listenToKeys } from "./keys.js";

function carried() {
  const described = JSON.parse(byId("document").textContent);
  return ranked(described, (name) => byId(`table-${name}`).textContent);
}

function start() {
  recall();
  startTheme((theme) => change({ theme }));
  let choose = carried();
  let recording = choose();
  const filter = () => filterOf(state.filter, recording);
  const parts = {
    findings: new Findings(byId("findings-list")),
    heatMap: new HeatMap(byId("heat-map"), filter),
    panel: new Panel(byId("panel-body")),
    depth: new Depth(byId("depth-body"), filter),
    curves: new Curves(byId("curves-body")),
    saved: new Saved(byId("saved-body"), filter),
    tree: new Tree(byId("modules-body"), filter),
  };
  const tellFilter = connectFilter(filter);
  const show = () => {
    recording = choose();
    showHead(recording);
    offerRanks(recording);
    for (const part of Object.values(parts)) part.show(recording);
    tellFilter();
  };
  show();
  listenToRank();
  listen((changed) => changed.has("rank") && keepingPlace(show));
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  listenToKeys({ recording: () => recording, panel: parts.panel });
  document.documentElement.dataset.ready = "yes";
  if (document.documentElement.dataset.source === "live") {
    follow((news) => {
      choose = ranked(news.document, (name) => news.tables[name]);
      keepingPlace(show);
    });
  }
}

// A redraw changes heights for a moment; the reader must not notice.
function keepingPlace(show) {
  const [x, y] = [scrollX, scrollY];
  const focused = document.activeElement?.id;
  document.body.style.minHeight = `${document.body.scrollHeight}px`;
  show();
  document.body.style.minHeight = "";
  scrollTo({ left: x, top: y, behavior: "instant" });
  if (focused && document.activeElement?.id !== focused) byId(focused)?.focus({ preventScroll: true });
}

// The server says when there is news; the page fetches it, one request at a time.
function follow(take) {
  const light = byId("live");
  const told = (text, tone) => {
    light.className = `live ${tone}`;
    fill(light, text);
  };
  let [busy, again] = [false, false];
  const fetchNews = async () => {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        const answer = await fetch("news", { headers: { Accept: "application/json" } });
        if (answer.ok) take(await answer.json());
      } while (again);
    } catch (lost) {
      told(`no answer from kedge serve (${lost.message})`, "warning");
    } finally {
      busy = false;
    }
  };
  const events = new EventSource("events");
  events.addEventListener("open", () => told("● live", "fine"));
  events.addEventListener("grown", fetchNews);
  events.addEventListener("error", () => {
    const over = events.readyState === EventSource.CLOSED;
    told(over ? "○ kedge serve has ended" : "○ kedge serve does not answer; trying again", "warning");
  });
  addEventListener("pagehide", () => events.close());
}

start();
