"""What follows from what: of a fault and what it leads to, the fault is a warning, and the rest is a hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kedge.json_input.classes import left_out
from kedge.rules import ALL, check
from kedge.rules.consequences import causes_and_effects
from kedge.rules.evidence import Evidence
from kedge.rules.rule import Finding, Rule, Severity
from kedge.store.recording import Recording
from tests.rules.scenes import size

FOLLOWS = causes_and_effects(ALL)
RATE, DEAD, NAN = "RATE-TOO-LARGE", "DEAD-CHANNEL", "NAN-BORN"


@dataclass(frozen=True)
class Told(Rule):
    """A rule that finds what it is given."""

    findings: Sequence[Finding] = field(default_factory=tuple)

    code = "TOLD"
    name = "what a test says"
    severity = "error"

    def check(self, recording: Recording) -> Sequence[Finding]:
        """Return it."""
        return self.findings


@dataclass(frozen=True, kw_only=True)
class Share(Evidence):
    """Evidence of one figure."""

    share: float | None = left_out(None)


def of(
    code: str,
    severity: Severity = "warning",
    *,
    site: str = "fc:out",
    step: int = 0,
    kind: str = "",
    share: float | None = None,
) -> Finding:
    """Make a finding."""
    evidence = Share(kind=kind, share=share)
    return Finding(code, severity, site, step, f"{code} was found.", evidence)


def judged(
    *findings: Finding, optimizers: Sequence[Sequence[int]] = ((0,), (1,)), trained: bool = True
) -> dict[str, Finding]:
    """Judge these findings in a program of two models, and a loss of both, that is measured in every tenth step."""
    sites = [
        {"site": "fc:out"},
        {"site": "head:out"},
        {"site": "Other.fc:out", "root": 1},
        {"site": "loss", "path": "loss", "kind": "loss", "root": -1},
    ]
    names = (("Net", ""), ("Other", "Other"))
    roots = [
        {"name": name, "prefix": prefix, "trained": trained or not i, "optimizers": list(held)}
        for i, ((name, prefix), held) in enumerate(zip(names, optimizers, strict=True))
    ]
    rows = [size(step, "fc:out", 1.0) for step in range(0, 200, 10)]
    return {
        finding.code: finding
        for finding in check(Recording.build(sites, rows, roots=roots), [Told(findings)])
    }


def test_what_follows_becomes_a_hint_that_names_its_cause():
    """In its message and in its evidence; the cause stays as it was."""
    found = judged(
        of(DEAD, "error", step=20, share=0.9), of(RATE, "error", site="head:out", step=10)
    )

    assert list(found) == [RATE, DEAD]
    assert found[RATE] == of(RATE, "error", site="head:out", step=10)
    assert (found[DEAD].severity, found[DEAD].message) == (
        "info",
        "DEAD-CHANNEL was found. It may follow from RATE-TOO-LARGE.",
    )
    assert found[DEAD].entry()["evidence"] == {"share": 0.9, "follows": RATE}


def test_what_no_cause_was_found_for_stays():
    """Neither does a cause follow from its effect, nor anything from what is not in the table."""
    found = judged(of(DEAD), of("EVAL-MODE"))

    assert {finding.severity for finding in found.values()} == {"warning"}


def test_a_hint_is_no_cause():
    """It was not sure enough to be a warning."""
    assert judged(of(DEAD), of(RATE, "info"))[DEAD].severity == "warning"


def test_a_hint_that_was_one_says_nothing_new():
    """Its message stays."""
    assert judged(of(DEAD, "info"), of(RATE))[DEAD] == of(DEAD, "info")


@pytest.mark.parametrize("cause", ["GRAD-VANISH", RATE, DEAD, "NOT-OPTIMIZED"])
def test_no_learning_follows_from_what_stops_it(cause):
    """It is a hint by itself; its advice to look at the labels would mislead where the fault is known."""
    still = judged(of("NO-LEARNING", "info", site="loss", step=190), of(cause))["NO-LEARNING"]

    assert still.message == f"NO-LEARNING was found. It may follow from {cause}."
    assert (still.severity, still.remedy) == ("info", f"Fix {cause} first.")


def test_no_learning_without_a_fault_keeps_its_remedy():
    """Nothing else was found, so its own remedy is what there is."""
    assert (
        judged(of("NO-LEARNING", "info", site="loss"))["NO-LEARNING"].message
        == "NO-LEARNING was found."
    )


def test_a_nan_is_always_an_error():
    """Whatever made it."""
    found = judged(
        of(NAN, "error", step=50), *(of(cause.partition(":")[0]) for cause, _ in FOLLOWS)
    )

    # Logarithms of logits make a loss that falls without end.
    assert (found[NAN].severity, found[NAN].follows) == ("error", "DOUBLE-SOFTMAX")
    assert [cause for cause, effects in FOLLOWS if NAN in effects] == ["LOSS-BELOW-ZERO"]


@pytest.mark.parametrize(
    ("site", "step", "follows"),
    [("loss", 50, "LOSS-BELOW-ZERO"), ("loss", 0, ""), ("fc:out", 50, "")],
    ids=["later", "at once", "elsewhere"],
)
def test_a_nan_of_a_loss_that_falls_without_end_names_it(site: str, step: int, follows: str):
    """It stays an error, and stands behind its cause, which becomes one."""
    found = judged(
        of(NAN, "error", site=site, step=step), of("LOSS-BELOW-ZERO", site="loss", step=0)
    )

    assert (found[NAN].severity, found[NAN].follows) == ("error", follows)
    assert (found["LOSS-BELOW-ZERO"].severity == "error") is bool(follows)
    assert next(iter(found)) == ("LOSS-BELOW-ZERO" if follows else NAN)


def test_what_follows_from_an_effect_alone_follows_from_its_cause():
    """Norms in evaluation mode do not hold the scale, and small outputs leave units dead."""
    found = judged(of("EVAL-MODE", step=0), of("INIT-SCALE", step=0), of(DEAD, "error", step=30))

    assert {code: each.follows for code, each in found.items()} == {
        "EVAL-MODE": "",
        "INIT-SCALE": "EVAL-MODE",
        DEAD: "EVAL-MODE",
    }
    assert [each.severity for each in found.values()] == ["error", "info", "info"]


@pytest.mark.parametrize("code", ["UPDATE-RATIO", "SCALE-DRIFT"])
@pytest.mark.parametrize(("kind", "severity"), [("all", "info"), ("some", "warning")])
def test_what_moves_the_weights_without_any_gradient_is_no_training(code, kind, severity):
    """As the decay of weights does, while a hinge loss is satisfied from the start."""
    told = of(code, kind="large" if code == "UPDATE-RATIO" else "", step=50)

    assert judged(told, of("GRAD-ZERO", "error", kind=kind))[code].severity == severity


@pytest.mark.parametrize(
    ("step", "severity"),
    [(0, "warning"), (60, "warning"), (70, "info"), (100, "info"), (-1, "info")],
)
def test_what_begins_clearly_earlier_does_not_follow(step, severity):
    """Three measured steps are within what rules can tell; a finding of no step is of the whole run."""
    assert judged(of(DEAD, step=step), of(RATE, step=100))[DEAD].severity == severity


def test_a_cause_of_the_whole_run_has_no_step():
    """As parameters that no optimizer holds."""
    assert judged(of(DEAD, step=0), of("NOT-OPTIMIZED", step=-1))[DEAD].severity == "info"


def test_models_of_other_optimizers_are_judged_one_by_one():
    """As a critic and a generator."""
    assert judged(of(DEAD, site="Other.fc:out"), of(RATE))[DEAD].severity == "warning"


@pytest.mark.parametrize(
    ("setting", "site"),
    [
        ({"optimizers": ((0,), (0,))}, "fc:out"),
        ({}, "loss"),
        ({"trained": False, "optimizers": ((0,), ())}, "fc:out"),
    ],
    ids=["one optimizer", "a loss", "a model that is not trained"],
)
def test_what_concerns_both_models_is_a_cause_in_both(setting, site):
    """Encoder and decoder share a fate."""
    cause = of(RATE, site="Other.fc:out" if setting else site)

    assert judged(of(DEAD, site="fc:out"), cause, **setting)[DEAD].severity == "info"


def test_a_site_that_is_only_in_the_ledger_is_of_its_model():
    """Parameters without a gradient have no rows."""
    still = of("UPDATE-RATIO", kind="small")

    assert (
        judged(still, of("UNUSED-PARAM", site="fc.weight:param.grad"))["UPDATE-RATIO"].severity
        == "info"
    )
    assert (
        judged(still, of("UNUSED-PARAM", site="Other.fc.weight:param.grad"))[
            "UPDATE-RATIO"
        ].severity
        == "warning"
    )


@pytest.mark.parametrize(("kind", "cause", "severity"), [
    ("large", RATE, "info"), ("small", RATE, "warning"), ("small", "UNDERFLOW", "info"), ("large", "UNDERFLOW", "warning"),
])  # fmt: skip
def test_steps_that_are_too_long_and_too_short_have_other_causes(kind, cause, severity):
    """Both are UPDATE-RATIO."""
    assert judged(of("UPDATE-RATIO", kind=kind), of(cause))["UPDATE-RATIO"].severity == severity


@pytest.mark.parametrize(("kind", "hint"), [("all", DEAD), ("some", "GRAD-ZERO")])
def test_of_two_that_may_cause_each_other_the_first_in_the_table_does(kind, hint):
    """Dead units stop gradients, unless none was ever anything but zero."""
    found = judged(of(DEAD), of("GRAD-ZERO", kind=kind))

    assert [code for code, finding in found.items() if finding.severity == "info"] == [hint]


def test_the_deepest_cause_is_named():
    """And what has become a hint causes nothing."""
    found = judged(of("GRAD-ZERO", kind="some"), of(DEAD), of(RATE), of("INPUT-SCALE"))

    assert {code: finding.follows for code, finding in found.items()} == {
        "INPUT-SCALE": "",
        "GRAD-ZERO": "INPUT-SCALE",
        DEAD: "INPUT-SCALE",
        RATE: "INPUT-SCALE",
    }


def test_rules_that_were_not_chosen_cause_nothing():
    """Only what was found counts."""
    assert judged(of(DEAD, "error"))[DEAD].severity == "error"


def test_the_table_names_rules_and_goes_one_way():
    """A cause stands before what follows from it, but for gradients that are all zero and units that were dead at the start."""
    known, causes = {rule.code for rule in ALL}, [cause for cause, _ in FOLLOWS]
    effects = {effect for _, several in FOLLOWS for effect in several}

    assert {name.partition(":")[0] for name in (*causes, *effects)} <= known
    assert len(set(causes)) == len(causes)
    for place, (_, several) in enumerate(FOLLOWS):
        assert not several & set(causes[: place + 1])


def test_a_cause_is_as_severe_as_what_follows_from_it():
    """An input that stops all training is an error, and what tells so points to it."""
    found = judged(of("INPUT-SCALE"), of("GRAD-ZERO", "error", kind="all"))

    assert (found["INPUT-SCALE"].severity, found["GRAD-ZERO"].severity) == ("error", "info")
    assert found["GRAD-ZERO"].remedy == "Fix INPUT-SCALE first."


@dataclass(frozen=True)
class Cause(Told):
    """A rule of one's own, whose fault others follow from."""

    code = "OWN-CAUSE"
    leads_to = "SPIKE UPDATE-RATIO:large"


