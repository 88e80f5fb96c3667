"""The pages of all rules as one document, ``docs/reference/rules.md``."""

from __future__ import annotations

import inspect

from kedge.rules.registry import ALL
from kedge.rules.rule import Rule
from kedge.rules.settings import toml

_HEAD = """# Rules

The rules of `kedge check`. `kedge explain CODE` prints one of these pages, with the thresholds that apply in the working
directory. An error means that the training is broken; a warning, that something is probably wrong; info is a hint.

One cause is one warning. A learning rate that is too large kills units, stops gradients and makes the loss jump, and a rule
finds each of these. A finding that may follow from another one, according to a table in `kedge.rules.consequences`, is info,
its message ends with the code of its cause, and `follows` in its evidence names it too. This holds within a model, or models
that one optimizer trains, if the effect did not begin clearly earlier. The cause gets the worst severity of its effects. A NaN
is an error even if it follows from another finding. Rules that were not chosen cause nothing. The exit status of
`kedge check` counts the errors that are left.

Choose rules with `kedge check --select CODES` and `--ignore CODES`, or for a project in its `pyproject.toml`:

```toml
[tool.kedge]
ignore = ["SAVED-MEMORY"]

[tool.kedge.rules.GRAD-VANISH]
ratio = 1e-4
```

The nearest `pyproject.toml` with a `[tool.kedge]` counts, from the working directory upwards; `--config FILE` names
another. Options on the command line take precedence over the file.

## Rules that could not judge

Most rules need samples: a median of twenty gradients, fifty losses, the end of the program. Kedge prints `✓ no findings` only
if every rule could judge. Otherwise the last line of `kedge run`, `kedge report` and its page, and `kedge check` name the
rules that could not, the samples that each had and needs, and the whole command that supplies them, unless the run was too
short or had these options already. Rules with nothing to judge, for example without a saturating activation, are not named.

`kedge check --json` has `unjudged`, a list of `{"code", "lacks", "have", "need"}`, and `command`; `kedge check --strict` exits
with 3 if a rule could not judge and none found an error.

Rules about training judge the models that an optimizer trains. They skip criteria, transforms, teachers, target networks and
models that are loaded again for a test.
"""
_SETTINGS = (
    "With their defaults, in the form of `pyproject.toml`. `kedge explain --thresholds` prints those that apply."
)


def markdown() -> str:
    """Return the pages of all rules as one Markdown document, the text of ``docs/reference/rules.md``."""
    lines = [f"| [{rule.code}](#{rule.code.lower()}) | {rule.severity} | {rule.name} |" for rule in ALL]
    table = "\n".join(["| code | worst severity | meaning |", "|---|---|---|", *lines])
    settings = f"\n## All thresholds\n\n{_SETTINGS}\n\n```toml\n{toml(ALL, ALL)}```\n"
    return f"{_HEAD}\n{table}\n" + "".join(map(_section, ALL)) + settings


def _section(rule: Rule) -> str:
    lines = (inspect.getdoc(type(rule)) or "").splitlines()
    body = "\n".join(_marked(line) for line in lines)
    return f"\n## {rule.code}\n\n*{rule.name} ({rule.severity})*\n\n{body}\n"


def _marked(line: str) -> str:
    """Return a line of a page in Markdown: headings become Markdown headings, indented text becomes paragraphs."""
    if line.endswith(":") and line[:1].isupper():
        return f"### {line[:-1]}\n"
    return line.removeprefix("    ")
