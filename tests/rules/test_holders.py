"""The ranks that a finding names."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.registry import check
from kedge.store.recording import Recording

SITES: list[dict[str, Any]] = [
    {"site": "a:out", "type": "Linear"},
    {"site": "b:in", "from": [0]},
    {"site": "b:out", "type": "Log"},
]


def recording(bad: set[int], ranks: int = 4) -> Recording:
    """Return a recording in which a module made NaN at some ranks."""
    rows = [
        {
            "site": site["site"],
            "rank": rank,
            "step": 0,
            "level": 2,
            "calls": 1,
            "count": 8,
            **numbers,
        }
        for rank in range(ranks)
        for site in SITES
        for numbers in [
            {"nonfinite": 8}
            if rank in bad and site["site"] == "b:out"
            else {"sum": 1.0, "sumsq": 8.0, "min": -1.0, "max": 2.0, "nonzero": 8, "nonfinite": 0}
        ]
    ]
    return Recording.build(SITES, rows, manifest={"world": ranks})


@pytest.mark.parametrize(
    ("bad", "words"),
    [({2}, "rank 2"), ({0, 1, 3}, "ranks 0, 1 and 3"), ({0, 1, 2, 3}, "all 4 ranks")],
)
def test_a_fault_of_several_ranks_is_one_finding_that_names_them(bad: set[int], words: str) -> None:
    """In its message and its evidence."""
    (finding,) = check(recording(bad), [NanBorn()])

    assert finding.site == "b:out"
    assert finding.message.endswith(f" This holds for {words}.")
    assert list(finding.ranks) == sorted(bad)


def test_a_single_process_has_no_ranks_to_name() -> None:
    """Its findings are as they were."""
    (finding,) = check(recording({0}, ranks=1), [NanBorn()])

    assert "This holds for" not in finding.message
    assert finding.ranks == ()
