"""NAN-BORN between a backward and the next forward: updates, gradients that were written, steps not looked at."""

from __future__ import annotations

import pytest

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from tests.rules.scenes import (
    ALL_GRADIENTS,
    EVERYTHING,
    FINITENESS,
    FULL,
    INF,
    NAN,
    Scene,
    all_of,
    chain,
    made_at,
    row,
    size,
)

TOTAL = ":grad.norm"


LOOK = (
    'To have the module named, run it again with "kedge run --budget none --every 1 SCRIPT". If no module is named then, the '
    "loss or an optimizer's step made it. "
    'To have the operation named, run "kedge run --dump SCRIPT".'
)


def only(scene: Scene) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = NanBorn().check(scene.recording())
    return finding


def with_totals(scene: Scene, *roots: str) -> Scene:
    """Add the site of each root that stands for all gradients as the optimizer gets them."""
    for prefix in roots or ("",):
        number = next(i for i, root in enumerate(scene.roots) if root["prefix"] == prefix)
        scene.site(f"{prefix}{TOTAL}", path=prefix, kind="grad.norm", root=number)
    return scene


def light(scene: Scene, step: int, sizes: dict[str, float]) -> None:
    """Add the norms of a light step."""
    scene.rows += [
        {**row_of, "level": FINITENESS}
        for site, rms in sizes.items()
        for row_of in [size(step, site, rms)]
    ]


def test_a_step_that_leaves_the_range_is_an_error():
    """An update whose norm is infinite ends a run, though every gradient and parameter before it was finite."""
    scene = chain()
    scene.step(0)
    scene.step(10)
    scene.rows = [r for r in scene.rows if r["site"] != "fc.weight:update" or r["step"] != 10]
    scene.rows.append({"step": 10, "site": "fc.weight:update", "count": 4, "sumsq": INF})

    finding = only(scene)

    assert (finding.severity, finding.site, finding.step) == ("error", "fc.weight:update", 10)
    assert finding.remedy.startswith(
        "Lower the learning rate: the step overflowed (its rms was 0.31,"
    )


def test_weights_that_the_optimizer_blew_up_are_the_cause_of_what_overflows_next():
    """The next forward overflows somewhere; the remedy is the learning rate and no epsilon."""
    scene = chain()
    scene.step(0)
    bad = all_of(["head:out", ":out", "head.weight:param.grad"], INF)
    scene.step(7, bad, level=FINITENESS, without=["fc.weight:param", "head.weight:param"])
    scene.rows += [
        {"step": 7, "site": "fc.weight:param", "count": 4, "sumsq": INF, "level": FINITENESS}
    ]
    light(scene, 7, {"head.weight:param": 1e8})

    finding = only(scene)

    assert finding.site == "head:out"
    assert finding.remedy.startswith(
        "The optimizer's steps are probably too large: the rms of fc.weight:param had gone from 0.31 at step 0 to more than 1e19 at step 7."
    )
    assert finding.evidence.growth.site == "fc.weight:param"


def test_weights_that_grew_as_weights_do_are_not_mentioned():
    """A parameter that doubled, or that began at zero, is no sign of a learning rate that is too large."""
    scene = chain()
    scene.step(0)
    scene.rows += [size(10, "fc.weight:param", 0.6), size(10, "head.weight:param", 0.4)]
    for r in scene.rows:
        if r["step"] == 0 and r["site"] == "head.weight:param":
            r["sumsq"] = 0.0
    scene.step(20, all_of(["log:out", "head:in", "head:out", ":out", *ALL_GRADIENTS], NAN))

    assert only(scene).evidence.growth is None


def test_gradients_that_the_program_spoiled_are_distinguished_from_those_a_backward_made():
    """Every gradient was finite when it was made, and not when the optimizer got it: something in between wrote it."""
    scene = with_totals(chain())
    scene.step(0)
    scene.step(10, {TOTAL: NAN, "fc.weight:update": NAN})
    scene.step(11, all_of(EVERYTHING, NAN) | {TOTAL: NAN}, level=FINITENESS)

    finding = only(scene)

    assert (finding.severity, finding.site, made_at(finding)) == ("error", TOTAL, "written, seen")
    assert finding.message == (
        ":grad.norm contained NaN (1 of 4 elements) when the optimizer got the gradients of step 10, although all of them "
        "were finite after backward: they were changed in between, by accumulation, unscaling, clipping or the program itself."
    )
    assert "clip_grad_norm_" in finding.remedy


