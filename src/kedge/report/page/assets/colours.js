// Colour scales. Both can be told apart without seeing hue: viridis grows lighter all along, the scale of change has its
// middle in a grey near the background's and ends in a cold and a warm colour of different lightness.

// Every 16th colour of matplotlib's viridis (CC0).
const VIRIDIS = [
  "440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e", "1f988b", "22a884", "35b779",
  "54c568", "7ad151", "a5db36", "d2e21b", "fde725",
];
const COLD_TO_WARM = {
  light: ["08519c", "3182bd", "85b7dd", "e9e9e6", "f2b277", "d9730d", "7f3b08"],
  dark: ["9ecbff", "4f9fe6", "2b5f93", "2e333a", "8f5415", "de8a2e", "ffc98a"],
};

const LEVELS = 256;

function ramp(stops) {
  const table = new Uint8ClampedArray(LEVELS * 3);
  const colours = stops.map((text) => [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16)));
  for (let level = 0; level < LEVELS; level++) {
    const place = (level / (LEVELS - 1)) * (colours.length - 1);
    const low = Math.min(Math.floor(place), colours.length - 2);
    for (let c = 0; c < 3; c++) {
      table[level * 3 + c] = colours[low][c] + (colours[low + 1][c] - colours[low][c]) * (place - low);
    }
  }
  return table;
}

const viridis = ramp(VIRIDIS);
const coldToWarm = { light: ramp(COLD_TO_WARM.light), dark: ramp(COLD_TO_WARM.dark) };

export const scaleTable = (relative, theme) => (relative ? coldToWarm[theme] : viridis);

export function parsed(text) {
  const digits = text.replace("#", "");
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}

// Red, green, blue, red, ... as the pixels of a canvas, which are opaque and start with the lowest byte.
export function pixelsOf(table) {
  const pixels = new Uint32Array(table.length / 3);
  for (let i = 0; i < pixels.length; i++) {
    pixels[i] = ((255 << 24) | (table[i * 3 + 2] << 16) | (table[i * 3 + 1] << 8) | table[i * 3]) >>> 0;
  }
  return pixels;
}

export const css = (table, level) => `rgb(${table[level * 3]},${table[level * 3 + 1]},${table[level * 3 + 2]})`;

export const topLevel = LEVELS - 1;
