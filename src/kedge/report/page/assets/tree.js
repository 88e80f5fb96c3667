// The modules as a tree that folds, with shapes, parameters, scales and what autograd saved in them. Blocks that are
// alike are one node, with the least and the largest of their figures; it unfolds into what is in each of them, and into
// the blocks one by one.

import { badge, byId, fill, make, MARKS } from "./elements.js";
import { brief, bytes, compact, thousands } from "./numbers.js";
import { change, listen, state } from "./state.js";
import { baseKind } from "./quantities.js";
import { BROKEN } from "./recording.js";

const SEVERITIES = ["error", "warning", "info"];
const OPEN_DEPTH = 2;
const FEW = 60;

export class Tree {
  constructor(host, filter) {
    this.host = host;
    this.filter = filter;
    this.folded = new Map(); // what the reader opened or closed, by path, so that a redraw leaves it
    listen((changed) => {
      if (changed.has("filter")) this.show(this.recording);
      else if (changed.has("site")) this.markChosen();
    });
  }

  show(recording) {
    this.recording = recording;
    this.nodes = nodesOf(recording);
    const roots = [...this.nodes.values()].filter((node) => node.holder === null);
    roots.forEach((root) => total(root));
    this.saved = roots.some((root) => root.saved > 0);
    this.most = Math.max(...[...this.nodes.values()].map((node) => node.module.saved || 0), 1);
    byId("modules").classList.toggle("bare", !roots.length);
    if (!roots.length) {
      fill(this.host, make("p", { class: "empty" }, "No module was watched."));
      return;
    }
    this.wanted = this.chosenPaths();
    this.leads = this.markedPaths();
    const titles = ["module", "class", "output", "parameters", "rms", "gradient", this.saved && "saved for backward"].filter(Boolean);
    fill(this.host, make("div", { class: `tree${this.saved ? " with-saved" : ""}` }, make("div", { class: "row titles" }, titles.map((text) => make("span", {}, text))), roots.map((root) => this.node(root, 0))));
    this.markChosen();
  }

  // The modules that the filter lets through, and all that hold them.
  chosenPaths() {
    const filter = this.filter();
    if (filter.all) return null;
    const wanted = new Set();
    for (let node of this.nodes.values()) {
      if (!filter.letsModule(node.module.path)) continue;
      for (; node; node = node.holder) wanted.add(node.module.path);
    }
    return wanted;
  }

  // The modules with a finding in them, and the worst severity of those; and the way to the worst of all is unfolded.
  markedPaths() {
    const inside = new Map();
    const unfolded = new Set();
    this.recording.findings.forEach((finding, place) => {
      let node = this.nodes.get(finding.owner)?.holder;
      for (; node; node = node.holder) {
        const { path } = node.module;
        if (!inside.has(path) || SEVERITIES.indexOf(finding.severity) < SEVERITIES.indexOf(inside.get(path))) inside.set(path, finding.severity);
        if (!place && finding.severity !== "info") unfolded.add(path);
      }
    });
    return { inside, unfolded };
  }

  lets(node) {
    return !this.wanted || node.members.some((one) => this.wanted.has(one.module.path));
  }

  node(node, depth) {
    if (!this.lets(node)) return null;
    const row = this.row(node, depth);
    const many = node.members.length > 1;
    if (!node.held.length && !node.blocks) return make("div", { class: "leaf" }, row);
    const folds = !many && foldedNodes(this.recording.folds, node.held).length < node.held.length;
    const open = !many && (this.wanted !== null || depth < OPEN_DEPTH || this.nodes.size <= FEW || folds || this.leads.unfolded.has(node.module?.path ?? node.members[0].module.path));
    return this.branch(node.key, row, open, () => this.inside(node, depth + 1));
  }

  // In a node of several blocks stand the parts of all of them, and then each by itself.
  inside(node, depth) {
    const parts = foldedNodes(this.recording.folds, node.held).map((one) => this.node(one, depth));
    if (!node.blocks) return parts;
    const row = make("span", { class: "row" }, make("span", { class: "name" }, indent(depth), `each of the ${node.members.length}`));
    return [...parts, this.branch(`${node.key} each`, row, false, () => node.members.map((one) => this.node(one, depth + 1)))];
  }

  // A row that unfolds by a click on it, or by its button.
  branch(key, row, usual, inside) {
    const body = make("div", { class: "inside" });
    const button = make("button", { class: "toggle", "aria-label": `what is in ${key || "the model"}` });
    const put = (open) => {
      // What is folded away is made when it is opened.
      if (open && !body.childElementCount) fill(body, inside());
      body.hidden = !open;
      button.setAttribute("aria-expanded", open);
      button.textContent = open ? "▾" : "▸";
    };
    const turn = (event) => {
      if (event.target !== button && event.target.closest("button")) return;
      this.folded.set(key, body.hidden);
      put(body.hidden);
    };
    put(this.folded.get(key) ?? usual);
    return make("div", { class: "branch" }, make("div", { class: "head", onclick: turn }, button, row), body);
  }

