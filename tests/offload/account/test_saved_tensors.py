"""``kedge.saved``: the account of one forward agrees with what is alive, and the look leaves no mark."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from kedge.offload.account.tensors import SavedTensors
from kedge.offload.saved_tensors import saved
from kedge.store.saved_tables import WORDS
from tests.marks import DEVICE, needs_device


class Block(nn.Module):
    """Attention and an MLP, as in a GPT."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.mlp = nn.Sequential(
            nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size), nn.Dropout(0.1)
        )

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(x)


class Blocks(nn.Module):
    """Several blocks, some of them perhaps checkpointed."""

    def __init__(self, *checkpointed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for number, block in enumerate(self.blocks):
            x = (
                checkpoint(block, x, use_reentrant=False)
                if number in self.checkpointed
                else block(x)
            )
        return x


def convolutions() -> nn.Module:
    """A small convolutional net."""
    first = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    )
    return nn.Sequential(
        first,
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(392, 4),
    )


class Made(TorchDispatchMode):
    """Keeps a weak reference to every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.storages[value.untyped_storage()] = value.untyped_storage().nbytes()
        return result

    def alive(self, *there: torch.Tensor) -> int:
        gc.collect()
        known = [tensor.untyped_storage() for tensor in there]
        return sum(
            size for storage, size in self.storages.items() if not any(storage is k for k in known)
        )


CASES = {
    "gpt": (Blocks, lambda: torch.randn(4, 16, 32)),
    "checkpointed": (lambda: Blocks(0, 1, 2), lambda: torch.randn(4, 16, 32)),
    "cnn": (convolutions, lambda: torch.randn(4, 3, 18, 18)),
    "channels last": (
        lambda: convolutions().to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 3, 18, 18).to(memory_format=torch.channels_last),
    ),
    "lstm": (lambda: nn.LSTM(8, 16, batch_first=True), lambda: torch.randn(4, 10, 8)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda: torch.randn(4, 10, 16),
    ),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_total_is_what_is_alive(case: str, autocast: bool) -> None:
    """The bytes in the account are, to 1 %, those of the storages that a forward makes and that are alive when it is over."""
    if case == "lstm" and autocast and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip(
            "this processor has no bfloat16, without which PyTorch computes no LSTM under autocast"
        )
    torch.manual_seed(0)
    model, x = (make() for make in CASES[case])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        account = saved(model)(x)
        with Made() as made:
            output = tree_leaves(model(x))[0]
        graph = output.grad_fn
        del output
        alive = made.alive(x, *model.parameters(), *model.buffers())

    assert graph is not None
    assert account.total.bytes - account.inputs == pytest.approx(alive, rel=0.01)
    assert sum(sums.bytes for sums in account.by_module()) == account.total.bytes
    assert sum(sums.bytes for sums in account.by_line()) == account.total.bytes
    assert account.by_module(inner=True)[0].bytes == account.total.bytes


@needs_device
@pytest.mark.parametrize("case", ["gpt", "checkpointed", "cnn"])
def test_the_total_is_what_the_device_has_allocated(case: str) -> None:
    """On a device the bytes in the account are, to 1 %, those that a forward leaves allocated."""
    make, data = CASES[case]
    model, x = make().to(DEVICE), data().repeat(16, *[1] * (data().dim() - 1)).to(DEVICE)
    saved(model)(x)
    before = torch.accelerator.memory_allocated()
    account = saved(model)(x)
    assert torch.accelerator.memory_allocated() == before
    graph = model(x).grad_fn

    assert graph is not None
    assert account.total.bytes - account.inputs == pytest.approx(
        torch.accelerator.memory_allocated() - before, rel=0.01
    )


def test_an_item_tells_where_it_comes_from() -> None:
    """Each item has its module, node, field, shape, bytes, storage, origin, sharers and line."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    account = saved(model)(torch.randn(16, 4))
    known = {(item.path, item.node, item.field): item for item in account.items}

    data = known["0", "AddmmBackward0", "mat1"]
    weight = known["2", "AddmmBackward0", "mat2"]
    result, again = known["1", "ReluBackward0", "result"], known["2", "AddmmBackward0", "mat1"]
    assert (data.origin, data.shape, data.bytes, data.alias, data.output) == (
        "input",
        (16, 4),
        256,
        False,
        False,
    )
    assert (weight.origin, weight.alias, weight.shape, weight.counts) == (
        "parameter",
        True,
        (8, 2),
        False,
    )
    assert (result.origin, result.output, again.output) == ("made", True, False)
    assert result.storage == again.storage
    assert (result.shared, again.shared) == ((again.number,), (result.number,))
    assert (result.dtype, result.device, result.held) == (torch.float32, torch.device("cpu"), 512)
    assert {item.source.text for item in account.items} == {
        "account = saved(model)(torch.randn(16, 4))"
    }
    assert {item.source.function for item in account.items} == {
        "test_an_item_tells_where_it_comes_from"
    }


