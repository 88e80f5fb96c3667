// The tensors that autograd held over a step, and at one moment as a tree: modules, in them operations, in them tensors.
// The forms are those of content.py.

const KIND_COLUMNS = ["path", "node", "field", "shape", "dtype", "origin", "line"];

export class HeldOverStep {
  constructor(described) {
    Object.assign(this, described);
    const { tensors } = described;
    this.kinds = !tensors ? [] : tensors.kinds.map((row) => kindOf(row, tensors));
    this.spans = !tensors ? [] : tensors.spans.map(([kind, storages, size, begin, end]) => ({ kind: this.kinds[kind], storages, size, begin, end }));
    this.rest = tensors?.rest || [];
    this.folds = this.kinds.some(({ folded, names }) => folded.some((name, place) => name !== names[place]));
    this.blocks = new Map();
    for (const { folded, names } of this.kinds) {
      folded.forEach((name, place) => {
        if (name === names[place]) return;
        const key = keyOf(folded.slice(0, place + 1).map((one) => ["module", one]));
        this.blocks.set(key, (this.blocks.get(key) || new Set()).add(names.slice(0, place + 1).join(".")));
      });
    }
    this.peakAt = Math.max(this.at.indexOf(this.peak_at), 0);
  }

  // The bytes of some spans at each moment.
  heights(chosen) {
    const changes = new Float64Array(this.at.length + 1);
    for (const { size, begin, end } of this.spans.filter(chosen)) {
      changes[begin] += size;
      changes[end] -= size;
    }
    let held = 0;
    return Array.from(changes.subarray(0, this.at.length), (change) => (held += change));
  }

  // What is held at a moment, in modules that are let through; `opened` are the keys of folded blocks that stand apart.
  tree(moment, lets, opened) {
    const root = boxOf(null, "root", "");
    for (const span of this.spans) {
      if (moment < span.begin || moment >= span.end || !lets(span.kind.path)) continue;
      addTo(root, boxesAround(span.kind, opened), span);
    }
    const left = this.rest[moment];
    if (left && lets(null)) addTo(root, [["tensor", "(smaller tensors)"]], { size: left, storages: 0, kind: null });
    return root;
  }
}

function kindOf(row, tensors) {
  const kind = Object.fromEntries(KIND_COLUMNS.map((name, place) => [name, tensors[name][row[place]]]));
  kind.names = kind.path === null ? ["(outside of modules)"] : kind.path === "" ? [] : kind.path.split(".");
  kind.folded = tensors.folded[row[0]] || kind.names;
  const shape = kind.shape.join("×") || "scalar";
  kind.text = [kind.field, kind.dtype, shape].filter(Boolean).join(" ");
  return kind;
}

// The boxes around a tensor, from the outside: level and name of each. In an opened fold its blocks have their own names.
export function boxesAround(kind, opened) {
  const steps = [];
  kind.folded.forEach((name, place) => {
    const folded = [...steps, ["module", name]];
    steps.push(name !== kind.names[place] && opened(keyOf(folded)) ? ["module", kind.names[place]] : folded.at(-1));
  });
  return [...steps, ["operation", kind.node || "(unknown)"], ["tensor", kind.text]];
}

export const keyOf = (steps) => steps.map(([level, name]) => `${level[0]}:${name}`).join("/");

function boxOf(parent, level, name) {
  const key = parent ? (parent.key ? `${parent.key}/${level[0]}:${name}` : `${level[0]}:${name}`) : "";
  return { key, level, name, parent, size: 0, storages: 0, inside: new Map(), lines: new Map(), blocks: new Set(), origins: new Set() };
}

function addTo(root, steps, { kind, size, storages }) {
  let box = root;
  countIn(box, kind, size, storages);
  steps.forEach(([level, name], place) => {
    const at = `${level[0]}:${name}`;
    if (!box.inside.has(at)) box.inside.set(at, boxOf(box, level, name));
    box = box.inside.get(at);
    countIn(box, kind, size, storages);
    if (level === "module" && kind.names[place] !== name) box.blocks.add(kind.names.slice(0, place + 1).join("."));
  });
}

function countIn(box, kind, size, storages) {
  box.size += size;
  box.storages += storages;
  if (kind?.line) box.lines.set(kind.line, (box.lines.get(kind.line) || 0) + size);
  if (kind) box.origins.add(kind.origin);
}

// A module that only holds one other module is one box with it, such as "transformer.h".
export function joined(box) {
  const labels = [box.name];
  let inner = box;
  while (inner.level === "module" && inner.inside.size === 1 && !inner.blocks.size) {
    const [only] = inner.inside.values();
    if (only.level !== "module") break;
    labels.push(only.name);
    inner = only;
  }
  return { box: inner, label: labels.join(".") };
}

// The path of a module's box, or of the module around an operation's or a tensor's.
export function pathOf(box) {
  const names = [];
  for (let one = box; one && one.level !== "root"; one = one.parent) if (one.level === "module") names.unshift(one.name);
  return names.join(".");
}
