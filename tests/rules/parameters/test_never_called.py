"""NEVER-CALLED and UNUSED-PARAM: what the ledger says, and what of it deserves a word."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.parameters.never_called import NeverCalled
from kedge.rules.parameters.unused_param import UnusedParam
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import size

UNCALLED = "never called while the hook was attached"
UNREACHED = "the backward that ran did not reach it"


def silent(site: str, cause: str, remedy: str = "call it") -> dict[str, Any]:
    """Describe a site that never fired."""
    return {"site": site, "fired": 0, "cause": cause, "remedy": remedy}


def found(*entries: dict[str, Any]) -> list[Finding]:
    """Run both rules over a ledger."""
    recording = Recording.build(events=[{"kind": "ledger", "sites": list(entries)}])
    return [*NeverCalled().check(recording), *UnusedParam().check(recording)]


def test_a_module_with_trainable_parameters_that_is_never_called_is_a_warning():
    """It and its parameters are one finding."""
    (finding,) = found(
        silent("pooler:out", UNCALLED),
        silent("pooler.dense:out", UNCALLED),
        silent("pooler.dense.weight:param.grad", UNREACHED),
        silent("pooler.dense.bias:param.grad", UNREACHED),
    )

    assert (finding.code, finding.severity, finding.site, finding.step) == (
        "NEVER-CALLED",
        "warning",
        "pooler:out",
        -1,
    )
    assert finding.message == f"pooler:out never fired: {UNCALLED}."
    assert finding.entry()["evidence"] == {
        "sites": ["pooler:out"],
        "cause": UNCALLED,
        "parameters": 0,
    }
    assert finding.remedy == "Call it."


@pytest.mark.parametrize(("other", "severity"), [("Net", "info"), ("Other", "warning")])
def test_what_another_model_of_the_class_calls_is_an_option_of_it(other, severity):
    """As a norm that one of two variants goes without; a model of another class says nothing of it."""
    entries = [
        silent("a.norm:out", UNCALLED),
        silent("a.norm.weight:param.grad", UNREACHED),
    ]
    roots = [
        {"name": "a", "prefix": "a", "type": "Net", "parameters": 8, "trained": True},
        {"name": "b", "prefix": "b", "type": other, "parameters": 8, "trained": True},
    ]
    recording = Recording.build(
        [{"site": "b.norm:out", "path": "b.norm", "kind": "out", "root": 1}],
        [size(0, "b.norm:out", 1.0)],
        roots=roots,
        events=[{"kind": "ledger", "sites": entries}],
    )
    (finding,) = NeverCalled().check(recording)

    assert (finding.severity, finding.site) == (severity, "a.norm:out")


def test_a_module_without_trainable_parameters_is_for_information():
    """A dropout that one way through the forward leaves out harms nobody."""
    (finding,) = found(silent("drop:out", UNCALLED))

    assert finding.severity == "info"


def test_frozen_parameters_do_not_make_a_module_trainable():
    """What requires no gradient is not missed."""
    (finding,) = found(
        silent("old:out", UNCALLED), silent("old.weight:param.grad", "it requires no grad")
    )

    assert finding.severity == "info"


def test_sites_with_the_same_cause_are_one_finding():
    """Twelve layers with one cause are one sentence, which names the first six, though each has its own remedy."""
    (finding,) = found(*(silent(f"h.{i}.pooler:out", UNCALLED, f'hook "h.{i}"') for i in range(12)))

    assert (finding.severity, len(finding.evidence.sites)) == ("info", 12)
    assert finding.message.startswith("h.0.pooler:out, h.1.pooler:out, ")
    assert f"h.5.pooler:out and 6 more never fired: {UNCALLED}." in finding.message


def test_fused_attention_is_one_quiet_line():
    """Whatever was left out because its container computes it, with parameters or without, is said once."""
    attention = "bypassed by a fused path: attention uses its weights without calling it"
    (finding,) = found(
        *(silent(f"h.{i}.out_proj:out", attention, f'hook "h.{i}"') for i in range(12)),
        *(
            silent(f"h.{i}.dropout:out", "bypassed: Block uses its p without calling it")
            for i in range(12)
        ),
        silent("h.0.out_proj.weight:param.grad", UNREACHED),
    )

    assert (finding.severity, len(finding.evidence.sites)) == ("info", 24)
    assert finding.message == (
        "h.0.out_proj:out, h.1.out_proj:out and 22 more are not recorded: their containers use what they hold without calling them."
    )


def test_only_what_is_fused_is_called_so():
    """A table of positions whose weight the model reads is in no fused operation."""
    (fused,) = found(silent("attn.out_proj:out", "bypassed by a fused path: attention uses it"))
    (read,) = found(silent("pos:out", "bypassed: GPT.forward reads its weight without calling it"))

    assert "its container computes it in one fused operation" in fused.message
    assert read.message == (
        "pos:out is not recorded: GPT.forward reads its weight without calling it."
    )


def test_a_bypassed_call_is_a_warning():
    """Calling .forward() leaves out everybody's hooks, with parameters or without."""
    (finding,) = found(
        silent("act:out", "Net.forward calls its .forward() directly, which fires no hook")
    )

    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("cause", "severity"),
    [
        ("its .forward() was called directly, which fires no hook", "warning"),
        (
            "never called itself, but the modules inside it were: one by one, or by a direct call of its .forward()",
            "info",
        ),
    ],
)
def test_a_module_whose_children_ran_does_not_stand_for_them(cause, severity):
    """What is inside it and never fired has a cause of its own."""
    findings = found(
        silent("block:out", cause),
        silent("block.aux:out", UNCALLED),
        silent("block.aux.weight:param.grad", UNREACHED),
    )

    assert [(finding.site, finding.severity) for finding in findings] == [
        ("block:out", severity),
        ("block.aux:out", "warning"),
    ]


