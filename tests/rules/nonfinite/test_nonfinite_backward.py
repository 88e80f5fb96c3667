"""NAN-BORN in the backward: in whose backward, or in the loss."""

from __future__ import annotations

import pytest

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from tests.rules.scenes import ALL_GRADIENTS, FINITENESS, INF, NAN, Scene, all_of, chain, made_at


def only(scene: Scene) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = NanBorn().check(scene.recording())
    return finding


def broken(scene: Scene, bad: dict[str, float], *, level: int = 2) -> Scene:
    """Record two healthy steps and one that goes wrong."""
    scene.step(0)
    scene.step(10)
    scene.step(20, bad, level=level)
    return scene


def test_it_was_born_in_the_backward_of_the_module_that_takes_the_output():
    """The gradient of relu's output is bad and that of log's is not: log's backward lies between them."""
    scene = broken(chain(), all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], NAN))

    finding = only(scene)

    assert finding.message == (
        "relu:out.grad was the first gradient to contain NaN (1 of 4 elements), at step 20; "
        "the gradient that arrived at log (Log) was finite, so its backward made it."
    )
    assert (
        made_at(finding),
        finding.evidence.module,
        finding.evidence.propagated,
    ) == (
        "backward, seen",
        "log",
        2,
    )
    assert list(finding.evidence.near) == ["log:out.grad"]
    assert (finding.severity, finding.confidence) == ("error", 0.9)


def test_containers_are_looked_through():
    """An output that leaves a container and enters another is its last child's and goes to the first child."""
    scene = Scene()
    scene.open("", "Net")
    scene.open("left")
    scene.module("left.fc", weight=True)
    scene.close("left")
    scene.open("right", of=["left.fc"])
    scene.module("right.root", "Sqrt", ["left.fc"])
    scene.module("right.head", of=["right.root"])
    scene.close("right")
    scene.close("", "Net")

    finding = only(
        broken(
            scene, all_of(["left:out.grad", "left.fc:out.grad", "left.fc.weight:param.grad"], INF)
        )
    )

    assert (finding.site, finding.evidence.module) == ("left.fc:out.grad", "right.root")


def test_the_consumer_of_a_container_is_found():
    """It makes no difference whether the recorded source is the container or its last child."""
    scene = Scene()
    scene.open("", "Net")
    scene.open("left")
    scene.module("left.fc", weight=True)
    scene.close("left")
    scene.module("right", "Sqrt", ["left"])
    scene.close("", "Net")

    finding = only(
        broken(
            scene, all_of(["left:out.grad", "left.fc:out.grad", "left.fc.weight:param.grad"], INF)
        )
    )

    assert (finding.site, finding.evidence.module) == ("left.fc:out.grad", "right")


def test_the_innermost_consumer_is_named():
    """Where a container and its first child both take the output, the child's backward made it."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc")
    scene.open("block", of=["fc"])
    scene.module("block.first", of=["fc"])
    scene.close("block")
    scene.close("", "Net")

    finding = only(broken(scene, {"fc:out.grad": NAN}))

    assert (finding.evidence.module, finding.confidence) == ("block.first", 0.9)


def test_a_container_without_a_gradient_of_its_own_is_looked_through():
    """Who takes a container's output takes its last child's, seen or not."""
    scene = Scene()
    scene.open("", "Net")
    scene.open("left")
    scene.module("left.fc", weight=True)
    scene.close("left")
    scene.module("right", "Sqrt", ["left"])
    scene.close("", "Net")
    scene.sites = [site for site in scene.sites if site["site"] != "left:out.grad"]
    for i, site in enumerate(scene.sites):
        site |= {"id": i, "from": [scene.id("left:out")] if site["site"] == "right:in" else []}

    finding = only(broken(scene, all_of(["left.fc:out.grad", "left.fc.weight:param.grad"], INF)))

    assert (made_at(finding), finding.evidence.module) == ("backward, seen", "right")


def test_a_loss_module_is_named():
    """A loss that is a module is a root of its own; its backward can make a NaN like any other's."""
    finding = only(broken(chain(loss=True), all_of(ALL_GRADIENTS, NAN)))

    assert (finding.site, finding.evidence.module) == ("head:out.grad", "Loss")


def test_a_loss_outside_of_modules_is_named():
    """If the gradient that enters the model is bad, what the program computed from its output made it."""
    finding = only(broken(chain(), all_of(ALL_GRADIENTS, NAN)))

    assert (finding.site, made_at(finding), finding.evidence.module) == (
        "head:out.grad",
        "backward, inferred",
        None,
    )
    assert (
        "an operation of the program after it, in the loss or before it, made it" in finding.message
    )


def test_a_parameters_gradient_can_be_the_first():
    """A weight's gradient is made in its module's backward, beside the gradient that goes on."""
    finding = only(broken(chain(), {"head.weight:param.grad": INF}))

    assert finding.message == (
        "head.weight:param.grad was the first gradient to contain inf (1 of 4 elements), at step 20; "
        "the gradient that arrived at head (Linear) was finite, so its backward made it."
    )


def test_the_one_nearest_to_the_loss_comes_first():
    """Of a weight's gradient and an output's, the one that the backward reaches first is reported."""
    bad = ["head.weight:param.grad", "relu:out.grad", "fc:out.grad", "fc.weight:param.grad"]

    assert only(broken(chain(), all_of(bad, NAN))).site == "head.weight:param.grad"


