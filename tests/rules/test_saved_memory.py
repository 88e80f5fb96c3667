"""SAVED-MEMORY: one module with most of it, and enough of it to matter."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.rule import Finding
from kedge.rules.saved_memory import MIB, SavedMemory
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import size


def saved(step: int = 0, **modules: float) -> dict[str, Any]:
    """Describe what was saved in a step, in MiB by module."""
    entries = [
        {"path": path, "bytes": int(size * MIB), "tensors": 3} for path, size in modules.items()
    ]
    return {
        "kind": "saved",
        "step": step,
        "bytes": sum(e["bytes"] for e in entries),
        "modules": entries,
    }


def found(*events: dict[str, Any]) -> list[Finding]:
    """Run the rule."""
    return list(SavedMemory().check(Recording.build(events=events)))


def test_a_module_that_holds_most_is_named():
    """With its share, and those that come next."""
    (finding,) = found(saved(attn=300, mlp=50, head=20))

    assert (finding.severity, finding.site, finding.step) == ("info", "attn:saved", 0)
    assert finding.message == (
        "attn:saved holds 300 MiB of the 370 MiB (81%) that autograd saves for backward in step 0."
    )
    assert finding.evidence.next == {"mlp": 50 * MIB, "head": 20 * MIB}
    assert (finding.evidence.tensors, finding.evidence.share) == (3, 0.810811)


@pytest.mark.parametrize(("size", "number"), [(64, 0), (65, 1)])
def test_little_does_not_matter(size, number):
    """64 MiB are the floor."""
    assert len(found(saved(attn=size, mlp=1))) == number


@pytest.mark.parametrize(("others", "number"), [(399, 1), (400, 0)])
def test_a_fifth_is_the_border(others, number):
    """Many equal layers are no single one's fault."""
    named = {f"l{i}": others / 8 for i in range(8)}
    assert len(found(saved(attn=100, **named))) == number


def test_the_step_in_which_most_was_saved_counts():
    """And each module in it that holds so much, the largest first."""
    findings = found(saved(0, a=100, b=90), saved(7, a=120, b=300), saved(9, a=1))

    assert [(finding.site, finding.step) for finding in findings] == [
        ("b:saved", 7),
        ("a:saved", 7),
    ]
    assert findings[1].evidence.next == {}


def test_without_such_an_event_there_is_nothing_to_say():
    """It is not always recorded."""
    assert found({"kind": "note", "step": 0, "text": "saved"}) == []


@golden("SAVED-MEMORY")
def golden_saved_memory(*, fires: bool) -> Golden:
    """Make one module save most of a large total, or of a tiny one."""
    mib = 2**20 if fires else 2**10
    modules = [
        {"path": "attn", "bytes": 300 * mib, "tensors": 3},
        {"path": "mlp", "bytes": 50 * mib, "tensors": 2},
    ]
    saved = {"kind": "saved", "step": 0, "bytes": 350 * mib, "modules": modules}
    return {
        "roots": [],
        "sites": [{"site": "attn:out"}],
        "rows": [size(0, "attn:out", 1.0)],
        "events": [saved],
    }
