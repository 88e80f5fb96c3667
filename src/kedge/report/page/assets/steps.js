// The axis of steps, true to scale.

// A spike that shares a pixel would be lost.
const LEAST_COLUMN = 2;

// Where columns begin and end: a column reaches from its first step to that of the next one, true to scale, but has a pixel.
export function edgesOf({ first, width }, plot) {
  const gaps = Array.from({ length: width }, (_, column) => (column + 1 < width ? first[column + 1] - first[column] : 0));
  if (width) gaps[width - 1] = width > 1 ? gaps[width - 2] : 1;
  const least = Math.min(LEAST_COLUMN, plot / Math.max(width, 1));
  const all = gaps.reduce((sum, gap) => sum + gap, 0);
  const scale = (plot - least * width) / (all || 1);
  const edges = [0];
  for (const gap of gaps) edges.push(edges.at(-1) + least + gap * scale);
  return edges;
}

// At most so many round steps, from the first column to the last.
export function roundSteps({ first, width }, most) {
  const [low, high] = [first[0], first[width - 1]];
  const least = (high - low) / Math.max(most, 1);
  const size = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const every = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= least);
  const from = Math.ceil(low / every) * every;
  const steps = Array.from({ length: Math.floor((high - from) / every) + 1 }, (_, at) => from + at * every);
  return steps.length ? steps : [low];
}
