"""NAN-BORN's words and evidence: the program's line, the operation, the advice, the steps before."""

from __future__ import annotations

import pytest

from kedge.json_input.classes import as_json
from kedge.rules.nonfinite.advice import OperationAdvice
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.rule import Finding
from kedge.sites.operation_names import recorded_name
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
    size,
)

LINE = {"file": "train.py", "line": 31, "function": "Net.forward", "text": "x = self.log(x)"}


def only(scene: Scene) -> Finding:
    """Run the rule, which finds one thing."""
    (finding,) = NanBorn().check(scene.recording())
    return finding


def described(scene: Scene, text: str, **entry: object) -> Scene:
    """Add to what is known of a site."""
    scene.sites[scene.id(text)].update(entry)
    return scene


def broken(scene: Scene, bad: dict[str, float]) -> Scene:
    """Record two healthy steps and one that goes wrong."""
    scene.step(0)
    scene.step(10)
    scene.step(20, bad)
    return scene


def test_the_programs_line_is_in_the_message_and_in_the_evidence():
    """Where the module that made it is called can be looked up without searching."""
    scene = broken(
        described(chain(), "log:out", source=LINE), all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN)
    )

    finding = only(scene)

    assert as_json(finding.evidence.source) == LINE
    assert finding.message.endswith(
        'its input was finite. log (Log) is called at train.py:31, in Net.forward: "x = self.log(x)".'
    )


def test_between_two_modules_the_line_is_that_of_the_next():
    """The operation stands somewhere before the line where its result goes in; its autograd node tells which it is."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("a")
    scene.module("b", of=[None])
    scene.close("", "Net")
    described(scene, "b:in", source={**LINE, "text": "self.b(x.log())"}, node="LogBackward0")

    finding = only(broken(scene, all_of(["b:in", "b:out", ":out"], NAN)))

    assert finding.message == (
        "b:in was the first to contain NaN (1 of 4 elements), at step 20, although a:out before it was finite: "
        "an operation in the forward of Net made it, outside any watched module (log was its last operation). "
        'The result goes in at train.py:31, in Net.forward: "self.b(x.log())".'
    )
    assert finding.evidence.node == "LogBackward0"


def test_an_operation_after_the_last_module_is_named_by_its_node():
    """Where a module's own forward made it, the autograd node of its output names the operation."""
    scene = broken(described(chain(), ":out", node="SqrtBackward0"), {":out": NAN})

    assert only(scene).message.endswith(
        "so an operation in its own forward made it (sqrt was its last operation)."
    )


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("LogBackward0", "log"),
        ("NativeLayerNormBackward0", "native_layer_norm"),
        ("torch::autograd::CopySlices", ""),
        (
            "ScaledDotProductFlashAttentionForCpuBackward0",
            "scaled_dot_product_flash_attention_for_cpu",
        ),
        (None, ""),
    ],
)
def test_a_nodes_operation(node, name):
    """The name that PyTorch gives a node holds the operation's."""
    assert recorded_name(node) == name


@pytest.mark.parametrize(
    "kind", ["Linear", "Conv2d", "ConvTranspose1d", "LSTM", "MultiheadAttention", "LazyLinear"]
)
def test_sums_of_products_are_never_told_to_mind_a_logarithm(kind):
    """They have no forbidden input: they can only overflow."""
    advice = OperationAdvice("fc", kind, None, "float32", 1e30).advice()

    assert advice.startswith(
        "In fc, products and sums of finite numbers overflowed float32 (it ends at 3.4e+38; the input"
    )
    assert not {"log", "epsilon", "sqrt"} & set(advice.replace(",", " ").split())


def test_a_products_node_says_the_same_of_a_programs_own_module():
    """A class that multiplies matrices in its own forward is known by its node."""
    assert OperationAdvice("mine", "MyProjection", "AddmmBackward0", "float32", 0).multiplies
    assert not OperationAdvice("mine", "MyLog", "LogBackward0", "float32", 0).multiplies


