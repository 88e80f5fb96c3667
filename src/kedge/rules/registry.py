"""All rules, their findings in a recording, and their pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import indent

from kedge.errors import NoSuchRule
from kedge.rules.activations.dead_channel import DeadChannel
from kedge.rules.activations.init_scale import InitScale
from kedge.rules.activations.input_scale import InputScale
from kedge.rules.activations.near_overflow import NearOverflow
from kedge.rules.activations.saturated import Saturated
from kedge.rules.activations.scale_drift import ScaleDrift
from kedge.rules.activations.underflow import Underflow
from kedge.rules.consequences import follow
from kedge.rules.gradients.grad_explode import GradExplode
from kedge.rules.gradients.grad_vanish import GradVanish
from kedge.rules.gradients.grad_zero import GradZero
from kedge.rules.gradients.grads_kept import GradsKept
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.parameters.never_called import NeverCalled
from kedge.rules.parameters.never_initialised import NeverInitialised
from kedge.rules.parameters.not_optimized import NotOptimized
from kedge.rules.parameters.rate_too_large import RateTooLarge
from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.parameters.update_ratio import UpdateRatio
from kedge.rules.rank_departs import RankDeparts
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.rules.saved_memory import SavedMemory
from kedge.rules.settings import toml
from kedge.rules.training.batch_of_one import BatchOfOne
from kedge.rules.training.double_softmax import DoubleSoftmax
from kedge.rules.training.eval_mode import EvalMode
from kedge.rules.training.loss_below_zero import LossBelowZero
from kedge.rules.training.no_learning import NoLearning
from kedge.rules.training.spike import Spike
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
    """Return the findings of rules in a recording.

    Args:
        recording: The recording; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.

    Returns:
        The findings: errors first, then in the order of steps. Findings that may follow from another one are info.
    """
    found = [finding for rule in (ALL if rules is None else rules) for finding in rule.check(recording)]
    return tuple(
        sorted(follow(recording, found), key=lambda finding: (SEVERITIES.index(finding.severity), finding.step))
    )


def explain(code: str, rules: Iterable[Rule] | None = None) -> str:
    """Return the page of a rule, and its thresholds as they are set.

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
    """Return a code in its usual spelling.

    Raises:
        NoSuchRule: No rule has this code.
    """
    known = [rule.code for rule in ALL]
    if code.upper() not in known:
        raise NoSuchRule(_unknown(code, known))
    return code.upper()


def markdown() -> str:
    """Return the pages of all rules as one Markdown document, the text of ``docs/rules.md``."""
    lines = [f"| [{rule.code}](#{rule.code.lower()}) | {rule.severity} | {rule.name} |" for rule in ALL]
    table = "\n".join(["| code | worst severity | meaning |", "|---|---|---|", *lines])
    settings = f"\n## All thresholds\n\n{_SETTINGS}\n\n```toml\n{toml(ALL, ALL)}```\n"
    return f"{_HEAD}\n{table}\n" + "".join(map(_section, ALL)) + settings


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


def _section(rule: Rule) -> str:
    lines = (inspect.getdoc(type(rule)) or "").splitlines()
    body = "\n".join(_marked(line) for line in lines)
    return f"\n## {rule.code}\n\n*{rule.name} ({rule.severity})*\n\n{body}\n"


def _marked(line: str) -> str:
    """Return a line of a page in Markdown: headings become Markdown headings, indented text becomes paragraphs."""
    if line.endswith(":") and line[:1].isupper():
        return f"### {line[:-1]}\n"
    return line.removeprefix("    ")


def _unknown(code: str, codes: list[str]) -> str:
    near = get_close_matches(code.upper(), codes, n=3, cutoff=0.4)
    if near:
        return f"there is no rule {code!r}: the nearest are {', '.join(near)}"
    return f"there is no rule {code!r}: the rules are {', '.join(codes)}"
