"""NAN-BORN in the forward: who made it, and who only passed it on."""

from __future__ import annotations

import dataclasses

import pytest

from kedge.json_input.classes import as_json
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.goldens import Golden, golden
from tests.rules.scenes import (
    AFTER_LOG,
    ALL_GRADIENTS,
    EVERYTHING,
    FINITENESS,
    INF,
    NAN,
    Scene,
    all_of,
    chain,
    made_at,
    row,
)


@golden("NAN-BORN")
def golden_nan_born(*, fires: bool) -> Golden:
    """Make log produce -inf at step 20, or a mask that the next module heals."""
    scene = chain(loss=True)
    scene.step(0)
    spread = {"head:out": -INF, ":out": -INF, "Loss:in": -INF, "Loss:out": INF} | dict.fromkeys(
        ALL_GRADIENTS, NAN
    )
    scene.step(20, {"log:out": -INF, "head:in": -INF} | (spread if fires else {}))
    return {"roots": scene.roots, "sites": scene.sites, "rows": scene.rows}


def found(scene: Scene | Recording) -> list[Finding]:
    """Run the rule."""
    return list(NanBorn().check(scene if isinstance(scene, Recording) else scene.recording()))


def only(scene: Scene | Recording) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = found(scene)
    return finding


def broken(scene: Scene, bad: dict[str, float], *, level: int = 2, step: int = 20) -> Scene:
    """Record two healthy steps and one that goes wrong."""
    scene.step(0)
    scene.step(10)
    scene.step(step, bad, level=level)
    return scene


def test_the_first_producer_is_named_and_the_others_are_counted():
    """Of all sites that hold a NaN only the one that made it is reported."""
    scene = broken(chain(), all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))

    finding = only(scene)

    assert (finding.severity, finding.site, finding.step) == ("error", "log:out", 20)
    assert finding.message == (
        "log:out was the first to contain NaN (1 of 4 elements), at step 20; its input was finite."
    )
    assert finding.evidence.propagated == len(AFTER_LOG) + len(ALL_GRADIENTS) - 1
    assert as_json(finding.evidence.near) == {
        "log:in": {"step": 20, "min": -0.25, "max": 0.5, "rms": 0.306186}
    }
    assert finding.confidence == 1.0
    assert "log" in finding.remedy


def test_a_module_with_a_parameter_says_that_it_was_finite():
    """The sentence names everything that was checked."""
    finding = only(broken(chain(), {"head:out": -INF, ":out": -INF, "head.weight:param.grad": NAN}))

    assert finding.message == (
        "head:out was the first to contain -inf (1 of 4 elements), at step 20; its input and parameters were finite."
    )


def test_a_container_is_not_named_for_what_its_child_made():
    """A container returns the tensor of its last child; the innermost module is the producer."""
    scene = Scene()
    scene.open("")
    scene.open("block")
    scene.open("block.inner")
    scene.module("block.inner.act", "Exp")
    scene.close("block.inner")
    scene.close("block")
    scene.close("")
    broken(scene, all_of(["block.inner.act:out", "block.inner:out", "block:out", ":out"], INF))

    finding = only(scene)

    assert (finding.site, made_at(finding)) == ("block.inner.act:out", "forward, seen")
    assert finding.evidence.propagated == 3


def test_an_operation_after_the_last_child_is_its_containers_own():
    """If all children returned finite values and the container did not, its own forward made it."""
    finding = only(broken(chain(), {":out": NAN}))

    assert (finding.site, made_at(finding)) == (":out", "forward, inferred")
    assert finding.message == (
        ":out was the first to contain NaN (1 of 4 elements), at step 20; "
        "the modules inside it returned finite values, so an operation in its own forward made it."
    )