@pytest.mark.parametrize(("weights", "confidence"), [(["fc"], 0.7), (["fc", "head"], 0.6)])
def test_between_full_steps_a_spoiled_gradient_is_not_blamed_on_the_program(weights, confidence):
    """There gradients are only seen as the optimizer gets them; a finite one after them makes the place surer."""
    scene = with_totals(chain())
    scene.step(0)
    scene.step(
        7,
        all_of([TOTAL, *(f"{path}.weight:param.grad" for path in weights)], NAN),
        level=FINITENESS,
    )

    assert (made_at(only(scene)), only(scene).confidence) == ("backward, between", confidence)


def test_a_parameter_that_was_finite_a_step_before_was_made_by_the_step_between():
    """What the optimizer did is distinguished from what came with a checkpoint."""
    scene = chain()
    scene.step(0)
    scene.step(1)
    scene.step(2, all_of(EVERYTHING, NAN), level=FINITENESS)

    finding = only(scene)

    assert (finding.site, made_at(finding), finding.confidence) == (
        "fc.weight:param",
        "optimizer, between",
        0.9,
    )
    assert finding.message.endswith(
        "and all was finite in step 1: the optimizer's step between the two made it, or the program's own code wrote it."
    )


def test_steps_that_were_not_looked_at_are_said_so():
    """Where the last look was some steps before, nobody is named; the remedy is to look at every step."""
    scene = chain()
    scene.step(0)
    scene.step(10, without=["fc.weight:update", "head.weight:update"])
    scene.step(23, all_of(EVERYTHING, NAN), level=FINITENESS)

    finding = only(scene)

    assert (finding.severity, made_at(finding), finding.confidence) == (
        "error",
        "unseen, between",
        0.6,
    )
    assert finding.message == (
        "fc.weight:param contained NaN when the forward of step 23 used it, and all was finite in step 10: "
        "it was made between the two, in steps that were not recorded."
    )
    assert finding.remedy == LOOK


def test_steps_that_were_too_large_before_are_named():
    """The last step that was measured in full had changed a weight by its own size."""
    scene = chain()
    scene.step(0)
    scene.step(10)
    scene.step(23, all_of(EVERYTHING, NAN), level=FINITENESS)

    assert only(scene).remedy == (
        "The optimizer's steps may be too large: that of step 10, the last measured one before, changed head.weight "
        "by 1 times its size; lower the learning rate or warm it up, and clip gradients. " + LOOK
    )


@pytest.mark.parametrize(("norm", "named"), [(600.0, False), (620.0, True)])
def test_gradients_that_had_risen_a_thousandfold_are_named(norm, named):
    """Then the run had diverged before; what gradients usually do is no sign of that."""
    scene = with_totals(chain())
    scene.step(0)
    scene.step(10)
    for each in scene.rows:
        if each["site"] == TOTAL and each["step"] == 10:
            each["sumsq"] = norm**2
    scene.step(23, all_of(EVERYTHING, NAN), level=FINITENESS)

    sentence = (
        "The run had diverged before: the norm of all gradients had gone from 0.61 to 6.2e+02 at step 10; "
        "lower the learning rate or warm it up, and clip gradients."
    )
    assert (sentence in only(scene).remedy) == named
    assert ("The run had diverged" in only(scene).remedy) == named


def test_a_module_is_named_after_steps_not_looked_at_if_its_parameters_are_finite():
    """Finite parameters show that nothing was spoiled before this step."""
    scene = chain()
    scene.step(0)
    bad = all_of(
        [
            "log:out",
            "head:in",
            "head:out",
            ":out",
            "fc.weight:param.grad",
            "head.weight:param.grad",
        ],
        NAN,
    )
    scene.step(23, bad, level=FINITENESS)

    assert only(scene).site == "log:out"


def gradients_alone(scene: Scene, step: int) -> Scene:
    """Record two healthy steps, and a guarded one with non-finite gradients."""
    scene.step(0)
    scene.step(10)
    weights = ("fc.weight:param.grad", "head.weight:param.grad")
    scene.rows += [row(step, site, [NAN], level=FINITENESS) for site in weights]
    return scene


