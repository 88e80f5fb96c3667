// What the heat-map can show: a statistic of one kind of sites.

const QUANTITIES = [
  { id: "rms.out", label: "rms of outputs", kind: "out", series: "rms", scale: "log" },
  { id: "rms.grad", label: "rms of output gradients", kind: "out.grad", series: "rms", scale: "log" },
  { id: "absmax.out", label: "largest |x| of outputs", kind: "out", series: "absmax", scale: "log" },
  { id: "absmax.grad", label: "largest |x| of output gradients", kind: "out.grad", series: "absmax", scale: "log" },
  { id: "std.out", label: "standard deviation of outputs", kind: "out", series: "std", scale: "log" },
  { id: "q05.out", label: "5 % quantile of |x| of outputs", kind: "out", series: "q05", scale: "log" },
  { id: "zero.out", label: "share of zeros in outputs", kind: "out", series: "zero", scale: "share" },
  { id: "zero.grad", label: "share of zeros in output gradients", kind: "out.grad", series: "zero", scale: "share" },
  { id: "saturated.out", label: "saturated share of activations", kind: "out", series: "saturated", scale: "share" },
  { id: "rms.in", label: "rms of inputs", kind: "in", series: "rms", scale: "log" },
  { id: "ratio", label: "update ratio of parameters", kind: "update", series: "ratio", scale: "log" },
  { id: "rms.param", label: "rms of parameters", kind: "param", series: "rms", scale: "log" },
  { id: "rms.param.grad", label: "rms of parameter gradients", kind: "param.grad", series: "rms", scale: "log" },
  { id: "rms.state", label: "rms of optimizer states", kind: "state", series: "rms", scale: "log" },
  { id: "time.forward", label: "forward time of modules, ms", kind: "time.forward", series: "milliseconds", scale: "log" },
  { id: "time.backward", label: "backward time of modules, ms", kind: "time.backward", series: "milliseconds", scale: "log" },
  { id: "nonfinite.out", label: "non-finite elements of outputs", kind: "out", series: "nonfinite", scale: "count" },
  { id: "nonfinite.grad", label: "non-finite elements of output gradients", kind: "out.grad", series: "nonfinite", scale: "count" },
];

// A kind with a leaf, out[0] or out.grad[logits], is of the kind before the bracket.
export const baseKind = (site) => site.kind.split("[")[0];

export function sitesOf(recording, quantity) {
  const kinds = new Set(recording.sites.filter((site) => baseKind(site) === quantity.kind).map((site) => site.kind));
  const sites = kinds.size === 1 ? recording.ofKind([...kinds][0]) : recording.sites.filter((site) => kinds.has(site.kind));
  return sites.filter((site) => isThere(recording, site, quantity));
}

function isThere(recording, site, quantity) {
  const names = { absmax: "max", ratio: "rms" };
  if (recording.has(site.id, names[quantity.series] || quantity.series)) return quantity.series !== "ratio" || Boolean(recording.site(`${site.path}:param`));
  // A site that was never finite has no figures, but it must not be left out.
  return !["zero", "saturated", "q05", "ratio"].includes(quantity.series) && recording.states(site.id).some((s) => s > 0);
}

// What the worst finding is about is what the heat-map shows first.
export function telling(recording, known) {
  const site = recording.findings.map((finding) => recording.site(finding.site)).find(Boolean);
  const kind = site && baseKind(site);
  const wanted = { "param.grad": "rms.grad", "out.grad": "rms.grad", "grad.norm": "rms.grad", update: "ratio", param: "rms.param", state: "rms.state" }[kind] || "rms.out";
  return known.find((quantity) => quantity.id === wanted) || known[0];
}

// A page may bring quantities of its own; one with a `middle` is coloured by how far it is from that.
export const offered = (recording) => (recording.quantities || QUANTITIES).filter((quantity) => sitesOf(recording, quantity).length > 0);