def test_of_several_outputs_the_first_is_named():
    """A model whose own operation spoils all that it returns is reported once, at its first output."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc")
    scene.site(":out[0]", type="Net", kind="out")
    scene.site(":out[1]", type="Net", kind="out")

    finding = only(broken(scene, {":out[0]": NAN, ":out[1]": NAN}))

    assert (finding.site, made_at(finding)) == (":out[0]", "forward, inferred")


def unwatched_operation(source: str | None) -> Scene:
    """Net: a, then an operation that is no module, then b.inner inside b."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("a")
    scene.open("b", of=[source])
    scene.module("b.inner", of=[source])
    scene.close("b")
    scene.close("", "Net")
    return broken(scene, all_of(["b:in", "b.inner:in", "b.inner:out", "b:out", ":out"], NAN))


@pytest.mark.parametrize(("source", "sure"), [(None, 0.8), ("a", 0.9)])
def test_what_no_module_made_was_born_between(source, sure):
    """An input that is not finite although what came before was: the parent's forward made it.

    The tensor is another one than a's output, or the same one changed in place.
    """
    finding = only(unwatched_operation(source))

    assert finding.message == (
        "b:in was the first to contain NaN (1 of 4 elements), at step 20, although a:out before it was finite: "
        "an operation in the forward of Net made it, outside any watched module."
    )
    assert (finding.evidence.module, list(finding.evidence.near)) == ("", ["a:out"])
    assert finding.confidence == sure


def test_between_the_start_of_a_forward_and_its_first_child():
    """Where nothing came before, the parent alone is named."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("a")
    scene.close("", "Net")

    finding = only(broken(scene, all_of(["a:in", "a:out", ":out"], NAN)))

    assert finding.message == (
        "a:in was the first to contain NaN (1 of 4 elements), at step 20: "
        "an operation in the forward of Net made it, outside any watched module."
    )


def test_without_inputs_the_sources_are_looked_at():
    """A recording of outputs alone still tells the producer from the others."""
    scene = Scene()
    for path, source in (("a", None), ("b", "a"), ("c", "b")):
        scene.site(
            f"{path}:out",
            type="Linear",
            **{"from": [scene.id(f"{source}:out") if source else None]},
        )
    broken(scene, {"b:out": NAN, "c:out": NAN})

    finding = only(scene)

    assert (finding.site, finding.confidence) == ("b:out", 0.9)


def test_with_neither_inputs_nor_sources_the_order_decides():
    """The first in the order of the flow is named, and the sentence says on what it rests."""
    scene = Scene()
    for path in "abc":
        scene.site(f"{path}:out", type="Linear", **{"from": []})
    broken(scene, {"b:out": NAN, "c:out": NAN})

    finding = only(scene)

    assert (finding.site, finding.confidence) == ("b:out", 0.7)
    assert finding.message.endswith(
        "its input and parameters were finite, as far as they were watched."
    )


def test_a_healed_infinity_is_no_finding():
    """A mask of -inf whose softmax, output and gradients are finite is what the program wants."""
    assert found(broken(chain(), {"log:out": -INF, "head:in": -INF})) == []


def test_a_healed_nan_is_a_warning():
    """A NaN that something replaced did no harm yet, but nobody makes one on purpose."""
    finding = only(broken(chain(), {"log:out": NAN, "head:in": NAN}))

    assert (finding.severity, finding.site) == ("warning", "log:out")
    assert finding.evidence.healed == ["head:out"]
    assert finding.message.endswith("The run went on.")


def test_a_nan_that_a_module_was_given_and_did_not_use_is_for_information():
    """Memory of torch.empty that a module takes and ignores hurts nothing, and no operation made it."""
    finding = only(broken(chain(), {"head:in": NAN}))

    assert (finding.severity, finding.site) == ("info", "head:in")
    assert finding.message.startswith(
        "head:in contained NaN (1 of 4 elements) at step 20, although log:out before it was "
        "finite: the forward of Net passes it in from outside any watched module."
    )
    assert finding.message.endswith(
        " No module returned it, and all gradients were finite. The run went on."
    )
    assert finding.remedy.startswith("If it is memory of torch.empty that the module does not use")


@pytest.mark.parametrize(("calls", "says"), [(1, "outside the model, with the batch"), (3, "")])
def test_a_model_that_takes_its_own_result_may_have_made_what_goes_in(calls, says):
    """A solver of an equation calls it again and again in a step, and the input of a later call is no batch."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc", weight=True)
    scene.close("", "Net")
    broken(scene, all_of([":in", "fc:in", "fc:out", ":out", "fc.weight:param.grad"], NAN))
    for each in scene.rows:
        each["calls"] = calls

    finding = only(scene)

    assert made_at(finding) == "entry, seen"
    assert says in finding.message
    assert ("in which Net was called 3 times: the result of one" in finding.message) == (not says)
    assert ("in the forward of Net, look at the range" in finding.remedy) == (not says)


