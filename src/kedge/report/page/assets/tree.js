// The modules as a tree that folds, with shapes, parameters and what autograd saved in them.

import { badge, byId, fill, make } from "./elements.js";
import { bytes, thousands } from "./numbers.js";
import { change, listen, state } from "./state.js";

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
    const titles = ["module", "class", "output", "parameters", this.saved && "saved for backward"].filter(Boolean);
    fill(this.host, make("div", { class: `tree${this.saved ? " with-saved" : ""}`, role: "tree" }, make("div", { class: "row titles" }, titles.map((text) => make("span", {}, text))), roots.map((root) => this.node(root, 0))));
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

  node(node, depth) {
    const { path } = node.module;
    if (this.wanted && !this.wanted.has(path)) return null;
    const row = this.row(node, depth);
    if (!node.held.length) return make("div", { class: "leaf", role: "treeitem" }, row);
    const open = this.folded.get(path) ?? (this.wanted !== null || depth < OPEN_DEPTH || this.nodes.size <= FEW);
    const inside = make("div", { class: "inside", role: "group" });
    // What is folded away is made when it is opened.
    const unfold = () => inside.childElementCount || fill(inside, node.held.map((one) => this.node(one, depth + 1)));
    if (open) unfold();
    const element = make("details", { open, role: "treeitem" }, make("summary", {}, row), inside);
    element.addEventListener("toggle", () => {
      this.folded.set(path, element.open);
      if (element.open) unfold();
    });
    return element;
  }

  row(node, depth) {
    const { module } = node;
    const label = module.path.split(".").pop() || `(${this.recording.roots[module.root]?.name ?? "root"})`;
    const site = module.sites.map((id) => this.recording.sites[id]).find((one) => one.kind === "out") || this.recording.sites[module.sites[0]];
    const open = (event) => {
      event.preventDefault();
      change({ site: site.site });
    };
    const name = site ? make("button", { class: "link mono", "data-path": module.path, onclick: open }, label) : make("span", { class: "mono faint", title: "not watched, or never called" }, label);
    const mark = this.worst(module);
    const share = this.saved && make("span", { class: "saved" }, node.saved > 0 && [bar((module.saved || 0) / this.most), bytes(node.saved)]);
    return make(
      "span",
      { class: "row" },
      make("span", { class: "name", "data-depth": depth, title: module.path }, make("i", { class: `indent d${Math.min(depth, 12)}` }), name, mark),
      make("span", { class: "faint", title: module.file ? `${module.file}:${module.line}` : null }, module.type),
      make("span", { class: "number" }, module.shape ? module.shape.join("×") || "scalar" : ""),
      make("span", { class: "number" }, node.parameters ? [thousands(node.parameters), module.own > 0 && !(module.trainable ?? true) ? " frozen" : ""] : ""),
      share,
    );
  }

  worst(module) {
    const texts = new Set(module.sites.map((id) => this.recording.sites[id].site));
    const found = this.recording.findings.filter((finding) => texts.has(finding.site)).map((finding) => finding.severity);
    const severity = SEVERITIES.find((one) => found.includes(one));
    return severity && badge(severity);
  }

  markChosen() {
    const owner = this.recording.site(state.site)?.owner;
    for (const button of this.host.querySelectorAll("[data-path]")) button.classList.toggle("chosen", button.dataset.path === owner);
  }
}

function bar(share) {
  const meter = make("i", { class: "meter" });
  meter.style.width = `${Math.round(share * 44)}px`;
  return meter;
}

function nodesOf(recording) {
  const nodes = new Map(recording.modules.map((module) => [module.path, { module, held: [], holder: null }]));
  const rooted = new Set(recording.roots.map((root) => root.prefix));
  for (const node of nodes.values()) {
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
