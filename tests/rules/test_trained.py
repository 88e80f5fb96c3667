"""Which models are trained, and what is not said of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kedge.rules.judgement import judge
from kedge.rules.parameters.never_called import NeverCalled
from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.recorded.roots import root_of
from kedge.rules.recorded.trained import trained_roots
from kedge.store.recording import Recording
from tests.rules.scenes import Course, steady

UNREACHED = "the backward that ran did not reach it"
UNCALLED = "never called while the hook was attached"


def recorded(
    *trained: bool | None, silent: tuple[tuple[str, str], ...] = (), graded: tuple[int, ...] = (0,)
) -> Recording:
    """Make a recording of roots, of which some got gradients, and a ledger."""
    names = ["", "Teacher", "Teacher-2"]
    made = Course(range(4))
    made.roots = [_root(name, told) for name, told in zip(names, trained, strict=False)]
    for root in graded:
        made.weight(f"{names[root]}.fc".lstrip("."), steady(0.1, 1e-3, 1e-4), root=root)
    entries = [
        {"site": site, "fired": 0, "cause": cause, "remedy": "call it"} for site, cause in silent
    ]
    made.events = [{"kind": "ledger", "sites": entries}, {"kind": "end", "steps": 4}]
    return made.recording()


def _root(name: str, trained: bool | None) -> dict[str, Any]:
    return {
        "name": name or "Net",
        "prefix": name,
        **({} if trained is None else {"trained": trained}),
    }


def test_an_optimizer_says_what_is_trained():
    """An old recording has them all; without an optimizer gradients tell."""
    assert trained_roots(recorded(True, False)) == {0}
    assert trained_roots(recorded(None, None)) == {0, 1}
    assert trained_roots(recorded(False, False, graded=(1,))) == {1}


def test_what_no_root_holds_belongs_to_none():
    """A model that was called and never measured has no root; its paths begin with its class."""
    recording = recorded(True)
    root = dataclasses.replace(
        recording.roots[0], modules=({"path": "", "type": "Net"}, {"path": "fc", "type": "Linear"})
    )
    recording = dataclasses.replace(recording, roots=(root,))

    assert [
        root_of(recording, path) for path in ("fc.weight", "fc", "bias", "Sequential.0.weight")
    ] == [0, 0, 0, -1]


def test_a_path_belongs_to_the_root_with_the_longest_prefix():
    """The plain names to the root without one."""
    recording = recorded(True, False, False)

    assert [
        root_of(recording, path)
        for path in ("fc.weight", "Teacher.fc", "Teacher-2.fc", "Teacher", "")
    ] == [
        *(0, 1, 2, 1, 0),
    ]


@pytest.mark.parametrize(("trained", "number"), [(True, 1), (False, 0), (None, 0)])
def test_a_model_that_never_ran_with_gradients_has_no_unused_parameters(trained, number):
    """A reloaded model, a target network; one that an optimizer holds is to get gradients."""
    silent = (("Teacher.fc.weight:param.grad", UNREACHED),)

    assert len(list(UnusedParam().check(recorded(True, trained, silent=silent)))) == number


def test_a_parameter_that_moved_is_not_unused():
    """Layers that train through .forward() fire no hook of a module, and their updates were seen."""
    recording = recorded(
        True, silent=(("fc.weight:param.grad", UNREACHED), ("aux.weight:param.grad", UNREACHED))
    )

    assert [finding.site for finding in UnusedParam().check(recording)] == ["aux.weight:param.grad"]


@pytest.mark.parametrize(("trained", "number"), [(True, 1), (False, 0)])
def test_modules_of_models_that_are_not_trained_may_stay_uncalled(trained, number):
    """A teacher's head is of no use."""
    silent = (("Teacher.head:out", UNCALLED), ("Teacher.head.weight:param.grad", UNREACHED))

    assert len(list(NeverCalled().check(recorded(True, trained, silent=silent)))) == number


def test_what_the_optimizers_hold_is_said_once():
    """Where the recording tells it, UNUSED-PARAM does not guess it from steps."""
    made = Course(range(4))
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.weight("head", steady(None, 1e-3, None, 1e-3))
    made.sites = [
        s
        for s in made.sites
        if (s.get("path"), s.get("kind"))
        not in {("head.weight", "param"), ("head.weight", "update")}
    ]
    assert len(list(UnusedParam().check(made.recording()))) == 1

    made.events = [{"kind": "optimizers", "optimizers": []}]
    assert list(UnusedParam().check(made.recording())) == []


#: Weights of a model in which every rule about training would find something.
BAD = {
    "GRAD-ZERO": steady(0.1, 0.0, 1e-4, 1e-3),
    "UPDATE-RATIO": steady(0.1, 1e-3, 0.05),
}


@pytest.mark.parametrize("code", BAD)
@pytest.mark.parametrize("trained", [True, False])
def test_rules_about_training_speak_of_trained_models_alone(code, trained):
    """A model that no optimizer trains may have what figures it likes."""
    made = Course(range(30))
    made.roots = [_root("", True), _root("Teacher", trained)]
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.weight("Teacher.fc", BAD[code], root=1)

    assert [
        finding.code for finding in judge(made.recording()).findings if finding.code == code
    ] == [code] * trained