def test_buffers_views_and_calls_are_named() -> None:
    """A buffer is one, a view says that it is, and the second call of a module is call 1."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(self.layer(self.norm(x)[:, :4]).tanh())

    items = saved(Again())(torch.randn(8, 8)).items

    assert {item.field for item in items if item.origin == "buffer"} <= {
        "running_mean",
        "running_var",
    }
    assert [item.call for item in items if item.path == "layer" and item.field == "mat1"] == [0, 1]
    assert next(item for item in items if item.path == "layer" and item.field == "mat1").alias


class Discarding(nn.Module):
    """Computes something that nobody keeps."""

    def forward(self, x: Any) -> Any:
        x = x * x.exp()
        (x.sin() * x.cos()).sum()
        return x.tanh()


def test_what_the_forward_itself_lets_go_is_not_in_the_account() -> None:
    """A graph that is dropped within the forward is not held when it is over, and shows in the time line."""
    x = torch.randn(1000, requires_grad=True)
    account = saved(Discarding())(x)

    assert "SinBackward0" not in {item.node for item in account.items}
    assert account.total.bytes == 3 * 4000
    assert account.timeline.peak == 5 * 4000


class Twice(nn.Module):
    """Changes what it holds besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen = self.seen + 1
        return F.dropout(self.norm(x) * random.random(), 0.5)


def test_the_look_leaves_no_mark() -> None:
    """Random numbers, buffers, gradients, hooks and graphs are as they were, and nothing of the forward is alive."""
    model, x = Twice(), torch.randn(8, 4)
    pending = model(x).sum()
    seen, before = model.seen, {name: value.clone() for name, value in model.state_dict().items()}
    state, python = torch.get_rng_state(), random.getstate()
    outputs: list[Any] = []
    handle = model.norm.register_forward_hook(
        lambda module, args, out: outputs.append(weakref.ref(out))
    )
    account = saved(model, backward=True)(x)
    handle.remove()

    assert torch.equal(state, torch.get_rng_state())
    assert python == random.getstate()
    assert model.seen is seen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == [None, None]
    assert [ref() for ref in outputs] == [None]
    assert not model.norm._forward_hooks
    assert not model._forward_pre_hooks
    assert account.items
    pending.backward()


def test_gradients_are_on_during_the_look_only() -> None:
    """A model is looked at as if it were trained, whatever the mode around."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert saved(model)(x).total.bytes == 32
            assert not torch.is_grad_enabled()


def test_a_report_of_a_program_without_gradients_says_that_it_saves_nothing() -> None:
    """A user who only infers does not hold these tensors; with gradients on there is no such remark."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            account = saved(model)(x)
        assert account.gradients_were_off
        assert "Gradients are off where kedge.saved was called" in str(account)
        assert "Gradients are off" in account._repr_html_()
    account = saved(model)(x)
    assert "Gradients are off" not in str(account)