def test_missing_values_that_the_model_replaces_are_for_information():
    """A batch with NaN, of which no module returns one, is what the model is made for."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc", weight=True)
    scene.close("", "Net")
    finding = only(broken(scene, {":in": NAN}))

    assert (finding.severity, made_at(finding)) == ("info", "entry, seen")
    assert finding.remedy.startswith(
        "If the model replaces missing values, this is as it should be"
    )


@pytest.mark.parametrize("reached", [["head:out"], ["fc.weight:param.grad"], ["head:out", ":out"]])
def test_a_given_nan_that_goes_on_is_no_information(reached):
    """What a module returns or a gradient holds is more than a hint."""
    finding = only(broken(chain(), all_of(["head:in", *reached], NAN)))

    assert finding.severity in ("warning", "error")


@pytest.mark.parametrize(
    "reached",
    [
        ["head:out", ":out"],
        ["head:out", "Loss:in", "Loss:out"],
        ["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"],
    ],
)
def test_an_infinity_that_reaches_what_counts_is_an_error(reached):
    """What the model returns, the loss and every gradient have to be finite.

    In the last case the forward replaced the infinity, and its derivative met it all the same.
    """
    scene = broken(chain(loss=True), all_of(["log:out", "head:in", *reached], INF))

    assert (only(scene).severity, only(scene).site) == ("error", "log:out")


def test_masked_scores_are_no_finding():
    """A model may return -inf for what is impossible, if every gradient is finite."""
    assert found(broken(chain(), {"head:out": -INF, ":out": -INF})) == []


def test_a_loss_of_minus_infinity_is_an_error():
    """A single number is a loss and no mask, whatever the gradients."""
    finding = only(broken(chain(loss=True), {"Loss:out": -INF}))

    assert (finding.severity, finding.site) == ("error", "Loss:out")


def test_a_model_that_is_tried_out_after_its_training_is_judged_to_the_end():
    """Without gradients a step is judged by what the model returned."""
    scene = broken(chain(), {})
    gradients = [
        site["site"] for site in scene.sites if "grad" in site["site"] or "update" in site["site"]
    ]
    scene.step(30, {"log:out": NAN, "head:in": NAN}, without=gradients)
    scene.step(40, {"head:out": NAN, ":out": NAN}, without=gradients)

    healed, last = sorted(found(scene), key=lambda finding: finding.step)

    assert (healed.severity, healed.site) == ("warning", "log:out")
    assert healed.message.endswith("The run went on.")
    assert (last.severity, last.site, last.step) == ("error", "head:out", 40)


def test_masked_scores_without_training_are_a_warning():
    """Where no gradient tells whether -inf was meant, it is said with less force."""
    scene = chain()
    gradients = [
        site["site"] for site in scene.sites if "grad" in site["site"] or "update" in site["site"]
    ]
    scene.step(0, without=gradients)
    scene.step(1, {"head:out": -INF, ":out": -INF}, without=gradients)

    assert (only(scene).severity, only(scene).site) == ("warning", "head:out")


def test_plus_infinity_without_training_is_an_error():
    """Nobody masks with it."""
    scene = chain()
    gradients = [
        site["site"] for site in scene.sites if "grad" in site["site"] or "update" in site["site"]
    ]
    scene.step(0, {"head:out": INF, ":out": INF}, without=gradients)

    assert only(scene).severity == "error"


def test_an_infinity_out_of_sight_of_outputs_and_gradients_is_for_information():
    """A recording of a few sites cannot tell what became of it."""
    scene = Scene()
    scene.module("deep.inside")
    broken(scene, {"deep.inside:out": INF})

    assert only(scene).severity == "info"


def test_a_row_of_minus_infinities_is_blamed_on_the_softmax():
    """An infinity that is there in healthy steps too does not excuse the module that makes NaN of it."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("scores", weight=True)
    scene.module("mask", "Mask", ["scores"])
    scene.module("softmax", "Softmax", ["mask"])
    scene.module("head", of=["softmax"], weight=True)
    scene.close("", "Net")
    usual = {"mask:out": -INF, "softmax:in": -INF}
    for step in (0, 10):
        scene.step(step, usual)
    scene.step(
        20,
        usual
        | all_of(["softmax:out", "head:in", "head:out", ":out", "head.weight:param.grad"], NAN),
    )

    assert (only(scene).site, only(scene).evidence.value) == ("softmax:out", "NaN")