@dataclass(frozen=True)
class Effect(Told):
    """A rule of one's own, whose fault follows from others."""

    code = "OWN-EFFECT"
    follows = "RATE-TOO-LARGE OWN-CAUSE"
    leads_to = "SCALE-DRIFT"


def test_a_rule_of_ones_own_has_its_place_among_the_causes():
    """It names what it follows from, and what follows from it, and no other rule is changed for it."""
    table = causes_and_effects([*ALL, Effect(), Cause()])
    order = [cause for cause, _ in table]

    assert dict(table)["OWN-CAUSE"] == {"SPIKE", "UPDATE-RATIO:large", "OWN-EFFECT"}
    assert "OWN-EFFECT" in dict(table)[RATE]
    assert order.index(RATE) < order.index("OWN-CAUSE") < order.index("OWN-EFFECT")
    assert [cause for cause in order if not cause.startswith("OWN")] == [
        cause for cause, _ in FOLLOWS
    ]


def test_a_finding_of_ones_own_rule_follows_from_others():
    """As one of Kedge's does."""
    findings = (of(RATE), of("OWN-EFFECT"))

    found = {finding.code: finding for finding in check(Recording.build(), [Effect(findings)])}

    assert found["OWN-EFFECT"].entry()["evidence"] == {"follows": RATE}
