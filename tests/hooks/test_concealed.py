"""Nothing of Kedge's is in a module's `__dict__`: clones, copies, pickles and scripts are those of a plain module."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import KedgeWarning, NeverFiredWarning, NoSuchKind
from kedge.hooks.placing.concealed import KedgeHook

pytestmark = [
    pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
HOLDERS = ["hook", "operations", "everywhere", "watch", "offload"]


def net() -> nn.Module:
    """Return two layers with an activation between them."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture(params=HOLDERS)
def hooked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[nn.Module, ExitStack]]:
    """Return a model that Kedge has hooked in one of its ways, and a function that removes the hooks."""
    model = net()
    with ExitStack() as stack:
        if request.param == "watch":
            stack.enter_context(kedge.watch(tmp_path / "w.kedge"))
        elif request.param == "offload":
            stack.enter_context(kedge.offload(model))
        else:
            session = stack.enter_context(kedge.session())
            given = {
                "hook": (model, "**:out"),
                "operations": (model, "/*"),
                "everywhere": ("**:out",),
            }
            session.hook(*given[request.param], kedge.measure())
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        yield model, stack


def clone(module: nn.Module) -> nn.Module:
    """Return a module of the same class with a copy of the `__dict__`, as replicas and EMA helpers are made, and other weights."""
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    new._parameters = {
        name: nn.Parameter(torch.zeros_like(p)) for name, p in module._parameters.items()
    }
    return new


def saved(module: nn.Module) -> nn.Module:
    """Save a module and load it."""
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "python pickle": lambda module: pickle.loads(pickle._dumps(module)),
    "save": saved,
    "script": torch.jit.script,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_clone_of_a_hooked_module_is_copied_as_itself(
    hooked: tuple[nn.Module, ExitStack], way: str
) -> None:
    """Its own weights are in the copy, in the block and after it, not those of the module that it was cloned from."""
    model, stack = hooked
    cloned = clone(model[0])

    inside = WAYS[way](cloned)
    assert not inside.weight.any()
    stack.close()
    after = WAYS[way](cloned)
    assert not after.weight.any()
    for copied in (inside, after):
        assert not [hook for hook in copied._forward_hooks.values() if isinstance(hook, KedgeHook)]
        assert not [
            name
            for name in vars(copied)
            if name in ("__reduce_ex__", "__deepcopy__", "__prepare_scriptable__")
        ]


def test_a_hooked_module_has_the_attributes_of_a_plain_one(
    hooked: tuple[nn.Module, ExitStack],
) -> None:
    """Also the copy of a table has the program's hooks alone, and after the block the tables are as they were."""
    model, stack = hooked
    for module in model.modules():
        assert not [name for name in vars(module) if name.startswith("__")]
        assert not module._forward_hooks.copy()
        assert not copy.copy(module._forward_pre_hooks)
        assert not copy.deepcopy(module._forward_hooks_always_called)
        assert list(module._forward_hooks.values()) == []
    stack.close()
    for module in model.modules():
        tables = [table for table in vars(module).values() if isinstance(table, OrderedDict)]
        assert not any(tables)
        assert not any(map(vars, tables))


def test_what_is_pickled_names_nothing_of_kedges(hooked: tuple[nn.Module, ExitStack]) -> None:
    """A checkpoint loads where Kedge is not installed, also one of a clone."""
    model, _ = hooked
    for module in (model, clone(model[0]), model._replicate_for_data_parallel()):
        assert b"kedge" not in pickle.dumps(module)


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook of the program's that edits."""
    return output * 2


def test_the_programs_hooks_stay_its_own(hooked: tuple[nn.Module, ExitStack]) -> None:
    """Handles from before and from within the block remove; copies have the program's hooks in their order, with flags."""
    model, stack = hooked
    layer = model[0]
    table = layer._forward_hooks
    handle = layer.register_forward_hook(double, always_call=True)
    x = torch.ones(2, 3)
    twice = layer(x)

    for copied in (copy.deepcopy(layer), saved(layer), copy.deepcopy(clone(layer))):
        assert list(copied._forward_hooks.values()) == [double]
        assert (
            list(copied._forward_hooks) == list(copied._forward_hooks_always_called) == [handle.id]
        )
    assert torch.equal(copy.deepcopy(layer)(x), twice)
    handle.remove()
    assert torch.equal(layer(x) * 2, twice)
    assert layer._forward_hooks is table
    layer.register_forward_hook(double)
    stack.close()
    assert layer._forward_hooks is table
    assert list(table.values()) == [double]


