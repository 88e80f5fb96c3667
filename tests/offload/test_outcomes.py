"""The account of an offload as text: what became of the tensors, averaged over the steps."""

from __future__ import annotations

from kedge.offload.outcomes import OffloadAccount, Outcome

MB = 1_000_000


def test_the_remarks_are_averages_over_the_steps() -> None:
    """What was kept, rebuilt, moved, brought back, freed and recomputed in two steps, each divided by two."""
    account = OffloadAccount()
    row = account.row("fc")
    row.book(Outcome("kept", "parameter", 8 * MB))
    row.book(Outcome("rebuilt", "gelu", 6 * MB, extra=3 * MB))
    row.book(Outcome("moved", "disk", 20 * MB, stored=10 * MB, seconds=0.04))
    row.restored(14 * MB, 0.006, again=False)
    row.restored(2 * MB, 0.002, again=True)
    row.gone(26 * MB)
    for _ in range(6):
        row.recomputed(MB)
        row.repeated(0.001)
    account.turn()
    account.checkpointed = 4

    lines = str(account).splitlines()

    assert lines[0].split()[:4] == ["module", "tensors", "saved", "resident"]
    assert [line.split() for line in lines[1:3]] == [
        ["fc", "2", "17.0", "4.0", "0.0", "3.0", "10.0"],
        ["all", "2", "17.0", "4.0", "0.0", "3.0", "10.0"],
    ]
    assert lines[4:] == [
        "2 steps; kept: parameter 4.0 MB",
        "rebuilt: gelu 3.0 MB; 1.5 MB kept for that",
        "moved: disk 10.0 MB; 5.0 MB stored in 20 ms",
        "restored 8.0 MB in 4 ms, 1.0 MB of it more than once; freed 13.0 MB",
        "recomputed 3 module calls a step, 3.0 MB of which were not kept; backward ran them again 3 times in 3 ms",
        "2 module calls a step ran in a checkpoint, which recomputes the tensors they save: there is nothing to offload, "
        "and its inputs count for the module that calls it",
    ]


def test_tensors_that_could_not_be_moved_are_counted_over_all_steps() -> None:
    """They are a failure and no average."""
    account = OffloadAccount()
    row = account.row("fc")
    row.book(Outcome("kept", "failed", 3 * MB))
    account.turn()

    assert "\n1 tensor of 3.0 MB could not be moved, over all steps, and stayed" in str(account)
    row.book(Outcome("kept", "failed", 3 * MB))
    assert "\n2 tensors of 6.0 MB could not be moved, over all steps, and stayed" in str(account)
