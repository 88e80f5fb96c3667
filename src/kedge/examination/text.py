"""The results of an examination as text: what was done, what came, and what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from kedge.examination.result import VERDICTS, Result, Verdict
from kedge.short_text import counted, listed

_WIDTH = 100
_WORDS = {"wrong": "WRONG", "look": "look", "ok": "ok", "untried": "untried"}
_INDENT = 9


def as_text(models: Sequence[str], results: Sequence[Result], notes: Sequence[str]) -> str:
    """Return the results, the worst first, and one line for all."""
    lines = []
    ordered = sorted(results, key=lambda result: VERDICTS.index(result.verdict))
    for result in ordered:
        head = f"{_WORDS[result.verdict]:<8} {result.trial}"
        if len(models) > 1 and result.model:
            head += f" of {result.model}"
        if result.where:
            head += f" ({result.where})"
        lines.append(head)
        lines += _wrapped(f"{result.did}: {result.came}.")
        if result.means:
            lines += _wrapped(result.means)
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS}
    lines.append("")
    lines += notes
    lines.append(_summary(models, counts))
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    indent = " " * _INDENT
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(models: Sequence[str], counts: Mapping[Verdict, int]) -> str:
    made = sum(counts.values()) - counts["untried"]
    parts = []
    if counts["wrong"]:
        parts.append(f"{counts['wrong']} wrong")
    if counts["look"]:
        parts.append(f"{counts['look']} to look at")
    said = ", ".join(parts) or "nothing wrong"
    text = f"{listed(list(models))}: {said} in {counted(made, 'trial')}"
    if counts["untried"]:
        text += f"; {counts['untried']} could not be made"
    return text