def test_an_argument_made_in_inference_mode_is_an_error_with_a_note() -> None:
    """PyTorch's own message proposes ``no_grad``, which would not help here; other errors get no such note."""
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.ones(2, 4)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved") as caught:
            saved(model)(x)
    assert any(
        "make the arguments outside of torch.inference_mode()" in note
        for note in caught.value.__notes__
    )
    with pytest.raises(RuntimeError) as caught:
        saved(nn.Linear(5, 4))(torch.ones(2, 4))
    assert not any("inference" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_error_of_the_model_is_its_own_and_leaves_no_mark() -> None:
    """What the forward raises comes through, and no hook and no state is left."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 4))
    before = model[0].running_mean.clone()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        saved(model)(torch.randn(8, 4))

    assert torch.equal(model[0].running_mean, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_changed_tensor_is_refused_as_without_the_look() -> None:
    """The check for in-place changes, which PyTorch leaves out under saved-tensor hooks, is made all the same."""

    class Changing(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x.exp()
            z = y * 2
            y.add_(1)
            return z

    x = torch.randn(4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), Changing())
    with pytest.raises(RuntimeError) as plain:
        model(x).sum().backward()
    with pytest.raises(RuntimeError) as looked:
        saved(model, backward=True)(x)

    assert str(looked.value).partition("Hint")[0] == str(plain.value).partition("Hint")[0]


def test_the_pair_in_force_is_still_called() -> None:
    """What the program's own saved-tensor hooks pack is packed by them."""
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    with hooks:
        account = saved(nn.Linear(4, 4))(torch.randn(2, 4))

    assert len(packed) == len(account.items) == 1


def test_the_loss_is_accounted_outside_of_the_modules() -> None:
    """With a loss its tensors are in the account too, without a module and with their own line."""
    target = torch.zeros(8, dtype=torch.long)
    account = saved(nn.Linear(4, 8), loss=lambda out: F.cross_entropy(out, target))(
        torch.randn(8, 4)
    )
    outside = [item for item in account.items if item.path is None]

    assert {item.node for item in outside} == {"LogSoftmaxBackward0", "NllLossBackward0"}
    assert [sums.path for sums in account.by_module(inner=True)] == ["", None]


def test_the_time_line_rises_and_falls() -> None:
    """The bytes rise to the peak in the forward and fall to nothing in the backward; the holders make up the peak."""
    account = saved(Blocks(), backward=True)(torch.randn(4, 16, 32))
    course = account.timeline

    assert course.peak == max(course.bytes) == account.total.bytes
    assert course.peak_at < course.backward
    assert course.bytes[-1] == 0
    assert sum(size for _, size in course.holders) <= course.peak
    assert course.holders[0][1] == max(sums.bytes for sums in account.by_module())
    assert len(course.bytes) == len(course.at) == 2 * len(account.items)


def test_it_is_printed_as_tables() -> None:
    """As text and as HTML the account has its totals, its modules and its lines; names are escaped."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a<b", nn.Linear(200, 100))

        def forward(self, x: Any) -> Any:
            return self.get_submodule("a<b")(x).tanh()

    account = saved(Model())(torch.randn(200, 200))
    text = str(account).splitlines()

    assert isinstance(account, SavedTensors)
    assert any(line.split() == ["can", "be", "moved", "80", "kB"] for line in text)
    assert next(line for line in text if line.startswith("module")).split()[-1] == "checkpoint"
    assert next(line for line in text if line.startswith("a<b")).split()[1:4] == ["1", "160", "kB"]
    assert any('return self.get_submodule("a<b")(x).tanh()' in line for line in text)
    assert ">a&lt;b</td>" in account._repr_html_()


def test_lines_of_the_program_are_printed_from_one_column_on() -> None:
    """Figures end in line with each other, words begin so: they are of many lengths."""
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4), nn.Tanh())
    printed = str(saved(model, backward=True)(torch.randn(2, 4))).splitlines()
    tables = [at for at, line in enumerate(printed) if line.endswith(WORDS)]
    assert tables
    for at in tables:
        start = printed[at].rindex(WORDS)
        rows = [line for line in printed[at + 1 : at + 3] if len(line) > start]
        assert rows
        assert all(line[start - 2 : start] == "  " and line[start] != " " for line in rows)
