// What was recorded, as the page's script reads it: a row a site, a column a bin of steps. Tables are decoded when they
// are first asked for, so that a page of a thousand sites opens at once. The forms are those of columns.py.

export const ABSENT = 0;
export const FINITE = 1;
export const BROKEN = 2;

function octetsOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text); // browsers of before 2025
  const octets = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) octets[i] = raw.charCodeAt(i);
  return octets;
}

function decode(text, form) {
  const octets = octetsOf(text);
  if (form === "f8") return new Float64Array(octets.buffer);
  if (form === "f4") return new Float32Array(octets.buffer);
  if (form === "b2") return widened(new Uint16Array(octets.buffer));
  return form === "u1" ? shares(octets) : octets;
}

function widened(halves) {
  const bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}

function shares(octets) {
  return Float32Array.from(octets, (part) => (part === 255 ? NaN : part / 254));
}

export class Recording {
  constructor(described, textOf) {
    Object.assign(this, described);
    this.textOf = textOf;
    this.decoded = new Map();
    this.first = decode(textOf("first"), "f8");
    this.last = decode(textOf("last"), "f8");
    this.width = this.columns.count;
    this.sites.forEach((site, id) => (site.id = id));
    this.byText = new Map(this.sites.map((site) => [site.site, site]));
    this.members = new Map(Object.entries(this.sheets).map(([name, sheet]) => [name, new Set(sheet.rows)]));
    this.followers = this.foundFollowers();
    this.findings.forEach((finding, number) => (finding.number = number));
  }

  site(text) {
    return this.byText.get(text);
  }

  state(id, column) {
    return this.table("state").values[id * this.width + column];
  }

  states(id) {
    return this.table("state").values.subarray(id * this.width, (id + 1) * this.width);
  }

  table(name) {
    if (!this.decoded.has(name)) {
      const { rows, form } = this.sheets[name];
      const places = rows && new Map(rows.map((id, place) => [id, place]));
      this.decoded.set(name, { places, values: decode(this.textOf(name), form) });
    }
    return this.decoded.get(name);
  }

  has(id, name) {
    return Boolean(this.members.get(name)?.has(id));
  }

  // One value a column, NaN where there is none; null where the site has none at all.
  series(id, name) {
    if (name === "absmax") return this.absmax(id);
    if (name === "ratio") return this.ratio(id);
    if (!this.sheets[name]) return null;
    const { places, values } = this.table(name);
    const place = places.get(id);
    return place === undefined ? null : values.subarray(place * this.width, (place + 1) * this.width);
  }

  absmax(id) {
    const low = this.series(id, "min");
    const high = this.series(id, "max");
    return low && high && low.map((value, column) => Math.max(Math.abs(value), Math.abs(high[column])));
  }

  // How much a step changed a parameter, relative to its size.
  ratio(id) {
    const size = this.site(`${this.sites[id].path}:param`);
    const changes = this.series(id, "rms");
    const sizes = size && this.series(size.id, this.sheets["rms.last"] ? "rms.last" : "rms");
    return changes && sizes && changes.map((value, column) => (sizes[column] > 0 ? value / sizes[column] : NaN));
  }

  least(id) {
    return this.series(id, "rms.least") || this.series(id, "rms");
  }

  // Sites of one kind in the order of the data; gradients stand where their outputs do.
  ofKind(kind) {
    const own = this.sites.filter((site) => site.kind === kind);
    if (!kind.startsWith("out.grad") && kind !== "param.grad") return own;
    const forward = kind === "param.grad" ? "param" : kind.replace(".grad", "");
    const place = (site) => this.site(site.site.replace(`:${kind}`, `:${forward}`))?.id ?? site.id;
    return own.map((site) => [place(site), site]).sort((a, b) => a[0] - b[0]).map(([, site]) => site);
  }

  // Sites of the same module, or of the same parameter's module.
  siblings(site) {
    return this.sites.filter((other) => other.owner === site.owner && other.id !== site.id);
  }

  // What a site's data came from: an output's are those of its module's inputs.
  sourcesOf(site) {
    const ids = site.kind.startsWith("in")
      ? site.from
      : this.sites.filter((s) => s.path === site.path && s.kind.startsWith("in") && !s.kind.includes("grad")).flatMap((s) => s.from);
    return [...new Set(ids)].filter((id) => id !== null && id !== undefined).map((id) => this.sites[id]);
  }

  foundFollowers() {
    const found = new Map();
    for (const site of this.sites) {
      for (const id of site.from) if (id !== null) found.set(id, [...(found.get(id) || []), site]);
    }
    return found;
  }

  // The outputs of the modules that take a site's value.
  goesTo(site) {
    const inputs = this.followers.get(site.id) || [];
    return [...new Set(inputs.map((input) => this.site(`${input.path}:out`) || input))];
  }

  // The column that holds a step.
  columnOf(step) {
    let low = 0;
    let high = this.width - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.first[middle] <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  findingsOf(site) {
    return this.findings.filter((finding) => finding.site === site.site);
  }

  curve(entry) {
    const values = (how) => entry[how] && decode(entry[how].data, entry[how].form);
    return { step: decode(entry.step, "f8"), last: values("last"), most: values("most"), least: values("least") };
  }
}