  row(node, depth) {
    const [{ module }] = node.members;
    const many = node.members.length > 1;
    const label = node.label ?? (module.path.split(".").pop() || `(${this.recording.roots[module.root]?.name ?? "root"})`);
    const site = module.sites.map((id) => this.recording.sites[id]).find((one) => one.kind === "out") || this.recording.sites[module.sites[0]];
    const open = () => change({ site: site.site });
    const title = many ? `${node.key}: ${node.members.length} modules` : module.path;
    const name =
      site && !many
        ? make("button", { class: "link mono", "data-path": module.path, onclick: open }, label)
        : make("span", { class: `mono${many ? " many" : " faint"}`, title: many ? title : "not watched, or never called" }, label);
    const sum = (of) => node.members.reduce((all, one) => all + (of(one) || 0), 0);
    const [parameters, saved] = [sum((one) => one.parameters), sum((one) => one.saved)];
    const share = this.saved && make("span", { class: "saved", "data-title": "saved" }, saved > 0 && [bar(Math.min(sum((one) => one.module.saved) / this.most, 1)), bytes(saved)]);
    return make(
      "span",
      { class: "row" },
      make("span", { class: "name", "data-depth": depth, title }, indent(depth), name, many && node.blocks && make("span", { class: "faint" }, ` ×${node.members.length}`), this.worst(node)),
      make("span", { class: "faint class", title: module.file ? `${module.file}:${module.line}` : null }, module.type),
      make("span", { class: "number output" }, module.shape ? module.shape.join("×") || "scalar" : ""),
      make("span", { class: "number parameters" }, parameters ? [thousands(parameters), module.own > 0 && !(module.trainable ?? true) ? " frozen" : ""] : ""),
      make("span", { class: "number", "data-title": "rms" }, this.spread(node, "out")),
      make("span", { class: "number", "data-title": "gradient" }, this.spread(node, "out.grad")),
      share,
    );
  }

  // The newest scale of a kind of sites: of one module, or the least and the largest of several.
  spread(node, kind) {
    const { recording } = this;
    const found = node.members.flatMap(({ module }) => {
      const site = module.sites.map((id) => recording.sites[id]).find((one) => [kind, OF_OPERATION + kind].includes(baseKind(one)));
      const states = site && recording.states(site.id);
      const column = states ? states.findLastIndex((held) => held > 0) : -1;
      if (column < 0) return [];
      return [states[column] === BROKEN ? NaN : (recording.series(site.id, recording.has(site.id, "rms.last") ? "rms.last" : "rms")?.[column] ?? NaN)];
    });
    const known = found.filter(Number.isFinite);
    if (!found.length) return "";
    if (known.length < found.length) return make("span", { class: "bad" }, known.length ? `${brief(Math.min(...known))}..✗` : "✗");
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return brief(low) === brief(high) ? compact(low) : `${brief(low)}..${brief(high)}`;
  }

  worst(node) {
    const paths = new Set(node.members.map(({ module }) => module.path));
    const found = this.recording.findings.filter((finding) => paths.has(finding.owner)).map((finding) => finding.severity);
    const severity = SEVERITIES.find((one) => found.includes(one));
    if (severity) return badge(severity);
    const held = SEVERITIES.find((one) => node.members.some(({ module }) => this.leads.inside.get(module.path) === one));
    return held && make("span", { class: `badge open ${held}`, title: `${held} of a module in it` }, MARKS[held]);
  }

  markChosen() {
    const owner = this.recording.site(state.site)?.owner;
    for (const button of this.host.querySelectorAll("[data-path]")) button.classList.toggle("chosen", button.dataset.path === owner);
  }
}

const indent = (depth) => make("i", { class: `indent d${Math.min(depth, 12)}` });

function bar(share) {
  const meter = make("i", { class: "meter" });
  meter.style.width = `${Math.round(share * 44)}px`;
  return meter;
}

// Nodes with those that a fold holds as one. A node has the parts of its first member; each part stands for those of all.
function foldedNodes(folds, nodes) {
  const foldAt = new Map(folds.flatMap((one) => one.paths.map((path) => [path, one])));
  const taken = new Set();
  return nodes.flatMap((node) => {
    const one = node.members.length === 1 && foldAt.get(node.module.path);
    if (!one) return [node];
    if (taken.has(one)) return [];
    taken.add(one);
    const paths = new Set(one.paths);
    return [merged(one.name, one.name.split(".").pop(), nodes.filter((other) => paths.has(other.module?.path)), true)];
  });
}

function merged(key, label, members, blocks = false) {
  const held = members[0].held.map((first, place) => {
    const name = first.module.path.split(".").pop();
    return merged(`${key}.${name}`, name, members.map((member) => member.held[place]));
  });
  return { key, label, members, held, blocks };
}

function nodesOf(recording) {
  const nodes = new Map(recording.modules.map((module) => [module.path, { module, key: module.path, held: [], holder: null }]));
  const rooted = new Set(recording.roots.map((root) => root.prefix));
  for (const node of nodes.values()) {
    node.members = [node];
    const { path } = node.module;
    if (path === "" || (rooted.has(path) && path)) continue;
    const holder = nodes.get(path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
    if (holder && holder !== node) {
      holder.held.push(node);
      node.holder = holder;
    }
  }
  return nodes;
}

function total(node) {
  node.parameters = node.module.own || 0;
  node.saved = node.module.saved || 0;
  for (const held of node.held) {
    total(held);
    node.parameters += held.parameters;
    node.saved += held.saved;
  }
}