def test_an_optimizer_that_was_fed_bad_gradients_shows_no_place():
    """What it makes of its spoiled moments in a later step came of the gradients of the earlier one."""
    scene = gradients_alone(chain(), 17)
    scene.step(20, {"fc.weight:update": NAN})

    finding = only(scene)

    assert (finding.site, finding.step, made_at(finding)) == (
        "fc.weight:param.grad",
        17,
        "unseen, unknown",
    )


def test_a_module_that_breaks_again_with_sound_parameters_is_the_place():
    """What a later step shows of finite inputs and parameters holds for the gradients before it, a little less surely."""
    scene = gradients_alone(chain(), 17)
    scene.step(20, all_of(["log:out", "head:in", "head:out", ":out"], NAN))

    finding = only(scene)

    assert (finding.site, made_at(finding)) == ("log:out", "forward, seen")
    assert (finding.step, finding.confidence) == (17, 0.8)


def skipping(dtype: str, *, stepped: bool) -> Scene:
    """Record a backward that overflows; its step is skipped, so that the same step's next backward reaches the optimizer."""
    scene = with_totals(chain())
    for site in scene.sites:
        site["dtype"] = dtype
    scene.step(0)
    bad = all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], INF)
    after = [
        TOTAL,
        "fc.weight:param",
        "head.weight:param",
        "fc.weight:update",
        "head.weight:update",
    ]
    scene.step(10, bad, without=[] if stepped else after)
    return scene


@pytest.mark.parametrize(("dtype", "severity"), [("float32", "warning"), ("float16", "info")])
def test_a_skipped_step_is_not_held_against_a_run(dtype, severity):
    """The gradients that the optimizer got in that step were finite: the others never reached it."""
    finding = only(skipping(dtype, stepped=True))

    assert (finding.severity, finding.evidence.skipped) == (severity, True)
    assert finding.message.endswith(
        "The run went on, because the optimizer never got these gradients."
    )
    assert finding.remedy.startswith("Once in a while this is normal") is (dtype == "float16")


@pytest.mark.parametrize(("dtype", "severity"), [("float32", "error"), ("float16", "info")])
def test_a_run_that_ends_with_a_skipped_step_may_be_healthy(dtype, severity):
    """With float16 a step that the optimizer did not make is the scaler's doing; without, the run ended there."""
    assert only(skipping(dtype, stepped=False)).severity == severity


def two_models() -> Scene:
    """A generator that goes wrong in step 10, and a discriminator that goes on healthily."""
    scene = Scene(name="D")
    scene.module("", "D", weight=True)
    root = scene.root("G")
    scene.open("G", "G", root=root)
    scene.module("G.log", "Log", root=root)
    scene.module("G.head", of=["G.log"], weight=True, root=root)
    scene.close("G", "G", root=root)
    return with_totals(scene, "", "G")


def test_another_model_that_does_well_does_not_heal_this_one():
    """A second finding about a parameter that held a NaN would be the consequence of the first."""
    scene = two_models()
    mine = [site["site"] for site in scene.sites if site["site"].startswith("G")]
    bad = all_of(
        [
            "G.log:out",
            "G.head:in",
            "G.head:out",
            "G:out",
            "G.head.weight:param.grad",
            "G:grad.norm",
        ],
        NAN,
    )
    scene.step(0)
    scene.step(10, bad)
    for step in range(11, 20):  # what goes on as badly as before is not written
        scene.step(
            step, level=FINITENESS, without=[s["site"] for s in scene.sites if s["site"] != TOTAL]
        )
    scene.step(20, all_of(mine, NAN))

    finding = only(scene)

    assert (finding.site, finding.severity, finding.evidence.recovered) == (
        "G.log:out",
        "error",
        False,
    )


def test_a_loss_that_is_finite_again_shows_that_a_step_was_survived():
    """Where the hurt model's own gradients are finite later, the run went on."""
    scene = two_models()
    bad = all_of(["G.log:out", "G.head:in", "G.head:out", "G:out"], NAN)
    scene.step(0)
    scene.step(10, bad, without=["G.head.weight:param.grad", "G:grad.norm"])
    scene.step(20)

    assert only(scene).evidence.recovered is True


def test_a_row_of_one_rank_tells_of_all():
    """The total of one rank that is not finite is enough."""
    scene = with_totals(chain())
    scene.step(0)
    scene.step(10)
    scene.rows.append(row(10, TOTAL, [NAN], level=FULL))
    scene.rows.append(row(11, "fc.weight:param", [NAN], level=FINITENESS))

    assert only(scene).site == TOTAL
