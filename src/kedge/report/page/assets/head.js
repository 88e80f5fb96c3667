// The head of the page: the verdict, what ran, how it ended, and what the watching cost.

import { badge, byId, cut, fill, make } from "./elements.js";
import { bytes, counted, percent, seconds, thousands, whole } from "./numbers.js";

export function showHead(recording) {
  const { run } = recording;
  fill(byId("name"), cut(run.name || "recording", 32));
  byId("name").title = run.name || "";
  document.title = `${run.name || "recording"} · Kedge`;
  const [manner, state] = statusOf(run);
  fill(byId("status"), tally(recording), make("span", { class: `pill ${manner}`, title: state }, state));
  const { said, tone } = recording.verdict;
  byId("verdict").className = tone;
  fill(byId("verdict"), tone && badge(tone), make("span", {}, said[0].toUpperCase() + said.slice(1)));
  fill(byId("command"), run.command ? [make("span", { class: "faint" }, "$ "), run.command] : "a program without a name");
  fill(byId("facts"), facts(recording).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  fill(byId("troubles"), troubles(run).map((text) => make("p", { class: "trouble" }, text)));
}

function statusOf(run) {
  if (run.running && run.written === false) return ["error", "✗ killed: the recording has no end"];
  if (run.running && run.written) return ["fine", document.documentElement.dataset.source === "live" ? "running" : "was running when this page was made"];
  if (run.running) return ["warning", "no end recorded: running or killed"];
  if (run.error || run.exit) return ["error", `✗ exit status ${run.exit}`];
  return ["", "ended"];
}

// The number of findings by severity; a narrow page has room for the digits alone.
function tally({ findings, verdict }) {
  if (!findings.length) return verdict.tone && make("span", { class: "tally", title: "no findings" }, badge(verdict.tone), make("span", { class: "words" }, " no findings"));
  return ["error", "warning", "info"].map((severity) => {
    const number = findings.filter((finding) => finding.severity === severity).length;
    const words = severity === "info" ? `${number} info` : counted(number, severity);
    const [digits, ...rest] = words.split(" ");
    return number > 0 && make("span", { class: `tally ${severity}`, title: words }, badge(severity), ` ${digits}`, make("span", { class: "words" }, ` ${rest.join(" ")}`));
  });
}

function facts(recording) {
  const { run, roots } = recording;
  const told = [];
  const tell = (name, value) => value !== null && value !== undefined && value !== "" && told.push([name, value]);
  const named = (root) => (root.parameters ? `${root.title}, ${thousands(root.parameters)} parameters` : root.title);
  roots.forEach((root, at) => tell(at ? "and" : "model", named(root)));
  tell("watched", counted(recording.sites.filter((site) => !site.kind.startsWith("time.")).length, "site"));
  tell("steps", stepsOf(run));
  tell("time", run.seconds && seconds(run.seconds));
  tell("watching took", costOf(run));
  tell("budget", run.budget && `${percent(run.budget)}, or 3 s if that is more`);
  tell("saved for backward", run.saved?.bytes && `${bytes(run.saved.bytes)} in step ${run.saved.step}`);
  tell("device", run.device);
  tell("ranks", Math.max(run.world || 1, run.ranks || 1) > 1 && `${run.ranks || 1} of ${run.world || run.ranks}`);
  tell("torch", run.torch);
  tell("Python", run.python);
  tell("Kedge", run.kedge);
  tell("started", moment(run.started));
  return told.filter(([, value]) => value !== false);
}

function stepsOf(run) {
  if (run.steps === undefined || run.steps === null) return `${whole(run.sampled)} measured${run.over ? "" : " so far"}`;
  return `${whole(run.steps)}, ${whole(run.sampled)} measured`;
}

function costOf(run) {
  if (Number.isFinite(run.slowdown)) return `${percent(run.slowdown)} of the time`;
  if (!run.seconds || !Number.isFinite(run.watching)) return null;
  return `${percent(run.watching / run.seconds)} of the time`;
}

function moment(started) {
  const found = /^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)/.exec(started || "");
  return found ? `${found[1]} ${found[2]} UTC` : started;
}

function troubles(run) {
  const told = [];
  if (run.truncated) told.push("The last step was only partly written, and is left out.");
  if (run.error) told.push(`Ended with exit status ${run.exit}: ${run.error}`);
  for (const place of run.positions) told.push(`${place[0].toUpperCase()}${place.slice(1)}.`);
  return told;
}