def test_a_parameter_that_no_backward_reaches_is_a_warning():
    """Its module was called and it is trainable, yet it never got a gradient."""
    (finding,) = found(silent("aux.weight:param.grad", UNREACHED))

    assert (finding.code, finding.severity, finding.site) == (
        "UNUSED-PARAM",
        "warning",
        "aux.weight:param.grad",
    )
    assert (
        finding.message == f"aux.weight:param.grad got no gradient in the whole run: {UNREACHED}."
    )


@pytest.mark.parametrize(
    ("site", "cause"),
    [
        ("fc.weight:param.grad", "it requires no grad, or did not when it was hooked"),
        ("fc.weight:param.grad", "no backward reached a hook of this session"),
        ("fc:out.grad", "its value requires no grad"),
        ("attn:out.grad[1]", UNREACHED),
        ("pos:out", "its value contains no tensor: int"),
        ("pos:out", "there is no tensor to see: int"),
        ("late:out", "its schedule did not select any of the steps 0 to 3"),
        ("block:out", "it ran only in a checkpoint's recompute"),
    ],
)
def test_silence_by_design_is_no_finding(site, cause):
    """Frozen layers, inference, unused leaves and recomputes are what they are."""
    assert found(silent(site, cause)) == []


def test_sites_that_fired_are_no_finding():
    """The ledger may list those as well."""
    assert found({"site": "fc:out", "fired": 12}) == []


def test_an_unknown_cause_is_not_lost():
    """A cause that this version has not heard of is reported under its own words."""
    (finding,) = found(silent("fc:out", "its action was switched off"))

    assert "its action was switched off" in finding.message


def test_without_a_ledger_there_is_nothing_to_say():
    """A program that is still running, or was killed, has not drawn one up."""
    assert list(NeverCalled().check(Recording.build())) == []
    assert list(UnusedParam().check(Recording.build())) == []


@golden("NEVER-CALLED", lacks=(0, 1))
def golden_never_called(*, fires: bool) -> Golden:
    """List a trainable module that was never called, or a frozen parameter."""
    uncalled = {
        "fired": 0,
        "cause": "never called while the hook was attached",
        "remedy": "call it",
    }
    unreached = {"fired": 0, "cause": "the backward that ran did not reach it", "remedy": "use it"}
    frozen = {
        "fired": 0,
        "cause": "it requires no grad, or did not when it was hooked",
        "remedy": "leave it",
    }
    missed = [{"site": "aux:out", **uncalled}, {"site": "aux.weight:param.grad", **unreached}]
    sites = missed if fires else [{"site": "old.weight:param.grad", **frozen}]
    rows = [size(0, "fc:out", 1.0)]
    return {
        "roots": [],
        "sites": [{"site": "fc:out"}],
        "rows": rows,
        "events": [{"kind": "ledger", "sites": sites}],
    }
