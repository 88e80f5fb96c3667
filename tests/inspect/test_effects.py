"""What an audit says that a hook does, made to happen: each sentence is said, and is true in this PyTorch."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import kedge
from kedge.inspection import effects
from kedge.inspection.audit import audit

CALLS: list[str] = []


def called(*_: Any) -> None:
    """Be a hook of any kind."""
    CALLS.append("called")


def prints(*_: Any) -> None:
    """Be a hook that Dynamo cannot read."""
    print("called")  # noqa: T201 - that is what it is for


class Net(nn.Module):
    """A layer inside a module that Dynamo compiles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(x + 1)))


class Holder:
    """A hook that is an object, with something to hold on to."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __call__(self, *_: Any) -> None:
        CALLS.append("held")

    def method(self, *_: Any) -> None:
        CALLS.append("held")


REGISTER = {
    "forward-pre": nn.Module.register_forward_pre_hook,
    "forward": nn.Module.register_forward_hook,
    "full-backward-pre": nn.Module.register_full_backward_pre_hook,
    "full-backward": nn.Module.register_full_backward_hook,
    "legacy-backward": nn.Module.register_backward_hook,
}
STATE = {
    "state-dict-pre": nn.Module.register_state_dict_pre_hook,
    "state-dict": nn.Module._register_state_dict_hook,
    "load-state-dict-pre": nn.Module.register_load_state_dict_pre_hook,
    "load-state-dict": nn.Module.register_load_state_dict_post_hook,
}
BACKWARD = ("full-backward-pre", "full-backward", "legacy-backward")


def said(model: nn.Module, on: str) -> list[str]:
    """What the audit says that hooks do to something, with a mark before what may hurt."""
    return ["! " * e.harms + e.what for entry in audit(model) for e in entry.effects if e.on == on]


def calls(model: Any, *, grad: bool = True) -> int:
    """Run forward and backward; return how often a hook was called."""
    before = len(CALLS)
    model(torch.ones(2, 3, requires_grad=grad)).sum().backward()
    return len(CALLS) - before


@pytest.mark.parametrize("kind", ["forward-pre", "forward"])
def test_a_forward_hook_is_read_into_compiled_code(kind: str, compiled: Any, capsys: Any) -> None:
    """A hook that came before the compile is in the graph; one that prints breaks it."""
    model = Net()
    REGISTER[kind](model.inner, called)
    (sentence,) = said(model, "compile")

    assert sentence.startswith(
        "where compiled code calls its module, it is traced into the graph; code that Dynamo cannot"
    )
    assert calls(compiled(model, backend="eager", fullgraph=True)) == 1
    REGISTER[kind](model.inner, prints)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        calls(compiled(model, backend="eager", fullgraph=True))


def test_code_compiled_for_another_instance_leaves_a_hook_out(compiled: Any) -> None:
    """A model that is hooked and then compiled runs the code of an unhooked one of its class."""
    calls(compiled(Net(), backend="eager"))
    model = Net()
    model.inner.register_forward_hook(called)

    assert said(model, "compile")[0].endswith(
        "for this model or another of its class, leaves it out"
    )
    assert calls(compiled(model, backend="eager")) == 0


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("method", [True, False])
def test_a_late_hook_is_left_out_of_compiled_code(kind: str, method: bool, compiled: Any) -> None:
    """A hook inside a compiled model that came later does not fire, until everything compiles again."""
    model = Net()
    if method:
        model.compile(backend="eager")
    runs = model if method else compiled(model, backend="eager")
    assert calls(runs) == 0
    REGISTER[kind](model.inner, called)

    assert said(runs, "compile")[-1].startswith(
        "! if it was registered after the compile: code compiled earlier leaves it out"
    )
    assert calls(runs) == 0
    torch.compiler.reset()
    assert calls(runs) == 1


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("method", [True, False])
def test_a_hook_on_the_root_runs_around_compiled_code(
    kind: str, method: bool, compiled: Any
) -> None:
    """A hook on the compiled model itself fires, though it came later, and breaks nothing."""
    model = Net()
    if method:
        model.compile(backend="eager", fullgraph=True)
    runs = model if method else compiled(model, backend="eager", fullgraph=True)
    assert calls(runs) == 0
    REGISTER[kind](model, called)

    assert said(runs, "compile") == ["runs around the compiled code, whenever it was registered"]
    assert calls(runs) == 1
    torch.compiler.reset()
    assert calls(runs) == 1


def test_a_hook_on_the_wrapper_runs_around_compiled_code(compiled: Any) -> None:
    """What `torch.compile` returns is a module of its own, with hooks of its own."""
    runs = compiled(Net(), backend="eager")
    assert calls(runs) == 0
    runs.register_forward_hook(called)

    assert said(runs, "compile") == ["runs around the compiled code, whenever it was registered"]
    assert calls(runs) == 1


def test_a_container_of_torch_is_inside_of_what_compile_makes_of_it(compiled: Any) -> None:
    """For a module of PyTorch's own, `torch.compile` takes the call with its hooks into the graph."""
    model = nn.Sequential(Net())
    runs = compiled(model, backend="eager")
    assert calls(runs) == 0
    for module in (model, model[0], model[0].inner):
        module.register_forward_hook(called)

    assert [s[:36] for s in said(runs, "compile")] == ["! if it was registered after the com"] * 3
    assert calls(runs) == 0