def test_a_containers_own_parameter_has_no_place_in_the_order():
    """It is used somewhere inside; that its gradient is bad says less than an output's."""
    scene = chain()
    scene.site("pos:param.grad", path="pos", kind="param.grad", owner="")

    finding = only(broken(scene, all_of(["pos:param.grad", "relu:out.grad", "fc:out.grad"], NAN)))

    assert (finding.site, finding.evidence.module) == ("relu:out.grad", "log")


def test_an_operation_between_two_modules_is_delimited():
    """Where no module takes the output as it is, the next one towards the loss marks the other end."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc", weight=True)
    scene.module("head")
    scene.close("", "Net")

    finding = only(broken(scene, all_of(["fc:out.grad", "fc.weight:param.grad"], NAN)))

    assert finding.message.endswith(
        "head:out.grad, nearer to the loss, was finite: a backward between the two made it."
    )


def test_another_use_of_the_output_is_not_ruled_out():
    """A skip connection may have brought the NaN past the module that takes the output in."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc")
    scene.module("branch", of=["fc"])
    scene.module("head")
    scene.close("", "Net")

    finding = only(broken(scene, {"fc:out.grad": NAN}))

    assert (made_at(finding), finding.evidence.module, finding.confidence) == (
        "backward, among",
        "branch",
        0.7,
    )
    assert (
        "or that of an operation in Net's own forward that takes the same value" in finding.message
    )


def test_a_bad_forward_explains_bad_gradients():
    """The gradients of a NaN loss are no births of their own."""
    scene = broken(chain(), all_of(["log:out", "head:in", "head:out", ":out", *ALL_GRADIENTS], NAN))

    assert only(scene).site == "log:out"


def test_a_replaced_infinity_is_the_cause_of_the_nan_it_gives_back():
    """torch.where hides -inf from the forward; its derivative times zero is NaN all the same."""
    scene = chain()
    scene.sites[scene.id("head:in")]["from"] = [None]
    bad = {"log:out": -INF} | all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], NAN)

    finding = only(broken(scene, bad))

    assert (finding.site, finding.severity, finding.evidence.value) == (
        "log:out",
        "error",
        "-inf",
    )


def test_a_replaced_infinity_elsewhere_is_not_the_cause():
    """If the backward went wrong nearer to the loss, the infinity has nothing to do with it."""
    scene = chain(loss=True)
    bad = all_of(["relu:out", "log:in"], INF) | all_of(ALL_GRADIENTS, NAN)

    assert only(broken(scene, bad)).evidence.module == "Loss"


def test_a_gradient_that_reaches_no_parameter_does_little_harm():
    """An infinity that stays among the activations is no finding, a NaN there is a warning."""
    assert list(NanBorn().check(broken(chain(), {"relu:out.grad": INF}).recording())) == []
    assert only(broken(chain(), {"relu:out.grad": NAN})).severity == "warning"


def test_off_schedule_the_parameters_gradients_delimit_the_place():
    """Between two samples only the norms of parameters' gradients are known."""
    scene = broken(chain(), {"fc.weight:param.grad": NAN}, level=FINITENESS)

    finding = only(scene)

    assert finding.message == (
        "fc.weight:param.grad was the first gradient to contain NaN, at step 20; "
        "head.weight:param.grad, nearer to the loss, was finite: a backward between the two made it, "
        "or the program changed it before the optimizer got it."
    )
    assert finding.confidence == 0.7


def test_a_recording_of_gradients_alone_is_read_backwards():
    """Without outputs the order in which gradients fired shows which one is nearer to the loss."""
    scene = Scene()
    for path in ("c", "b", "a"):
        scene.site(
            f"{path}.weight:param.grad", path=f"{path}.weight", kind="param.grad", owner=path
        )
    broken(scene, all_of(["b.weight:param.grad", "a.weight:param.grad"], NAN))

    finding = only(scene)

    assert (finding.site, list(finding.evidence.near)) == (
        "b.weight:param.grad",
        ["c.weight:param.grad"],
    )


def test_off_schedule_clipping_may_have_spread_it():
    """If no gradient is finite, a clip by norm may have carried it from one to all."""
    scene = broken(
        chain(), all_of(["fc.weight:param.grad", "head.weight:param.grad"], NAN), level=FINITENESS
    )

    finding = only(scene)

    assert (finding.site, made_at(finding)) == ("head.weight:param.grad", "backward, between")
    assert "clipping by norm spreads it to all gradients" in finding.message


def test_a_norm_that_overflows_is_called_so():
    """An infinite sum of squares does not say that an element is infinite."""
    scene = broken(chain(), {"fc.weight:param.grad": INF}, level=FINITENESS)

    assert "to contain an infinite norm, at step 20" in only(scene).message


@pytest.mark.parametrize(("dtype", "severity"), [("float32", "warning"), ("float16", "info")])
def test_skipped_steps_are_one_finding_of_little_weight(dtype, severity):
    """After bad gradients the run went on: the program skipped those steps, as loss scaling does with float16."""
    scene = chain()
    for site in scene.sites:
        site["dtype"] = dtype
    for step in range(0, 50, 5):
        bad = all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], INF)
        scene.step(
            step, bad if step in (5, 10, 35) else {}, level=2 if step % 10 == 0 else FINITENESS
        )

    finding = only(scene)

    assert (finding.severity, finding.evidence.module, finding.evidence.steps) == (
        severity,
        "log",
        3,
    )
    assert finding.message.endswith("This happened in 3 steps from step 5 on, and the run went on.")