def test_a_handle_from_before_the_block_removes_within_it_and_after() -> None:
    """The table that the handle refers to is still the module's."""
    layer, x = nn.Linear(3, 3), torch.ones(1, 3)
    first, second = (layer.register_forward_hook(double) for _ in range(2))
    plain = layer(x) / 4
    with kedge.hook(layer, ":out", kedge.measure()):
        first.remove()
        assert torch.equal(layer(x), plain * 2)
    second.remove()
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("change", ["clear", "replace"])
def test_a_table_that_the_program_clears_or_replaces_is_left_as_it_made_it(change: str) -> None:
    """The hooks are gone, and no trace of them stays at the end."""
    layer = nn.Linear(3, 3)
    with kedge.session() as s:
        s.hook(layer, ":out", kedge.measure())
        if change == "clear":
            layer._forward_hooks.clear()
        else:
            layer._forward_hooks = OrderedDict()
        copied = pickle.loads(pickle.dumps(layer))
        s.pause()
        s.resume()
    for module in (layer, copied):
        assert not module._forward_hooks
        assert not vars(module._forward_hooks)


def test_hooks_that_move_to_another_module_are_the_programs_alone() -> None:
    """PyTorch's quantization moves the hooks of a module by the values of its table."""
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    layer.register_forward_hook(double)
    with kedge.hook(layer, ":out", kedge.measure()):
        for hook in layer._forward_hooks.values():
            other.register_forward_hook(hook)
        layer(torch.ones(1, 3))
    assert list(other._forward_hooks.values()) == [double]


def test_an_average_and_a_functional_call_of_a_hooked_model_are_those_of_a_plain_one() -> None:
    """`AveragedModel` copies the model; `functional_call` calls it with other parameters, which the hooks see."""
    model, x = net(), torch.ones(2, 3)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with kedge.hook(model, ":out", kedge.record(keep=None)) as acts:
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        assert not [hook for m in average.modules() for hook in m._forward_hooks.items()]
        assert torch.equal(average(x), model(x))
        torch.func.functional_call(model, zeros, (x,))
    first, second = acts.records(":out")
    assert first.value.any()
    assert not second.value.any()
    assert torch.equal(average(x), model(x))


def test_a_parametrized_module_of_a_hooked_model_is_copied_with_its_class() -> None:
    """Parametrizing in the block changes the class of the module, and so of what is copied."""
    model = net()
    with kedge.hook(model, "**:out", kedge.measure()):
        nn.utils.parametrizations.weight_norm(model[0])
        twin = copy.deepcopy(model)
        model(torch.ones(1, 3))
    assert type(twin[0]) is type(model[0])
    assert torch.equal(twin[0].weight, model[0].weight)


TRACED = pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 3))]
)


@TRACED
@pytest.mark.parametrize("selector", ["0", "0:in, 2:out", "**:out.grad, !:out.grad", "0/*"])
def test_modules_in_torchscript_are_refused(make: Callable[..., Any], selector: str) -> None:
    """In a line, which says what to do; the model works as before."""
    model, x = make(net()), torch.ones(1, 3)
    expected = model(x)
    with (
        pytest.raises(NoSuchKind, match="only what TorchScript runs.*hook the model before"),
        kedge.session() as s,
    ):
        s.hook(model, selector, kedge.record())
    assert torch.equal(model(x), expected)


@TRACED
def test_modules_in_torchscript_beside_others_are_the_cause(make: Callable[..., Any]) -> None:
    """The others fire; these are reported with what keeps them from it."""
    model, x = nn.Sequential(nn.Linear(3, 3), make(net())), torch.ones(1, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KedgeWarning)
        with kedge.session() as s:
            acts = s.hook(model, "**", kedge.record())
            model(x)
    assert torch.equal(acts["0"], model[0](x))
    (warning,) = [
        str(each.message) for each in caught if issubclass(each.category, NeverFiredWarning)
    ]
    assert "1.0:out" in warning
    assert "TorchScript runs its module without Python" in warning


@TRACED
def test_gradients_of_parameters_in_torchscript_are_seen(make: Callable[..., Any]) -> None:
    """They need no hook on a module."""
    model = make(net())
    with kedge.hook(model, "**:param.grad", kedge.record()) as acts:
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(acts["0.weight:param.grad"], dict(model.named_parameters())["0.weight"].grad)
