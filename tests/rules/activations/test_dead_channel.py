"""DEAD-CHANNEL: per channel, over many samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kedge.rules.activations.dead_channel import DeadChannel, DeadChannelEvidence
from kedge.rules.gradients.grad_zero import GradZeroEvidence
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden

CHANNELS = 16
Above = Callable[[int], Sequence[bool]]


def layer(
    site: str, above: Above, *, steps: int = 100, samples: int = 128, **columns: Any
) -> list[dict[str, Any]]:
    """Describe the rows of an activation; ``above`` says for each sample which channels were above zero."""
    rows = []
    for i in range(steps):
        bits = list(above(i))
        rows.append(
            {
                "step": 10 * i,
                "site": site,
                "count": samples * len(bits),
                "sum": 1.0,
                "active": bits,
                **columns,
            }
        )
    return rows


def half(i: int) -> list[bool]:
    """Wake another half of the channels in every step."""
    return [(channel + i) % 2 == 0 for channel in range(CHANNELS)]


def without(dead: int, since: int = 0) -> Above:
    """Silence the first channels from some sample on."""
    return lambda i: [channel >= dead or i < since for channel in range(CHANNELS)]


def found(*rows: dict[str, Any], root: int = 0) -> list[Finding]:
    """Run the rule."""
    names = dict.fromkeys(row["site"] for row in rows)
    sites = [{"site": name, "type": "ReLU", "channels": CHANNELS, "root": root} for name in names]
    return list(DeadChannel().check(Recording.build(sites, rows)))


def test_half_zeros_are_healthy():
    """Each input silences other channels; none is silent for all."""
    assert found(*layer("relu:out", half)) == []


@pytest.mark.parametrize(
    ("dead", "severity"), [(8, None), (9, "warning"), (12, "warning"), (13, "error"), (16, "error")]
)
def test_the_share_of_dead_channels_decides(dead, severity):
    """More than a half are a warning, more than three quarters an error."""
    findings = found(*layer("relu:out", without(dead)))

    assert [finding.severity for finding in findings] == ([severity] if severity else [])


def test_dead_from_the_start():
    """The sentence tells channels that were never alive from those that fell silent."""
    (finding,) = found(*layer("relu:out", without(12)))

    assert finding.message == (
        "12 of the 16 channels of relu:out (75%) were never above zero in the last 10,112 samples "
        "(79 measured steps), nor at any time before."
    )
    assert (finding.step, finding.confidence, finding.evidence.once_alive) == (0, 0.95, 0)
    assert finding.evidence.first_dead == list(range(10))
    assert "biases with zeros" in finding.remedy


def test_channels_that_died_have_a_step():
    """From which measured step on they were silent."""
    (finding,) = found(*layer("relu:out", without(12, since=7)))

    assert finding.step == 70
    assert finding.message.endswith("(79 measured steps); they fell silent by step 70.")
    assert "learning rate" in finding.remedy


def test_the_step_is_that_of_the_share_not_of_the_last_channel():
    """One channel that dies late does not move the step at which most had died."""

    def above(i: int) -> list[bool]:
        return [channel >= 12 or i < (20 if channel == 0 else 3) for channel in range(CHANNELS)]

    (finding,) = found(*layer("relu:out", above))

    assert finding.step == 30
    assert finding.message.endswith("; 9 of them fell silent by step 30, all by step 200.")


def test_one_firing_in_the_window_is_life():
    """A channel that one step of seventy-nine wakes is not dead."""
    assert (
        found(
            *layer("relu:out", lambda i: [channel >= 12 or i == 30 for channel in range(CHANNELS)])
        )
        == []
    )


def test_firing_before_the_window_is_not():
    """The window is the end of the run."""
    (finding,) = found(
        *layer("relu:out", lambda i: [channel >= 12 or i == 20 for channel in range(CHANNELS)])
    )

    assert (finding.step, finding.evidence.once_alive) == (210, 12)


def test_a_short_run_is_judged_with_less_confidence():
    """Two thousand samples in ten steps are enough for a word."""
    (finding,) = found(*layer("relu:out", without(12), steps=20))

    assert (finding.confidence, finding.evidence.samples, finding.evidence.steps) == (
        0.6,
        2048,
        16,
    )


@pytest.mark.parametrize(("steps", "samples"), [(15, 128), (9, 5000), (1, 100_000)])
def test_too_little_is_no_evidence(steps, samples):
    """Neither a few samples nor the many positions of a few batches are independent inputs."""
    assert found(*layer("relu:out", without(12), steps=steps, samples=samples)) == []


def test_one_channel_of_a_tiny_layer_is_no_finding():
    """A share of one half is one channel of two."""
    assert found(*layer("relu:out", lambda i: [True, False])) == []


def test_layers_that_a_dead_one_starves_are_its_evidence():
    """After a layer without life the next ones see constants; they are named, not reported."""
    rows = [
        *layer("a:out", without(10)),
        *layer("b:out", without(16)),
        *layer("c:out", without(9)),
        *layer("d:out", without(1)),
    ]

    findings = found(*rows)

    assert [finding.site for finding in findings] == ["a:out", "b:out"]
    assert findings[0].evidence.after_it == {}
    assert findings[1].evidence.after_it == {"c:out": 0.5625}
    assert findings[1].message.endswith("; many channels after it are silent too, in c:out.")


def test_a_nan_is_not_a_death():
    """No comparison with NaN is true; steps with one are left out."""
    rows = layer("relu:out", half, steps=200)
    for row in rows[100:]:
        row |= {"sum": np.nan, "active": [False] * CHANNELS}

    assert found(*rows) == []


def test_ranks_are_one():
    """A channel that one rank's batch wakes is alive."""
    rows = layer("relu:out", lambda i: [channel < 8 for channel in range(CHANNELS)])
    rows += layer("relu:out", lambda i: [channel >= 8 for channel in range(CHANNELS)])

    assert found(*rows) == []


