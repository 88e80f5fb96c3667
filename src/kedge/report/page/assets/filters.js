// Filters in the site language, as kedge.sites.language and kedge.sites.filters have them: the same texts are read, and
// the same sites are chosen.
// FILTER_KINDS, OF_PARAMETER and OF_OPERATION, of the kinds of sites, stand before all scripts: kedge.report.page.render takes them from
// kedge.sites.site.

class Unreadable extends Error {}

class FilterReader {
  constructor(text) {
    this.text = [...text];
    this.at = 0;
  }

  peek() {
    return this.text[this.at] ?? "";
  }

  accept(letter) {
    const found = this.peek() === letter;
    this.at += found ? 1 : 0;
    return found;
  }

  spaces() {
    while (/^\s$/u.test(this.peek())) this.at++;
  }

  fail(problem) {
    throw new Unreadable(`column ${this.at + 1}: ${problem}`);
  }

  until(stops) {
    const start = this.at;
    while (this.peek() && !stops.includes(this.peek())) {
      if (this.peek() === "[") this.letters();
      else this.at += this.peek() === "\\" ? 2 : 1;
    }
    if (this.at > this.text.length) this.fail("nothing follows the backslash");
    return this.text.slice(start, this.at).join("");
  }

  // Several letters in brackets, one of which is meant.
  letters() {
    const end = this.text.indexOf("]", this.at);
    if (end < 0) this.fail("this bracket is never closed");
    const inside = this.text.slice(this.at + 1, end).join("");
    if (inside === "" || inside === "!") this.fail("empty brackets match nothing");
    if ([...inside.matchAll(/(.)-(.)/gsu)].some(([, low, high]) => low.codePointAt(0) > high.codePointAt(0))) this.fail("this range runs backwards");
    this.at = end + 1;
  }

  enclosed(close) {
    const end = this.text.indexOf(close, this.at);
    const inside = end < 0 ? "" : this.text.slice(this.at, end).join("").trim();
    if (!inside) this.fail(end < 0 ? `no "${close}" closes this` : "nothing stands between these");
    this.at = end + 1;
    return inside;
  }

  index() {
    const start = this.at;
    while (/^\p{Nd}$/u.test(this.peek())) this.at++;
    if (start === this.at) this.fail('a number must follow "#"');
    return Number(this.text.slice(start, this.at).join(""));
  }

  term() {
    this.spaces();
    const start = this.at;
    const term = { excluded: this.accept("!"), path: this.path(), types: [], call: null, op: null, nth: null, kind: null, leaf: null };
    if (this.accept("{")) {
      term.types = this.enclosed("}").split(",").map((name) => name.trim());
      if (term.types.includes("")) this.fail("a name is missing between these");
    }
    if (this.accept("#")) term.call = this.index();
    if (this.accept("/")) {
      term.op = this.until("#:,! \t\n");
      if (!term.op) this.fail('the name of an operation must follow "/"');
      if (/^\p{Nd}+$/u.test(term.op)) this.fail(`"${term.op}" is not the name of an operation, which is a function's`);
      if (this.accept("#")) term.nth = this.index();
    }
    if (this.accept(":")) {
      term.kind = this.until("[,! \t\n");
      if (!FILTER_KINDS.includes(term.kind)) this.fail(`unknown kind "${term.kind}"`);
      if (this.accept("[")) term.leaf = this.enclosed("]");
    }
    term.said = this.text.slice(start, this.at).join("");
    this.spaces();
    return term;
  }

  path() {
    const text = this.until("{#/:,! \t\n}]");
    if (!text && ![":", "#", "{", "/"].includes(this.peek())) this.fail("a path is missing here");
    const segments = text ? segmentsOf(text) : [];
    if (segments.includes("")) this.fail("an empty segment between dots");
    if (segments.some((one) => one !== "**" && one.replace(/\\.|\[[^\]]*\]/gsu, "").includes("**"))) this.fail('"**" must stand alone between dots');
    return segments;
  }
}

const PIECE = /\\.|\[[^\]]*\]|./gsu;

function segmentsOf(text) {
  const segments = [""];
  for (const piece of text.match(PIECE) || []) {
    if (piece === ".") segments.push("");
    else segments[segments.length - 1] += piece;
  }
  return segments;
}

function termsOf(text) {
  const reader = new FilterReader(text);
  const terms = [reader.term()];
  while (reader.accept(",")) terms.push(reader.term());
  if (reader.peek()) reader.fail(`unexpected "${reader.peek()}"`);
  if (terms.every((term) => term.excluded)) reader.fail('every part is excluded with "!"');
  return terms;
}