def test_a_compiled_container_of_torch_is_around_compiled_code_or_its_entry(compiled: Any) -> None:
    """After ``Sequential.compile()`` compiled code begins at the first module that is not PyTorch's; since 2.14 at its call."""
    model = nn.Sequential(Net())
    model.compile(backend="eager")
    assert calls(model) == 0
    model[0].inner.register_forward_hook(called)
    assert calls(model) == 0
    for module in (model, model[0]):
        module.register_forward_hook(called)

    found = [s[:13] for s in said(model, "compile")]
    if effects.dynamo.takes_calls_in():
        assert found == ["is traced int", "! if it was r", "! if it was r"]
        assert calls(model) == 3  # the hook on the container had all of it compiled again
    else:
        assert found == ["runs around t", "runs around t", "! if it was r"]
        assert calls(model) == 2


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", BACKWARD)
def test_a_backward_hook_on_the_entry_breaks_the_graph(kind: str, compiled: Any) -> None:
    """It fires, wherever compiled code begins, and the audit says so."""
    model = nn.Sequential(Net())
    model.compile(backend="eager")
    assert calls(model) == 0
    REGISTER[kind](model, called)

    entry = effects.dynamo.takes_calls_in()
    assert said(model, "compile")[0].startswith("! breaks the graph" if entry else "runs around")
    assert calls(model) == 1


class Outer(nn.Module):
    """A module around `Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * 2)


@pytest.mark.parametrize("outer_first", [True, False])
def test_what_is_compiled_inside_of_compiled_code_is_inside(
    outer_first: bool, compiled: Any
) -> None:
    """A module that is compiled for itself as well is called by the code of the model around it."""
    model = Outer()
    for module in (model, model.net) if outer_first else (model.net, model):
        module.compile(backend="eager")
    assert calls(model) == 0
    model.net.register_forward_hook(called)

    assert [s[:36] for s in said(model, "compile")] == ["! if it was registered after the com"]
    assert calls(model) == 0


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", BACKWARD)
def test_a_modules_backward_hook_breaks_the_graph(kind: str, compiled: Any) -> None:
    """With ``fullgraph=True`` it raises; without, it fires, outside of the graphs."""
    model, graphs = Net(), []
    REGISTER[kind](model.inner, called)

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert said(model, "compile")[0].startswith(
        "! breaks the graph where its module is called in compiled code"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        calls(compiled(model, backend="eager", fullgraph=True))
    torch.compiler.reset()
    assert calls(compiled(model, backend=backend)) == 1
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("kind", ["full-backward-pre", "full-backward"])
def test_a_global_full_backward_hook_breaks_the_graph(kind: str, compiled: Any) -> None:
    """What is true of one module's is true of every module's."""
    register = getattr(modules, f"register_module_{kind.replace('-', '_')}_hook")
    with register(called):
        assert said(Net(), "compile")[0].startswith("! breaks the graph")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            calls(compiled(Net(), backend="eager", fullgraph=True))


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_late_global_hook_is_left_out_of_compiled_code(compiled: Any) -> None:
    """It fires for the wrapper and the model, not for the modules inside."""
    runs = compiled(Net(), backend="eager")
    calls(runs)
    with modules.register_module_forward_hook(called):
        assert said(runs, "compile")[0].startswith("! if it was registered after the compile")
        assert calls(runs) == 2


@pytest.mark.parametrize(
    "register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
)
@pytest.mark.parametrize("late", [True, False])
def test_a_tensors_hook_runs_outside_compiled_code(
    register: Any, late: bool, compiled: Any
) -> None:
    """A parameter's hook fires for compiled code as well, early or late, and breaks no graph."""
    model = Net()
    runs = compiled(model, backend="aot_eager", fullgraph=True)
    if late:
        calls(runs)
    register(model.inner.weight, called)

    assert said(runs, "compile") == ["runs outside compiled code, whenever it was registered"]
    assert calls(runs) == 1


