"""All rules: run them over a recording, look up their pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import indent

from kedge.errors import NoSuchRule
from kedge.rules.activations.dead_channel import DeadChannel
from kedge.rules.activations.input_scale import InputScale
from kedge.rules.activations.precision import NearOverflow, Underflow
from kedge.rules.activations.saturated import Saturated
from kedge.rules.activations.scale import InitScale, ScaleDrift
from kedge.rules.consequences import follow
from kedge.rules.memory import SavedMemory
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.ranks import RankDeparts
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.rules.settings import toml
from kedge.rules.training.batch_of_one import BatchOfOne
from kedge.rules.training.double_softmax import DoubleSoftmax
from kedge.rules.training.eval_mode import EvalMode
from kedge.rules.training.grad_explode import GradExplode
from kedge.rules.training.grad_vanish import GradVanish
from kedge.rules.training.grad_zero import GradZero
from kedge.rules.training.grads_kept import GradsKept
from kedge.rules.training.loss_below_zero import LossBelowZero
from kedge.rules.training.never_called import NeverCalled
from kedge.rules.training.never_initialised import NeverInitialised
from kedge.rules.training.no_learning import NoLearning
from kedge.rules.training.not_optimized import NotOptimized
from kedge.rules.training.rate_too_large import RateTooLarge
from kedge.rules.training.spike import Spike
from kedge.rules.training.unused_param import UnusedParam
from kedge.rules.training.update_ratio import UpdateRatio
from kedge.store.recording import Recording

#: Every rule with its default thresholds, in the order in which they are listed.
ALL: tuple[Rule, ...] = (
    NanBorn(),
    NotOptimized(),
    GradsKept(),
    NeverInitialised(),
    RateTooLarge(),
    NearOverflow(),
    Underflow(),
    GradExplode(),
    GradVanish(),
    GradZero(),
    Spike(),
    DeadChannel(),
    Saturated(),
    DoubleSoftmax(),
    LossBelowZero(),
    EvalMode(),
    BatchOfOne(),
    InputScale(),
    UpdateRatio(),
    InitScale(),
    ScaleDrift(),
    UnusedParam(),
    NeverCalled(),
    NoLearning(),
    SavedMemory(),
    RankDeparts(),
)


def check(recording: Recording, rules: Iterable[Rule] | None = None) -> tuple[Finding, ...]:
    """Run rules over a recording.

    Args:
        recording: What to judge; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.

    Returns:
        What was found: errors first, then in the order of steps. What may follow from another finding is info.
    """
    found = [finding for rule in (ALL if rules is None else rules) for finding in rule.check(recording)]
    return tuple(
        sorted(follow(recording, found), key=lambda finding: (SEVERITIES.index(finding.severity), finding.step))
    )


def explain(code: str, rules: Iterable[Rule] | None = None) -> str:
    """Give the page of a rule, and how its thresholds are set.

    Args:
        code: The rule's code, in any case.
        rules: The rules as they are configured; with their default thresholds if None.

    Raises:
        NoSuchRule: No rule has this code.
    """
    wanted = known_code(code)
    usual = next(rule for rule in ALL if rule.code == wanted)
    rule = next((rule for rule in rules or () if rule.code == wanted), usual)
    page = f"{rule.code} ({rule.severity}): {rule.name}\n\n{inspect.getdoc(type(rule))}\n"
    return f"{page}\nSettings, as pyproject.toml has them:\n{indent(toml([rule], [usual]), '    ')}"


def known_code(code: str) -> str:
    """Give a code as it is written.

    Raises:
        NoSuchRule: No rule has this code.
    """
    known = [rule.code for rule in ALL]
    if code.upper() not in known:
        raise NoSuchRule(_unknown(code, known))
    return code.upper()


def markdown() -> str:
    """Give the pages of all rules as one Markdown document, the text of ``docs/rules.md``."""
    lines = [f"| [{rule.code}](#{rule.code.lower()}) | {rule.severity} | {rule.name} |" for rule in ALL]
    table = "\n".join(["| code | at worst | says |", "|---|---|---|", *lines])
    settings = f"\n## All thresholds\n\n{_SETTINGS}\n\n```toml\n{toml(ALL, ALL)}```\n"
    return f"{_HEAD}\n{table}\n" + "".join(map(_section, ALL)) + settings


_HEAD = """# Rules

What `kedge check` looks for. `kedge explain CODE` prints one of these pages, with the thresholds as they are set
where it is typed. An error means that the training is broken; a warning, that something is likely to be; info is a hint.

One cause is one warning. A learning rate that is too large kills units, stops gradients and makes the loss jump, and a rule
finds each of these. What may follow from another finding, as far as a table in `kedge.rules.consequences` knows, is info, its
message ends with the code of that one, and `follows` in its evidence names it too. That holds within a model, or models that
one optimizer trains, if it did not begin clearly earlier. The cause is as severe as the worst of what follows from it. A NaN
is an error whatever it follows from. Rules that were not chosen are the cause of nothing. The exit status of `kedge check`
counts the errors that are left.

Choose rules with `kedge check --select CODES` and `--ignore CODES`, or for a project in its `pyproject.toml`:

```toml
[tool.kedge]
ignore = ["SAVED-MEMORY"]

[tool.kedge.rules.GRAD-VANISH]
ratio = 1e-4
```

The nearest `pyproject.toml` with a `[tool.kedge]` counts, from the working directory upwards; `--config FILE` names
another. What is typed goes before what the file says.

## What could not be judged

Most rules need samples: a median of twenty gradients, fifty losses, the end of the program. `✓ no findings` is said only where
every rule could judge. Otherwise the last line of `kedge run`, `kedge report` and its page, and `kedge check` name the rules
that could not, what each had and needs, and the whole command that gives it to them, unless the run was too short or had
these options already. A rule that has nothing to judge, as where a model has no saturating activation, is not named.

`kedge check --json` has `unjudged`, a list of `{"code", "lacks", "have", "need"}`, and `command`; `kedge check --strict` exits
with 3 if a rule could not judge and none found an error.

Rules about training speak of the models that an optimizer trains. Criteria, transforms, teachers, target networks and models
that are loaded again for a test are left alone by them.
"""
_SETTINGS = "With their defaults, as `pyproject.toml` has them. `kedge explain --thresholds` prints those that apply."


def _section(rule: Rule) -> str:
    lines = (inspect.getdoc(type(rule)) or "").splitlines()
    body = "\n".join(_marked(line) for line in lines)
    return f"\n## {rule.code}\n\n*{rule.name} ({rule.severity})*\n\n{body}\n"


def _marked(line: str) -> str:
    """Turn a heading of a page into a Markdown heading, and its indented text into a paragraph."""
    if line.endswith(":") and line[:1].isupper():
        return f"### {line[:-1]}\n"
    return line.removeprefix("    ")


def _unknown(code: str, codes: list[str]) -> str:
    near = get_close_matches(code.upper(), codes, n=3, cutoff=0.4)
    if near:
        return f"there is no rule {code!r}: the nearest are {', '.join(near)}"
    return f"there is no rule {code!r}: the rules are {', '.join(codes)}"