const quoted = (text) => text.replace(/[.*+?^${}()|[\]\\/]/gu, "\\$&").replaceAll("-", "\\x2d");

function pieceOf(piece) {
  if (piece === "*") return "[^.]*";
  if (piece === "?") return "[^.]";
  if (!piece.startsWith("[") || piece.length === 1) return quoted(piece.startsWith("\\") ? piece.slice(1) : piece);
  const inside = piece.slice(1, -1);
  const negated = inside.startsWith("!");
  const letters = [...(negated ? inside.slice(1) : inside).matchAll(/(.)-(.)|(.)/gsu)];
  return `(?!\\.)[${negated ? "^" : ""}${letters.map(([, low, high, one]) => (one ? quoted(one) : `${quoted(low)}-${quoted(high)}`)).join("")}]`;
}

function patternOf(path) {
  const parts = path.map((segment) => (segment === "**" ? "(?:\\.[^.]+)*" : `\\.${(segment.match(PIECE) || []).map(pieceOf).join("")}`));
  return new RegExp(`^(?:${parts.join("")})$`, "su");
}

const isLiteral = (term) => !term.types.length && !/(?<!\\)(\\\\)*[*?[]/u.test(term.path.join("."));
const unescaped = (term) => term.path.join(".").replace(/\\(.)/gsu, "$1");

// A path that is no name stands for all names that begin so, at any depth.
function widenedTerm(term, paths) {
  const literal = isLiteral(term) ? unescaped(term) : null;
  const path = literal && !paths.has(literal) ? ["**", ...term.path.slice(0, -1), `${term.path.at(-1)}*`] : term.path;
  return { ...term, path, literal: path === term.path ? literal : null, pattern: patternOf(path) };
}

// A site that two recordings share has a name in each of them, and either will do.
const means = (term, site) => meansOne(term, site) || (site.other !== undefined && meansOne(term, site.other));

function meansOne(term, site) {
  const at = (path) => term.pattern.test(path ? `.${path}` : "") && (!term.types.length || term.types.includes(site.type));
  const kind = site.kind.split("[")[0];
  const leaf = term.leaf === null || site.site.endsWith(`[${term.leaf}]`);
  if (term.op !== null && kind.startsWith(OF_OPERATION)) return leaf && (term.kind === null || kind === OF_OPERATION + term.kind) && meansOperation(term, site.site);
  const named =
    term.kind === null
      ? at(site.owner) || (term.literal !== null && term.literal === site.path)
      : kind === term.kind && ((OF_PARAMETER.includes(kind) && at(site.owner)) || at(site.path));
  return named && leaf && (term.call ?? callOf(site)) === callOf(site) && (term.op === null || site.site.includes(`/${term.op}`));
}

// The name and the number of an operation outside of modules, as in "/relu#1:out".
function meansOperation(term, text) {
  const [, name, number] = /^\/([^#:]*)#?(\d*)/u.exec(text);
  const pattern = (term.op.match(PIECE) || []).map(pieceOf).join("");
  return new RegExp(`^(?:${pattern})$`, "su").test(name) && (term.nth === null || term.nth === Number(number));
}

// Of a module without sites only the path is known.
const names = (term, path) => !term.kind && !term.types.length && term.pattern.test(path ? `.${path}` : "");

// A module and all that hold it, by their paths.
const around = (path) => (path === null ? [] : path.split(".").map((_, place, parts) => parts.slice(0, place + 1).join(".")));

const callOf = (site) => Number(/#(\d+)(?=[:/])/u.exec(site.site)?.[1] ?? 0);

// What a term that selects nothing may have meant, as kedge.sites.filters.nearest has it.
function nearTo(term, paths, types) {
  const known = [...new Set(paths)].filter(Boolean);
  const classes = [...new Set(types)].sort();
  const wrong = term.types.find((name) => !classes.includes(name));
  if (wrong !== undefined) {
    const close = closeMatches(wrong, classes, 3, 0.5);
    return (close.length ? close : classes.slice(0, 3)).map((name) => `"**{${name}}"`).join(", ");
  }
  for (const path of variants(term)) {
    const pattern = patternOf(path);
    if (known.some((one) => pattern.test(`.${one}`))) return `"${path.join(".")}"`;
  }
  return nearNames(term, known).map((name) => `"${name}"`).join(", ");
}

const RANGES = /(?<![^.])\d+-\d+(?![^.])/gu;

// A term with stars in place of the numbers of folded blocks, and one at any depth.
function variants({ path }) {
  const typed = path[0] === "**" ? path.slice(1) : path;
  const starred = typed.map((segment) => (segment.replace(/\*$/u, "") || "*").replace(RANGES, "*"));
  const ranged = typed.some((segment) => segment.search(RANGES) >= 0);
  return [...(ranged ? [starred, ["**", ...starred]] : []), ...(typed[0] === "*" ? [["**", ...typed.slice(1)]] : []), ["**", ...typed]];
}

// The nearest segments for a term of one, else the nearest paths, one of several alike blocks.
function nearNames(term, known) {
  const plain = term.path.filter((segment) => segment !== "**").join(".").replace(/[*?\\]/gu, "");
  if (plain.includes(".")) {
    const near = closeMatches(plain, known, 12, 0.4).reverse();
    return [...new Map(near.map((path) => [path.replace(/(?<![^.])(?:0|[1-9]\d*)(?![^.])/gu, "\0"), path])).values()].reverse().slice(0, 3);
  }
  const segments = [...new Set(known.flatMap((path) => path.split(".")))].filter((name) => !/^\d+$/u.test(name));
  const near = closeMatches(plain, segments, 3, 0.5);
  return near.length || !plain ? near : segments.filter((name) => name.includes(plain)).sort().slice(0, 3);
}

// As Python's difflib finds them: by the share of letters in common blocks.
function closeMatches(word, names, most, least) {
  const share = (name) => (2 * commonLetters(name, word)) / (name.length + word.length || 1);
  return names.map((name) => [share(name), name]).filter(([close]) => close >= least).sort((a, b) => b[0] - a[0] || (a[1] < b[1] ? 1 : -1)).slice(0, most).map(([, name]) => name);
}

// The letters in the longest common block, and in those before and after it.
function commonLetters(a, b) {
  let [from, to, size] = [0, 0, 0];
  let runs = [];
  for (let i = 0; i < a.length; i++) {
    const longer = [];
    for (let j = 0; j < b.length; j++) {
      if (a[i] !== b[j]) continue;
      longer[j] = (runs[j - 1] || 0) + 1;
      if (longer[j] > size) [from, to, size] = [i - longer[j] + 1, j - longer[j] + 1, longer[j]];
    }
    runs = longer;
  }
  if (!size) return 0;
  return size + commonLetters(a.slice(0, from), b.slice(0, to)) + commonLetters(a.slice(from + size), b.slice(to + size));
}

function made(text, { sites }) {
  const everything = { all: true, problem: "", lets: () => true, letsModule: () => true, letsIn: () => true };
  if (!text.trim()) return everything;
  const named = sites.flatMap((site) => (site.other ? [site, site.other] : [site]));
  const paths = named.flatMap((site) => [site.path, site.owner]);
  let terms;
  try {
    terms = termsOf(text).map((term) => widenedTerm(term, new Set(paths)));
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    return { ...everything, problem: `cannot read the filter, ${error.message}` };
  }
  const chosen = new Set(sites.filter((site) => terms.reduce((found, term) => (found === term.excluded && means(term, site) ? !term.excluded : found), false)));
  const owners = new Set([...chosen].map((site) => site.owner));
  const idle = terms.find((term) => !term.excluded && !sites.some((site) => means(term, site)));
  const near = idle && nearTo(idle, paths, named.map((site) => site.type));
  const problem = idle ? `"${idle.said}" selects nothing in this recording; ${near ? `the nearest are ${near}` : '"**" selects everything'}` : "";
  const recorded = new Set(sites.map((site) => site.owner));
  const holds = (path) => terms.reduce((found, term) => (found === term.excluded && names(term, path) ? !term.excluded : found), false);
  const told = new Map(terms.map((term) => [term, new Set(sites.filter((site) => means(term, site)).map((site) => site.owner))]));
  // A module that is let through is so with all in it, and one that is taken away too.
  const letsIn = (path) => terms.reduce((found, term) => (found === term.excluded && around(path).some((one) => told.get(term).has(one) || names(term, one)) ? !term.excluded : found), false);
  return { all: false, problem, letsIn, lets: (site) => chosen.has(site), letsModule: (path) => owners.has(path) || (!recorded.has(path) && holds(path)) };
}

let latest = {};

// What a filter lets through: sites, and modules by their paths. One that cannot be read lets everything through.
export function filterOf(text, recording) {
  if (latest.text !== text || latest.recording !== recording) latest = { text, recording, filter: made(text, recording) };
  return latest.filter;
}