class TwoOutputs(nn.Module):
    """A residual block, whose input is used beside it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return h + x, self.b(h) * y


class Residual(nn.Module):
    """A net around `TwoOutputs`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.block, self.after = nn.Linear(64, 64), TwoOutputs(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        u, v = self.block(h, h)
        return self.after(u + v + h).pow(2).sum()


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of every parameter, for a seeded input."""
    torch.manual_seed(1)
    model(torch.randn(32, 64)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", ["full-backward-pre", "full-backward"])
def test_a_full_backward_hook_changes_bits(kind: str) -> None:
    """One that does nothing gives other gradients than none at all."""
    hooked = Residual()
    REGISTER[kind](hooked.block, called)

    assert said(hooked, "gradients")[0].startswith(
        "! puts an identity into the graph, which can change bits of grad"
    )
    assert not all(map(torch.equal, gradients(Residual()), gradients(hooked)))


@dataclass
class Output:
    """A structured output."""

    y: Tensor


class Structured(nn.Module):
    """Returns what it is told to."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x * 2)


@pytest.mark.parametrize("kind", ["full-backward-pre", "full-backward"])
@pytest.mark.parametrize(
    ("wrap", "get", "fired"),
    [
        (lambda y: [y], lambda o: o[0], 0),
        (lambda y: {"y": y}, lambda o: o["y"], 0),
        (Output, lambda o: o.y, 0),
        (lambda y: (y,), lambda o: o[0], 1),
    ],
    ids=["list", "dict", "dataclass", "tuple"],
)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
def test_a_full_backward_hook_never_fires_for_some_outputs(
    kind: str, wrap: Any, get: Any, fired: int
) -> None:
    """A list, dict or dataclass is never looked into; a tuple is."""
    model = Structured(wrap)
    REGISTER[kind](model, called)

    assert "never fires for outputs in a list, dict or dataclass" in said(model, "gradients")[0]
    assert calls(lambda x: get(model(x))) == fired


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_full_backward_hook_leaves_out_keyword_arguments() -> None:
    """The gradient of an input given by keyword is missing."""
    model, seen = Structured(lambda y: y), []
    model.register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(grad_input)
    )
    model(x=torch.ones(2, requires_grad=True)).sum().backward()

    assert said(model, "gradients")[0].endswith("; its grad_input leaves out keyword arguments")
    assert seen == [()]


class Several(nn.Module):
    """Two operations, the first of which changes the shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=0, keepdim=True) * 2


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_legacy_backward_hook_sees_the_last_operation() -> None:
    """Its ``grad_input`` has the shape of what the last operation was given."""
    model, seen = Several(), []
    model.register_backward_hook(lambda module, grad_input, _: seen.append(grad_input[0].shape))
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()

    assert said(model, "gradients") == [
        "! sees the gradients of the last operation in its module, not of the module's inputs"
    ]
    assert seen == [(1, 3)]


class Chain(nn.Module):
    """A layer with something before it and in-place work after it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(3, 3), inside
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layer(x)) if self.inside else self.layer(x).relu_()


