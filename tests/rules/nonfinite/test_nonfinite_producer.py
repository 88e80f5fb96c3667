"""NAN-BORN where the loss itself is not finite, and where its graph shows the operation that made it."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.rules.scenes import (
    AFTER_LOG,
    ALL_GRADIENTS,
    FINITENESS,
    INF,
    NAN,
    Scene,
    all_of,
    chain,
    made_at,
    row,
)

SOURCE = {"file": "train.py", "line": 38, "function": "<module>", "text": "loss.backward()"}
MANIFEST = {"command": ["train.py"], "script": "train.py", "every": 10, "budget": 0.03}


def with_loss() -> Scene:
    """Make a model whose loss is made by the program: its mean, which backward is called on."""
    scene = chain()
    scene.site(
        "loss",
        path="loss",
        kind="loss",
        shape=[],
        root=-1,
        node="MeanBackward0",
        source=SOURCE,
        type="",
    )
    return scene


def producer(step: int = 20, **entry: Any) -> dict[str, Any]:
    """Describe the operation that the graph of the loss shows."""
    return {
        "kind": "producer",
        "step": step,
        "operation": "log",
        "node": "LogBackward0",
        "module": "",
        "file": "train.py",
        "line": 37,
        "text": "loss = torch.log(var).mean()",
        "where": "forward",
        "certain": True,
        "detail": "its input holds 3 zeros",
        **entry,
    }


def found(scene: Scene, **manifest: Any) -> list[Finding]:
    """Run the rule."""
    made = Recording.build(
        scene.sites, scene.rows, {**MANIFEST, **manifest}, scene.events, scene.roots
    )
    return list(NanBorn().check(made))


def only(scene: Scene, **manifest: Any) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = found(scene, **manifest)
    return finding


def broken(scene: Scene, bad: dict[str, float], **how: Any) -> Scene:
    """Record two healthy steps, and a third from which on something stays wrong."""
    for step in (0, 10):
        scene.step(step)
    scene.step(20, bad, **how)
    return scene


def test_a_loss_of_finite_outputs_is_named_with_its_line():
    """Its last operation, and where backward is called on it."""
    finding = only(broken(with_loss(), {"loss": NAN} | all_of(ALL_GRADIENTS, NAN)))

    assert (finding.severity, finding.site, finding.step) == ("error", "loss", 20)
    assert finding.message == (
        "loss contained NaN (1 of 4 elements) at step 20, while the modules' outputs were finite: the program's own operations "
        'after them made it (mean was its last operation). backward() is called on it at train.py:38, in <module>: "loss.backward()".'
    )
    assert made_at(finding) == "loss, seen"
    assert "Look at the loss" in finding.remedy


def test_a_loss_that_comes_of_a_module_is_the_modules():
    """It only passes it on."""
    finding = only(broken(with_loss(), {"loss": NAN} | all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN)))

    assert finding.site == "log:out"


def test_a_loss_that_recovers_is_a_warning():
    """The optimizer got finite gradients afterwards."""
    scene = broken(with_loss(), {"loss": INF} | all_of(ALL_GRADIENTS, NAN))
    scene.step(30)

    assert only(scene).severity == "warning"


def test_a_loss_in_a_step_of_which_nothing_else_was_seen_says_so():
    """A guarded step looks at the loss and the gradients alone."""
    scene = broken(
        with_loss(), {"loss": NAN}, level=FINITENESS, without=[*EVERY_VALUE, *ALL_GRADIENTS]
    )

    assert "without records of the modules' outputs" in only(scene).message


EVERY_VALUE = tuple(
    f"{path}{kind}" for path in ("", "fc", "relu", "log", "head") for kind in (":in", ":out")
)


def guarded(loss: float) -> Scene:
    """Record a guarded step with a non-finite loss and non-finite gradients."""
    scene = with_loss()
    scene.step(0)
    scene.step(10)
    scene.rows += [
        row(27, text, [NAN], level=FINITENESS)
        for text in ("fc.weight:param.grad", "head.weight:param.grad")
    ]
    scene.rows.append(row(27, "loss", [loss], level=FINITENESS))
    return scene


def test_the_loss_of_a_guarded_step_tells_forward_from_backward():
    """Where it was finite a backward made it."""
    assert (
        "loss (made by mean), on which train.py:38 calls backward(), was not finite either: a forward, an optimizer's step "
        "or the loss itself can have made it." in only(guarded(NAN)).message
    )
    assert (
        "the loss was finite: a backward, the clipping or another change of the gradients can have made it."
        in (only(guarded(1.0)).message)
    )


@pytest.mark.parametrize(
    ("manifest", "advice"),
    [
        ({}, '"kedge run --budget none --every 1 train.py"'),
        ({"budget": None, "every": 1}, '"kedge run --budget none --every 1 --dump train.py"'),
        ({"budget": None, "every": 1, "dump": True}, ""),
    ],
)
def test_no_option_is_advised_that_was_in_use(manifest, advice):
    """A second run with the same options shows the same."""
    remedy = only(guarded(NAN), **manifest).remedy

    assert ("run it again" in remedy) == bool(advice)
    assert advice in remedy
    assert remedy.endswith("exp of a large number.")


def test_after_a_guarded_step_of_compiled_code_both_commands_are_given():
    """One names the module in the program as it is, the other the operation in the program uncompiled."""
    scene = guarded(NAN)
    scene.events = [{"kind": "compiled", "step": 0}]
    remedy = only(scene).remedy

    assert (
        'run it again from a checkpoint of step 10 or before, if there is one, with "kedge run --budget'
        in remedy
    )
    assert remedy.endswith(
        ' To have the operation named, run "TORCH_COMPILE_DISABLE=1 kedge run --dump train.py".'
    )
    every_step = only(scene, budget=None, every=1).remedy
    assert every_step.count("TORCH_COMPILE_DISABLE=1") == 1


def test_the_producer_is_named_where_the_rows_show_a_range_of_steps():
    """Operation, place, line and what is known of its input; no option is advised."""
    scene = guarded(NAN)
    scene.events = [producer(27)]
    finding = only(scene)

    assert (finding.severity, finding.site, finding.step) == ("error", "loss", 27)
    assert finding.message == (
        'loss was not finite at step 27: log made it, outside of modules, at train.py:37: "loss = torch.log(var).mean()"; its '
        "input holds 3 zeros."
    )
    assert finding.evidence.operation.operation == "log"
    assert "kedge run" not in finding.remedy
    assert "clamp it" in finding.remedy


def test_the_producer_stands_for_what_came_of_it_later():
    """The rows may show its consequences in a later step only."""
    scene = broken(with_loss(), {"loss": NAN} | all_of(["fc.weight:param", *ALL_GRADIENTS], NAN))
    scene.events = [producer(17)]
    finding = only(scene)

    assert (finding.step, finding.site) == (17, "loss")
    assert "shows it at step 20." in finding.message


def test_a_producer_inside_a_module_is_a_site_of_it():
    """And told as its own."""
    scene = guarded(NAN)
    scene.events = [producer(27, module="log", certain=False)]
    finding = only(scene)

    assert (finding.site, finding.confidence) == ("log:out", 0.7)
    assert "probably log made it, in log, at train.py:37" in finding.message
    assert finding.remedy.startswith(
        "Print the inputs of log in step 27. If the input of log came to zero or below, keep "
    )


@pytest.mark.parametrize(
    ("module", "manifest", "advice"),
    [
        ("log", {}, 'certain, run "kedge run --dump train.py".'),
        ("log", {"dump": True}, ""),
        (
            None,
            {},
            'run "kedge run --dump train.py"; if these lines are outside modules, put them into the forward of one first.',
        ),
        (
            None,
            {"dump": True},
            "certain, put these lines into the forward of a module, and run it again with --dump.",
        ),
        (
            "",
            {},
            'put these lines into the forward of a module, and run "kedge run --dump train.py".',
        ),
    ],
)
def test_a_dump_is_advised_of_an_operation_in_a_module_alone(module, manifest, advice):
    """It keeps calls of modules: for a loss written as a function it would keep none."""
    scene = guarded(NAN)
    scene.events = [producer(27, module=module, certain=False)]
    remedy = only(scene, **manifest).remedy

    assert remedy.endswith(advice)
    assert ("for certain" in remedy) == bool(advice)


def test_an_operation_after_finite_outputs_is_outside_modules():
    """The rows show that the model's own outputs were finite."""
    scene = broken(with_loss(), {"loss": NAN} | all_of(ALL_GRADIENTS, NAN))
    scene.events = [producer(module=None, certain=False)]

    assert "certain, put these lines into the forward of a module, and run" in only(scene).remedy


