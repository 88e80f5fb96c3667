// Figures as short text, the same as in the terminal's report.

export function compact(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 0.009995 && size < 9999.5) {
    const power = Number(size.toExponential(2).split("e")[1]);
    return value.toFixed(Math.max(2 - power, 0));
  }
  const [mantissa, power] = value.toExponential(1).split("e");
  return `${mantissa}e${Number(power)}`;
}

// Two digits, for the ends of a range.
export function brief(value) {
  const size = Math.abs(value);
  if (size >= 0.00995 && size < 99.5) return value.toFixed(Math.max(1 - Number(size.toExponential(1).split("e")[1]), 0));
  return size >= 99.5 && size < 9999.5 ? value.toFixed(0) : compact(value);
}

// For axes: no zeros at the end.
export function round(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

export const whole = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, ",");

export const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

export function thousands(number) {
  for (const [limit, unit] of [[1e3, ""], [1e6, "k"], [1e9, "M"]]) {
    if (number < 0.9995 * limit) return unit ? `${short((number * 1e3) / limit)}${unit}` : String(number);
  }
  return `${short(number / 1e9)}G`;
}

const short = (number) => String(Number(number.toPrecision(3)));

export function bytes(number) {
  for (const [limit, unit, size] of [[1e3, "B", 1], [1e6, "kB", 1e3], [1e9, "MB", 1e6]]) {
    if (number < 0.9995 * limit) return `${short(number / size)} ${unit}`;
  }
  return `${short(number / 1e9)} GB`;
}

export function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(share * 100).toFixed(1)} %`;
}

export function seconds(duration) {
  if (duration < 99.95) return `${short(duration)} s`;
  const all = Math.round(duration);
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
}

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

export const power = (base, exponent) => base + [...String(exponent)].map((digit) => RAISED[digit]).join("");

export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)}`;

export function stepsText(first, last) {
  return first === last ? `step ${whole(first)}` : `steps ${whole(first)}–${whole(last)}`;
}

// A value between two of a sorted list, as numpy's default quantile.
export function quantileOf(sorted, share) {
  if (!sorted.length) return NaN;
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}