@pytest.mark.parametrize("kind", ["full-backward-pre", "full-backward"])
@pytest.mark.parametrize("inside", [True, False], ids=["module", "operation"])
def test_a_full_backward_hook_forbids_in_place_work_after_it(kind: str, inside: bool) -> None:
    """The next module or operation raises if it works in place; without grad it does not."""
    model = Chain(inside=inside)
    REGISTER[kind](model.layer, called)
    sentence = (
        "! an in-place operation on inputs or outputs of its module raises, if they require grad"
    )

    assert said(model, "in-place") == [sentence]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        calls(model)
    with torch.no_grad():
        model(torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["full-backward-pre", "full-backward"])
def test_a_full_backward_hook_on_a_module_that_works_in_place_raises(kind: str) -> None:
    """An activation with ``inplace=True`` cannot carry one, if its input requires grad."""
    model = Chain(inside=True)
    REGISTER[kind](model.relu, called)

    assert said(model, "in-place") == [
        "! raises, if the input requires grad: its module works in place"
    ]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        calls(model)
    model.relu(torch.ones(2, 3))


def test_a_global_full_backward_hook_forbids_in_place_work() -> None:
    """In every module there is."""
    with modules.register_module_full_backward_hook(called):
        assert said(Chain(inside=True), "in-place")[0].startswith("! an in-place operation")
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            calls(Chain(inside=True))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", ["forward-pre", "forward", "legacy-backward"])
def test_nothing_is_said_of_in_place_work_for_other_hooks(kind: str) -> None:
    """The other hooks do not mind it."""
    model = Chain(inside=True)
    REGISTER[kind](model.layer, called)

    assert said(model, "in-place") == []
    assert calls(model) == 1


def test_a_forward_hook_on_a_module_that_works_in_place_sees_no_input() -> None:
    """What it is given as input is the output already."""
    model, seen = nn.ReLU(inplace=True), []
    model.register_forward_hook(lambda module, args, output: seen.append(args[0].clone()))
    model(torch.tensor([-1.0]))

    assert said(model, "in-place") == [
        "receives an input that is already overwritten: its module works in place"
    ]
    assert seen == [torch.tensor([0.0])]


def local() -> Any:
    """Make a function that pickle does not find by its name."""

    def inside(*_: Any) -> None:
        CALLS.append("called")

    return inside


def copied(hook: Any) -> Any:
    """Be a function for a partial."""


HOOKS = {
    "function": lambda: called,
    "builtin": lambda: print,
    "lambda": lambda: lambda *_: None,
    "local function": local,
    "partial": lambda: functools.partial(copied, 1),
    "partial of a lambda": lambda: functools.partial(lambda *_: None),
    "partial with a lock": lambda: functools.partial(copied, threading.Lock()),
    "object": Holder,
    "method": lambda: Holder().method,
    "object with a lock": lambda: Holder(threading.Lock()),
    "method of one with a lambda": lambda: Holder(lambda: None).method,
    "object with a leaf": lambda: Holder([torch.ones(2, requires_grad=True)]),
    "object with an activation": lambda: Holder({"a": [torch.ones(2, requires_grad=True) * 2]}),
    "object with another model": lambda: Holder(nn.Linear(2, 2)),
    "object with a model that is hooked": lambda: Holder(hooked_linear()),
    "object with a class": lambda: Holder(Net),
    "object of a local class": type("Inside", (Holder,), {}),
    "object with a generator": lambda: Holder(i for i in ()),
}