def test_rows_that_name_the_module_learn_the_operation():
    """They know what went in and who passed it on; the graph knows the line."""
    scene = broken(with_loss(), {"loss": NAN} | all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    scene.events = [producer(module="log")]
    finding = only(scene)

    assert finding.message.startswith(
        "log:out was the first to contain NaN (1 of 4 elements), at step 20; its input was finite."
    )
    assert "The graph of the loss shows it: log made it, in log, at train.py:37" in finding.message
    assert finding.evidence.propagated > 0
    assert finding.evidence.operation.line == 37


def test_a_producer_of_a_later_step_is_a_consequence():
    """What was wrong before, and did not pass, comes first."""
    scene = broken(with_loss(), {"loss": NAN} | all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    scene.events = [producer(24, operation="div")]

    assert only(scene).site == "log:out"
    assert "div" not in only(scene).message


def test_a_producer_alone_is_enough():
    """Where no row tells of it, as in a step that was left out."""
    scene = with_loss()
    scene.step(0)
    scene.events = [
        producer(3, operation="addmm", node="AddmmBackward0", where="forward", detail="")
    ]
    finding = only(scene)

    assert (finding.severity, finding.step) == ("error", 3)
    assert "products and sums of finite numbers overflowed" in finding.remedy


def test_the_backward_of_an_operation_is_named_as_one():
    """Its slope is infinite, and its value is not."""
    scene = guarded(1.0)
    scene.events = [producer(27, operation="sqrt", node="SqrtBackward0", where="backward")]
    finding = only(scene)

    assert "the backward of sqrt made it" in finding.message
    assert "whose derivative is infinite" in finding.remedy


def test_an_operation_whose_result_a_mask_hides_made_it_in_the_forward():
    """No slope is accused, and the remedy is the operation's own."""
    scene = guarded(1.0)
    detail = "norm took a value that was not finite"
    scene.events = [producer(27, operation="softmax", where="hidden", certain=False, detail=detail)]
    finding = only(scene)

    assert finding.message.startswith("The gradients of loss were not finite at step 27: probably")
    assert "probably softmax made it, outside of modules, at train.py:37" in finding.message
    assert "backward" not in finding.message
    assert "Leave one position unmasked in every row" in finding.remedy


def test_operations_whose_backward_only_may_have_made_it_are_not_called_probable():
    """They are listed, with what to look for in their inputs."""
    among = [
        {"operation": name, "node": None, "file": "train.py", "line": line}
        for name, line in (("sqrt", 7), ("div", 9))
    ]
    scene = guarded(1.0)
    scene.events = [
        producer(27, operation="sqrt", where="backward", certain=False, among=among, of=2)
    ]
    finding = only(scene)

    assert "probably" not in finding.message
    assert (
        "the backward of one of these operations can have made it, whose inputs were not seen: sqrt at train.py:7; "
        "div at train.py:9" in finding.message
    )
    assert finding.remedy.startswith("Print the inputs of these operations in step 27")


@pytest.mark.parametrize(
    ("detail", "advice"),
    [
        ("it took the mean of no elements", "The mean of no elements is NaN"),
        ("its inputs are finite and its result is not", "Sums and squares of large numbers"),
    ],
)
def test_an_empty_mean_is_advised_against_only_where_it_was_seen(detail, advice):
    """Squares of large numbers overflow in the same operation."""
    scene = guarded(NAN)
    scene.events = [producer(27, operation="mse_loss", detail=detail)]

    assert only(scene).remedy.startswith(advice)


def test_no_inputs_are_said_to_be_in_the_evidence_of_an_operation_that_has_none():
    """Nor is an operation advised on that was not named."""
    scene = guarded(NAN)
    scene.events = [producer(27, operation="fancy", node="FancyBackward0")]
    remedy = only(scene).remedy

    assert "evidence" not in remedy
    assert "Print the inputs of fancy" in remedy


def test_what_a_dump_found_goes_before_the_graph():
    """It has run the call again: its operation is the answer, and is named once."""
    scene = broken(with_loss(), {"loss": NAN} | all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    made = {
        "site": "log/log:out",
        "value": "nan",
        "file": "train.py",
        "line": 9,
        "text": "torch.log(x)",
    }
    scene.events = [
        {
            "kind": "dump",
            "step": 20,
            "site": "log:out",
            "folder": "dump-20",
            "module": "log",
            "value": "nan",
        },
        {"kind": "operation", "folder": "dump-20", "operations": [made]},
        producer(module="log"),
    ]
    finding = only(scene)

    assert "NaN in the operation log/log:out (train.py:9)" in finding.message
    assert "The graph of the loss" not in finding.message


def test_the_first_step_is_no_matter_of_the_learning_rate():
    """What is broken before any training comes of the inputs or the initialisation."""
    for bad in (
        all_of(["head:out", ":out"], INF),
        all_of(["head.weight:param.grad"], INF),
        {"fc.weight:param": NAN},
    ):
        scene = chain()
        scene.step(0, bad)

        assert "learning rate" not in only(scene).remedy

    scene = chain()
    scene.step(0, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    scene.rows = [r | {"max": 1e20} if r["site"] == "log:in" else r for r in scene.rows]
    assert "in the first step already, before any training" in only(scene).remedy