def test_a_bad_batch_is_said_to_come_from_outside():
    """A NaN in what the model is given was not made by the model."""
    finding = only(broken(chain(), all_of([":in", "fc:in", *EVERYTHING[:-2]], NAN)))

    assert (finding.site, finding.severity, finding.evidence.module) == (":in", "error", None)
    assert "with the batch" in finding.message
    assert finding.confidence == 0.9


def test_a_bad_batch_that_was_skipped_is_reported_once():
    """The same birth in several steps after which the run went on is one finding."""
    scene = chain()
    bad = all_of([":in", "fc:in", *EVERYTHING[:-2]], NAN)
    for step in range(0, 60, 10):
        scene.step(step, bad if step in (20, 40) else {})

    finding = only(scene)

    assert finding.message.endswith(
        "This happened in 2 steps from step 20 on, and the run went on."
    )
    assert (finding.evidence.steps, finding.evidence.recovered) == (2, True)


def test_a_parameter_that_was_loaded_broken():
    """A NaN that is in a parameter from the start was born there, whatever spreads it."""
    scene = chain()
    scene.step(0, all_of(["head.weight:param", "head:out", ":out", *ALL_GRADIENTS], NAN))

    finding = only(scene)

    assert (finding.site, finding.step, made_at(finding)) == (
        "head.weight:param",
        0,
        "parameter, inferred",
    )
    assert "checkpoint" in finding.message


def test_a_broken_parameter_that_a_container_uses_itself():
    """What a child is given is the container's own doing, and that is the parameter's."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("head", weight=True)
    scene.close("", "Net", weight=True)
    scene.step(
        0, all_of(["weight:param", "head:in", "head:out", ":out", "head.weight:param.grad"], NAN)
    )

    assert only(scene).site == "weight:param"


def test_after_the_parameters_are_gone_nothing_more_is_reported():
    """A hundred later steps full of NaN are the consequence of one birth."""
    scene = broken(chain(), all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    for step in range(30, 1030, 10):
        scene.step(step, all_of(EVERYTHING, NAN))

    assert (only(scene).site, only(scene).step) == ("log:out", 20)


def test_an_optimizer_step_that_makes_it_is_named():
    """Finite gradients and a change that is not: the optimizer did it, and what follows follows from it."""
    scene = broken(chain(), {"fc.weight:update": NAN})
    scene.step(21, all_of(EVERYTHING, NAN), level=FINITENESS)

    finding = only(scene)

    assert (finding.site, finding.step, finding.severity) == ("fc.weight:update", 20, "error")


def test_two_independent_births_are_two_findings():
    """Two heads that both go wrong are both named."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("left", "Log")
    scene.module("right", "Log")
    scene.module("head", of=["left", "right"], weight=True)
    scene.close("", "Net")
    broken(scene, all_of(["left:out", "right:out", "head:in", "head:out", ":out"], NAN))

    assert [finding.site for finding in found(scene)] == ["left:out", "right:out"]