def test_the_message_names_the_headroom_of_a_narrow_dtype():
    """With float16 ordinary values overflow: how near the inputs came is said, and what holds more."""
    scene = chain()
    for site in scene.sites:
        site["dtype"] = "float16"
    scene.step(0)
    scene.step(10, all_of(["head:out", ":out", "head.weight:param.grad"], INF))
    scene.rows = [r for r in scene.rows if r["step"] != 10 or r["site"] != "head:in"]
    scene.rows.append(row(10, "head:in", [4e4, -1.0]))

    assert (
        "overflowed float16 (it ends at 6.55e+04; the input reached 4e+04, 0.7 doublings below)"
        in only(scene).remedy
    )
    assert only(scene).remedy.endswith("or compute it in bfloat16 or float32.")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("BatchNorm2d", "the variance was zero"),
        ("LlamaRMSNorm", "the variance was zero"),
        ("Softmax", "a row that is -inf everywhere"),
        ("CrossEntropyLoss", "ignore_index"),
        ("BCELoss", "BCEWithLogitsLoss"),
        ("Log", "clamp the input"),
    ],
)
def test_the_advice_is_that_for_the_kind_of_module(kind, words):
    """What helps depends on what made it."""
    assert words in OperationAdvice("it", kind, None, "float32", 1.0).advice()


def test_the_advice_for_the_backward_of_a_product_is_about_gradients():
    """It overflows because what arrives is too large."""
    finding = only(broken(chain(), {"head.weight:param.grad": INF}))

    assert finding.remedy.startswith(
        "In the backward of head (Linear), products of finite gradients with weights and inputs"
    )


def test_the_steps_before_are_in_the_evidence():
    """The last sixteen recorded steps of the site and of what went into it, full and light ones, with what was known of each."""
    scene = chain()
    for step in range(20):
        scene.step(step, level=2 if step % 10 == 0 else FINITENESS)
    scene.rows = [
        r | {"sumsq": 4.0 * 4} if r["step"] == 13 and r["site"] == "relu:out" else r
        for r in scene.rows
    ]
    scene.step(20, all_of(AFTER_LOG, -INF) | all_of(ALL_GRADIENTS, NAN), level=FINITENESS)

    before = only(scene).evidence.before

    assert before.steps == list(range(5, 21))
    assert list(before.sites) == ["log:out", "relu:out"]
    assert before.sites["log:out"].state == ["finite"] * 15 + ["inf"]
    assert before.sites["relu:out"].rms[8] == 2.0
    assert before.sites["relu:out"].absmax[5] == 0.5
    assert before.sites["relu:out"].absmax[6] is None


def test_propagators_and_healed_modules_are_listed():
    """Who only passed it on is named in the order of the flow, up to twelve; who made finite values of it, too."""
    scene = chain()
    scene.module("more", of=["log"])
    finding = only(
        broken(scene, all_of(["log:out", "head:in", "head:out", ":out", "more:in"], NAN))
    )

    assert finding.evidence.propagators == ["head:in", "head:out", ":out", "more:in"]
    assert finding.evidence.propagated == 4
    assert finding.evidence.healed == ["more:out"]


def test_the_list_of_propagators_is_bounded():
    """A model of a thousand modules does not fill the evidence."""
    scene = Scene()
    scene.module("m0", "Log")
    for i in range(1, 40):
        scene.module(f"m{i}", of=[f"m{i - 1}"])
    finding = only(
        broken(
            scene,
            all_of(["m0:out", *(f"m{i}:{k}" for i in range(1, 40) for k in ("in", "out"))], NAN),
        )
    )

    assert (len(finding.evidence.propagators), finding.evidence.propagated) == (12, 78)


def test_a_first_step_has_nothing_before_it():
    """A birth in the first step shows that step alone."""
    scene = chain()
    scene.step(0, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN))
    scene.rows.append(size(0, "log:in", 1.0))

    assert only(scene).evidence.before.steps == [0]


