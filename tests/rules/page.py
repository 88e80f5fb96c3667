"""The pages of the docs about rules: the index ``docs/reference/rules.md``, and in the folder beside it a page for each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kedge.compare.against.departs import Departs
from kedge.rules.registry import ALL
from kedge.rules.rule import Rule
from kedge.rules.settings import toml

_HEAD = """# Rules

Look up the code of a finding here, or print the page of its rule in the terminal, with the thresholds that apply in the working directory:

```console
$ kedge explain NAN-BORN
```

A rule is a check that Kedge makes on a [recording](recording.md). Its findings have one of three severities:

* **error**: the training is broken;
* **warning**: something is probably wrong;
* **info**: a hint.

`kedge check` exits with 1 if any finding is an error.
"""
_WITH_A_GOOD_RUN = """
One more code needs a second recording: `kedge check RUN --against GOOD` reports as [DEPARTS](rules/departs.md) what held in a
[good run](../how-to/compare-runs.md#against-a-good-run) and does not hold in this one.
"""
_REST = """
## Choosing rules and thresholds

Choose rules with `kedge check --select CODES` and `--ignore CODES`, or for a project in its `pyproject.toml`:

```toml
[tool.kedge]
ignore = ["SAVED-MEMORY"]

[tool.kedge.rules.GRAD-VANISH]
ratio = 1e-4
```

The nearest `pyproject.toml` with a `[tool.kedge]` counts, from the working directory upwards; `--config FILE` names
another. `[tool.kedge.on]` says [what is done at a finding](../how-to/act.md) while a program runs. Options on the command line take precedence over the file. [All thresholds](rules/thresholds.md) are on a page of their own.

## Causes and effects

One cause gives one warning. A learning rate that is too large, for example, kills units, stops gradients and makes the loss
jump, and there is a rule for each of these. If a finding may follow from another one, as its rule says (`follows` in its
file), it becomes info: its message ends with the code of its cause, and so does its evidence (`follows`).
This applies within one model, or to models that one optimizer trains, unless the effect clearly began earlier. The cause gets the
worst severity of its effects, and stands before them. A rule may look whether its finding can be the cause there (`explains`): dead
channels, for example, make a gradient exactly zero only if the whole layer is dead and lies on its way. What follows from an effect
follows from its cause. A NaN is an error even if it follows from another finding. Rules that you did not choose are never causes.

## What the rules cannot see

The table says it of each rule. Together: `✓ no findings` means that no rule found a mistake in the losses, the values and the gradients of training. It does not mean that the
network is good: Kedge does not know what the data mean, and it does not measure validation. If labels do not belong to their inputs,
for example, NO-LEARNING reports a short run. In a longer one the network learns the labels by heart: the loss falls slowly, and no rule
has a finding, but the accuracy on data that it has not seen stays at chance. Then look at a few inputs and their labels, as the
`DataLoader` returns them.

## Rules that could not judge

Most rules need a number of samples, such as twenty gradients or fifty losses, or need the program to have ended. Kedge prints
`✓ no findings` only if every rule had enough data to judge. Otherwise `kedge run`, `kedge report`, its page and `kedge check`
list the rules that could not judge, with the samples that each had and needs. They also print the whole command that collects
enough, unless the run was too short or had these options already. After a NaN from which the run does not recover, nothing
else can be judged: if there were too few steps before it, they say that NAN-BORN has to be mended first. Rules with nothing to judge, such as SATURATED in a model
without a saturating activation, are not listed.

In `kedge check --json` these are `unjudged`, a list of `{"code", "lacks", "have", "need"}`, and `command`. `kedge check --strict`
exits with 3 if a rule could not judge and none found an error.

Rules about training judge only models that an optimizer trains. They skip losses, transforms, teachers, target networks and
models that are loaded again for a test.
"""
_THRESHOLDS = """# Thresholds

The defaults of all [rules](../rules.md), in the form of `pyproject.toml`. `kedge explain --thresholds` prints the thresholds that apply in the working
directory.
"""
_END = """
---

`kedge explain {code}` prints this page with the thresholds that apply in the working directory. [All rules](../rules.md)
"""
_CODE = re.compile(
    "|".join(sorted((rf"(?<![\\w`-]){rule.code}(?![\\w`-])" for rule in ALL), key=len))
)

INDEX = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"
FOLDER = INDEX.with_suffix("")


def pages() -> dict[Path, str]:
    """Return the text of every page about rules, by its file."""
    explained = [*map(type, ALL), Departs]
    thresholds = f"{_THRESHOLDS}\n```toml\n{toml(ALL, ALL)}```\n"
    return {
        INDEX: _index(),
        **{FOLDER / _name(rule.code): _page(rule) for rule in explained},
        FOLDER / "thresholds.md": thresholds,
    }


def write() -> None:
    """Write the pages, and remove those of rules that are gone."""
    made = pages()
    FOLDER.mkdir(exist_ok=True)
    for path in {*FOLDER.iterdir()} - {*made}:
        path.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


def _name(code: str) -> str:
    return f"{code.lower()}.md"


def _index() -> str:
    lines = []
    for rule in ALL:
        unseen = _linked(_cannot_see(type(rule)), rule.code, "rules/")
        link = f"[{rule.code}](rules/{_name(rule.code)})"
        lines.append(f"| {link} | {rule.severity} | {rule.name} | {unseen} |")
    head = ["| code | worst severity | what it says | what it cannot see |", "|---|---|---|---|"]
    table = "\n".join([*head, *lines])
    return f"{_HEAD}\n{table}\n{_WITH_A_GOOD_RUN}{_REST}"


def _page(explained: type[Rule | Departs]) -> str:
    lines = (inspect.getdoc(explained) or "").splitlines()
    body = _linked("\n".join(_marked(line) for line in lines), explained.code, "")
    title = f"*{explained.name} ({explained.severity})*"
    end = _END.format(code=explained.code)
    return f"# {explained.code}\n\n{title}\n\n{body}\n{end}"


def _cannot_see(explained: type[Rule | Departs]) -> str:
    """Return what a rule cannot see, from its docstring, in one line."""
    _, _, rest = (inspect.getdoc(explained) or "").partition("\nCannot see:\n")
    section = re.split(r"\n(?=\S)", rest)[0]
    return " ".join(section.split())


def _linked(text: str, own: str, folder: str) -> str:
    """Return a text in which the codes of other rules lead to their pages."""

    def link(found: re.Match[str]) -> str:
        code = found[0]
        return code if code == own else f"[{code}]({folder}{_name(code)})"

    return _CODE.sub(link, text)


def _marked(line: str) -> str:
    """Return a line of a page in Markdown: headings become Markdown headings, indented text becomes paragraphs."""
    if line.endswith(":") and line[:1].isupper():
        return f"## {line[:-1]}\n"
    return line.removeprefix("    ")
