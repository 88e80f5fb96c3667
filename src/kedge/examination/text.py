"""The results of an examination as text: what was done, what came, and what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kedge.examination.result import NAMES, VERDICTS, Result
from kedge.short_text import counted, listed

_WIDTH = 100
_MARKS = {"wrong": "✗ wrong", "look": "! look", "ok": "✓ ok", "untried": "- untried"}
_MARK_WIDTH = 11
_NAME_WIDTH = max(map(len, NAMES)) + 2


def as_text(models: Sequence[str], results: Sequence[Result], notes: Sequence[str]) -> str:
    """Return the results, the worst first, and one line for all."""
    ordered = sorted(results, key=lambda result: VERDICTS.index(result.verdict))
    lines = []
    for result in ordered:
        lines += _shown(result, with_model=len(models) > 1)
    return "\n".join([*lines, "", *notes, _summary(models, results)])


def _shown(result: Result, *, with_model: bool) -> list[str]:
    """Return the lines of a result: what was done and came, beside its name, and below what it means."""
    said = f"{result.did}: {result.came}"
    if with_model and result.model:
        said = f"{result.model}: {said}"
    if result.where:
        said += f" ({result.where})"
    head = f"{_MARKS[result.verdict]:<{_MARK_WIDTH}}{result.trial:<{_NAME_WIDTH}}"
    lines = _wrapped(said, head)
    if result.means:
        lines += [*_wrapped(f"→ {result.means}", ""), ""]
    return lines


def _wrapped(text: str, head: str) -> list[str]:
    indent = " " * (_MARK_WIDTH + _NAME_WIDTH)
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head or indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(models: Sequence[str], results: Sequence[Result]) -> str:
    counts = {verdict: sum(each.verdict == verdict for each in results) for verdict in VERDICTS}
    made = {(each.model, each.trial) for each in results if each.verdict != "untried"}
    parts = []
    if counts["wrong"]:
        parts.append(f"{counts['wrong']} wrong")
    if counts["look"]:
        parts.append(f"{counts['look']} to look at")
    said = ", ".join(parts) or "nothing wrong"
    text = f"{listed(list(models)) or 'no model'}: {said} in {counted(len(made), 'trial')}"
    if counts["untried"]:
        text += f"; {counts['untried']} could not be made"
    return text