def test_a_call_that_was_kept_is_offered():
    """Where --dump has kept the call, the remedy is to run it again alone; what the rows show is said as without it."""
    scene = chain()
    scene.events.append({"kind": "dump", "step": 20, "site": "log:out", "folder": "dump-20"})

    finding = only(broken(scene, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN)))

    assert finding.remedy.startswith(
        "To run that call again by itself: python dump-20/replay.py. In log (Log), look at"
    )
    assert finding.message == (
        "log:out was the first to contain NaN (1 of 4 elements), at step 20; its input was finite."
    )
    assert as_json(finding.evidence.dump) == {"step": 20, "site": "log:out", "folder": "dump-20"}


def test_a_dump_names_what_the_recording_did_not_see():
    """A dump looks at every step, also at those of which nothing was recorded."""
    scene = chain()
    scene.events.append(
        {"kind": "dump", "step": 17, "site": "log:out", "folder": "dump-17", "value": "nan"}
    )
    scene.step(0)
    scene.step(10)
    scene.step(20, all_of(EVERYTHING, NAN))

    finding = only(scene)

    assert (finding.site, finding.step, made_at(finding)) == ("log:out", 17, "forward, seen")
    assert finding.message.startswith(
        "log:out was the first to contain NaN, at step 17: --dump checks every"
    )
    assert (
        "nothing else was recorded in this step. The input was finite, so the forward of log (Log) made"
        in finding.message
    )
    assert finding.message.endswith(" at step 20.")
    assert finding.severity == "error"
    assert finding.evidence.before.steps == [0, 10]


def test_a_dump_of_another_step_is_a_birth_of_its_own():
    """What it saw is reported although the run continued, and is not mistaken for what is recorded of a later step."""
    scene = chain()
    scene.events.append({"kind": "dump", "step": 3, "site": "log:out", "folder": "dump-3"})

    healed, born = NanBorn().check(
        broken(scene, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN)).recording()
    )

    assert (healed.severity, healed.step) == ("warning", 3)
    assert healed.message.endswith(" The run went on.")
    assert born.evidence.dump is None


def test_a_dump_speaks_where_no_row_shows_anything():
    """A program of short steps may end before another of its steps is looked at."""
    scene = chain()
    scene.events.append(
        {"kind": "dump", "step": 17, "site": "log:out", "folder": "dump-17", "reached": True}
    )
    scene.step(0)
    scene.step(10)

    assert (only(scene).severity, only(scene).step) == ("error", 17)


def test_what_a_dump_saw_in_the_backward_has_its_words():
    """A gradient has no input: what arrived was finite, and the module's backward made the rest of it."""
    scene = chain()
    kept = {
        "site": "log:in.grad",
        "module": "log",
        "direction": "backward",
        "value": "inf",
        "reached": True,
    }
    scene.events.append({"kind": "dump", "step": 17, "folder": "dump-17", **kept})
    scene.step(0)

    assert only(scene).message.startswith(
        "log:in.grad was the first gradient to contain infinities, at step 17"
    )
    assert (
        "The gradient that arrived at log (Log) was finite, so its backward made it"
        in only(scene).message
    )
    assert "an operation whose derivative is infinite" in only(scene).remedy


def test_the_operation_that_a_kept_call_shows_is_named():
    """It takes the place of the last one, which the autograd node names."""
    scene = chain()
    scene.events.append({"kind": "dump", "step": 20, "site": "log:out", "folder": "dump-20"})
    made = {
        "site": "log/log:out",
        "name": "log",
        "value": "inf",
        "file": "net.py",
        "line": 12,
        "text": "x.log()",
    }
    scene.events.append(
        {"kind": "operation", "folder": "dump-20", "operations": [made, {**made, "value": "nan"}]}
    )

    finding = only(broken(scene, all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN)))

    assert (
        'makes infinities in the operation log/log:out (net.py:12): "x.log()", then NaN in'
        in finding.message
    )
    assert as_json(finding.evidence.operation) == made
    assert finding.remedy == (
        "To run that call again by itself: python dump-20/replay.py. Keep the input of log above zero: clamp it "
        "(x.clamp_min(eps)), or use log_softmax, logsumexp or log1p, which do not need this."
    )