def test_a_later_birth_beside_an_earlier_one_is_found():
    """What a parallel branch made does not excuse a module whose own sources were finite."""
    scene = Scene()
    for path, sources in {
        "left": [None],
        "stem": [None],
        "right": ["stem"],
        "head": ["left", "right"],
    }.items():
        ids = [scene.id(f"{source}:out") if source else None for source in sources]
        scene.site(f"{path}:out", type="Log", **{"from": ids})
    broken(scene, all_of(["left:out", "right:out", "head:out"], NAN))

    assert [finding.site for finding in found(scene)] == ["left:out", "right:out"]


def test_an_operation_that_passes_a_nan_on_is_not_taken_for_its_birth():
    """Behind a flatten or an addition the tensor is a new one, but what came before explains it."""
    scene = chain()
    scene.sites[scene.id("head:in")]["from"] = [None]

    assert only(broken(scene, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))).site == "log:out"


def test_no_more_births_are_reported_than_asked_for():
    """A broken recording does not fill the screen."""
    scene = Scene()
    for i in range(9):
        scene.module(f"m{i}")
    broken(scene, {f"m{i}:out": NAN for i in range(9)})

    findings = list(NanBorn(max_findings=3).check(scene.recording()))

    assert len(findings) == 3
    assert findings[0].evidence.births == 9


def test_a_module_fed_by_itself_is_named_with_little_confidence():
    """In a cell that is called many times a step the rows of all calls are one: the call cannot be known."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("embed")
    scene.site("cell:in", type="RNNCell", **{"from": [scene.id("embed:out"), len(scene.sites) + 1]})
    scene.close("cell", "RNNCell", weight=True)
    scene.module("head", of=["cell"], weight=True)
    scene.close("", "Net")
    broken(scene, all_of(["cell:in", "cell:out", "head:in", "head:out", ":out"], NAN))

    finding = only(scene)

    assert (finding.site, finding.confidence, made_at(finding)) == (
        "cell:out",
        0.5,
        "forward, unknown",
    )


def test_one_activation_used_twice_does_not_hide_the_producer():
    """A ReLU that is called before and after the culprit holds a NaN, but its own source explains it."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc")
    scene.site("relu:in", type="ReLU", **{"from": [scene.id("fc:out"), len(scene.sites) + 5]})
    scene.close("relu", "ReLU")
    scene.module("log", "Log", ["relu"])
    scene.module("head", of=["relu"])
    scene.close("", "Net")
    scene.sites[scene.id("relu:in")]["from"][1] = scene.id("log:out")
    broken(scene, all_of(["log:out", "relu:in", "relu:out", "head:in", "head:out", ":out"], NAN))

    assert only(scene).site == "log:out"


def test_one_rank_of_several_is_enough():
    """Rows of one step and site from several ranks are one, and a NaN in any of them counts."""
    scene = broken(chain(), all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    healthy = chain()
    healthy.step(20)
    scene.rows += healthy.rows

    finding = only(scene)

    assert (finding.site, finding.evidence.nonfinite, finding.evidence.count) == (
        "log:out",
        1,
        8,
    )


def test_an_overflow_of_values_that_had_grown_is_called_a_divergence():
    """Where the inputs are huge already, the remedy is not an epsilon."""
    scene = broken(chain(), {})
    scene.rows += [
        row(30, site["site"], [1.0, 2e30 if site["site"] == "head:in" else 1.0])
        for site in scene.sites
    ]
    scene.rows = [r for r in scene.rows if r["step"] != 30 or r["site"] not in ("head:out", ":out")]
    scene.rows += [row(30, "head:out", [INF, -INF]), row(30, ":out", [INF, -INF])]

    finding = only(scene)

    assert finding.evidence.value == "inf and -inf"
    assert finding.remedy.startswith(
        "The values next to it had grown to 2.0e+30: the run had diverged"
    )


def test_a_running_program_is_judged_by_what_is_there():
    """Neither an end event nor later steps are needed, and one step is enough."""
    scene = chain()
    scene.step(0, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))

    assert scene.recording().end is None
    assert (only(scene).site, only(scene).step) == ("log:out", 0)


def test_the_rule_is_a_value():
    """Thresholds are fields; a rule with others is another rule."""
    assert dataclasses.replace(NanBorn(), max_findings=1) == NanBorn(max_findings=1)
