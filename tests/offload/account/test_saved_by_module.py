"""The account of what autograd saved agrees with PyTorch's own saved-tensor hooks, and takes no part in the saving."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import _get_sequence_nr
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kedge.hooks.placing.module_calls import CallTracker
from kedge.watch.records.saved_by_module import SavedByModule

Sums = dict[str | None, tuple[int, int]]


@contextmanager
def told(model: nn.Module, begin: Callable[[str], Any], end: Callable[[str], Any]):
    """Report the beginning and the end of every module's call, by plain hooks."""
    with ExitStack() as handles:
        for name, module in model.named_modules():

            def before(module, args, name=name):
                begin(name)

            def after(module, args, output, name=name):
                end(name)

            handles.callback(module.register_forward_pre_hook(before).remove)
            handles.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def followed(model: nn.Module, account: SavedByModule, prefix: str = ""):
    """Connect an account to the calls of every module."""

    def begin(calls, path, module, given):
        account.begin(path, calls.notes[-1] if calls.notes else None)
        return path

    def end(calls, path, output):
        account.end(calls.notes[-1] if calls.notes else None)

    calls = CallTracker(begin, end)
    for name, module in model.named_modules():
        calls.follow(module, prefix + name)
    yield
    calls.close()


def recorded(model: nn.Module, *inputs: Any) -> Sums:
    """What the account says of one call."""
    account = SavedByModule()
    with followed(model, account):
        output = model(*inputs)
        return sums(account.account(output, model))


def sums(entries: Iterable[Any]) -> Sums:
    """The account by path: bytes and tensors."""
    return {entry.path: (entry.bytes, entry.tensors) for entry in entries}


def packed(model: nn.Module, *inputs: Any) -> Sums:
    """What PyTorch's saved-tensor hooks see in one call: each storage once, the model's own left out."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    inside: list[str | None] = [None]
    held, found = {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in held:
            held[storage._cdata] = storage  # so that its identity is not given to another one
            size, count = found.get(inside[-1], (0, 0))
            found[inside[-1]] = (size + storage.nbytes(), count + 1)
        return tensor.detach()

    with (
        told(model, inside.append, lambda _: inside.pop()),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        model(*inputs)
    return found


class Block(nn.Module):
    """Attention and an MLP, with the operations of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x * torch.sigmoid(self.mlp(x))


class Checkpointed(nn.Module):
    """Blocks that are run again in backward, one of them inside another such region."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = checkpoint(self.blocks[0], x * 2, use_reentrant=False)
        x = checkpoint(self.pair, x * 2, use_reentrant=False)
        return checkpoint(self.blocks[3], x * 2, use_reentrant=False)

    def pair(self, x):
        x = checkpoint(self.blocks[1], x * x, use_reentrant=False)
        return self.blocks[2](x)


class Shared(nn.Module):
    """One layer that is called three times, and a value that several save."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return {"sin": x.sin(), "both": [x.cos(), (x.exp(), "a word")]}


MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4)),
        (6, 8),
    ),
    "in place": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
        (6, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            *(
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Flatten(),
            ),
            nn.Linear(72, 5),
        ),
        (4, 3, 8, 8),
    ),
    "block": (Block, (2, 5, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    "lstm": (lambda: nn.LSTM(8, 8, 2), (5, 2, 8)),
    "checkpoint": (Checkpointed, (2, 5, 16)),
    "shared": (Shared, (6, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_account_is_what_the_saved_tensor_hooks_see(name):
    """Bytes, tensors and modules are those of PyTorch's own hooks in a separate run, in the same order."""
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape, requires_grad=True)
    torch.manual_seed(1)
    truth = packed(model, x)
    torch.manual_seed(1)
    account = recorded(model, x)

    assert truth
    assert list(account.items()) == list(truth.items())


def test_what_was_packed_is_not_unpacked():
    """No saved-tensor hook of the program runs, so no checkpointed block runs again."""
    calls = []

    def pack(tensor):
        calls.append("pack")
        return [tensor.detach().half(), "and a word"]

    def unpack(pair):
        calls.append("unpack")
        return pair[0].float()

    model, account = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), SavedByModule()
    with followed(model, account), saved_tensors_hooks(pack, unpack):
        output = model(torch.randn(4, 8, requires_grad=True))
    before = list(calls)
    entries = account.account(output, model)

    assert calls == before
    assert "unpack" not in calls
    assert sums(entries) == {
        "0": (2 * (4 * 8 + 8 * 8), 2),
        "1": (2 * 4 * 8, 1),
    }  # the halves that the program made


def test_nothing_is_computed_numbered_or_kept():
    """After the count autograd's numbers are where they were, gradients are the same bits, and all memory is freed."""
    model, account = Block(), SavedByModule()
    x = torch.randn(2, 5, 16)
    torch.manual_seed(1)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    with followed(model, account):
        output = model(x)
    number, generator = _get_sequence_nr(), torch.get_rng_state()
    account.account(output, model)
    assert _get_sequence_nr() == number
    assert torch.equal(torch.get_rng_state(), generator)
    output.sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))

    gone = [weakref.ref(t) for t in (x, output, output.untyped_storage())]
    output = x = None
    gc.collect()

    assert [ref() for ref in gone] == [None, None, None]