@pytest.mark.parametrize(
    ("name", "direction", "remedy"),
    [
        ("sqrt", "backward", "Keep the input of sqrt above zero, by more than rounding"),
        ("div", "forward", "Keep the divisor away from zero"),
    ],
)
def test_a_kept_call_has_the_remedy_of_its_operation(name, direction, remedy):
    """The operation is known, so no list of possible ones is given."""
    scene = chain()
    site = "log:in.grad" if direction == "backward" else "log:out"
    kept = {"site": site, "module": "log", "direction": direction, "value": "nan", "reached": True}
    made = {
        "site": f"log/{name}:out",
        "name": name,
        "value": "nan",
        "file": "net.py",
        "line": 12,
        "text": "...",
    }
    scene.events = [
        {"kind": "dump", "step": 17, "folder": "dump-17", **kept},
        {"kind": "operation", "folder": "dump-17", "operations": [made]},
    ]
    scene.step(0)
    finding = only(scene)

    assert finding.remedy.startswith(
        f"To run that call again by itself: python dump-17/replay.py. {remedy}"
    )
    assert "look " not in finding.remedy
    assert ("torch.where after an operation" in finding.remedy) == (direction == "backward")


@pytest.mark.parametrize(
    "bad",
    [
        all_of([*AFTER_LOG, *ALL_GRADIENTS], NAN),
        all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], NAN),
    ],
)
def test_in_compiled_code_the_command_that_names_the_operation_is_given(bad):
    """No graph shows it there: the program has to run uncompiled."""
    scene = broken(chain(), bad)
    command = '"TORCH_COMPILE_DISABLE=1 kedge run --dump SCRIPT"'

    assert command not in only(scene).remedy
    scene.events.append({"kind": "compiled", "step": 0})
    assert only(scene).remedy.endswith(f" To have the operation named, run {command}.")


def kept_operation(name: str, value: str) -> Finding:
    """Return the finding of a kept call of attention in which one operation made the value."""
    scene = chain()
    scene.events = [
        {"kind": "dump", "step": 17, "folder": "dump-17", "site": "log:out", "value": value},
        {
            "kind": "operation",
            "folder": "dump-17",
            "operations": [{"site": f"log/{name}:out", "name": name, "value": value}],
        },
    ]
    scene.sites = [site | {"type": "MultiheadAttention"} for site in scene.sites]
    scene.step(0)
    return only(scene)


def test_a_softmax_that_a_kept_call_shows_is_not_called_an_overflow():
    """The operation is known, so the module's kind says nothing about what can have happened."""
    finding = kept_operation("softmax", "nan")

    assert "The softmax of a row that is -inf everywhere is NaN" in finding.remedy
    assert "overflowed" not in finding.remedy


def test_an_update_of_usual_numbers_is_not_said_to_have_overflowed():
    """Zero divided by zero is NaN at any learning rate; an infinity did overflow."""
    remedies = []
    for value in (NAN, INF):
        scene = broken(chain(), {"fc.weight:update": value})
        remedies.append(only(scene).remedy)

    assert "of numbers of usual size" in remedies[0]
    assert "overflowed" not in remedies[0]
    assert "the step overflowed" in remedies[1]


def test_gradients_that_were_written_have_no_line_of_a_call():
    """What changed them is no call of a module, so the line of the first backward is not shown."""
    scene = chain()
    scene.site(":grad.norm", kind="grad.norm", path="", owner="", source=LINE)
    scene.step(0)
    scene.step(10, {":grad.norm": NAN})

    assert " is called at " not in only(scene).message


def test_a_gradient_whose_user_got_one_that_was_not_recorded_is_not_blamed_on_it_alone():
    """What arrived at the user may have been bad already."""
    scene = chain()
    scene.step(0)
    scene.step(10, all_of(["relu:out.grad", "fc:out.grad", "fc.weight:param.grad"], NAN))
    later = ("log:out.grad", "head:out.grad", "head.weight:param.grad", ":out.grad")
    scene.rows = [r for r in scene.rows if r["step"] != 10 or r["site"] not in later]

    message = only(scene).message

    assert (
        "log (Log) takes the value, and the gradient that arrived there was not recorded" in message
    )
    assert "was finite" not in message
