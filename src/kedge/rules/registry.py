"""All rules: run them over a recording, look up their pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches

from kedge.errors import NoSuchRule
from kedge.rules.explode import GradExplode
from kedge.rules.ledger import NeverFired
from kedge.rules.nonfinite import NanBorn
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.rules.units import DeadUnits
from kedge.rules.updates import UpdateRatio
from kedge.rules.vanish import GradVanish
from kedge.store.recording import Recording

#: Every rule with its default thresholds.
ALL: tuple[Rule, ...] = (NanBorn(), GradExplode(), GradVanish(), DeadUnits(), UpdateRatio(), NeverFired())


def check(recording: Recording, rules: Iterable[Rule] | None = None) -> tuple[Finding, ...]:
    """Run rules over a recording.

    Args:
        recording: What to judge; it may still be growing, or have been cut short.
        rules: The rules to run; all of them, with their default thresholds, if None.

    Returns:
        What was found: errors first, then in the order of steps.
    """
    found = [finding for rule in (ALL if rules is None else rules) for finding in rule.check(recording)]
    return tuple(sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.step)))


def explain(code: str) -> str:
    """Give the page of a rule.

    Args:
        code: The rule's code, in any case.

    Raises:
        NoSuchRule: No rule has this code.
    """
    rules = {rule.code: rule for rule in ALL}
    if code.upper() not in rules:
        raise NoSuchRule(_unknown(code, list(rules)))
    rule = rules[code.upper()]
    return f"{rule.code} ({rule.severity}): {rule.name}\n\n{inspect.getdoc(type(rule))}\n"


def markdown() -> str:
    """Give the pages of all rules as one Markdown document, the text of ``docs/rules.md``."""
    head = "# Rules\n\nWhat `kedge check` looks for. `kedge explain CODE` prints one of these pages.\n"
    return head + "".join(_section(rule) for rule in ALL)


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
