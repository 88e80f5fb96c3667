"""The ranks that a finding holds for: one fault on many ranks is one finding, which names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from kedge.rules.rule import Finding, Rule
from kedge.store.recording import Recording

MOST = 64
"""Most ranks that are judged one by one."""


def naming_ranks(
    recording: Recording, rules: Iterable[Rule], findings: Sequence[Finding]
) -> list[Finding]:
    """Return the findings of a recording, each with the ranks whose own recordings show it too, or that have its site.

    Args:
        recording: The recording.
        rules: The rules that found them.
        findings: The findings in the ranks' data together.
    """
    ranks = recording.ranks
    if not findings or not 1 < len(ranks) <= MOST:
        return list(findings)
    judging = {rule.code: rule for rule in rules if not rule.compares_ranks}

    @cache
    def places(code: str, rank: int) -> frozenset[str]:
        found = judging[code].check(recording.of_rank(rank))
        return frozenset(finding.site for finding in found)

    named = []
    for finding in findings:
        holding: list[int] = []
        if finding.code in judging:
            site, code = finding.site, finding.code
            holding = [rank for rank in ranks if site in places(code, rank)]
            holding = holding or _having(recording, site)
        if holding:
            named.append(_with_ranks(finding, holding, len(ranks)))
        else:
            named.append(finding)
    return named


def _having(recording: Recording, text: str) -> list[int]:
    """Return the ranks that have a site at all, if others do not, as in a pipeline."""
    site = next((site for site in recording.sites if site.site == text), None)
    if site is None:
        return []
    ranks = recording.ranks
    having = [rank for rank in ranks if len(recording.of_rank(rank).rows(site))]
    if len(having) < len(ranks):
        return having
    return []


def _with_ranks(finding: Finding, ranks: Sequence[int], world: int) -> Finding:
    held = f"rank {ranks[0]}"
    if len(ranks) == world:
        held = f"all {world} ranks"
    elif len(ranks) > 1:
        held = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    message = f"{finding.message} This holds for {held}."
    return replace(finding, message=message, ranks=tuple(ranks))