def test_the_calls_of_a_step_add_up():
    """Micro-batches and several roots are one account; what lies between roots has no path, nothing counts twice."""
    body, head, account = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 2)),
        SavedByModule(),
    )
    with (
        followed(body, account, "body."),
        followed(head, account),
    ):
        for _ in range(2):
            features = body(torch.randn(3, 4))
            account.account(features, body)
            output = head(features.exp() + features)  # body.1 has saved what exp() is made of
            entries = account.account(output, head)
            output.sum().backward()

    assert sums(entries) == {
        "body.0": (2 * 3 * 4 * 4, 2),
        "body.1": (2 * 3 * 8 * 4, 2),
        None: (2 * 3 * 8 * 4, 2),
        "0": (2 * 3 * 8 * 4, 2),
    }


def test_a_recompute_is_not_a_call():
    """The calls of a recompute between two micro-batches change nothing, though the last of them never ends."""
    model, account = Checkpointed(), SavedByModule()
    with followed(model, account):
        output = model(torch.randn(2, 5, 16, requires_grad=True))
        once = sums(account.account(output, model))
        output.sum().backward()
        twice = sums(account.account(model(torch.randn(2, 5, 16, requires_grad=True)), model))

    assert twice == {path: (2 * size, 2 * count) for path, (size, count) in once.items()}


class Doubled(torch.autograd.Function):
    """Saves one tensor by the rules, and keeps two more on its ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone(), None)
        ctx.mask, ctx.list, ctx.word = x > 0, [x.clone()], "word"
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


def test_what_a_function_keeps_on_its_ctx_counts():
    """A custom function's saved tensors count, and what it keeps beside them, which no saved-tensor hook sees."""
    assert recorded(Custom(), torch.randn(10, requires_grad=True)) == {"": (40 + 10 + 40, 3)}


def test_a_call_that_raises_ends_with_the_one_around_it():
    """A module that was interrupted, and whose end nobody told of, does not get what is saved after it."""

    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.broken = Interrupted()

        def forward(self, x):
            with suppress(KeyboardInterrupt):
                self.broken(x)
            return x.detach()

    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    account = SavedByModule()
    x = torch.ones(4, requires_grad=True)
    with followed(around := Around(), account), followed(following := Exp(), account, "next"):
        around(x)
        y = following(x)

    assert sums(account.account(y, nn.Identity())) == {"next": (16, 1)}


def test_a_graph_that_is_freed_already_counts_nothing():
    """A backward pass inside the forward frees what it used; that is not saved any more."""
    model = Custom()
    x = torch.ones(4, requires_grad=True)
    account = SavedByModule()
    with followed(model, account):
        y = model(x.exp())
        y.sum().backward()

    # the mask and the list stay on ctx
    assert sums(account.account(y, model)) == {"": (4 + 16, 2)}


def test_sparse_and_transformed_tensors_have_their_parts_counted():
    """A sparse tensor counts with its indices and values, one inside a torch.func transform as what it wraps."""
    matrix = torch.eye(4).to_sparse()
    dense = nn.Parameter(torch.ones(4, 2))

    class Times(nn.Module):
        def forward(self, m):
            return torch.sparse.mm(m, dense.exp())

    times, accounts = Times(), []

    def loss(x):
        account = SavedByModule()
        account.begin("f", None)
        y = x.sin().exp()
        account.end(None)
        accounts.append(sums(account.account(y, times)))
        return y.sum()

    assert recorded(times, matrix) == {"": (4 * 2 * 8 + 4 * 4 + 4 * 2 * 4, 3)}
    torch.func.grad(loss)(torch.ones(3))
    torch.func.vmap(torch.func.grad(loss))(torch.ones(5, 3))
    assert accounts == [{"f": (2 * 3 * 4, 2)}, {"f": (5 * 2 * 3 * 4, 2)}]


def test_compiled_code_is_one_node_of_the_module_around_it(compiled):
    """What compiled code saves belongs to the module in whose call it runs."""
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model, account = nn.Sequential(compiled(inner, backend="aot_eager")), SavedByModule()
    account.begin("", None)
    y = model(torch.randn(3, 4))
    account.end(None)

    assert sums(account.account(y, model)) == {"": (3 * 4 * 4 + 3 * 8 * 4, 2)}


def test_an_in_place_change_of_a_slice_is_the_known_gap():
    """PyTorch does not show what the node of such a change saved; if this fails, it does now."""

    class Slice(nn.Module):
        def forward(self, x):
            y = x.exp()
            y[:, 0].mul_(x[:, 1].sin())
            return y.sin()

    model, x = Slice(), torch.randn(4, 4, requires_grad=True)

    operands = 2 * 4 * 4
    assert recorded(model, x)[""][0] + operands == packed(model, x)[""][0]


def test_a_model_without_gradients_saves_nothing():
    """Under no_grad the account is empty."""
    with torch.no_grad():
        assert recorded(Block(), torch.randn(2, 5, 16)) == {}