def hooked_linear() -> nn.Module:
    """Make another model that cannot be pickled."""
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("kind", [*REGISTER, *STATE])
def test_whether_a_model_pickles_and_copies_is_said_as_it_is(kind: str, name: str) -> None:
    """For hooks of many makes: the audit says that pickle, torch.save or deepcopy raise exactly if they do."""
    hook, model = HOOKS[name](), nn.Linear(2, 2)
    if kind == "state-dict":
        model._state_dict_hooks[0] = (
            hook  # registering wants to set an attribute, which not all of these have
        )
    else:
        (REGISTER | STATE)[kind](model, hook)
    raised = {}
    for on, use in (
        ("pickle", pickle.dumps),
        ("save", lambda m: torch.save(m, io.BytesIO())),
        ("deepcopy", copy.deepcopy),
    ):
        try:
            use(model)
        except Exception as error:  # noqa: BLE001 - whether it raises is the question
            raised[on] = type(error)
    (pickled,), (deepcopied,) = said(model, "pickle"), said(model, "deepcopy")

    assert (
        pickled.startswith("! pickle and torch.save of the model raise")
        == ("pickle" in raised)
        == ("save" in raised)
    )
    assert deepcopied.startswith("! deepcopy of the model raises") == ("deepcopy" in raised)
    if kind in REGISTER:
        torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lambda", "a lambda has no name to import it by"),
        ("partial of a lambda", "a lambda has no name to import it by"),
        ("local function", "inside is defined inside a function"),
        ("object with a lock", "TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_why_a_hook_cannot_be_pickled_is_said(name: str, reason: str) -> None:
    """The reason stands in brackets."""
    model = nn.Linear(2, 2)
    model.register_forward_hook(HOOKS[name]())

    assert said(model, "pickle") == [
        f"! pickle and torch.save of the model raise ({reason}); saving its state_dict() works"
    ]


def test_a_pickled_model_keeps_its_hooks_and_needs_their_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function is pickled by its name, so loading looks it up."""
    model = nn.Linear(3, 3)
    model.register_forward_hook(called)
    pickled = pickle.dumps(model)

    assert said(model, "pickle") == ["is pickled with the model, and needed to load it"]
    assert calls(pickle.loads(pickled)) == 1
    monkeypatch.delitem(globals(), "called")
    with pytest.raises(AttributeError, match="called"):
        pickle.loads(pickled)


def test_trying_copies_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit costs no memory, whatever the hooks hold on to."""
    model = nn.Linear(3, 3)
    holder = Holder([torch.ones(1000), model])
    model.register_forward_hook(holder)
    model.register_forward_hook(holder.method)

    def refuse(*_: Any) -> None:
        pytest.fail("a tensor is pickled or copied")

    for method in ("__reduce_ex__", "__deepcopy__"):
        monkeypatch.setattr(Tensor, method, refuse)

    assert said(model, "pickle") == ["is pickled with the model, and needed to load it"] * 2


def test_trying_copies_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's arrays are passed by as well."""
    model, written = nn.Linear(3, 3), []
    model.register_forward_hook(Holder(np.zeros(100_000)))
    monkeypatch.setattr(effects._Nowhere, "write", lambda self, data: written.append(len(data)))

    assert said(model, "pickle") == ["is pickled with the model, and needed to load it"]
    assert 0 < sum(written) < 10_000


def test_a_deep_copy_shares_functions_and_copies_objects() -> None:
    """A copied model's function writes to where the first one's does; its object does not."""
    model, holder, results = nn.Linear(3, 3), Holder([]), []
    model.register_forward_hook(lambda *_: results.append(1))
    model.register_forward_hook(holder.method)
    twin = copy.deepcopy(model)
    calls(twin)

    assert said(model, "deepcopy") == [
        "a deep copy of the model calls the same function, with all objects it refers to",
        "a deep copy of the model calls a copy of this Holder",
    ]
    assert results == [1]
    assert [hook.__self__ for hook in list(twin._forward_hooks.values())[1:]] != [holder]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "apply",
    [weight_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)],
    ids=["weight_norm", "pruning"],
)
def test_a_computed_weight_forbids_deepcopy(apply: Any) -> None:
    """What weight_norm and pruning leave in place of the weight is no leaf."""
    model = apply(nn.Linear(3, 3))

    assert said(model, "deepcopy") == [
        "! deepcopy of the model raises (weight is computed from others, so it is not a leaf)"
    ]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)


