// The axis of steps, true to scale.

// A spike that shares a pixel would be lost.
const LEAST_COLUMN = 2;
// What was measured in a column has so many pixels, and half of its column at most; a narrower column has no room for a gap.
const [LEAST_MEASURED, LEAST_GAPPED] = [8, 4];

// The step after a column: that of the next one, or the end of the run.
function after({ first, last, width, columns }, column) {
  if (column + 1 < width) return first[column + 1];
  if (columns.end) return Math.max(columns.end, last[column] + 1);
  return width > 1 ? 2 * first[column] - first[column - 1] : last[column] + 1;
}

// Where columns begin and end: a column reaches from its first step to that of the next one, true to scale, but has a pixel.
export function edgesOf(recording, plot) {
  const { first, width } = recording;
  const gaps = Array.from({ length: width }, (_, column) => after(recording, column) - first[column]);
  const least = Math.min(LEAST_COLUMN, plot / Math.max(width, 1));
  const all = gaps.reduce((sum, gap) => sum + gap, 0);
  const scale = (plot - least * width) / (all || 1);
  const edges = [0];
  for (const gap of gaps) edges.push(edges.at(-1) + least + gap * scale);
  return edges;
}

// Where in its column a step is: 0 at the column's beginning, 1 at that of the next one.
export function shareOf(recording, step, column) {
  return (step - recording.first[column]) / (after(recording, column) - recording.first[column]);
}

// Where what was measured in each column ends: from there to the next column there is a gap.
export function measuredEnds(recording, edges) {
  const { last, width } = recording;
  return Array.from({ length: width }, (_, column) => {
    const room = edges[column + 1] - edges[column];
    const share = shareOf(recording, last[column] + 1, column);
    const least = room < LEAST_GAPPED ? room : Math.min(LEAST_MEASURED, room / 2);
    return edges[column] + Math.max(Math.min(share, 1) * room, least);
  });
}

// The steps between a column and the next one, none of which was measured: the first and the last of them, or null.
export function gapAfter(recording, column) {
  const [from, to] = [recording.last[column] + 1, after(recording, column) - 1];
  return from <= to && (column + 1 < recording.width || recording.columns.end) ? [from, to] : null;
}

// At most so many round steps, from the first column to the end.
export function roundSteps(recording, most) {
  const { first, width } = recording;
  const [low, high] = [first[0], Math.max(first[width - 1], (recording.columns.end ?? 0) - 1)];
  const least = (high - low) / Math.max(most, 1);
  const size = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const every = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= least);
  const from = Math.ceil(low / every) * every;
  const steps = Array.from({ length: Math.floor((high - from) / every) + 1 }, (_, at) => from + at * every);
  return steps.length ? steps : [low];
}
