// The patterns of `kedge report --sites`: * is one segment of a path or a part of one, ** any number, ? one character.

const PIECES = { "**": ".*", "**.": "(?:.*\\.)?", ".**": "(?:\\..*)?", "*": "[^.]*", "?": "[^.]" };

function pattern(glob) {
  const pieces = glob.match(/\*\*\.?|\.\*\*$|./gsu) || [];
  const text = pieces.map((piece) => PIECES[piece] ?? piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("");
  return new RegExp(`^(?:${text})$`, "su");
}

// Gives what a filter lets through. While somebody types, a word that is no path yet stands for paths with it inside.
export function filterOf(text, paths) {
  const globs = text.split(",").map((part) => part.trim().replace(/:out$/, "")).filter(Boolean);
  if (!globs.length) return { all: true, inside: false, lets: () => true };
  const patterns = globs.map(pattern);
  const lets = (path) => patterns.some((one) => one.test(path));
  if (paths.some(lets) || globs.some((glob) => /[*?]/.test(glob))) return { all: false, inside: false, lets };
  const words = globs.map((glob) => glob.toLowerCase());
  return { all: false, inside: true, lets: (path) => words.some((word) => path.toLowerCase().includes(word)) };
}