def test_sites_without_tracked_channels_are_passed_over():
    """Only activations with an exact zero are tracked."""
    rows = [{"step": step, "site": "gelu:out", "count": 64, "sum": 1.0} for step in range(100)]

    assert found(*rows) == []


def test_a_layer_that_is_wholly_dead_needs_few_samples():
    """A hundred values of every channel in ten steps: no healthy layer is silent that long."""
    (finding,) = found(*layer("relu:out", without(16), steps=10, samples=10))

    assert (finding.severity, finding.step, finding.confidence) == ("error", 0, 0.6)
    assert "in the last 100 samples (10 measured steps), nor at any time before" in finding.message


@pytest.mark.parametrize(("steps", "samples"), [(9, 100), (10, 9)])
def test_a_layer_that_is_wholly_dead_needs_some_samples(steps, samples):
    """Ten steps, and a hundred values."""
    assert found(*layer("relu:out", without(16), steps=steps, samples=samples)) == []


def test_a_layer_that_died_lately_is_judged_by_what_came_since():
    """That it was alive before does not matter, however many samples that was."""
    (finding,) = found(*layer("relu:out", without(16, since=60), steps=75, samples=40))

    assert (finding.step, finding.evidence.samples, finding.evidence.steps) == (600, 600, 15)
    assert finding.evidence.once_alive == 16


def test_a_layer_that_is_dead_in_part_needs_its_samples():
    """Some channels are rarely awake."""
    assert found(*layer("relu:out", without(15), steps=20, samples=10)) == []


def of_zeros(*parameters: str, nearer: str | None) -> Finding:
    """Make a finding of gradients that are zero."""
    evidence = GradZeroEvidence(kind="some", parameters=parameters, of=4, next_with_gradient=nearer)
    return Finding("GRAD-ZERO", "warning", f"{parameters[-1]}:param.grad", 0, "", evidence)


@pytest.mark.parametrize(
    ("dead", "after", "parameters", "nearer", "explains"),
    [
        (16, {}, ["a.weight"], "c.weight", True),
        (16, {}, ["a.weight", "c.weight"], None, True),
        (9, {}, ["a.weight"], "c.weight", False),
        (9, {"late:out": 1.0}, ["a.weight", "c.weight"], None, True),
        (9, {"late:out": 0.7}, ["a.weight", "c.weight"], None, False),
        (16, {}, ["c.weight"], None, False),
        (9, {"late:out": 1.0}, ["a.weight"], "c.weight", False),
    ],
    ids=[
        "before it",
        "on both sides",
        "half of it lives",
        "what it silences",
        "what it does not",
        "behind it alone",
        "cut off before it",
    ],
)
def test_only_a_layer_that_is_wholly_dead_makes_gradients_zero(
    dead: int, after: dict[str, float], parameters: list[str], nearer: str | None, explains: bool
):
    """And only of parameters on its way: not of a branch that another operation cuts off."""
    recording = Recording.build(
        [
            {"site": "a:out"},
            {"site": "act:out"},
            {"site": "c:out"},
            {"site": "late:out"},
            *(
                {"site": f"{path}.weight:param.grad", "path": f"{path}.weight", "owner": path}
                for path in ("c", "a")
            ),
        ],
        [],
    )
    evidence = DeadChannelEvidence(
        dead=dead,
        channels=16,
        share=dead / 16,
        samples=2000,
        steps=20,
        once_alive=0,
        first_dead=[0],
        after_it=after,
    )
    found = Finding(DeadChannel.code, "warning", "act:out", 0, "", evidence)

    zeros = of_zeros(*parameters, nearer=nearer)
    assert DeadChannel().explains(recording, found, zeros) is explains


@golden("DEAD-CHANNEL")
def golden_dead_channel(*, fires: bool) -> Golden:
    """Silence six of eight channels from the third sample on, or another half of them in every step."""
    bits = [
        [c > 5 or i < 2 for c in range(8)] if fires else [(c + i) % 2 == 0 for c in range(8)]
        for i in range(14)
    ]
    rows = [
        {"step": 10 * i, "site": "relu:out", "count": 2048, "sum": 1.0, "active": b}
        for i, b in enumerate(bits)
    ]
    return {
        "roots": [],
        "sites": [{"site": "relu:out", "type": "ReLU", "channels": 8, "shape": [256, 8]}],
        "rows": rows,
    }