def test_a_computed_weight_forbids_deepcopy_only_once_it_is_computed() -> None:
    """spectral_norm computes its weight in the first forward."""
    model = spectral_norm(nn.Linear(3, 3))
    assert [s for s in said(model, "deepcopy") if s.startswith("!")] == []
    copy.deepcopy(model)
    calls(model)

    assert said(model, "deepcopy")[0].startswith("! deepcopy of the model raises")
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)


def test_copies_are_without_a_parameters_hooks() -> None:
    """Neither pickle nor deepcopy takes them along, and a lambda does not matter."""
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda grad: None)
    model.weight.register_post_accumulate_grad_hook(lambda param: None)

    assert said(model, "pickle") == ["a pickled or deep-copied model lacks it"] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [len(audit(m)) for m in copies] == [0, 0]


def test_pickle_warns_of_a_buffers_hook() -> None:
    """Unlike a parameter's."""
    model = nn.Module()
    model.register_buffer("table", torch.ones(2, requires_grad=True))
    model.table.register_hook(called)

    assert said(model, "pickle") == [
        "a pickled or deep-copied model lacks it, and pickle warns about that"
    ]
    with pytest.warns(UserWarning, match="will not be serialized"):
        loaded = pickle.loads(pickle.dumps(model))
    assert [len(audit(m)) for m in (loaded, copy.deepcopy(model))] == [0, 0]


def test_copies_are_without_kedges_hooks() -> None:
    """A session is on this model, not on copies of it."""
    model = Net()
    with kedge.hook(model, "inner:out, inner:in, inner.weight:param.grad", lambda value: called()):
        assert set(said(model, "pickle")) == {"a pickled or deep-copied model lacks it"}
        assert said(model, "deepcopy") == said(model, "in-place") == []
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        assert calls(model) == 3
        assert [calls(m) for m in copies] == [0, 0]
    assert len(audit(copies[0])) == 0


def test_kedge_listens_to_in_place_modules_without_harm() -> None:
    """Nothing is said of them, and the input of one is seen as it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    seen = []
    with kedge.hook(model, "1:in, 1:out, 1:out.grad", lambda value: seen.append(value.clone())):
        assert said(model, "in-place") == []
        calls(model)

    assert torch.equal(seen[0].relu(), seen[1])
    assert not torch.equal(seen[0], seen[1])


def test_a_parametrized_model_does_not_pickle() -> None:
    """PyTorch refuses; a deep copy works."""
    model = parametrizations.orthogonal(nn.Linear(3, 3))

    assert said(model, "pickle") == [
        "! pickle and torch.save of the model raise (its module is parametrized); saving its state_dict() works"
    ]
    for use in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match="only supported through state_dict"):
            use(model)
    assert len(audit(copy.deepcopy(model)).of("parametrization")) == 1
    torch.save(model.state_dict(), io.BytesIO())


def test_what_compile_returns_prefixes_its_state_dict(compiled: Any) -> None:
    """A checkpoint of it does not fit the model."""
    model = nn.Linear(3, 3)
    runs = compiled(model, backend="eager")

    assert said(runs, "state_dict") == ['! state_dict() puts "_orig_mod." in front of every name']
    assert all(name.startswith("_orig_mod.") for name in runs.state_dict())
    assert said(model, "state_dict") == []


def test_copies_of_a_compiled_module_are_not_compiled(compiled: Any) -> None:
    """``module.compile()`` is neither pickled nor copied."""
    model = Net()
    model.compile(backend="eager")

    assert said(model, "pickle") == ["a pickled or deep-copied model lacks it"]
    assert [len(audit(m)) for m in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model))] == [
        0,
        0,
    ]


def test_a_replaced_forward_stays_that_of_the_first_model() -> None:
    """A deep copy of a model whose ``forward`` is a closure runs the first model's weights."""
    model = nn.Linear(3, 3)
    forward = model.forward
    model.forward = lambda x: forward(x) + 1
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.weight)

    assert said(model, "deepcopy") == [
        "a deep copy of the model calls the same function, with all objects it refers to"
    ]
    assert said(model, "pickle")[0].startswith(
        "! pickle and torch.save of the model raise (a lambda"
    )
    assert torch.equal(twin(torch.ones(1, 3)), model(torch.ones(1, 3)))
