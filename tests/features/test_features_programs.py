"""Features in programs: copies, training, threads, checkpoints, errors and interrupts."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.errors import ActionError, ExtractError, NeverFiredWarning, NotRecorded
from kedge.testing import assert_same_bits, assert_unhooked, hook_tables


def nothing(value: Any) -> None:
    """Do nothing."""


class Net(nn.Module):
    """A normalized layer, a head, and something to do between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 2)
        self.between: Callable[[Tensor], Any] = nothing

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.between(x)
        return self.head(x)


class Head(nn.Module):
    """Classifies what features give."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        return self.fc(values["body"])


def x() -> Tensor:
    """Make an input."""
    return torch.randn(6, 3)


def interrupt(value: Any) -> None:
    """Raise as Ctrl-C does."""
    raise KeyboardInterrupt


def fail(value: Any) -> None:
    """Fail."""
    raise ValueError("no")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("used", [False, True], ids=["first", "later"])
def test_nothing_stays_on_a_model_whose_forward_ends_in_an_error(
    error: type[BaseException], used: bool
) -> None:
    """The error arrives as it is, the hook tables are what they were, and the next call gives right values."""
    model, data = Net().eval(), x()
    before, optimizer_hooks = hook_tables(model), dict(optimizers._global_optimizer_post_hooks)
    features = kedge.extract(model, ["body.0", "head"])
    if used:
        features(data)
    model.between = interrupt if error is KeyboardInterrupt else fail
    for _ in range(2):
        with pytest.raises(error):
            features(data)
        assert {k: v for k, v in hook_tables(model).items() if k != ".__dict__"} == {
            k: v for k, v in before.items() if k != ".__dict__"
        }
        assert optimizers._global_optimizer_post_hooks == optimizer_hooks
        assert torch.is_grad_enabled()
    model.between = nothing
    assert_same_bits(features(data)["head"], model(data).detach())


def test_an_error_outside_of_the_forward_leaves_nothing_either() -> None:
    """A block that collects may end in an error."""
    model = Net()
    features = kedge.extract(model, "body")
    with pytest.raises(ValueError, match="no"), features.collect():
        model(x())
        fail(None)
    assert_unhooked(model)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))], ids=["deepcopy", "pickle"]
)
def test_copies_work_on_their_own_model(twin_of: Callable[[Any], Any], used: bool) -> None:
    """A copied or pickled extractor holds a copied model, gives the same values, and neither touches the other."""
    model, data = Net().eval(), x()
    features = kedge.extract(model, ["body.0", "head"], rename={"head": "logits"})
    if used:
        features(data)
    twin = twin_of(features)
    assert twin.model is not model
    assert_same_bits(twin(data), features(data))
    with torch.no_grad():
        twin.model.head.bias.add_(1)
    assert_same_bits(twin(data)["logits"], twin.model(data).detach())
    assert_same_bits(features(data)["logits"], model(data).detach())
    assert_unhooked(model)
    assert_unhooked(twin.model)


def test_a_copy_made_within_a_forward_is_not_hooked() -> None:
    """A model may copy itself while its features are taken."""
    model, twins = Net().eval(), []
    features = kedge.extract(model, ["body", "head"])
    model.between = lambda value: twins.append(pickle.loads(pickle.dumps(model.body)))
    features(x())
    assert_unhooked(twins[0])


def test_another_model_in_the_place_of_the_first_is_hooked_in_its_turn() -> None:
    """An extractor whose model is replaced takes the features of the new one."""
    features, data = kedge.extract(Net().eval(), "head"), x()
    features(data)
    features.model = Net().eval()
    assert_same_bits(features(data)["head"], features.model(data).detach())


def test_a_replaced_module_is_missed_and_said_to_be() -> None:
    """A module put in the place of a hooked one has no hook, which is an error that tells the cause."""
    model = Net().eval()
    features = kedge.extract(model, "head")
    model.head = nn.Linear(4, 2)
    with pytest.raises(NotRecorded, match="head"):
        features(x())


def test_a_dropped_extractor_drops_the_model() -> None:
    """Nothing global keeps features or model alive."""
    features = kedge.extract(Net().eval(), "body")
    features(x())
    gone = weakref.ref(features.model)
    del features
    gc.collect()
    assert gone() is None


def test_features_train_within_a_sequence_as_the_plain_model_does() -> None:
    """In ``nn.Sequential`` with an optimizer every gradient, weight and running statistic is that of the plain model."""
    torch.manual_seed(0)
    model, head = Net(), Head()
    plain, plain_head = copy.deepcopy((model, head))
    whole = nn.Sequential(kedge.extract(model, "body", no_grad=False), head)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    plain_optimizer = torch.optim.SGD([*plain.parameters(), *plain_head.parameters()], 0.1)
    for _ in range(4):
        data = x()
        for outputs, opt in (
            (whole(data), optimizer),
            (plain_head({"body": plain.body(data)}), plain_optimizer),
        ):
            opt.zero_grad()
            outputs.square().sum().backward()
            opt.step()
        gradients = [
            [p.grad for p in m.parameters() if p.grad is not None]
            for m in (model, head, plain, plain_head)
        ]
        assert_same_bits(gradients[:2], gradients[2:])
        assert_same_bits(model.state_dict(), plain.state_dict())
    assert [module.training for module in whole.eval().modules()] == [False] * len(
        list(whole.modules())
    )


def test_moving_the_extractor_moves_the_model() -> None:
    """``.to`` reaches the model, and values come in its dtype."""
    features = kedge.extract(Net().eval(), "body")
    features(x())
    features.double()
    assert features(x().double())["body"].dtype is torch.float64


def test_other_sessions_hooks_see_what_runs() -> None:
    """A session on the same model fires in forwards that features run, up to where these end."""
    model = Net().eval()
    features = kedge.extract(model, "body")
    with kedge.session() as s:
        s.hook(model, "body, head", lambda value: None)
        features(x())
        features(x())
        assert [entry.fired for entry in s.ledger()] == [2, 1]
        with pytest.raises(AssertionError):
            assert_unhooked(model)
    features(x())
    assert_unhooked(model)


@pytest.mark.parametrize(
    ("site", "reentrant"), [("body.0", False), ("body", False), ("head", False), ("head", True)]
)
def test_gradients_of_features_in_a_checkpoint_are_those_without(
    site: str, reentrant: bool
) -> None:
    """Values taken inside a checkpointed block, of it and behind it differentiate as in the plain model.

    Inside a reentrant one there is no graph: its forward runs without grad.
    """

    class Saving(nn.Module):
        def __init__(self, inner: Net) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.head(checkpoint(self.inner.body, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    model = Net().eval()
    data = x().requires_grad_()
    features = kedge.extract(Saving(model), f"inner.{site}", no_grad=False)
    for _ in range(3):
        (value,) = features(data).values()
        expected = {"body.0": model.body[0], "body": model.body, "head": model}[site](data)
        assert_same_bits(value.detach(), expected.detach())
        wanted = torch.autograd.grad(expected.square().sum(), data)
        value.square().sum().backward()
        assert_same_bits(data.grad, wanted[0])
        data.grad = None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Replicated(nn.Module):
    """Splits a batch among threads, each with a replica of one model, as ``DataParallel`` does."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count, self.order = inner, count, list(range(count))

    def forward(self, x: Tensor) -> Tensor:
        replicas = [self.inner._replicate_for_data_parallel() for _ in range(self.count)]
        for replica in replicas:
            for name, module in self.inner.named_children():
                setattr(replica, name, module)
        results: dict[int, Tensor] = {}
        turn = [threading.Event() for _ in range(self.count + 1)]
        grad = torch.is_grad_enabled()

        def work(i: int, part: Tensor) -> None:
            turn[i].wait(10)
            with torch.set_grad_enabled(grad):
                results[i] = replicas[i](part)
            later = self.order.index(i) + 1
            turn[self.order[later] if later < self.count else self.count].set()

        threads = [
            threading.Thread(target=work, args=pair) for pair in enumerate(x.chunk(self.count))
        ]
        for thread in threads:
            thread.start()
        turn[self.order[0]].set()
        for thread in threads:
            thread.join()
        return torch.cat([results[i] for i in range(self.count)])


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_replicas_in_threads_are_joined_in_the_order_of_their_start(
    order: list[int], no_grad: bool
) -> None:
    """Whichever replica comes first, the parts stand as in the batch; so do several calls."""
    model, data = Net().eval(), x()
    split = Replicated(model, 3)
    split.order = order
    functions = {"inner.body.0": model.body[0], "inner.head": model, ":out": model}
    features = kedge.extract(split, list(functions), no_grad=no_grad)
    for _ in range(3):
        out = features(data)
        parts = data.chunk(3)
        expected = {name: torch.cat([f(part) for part in parts]) for name, f in functions.items()}
        assert_same_bits(out, {name: value.detach() for name, value in expected.items()})
        assert out["inner.head"].requires_grad is not no_grad


def test_the_extractor_itself_may_be_replicated() -> None:
    """Replicas of features run at the same time in threads, each with values of its own."""
    model = Net().eval()
    features = kedge.extract(model, ["body", "head"])
    inputs = [x() for _ in range(8)]
    results: dict[int, Any] = {}
    start = threading.Barrier(len(inputs))

    def work(i: int) -> None:
        start.wait(10)
        for _ in range(5):
            results[i] = features(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, data in enumerate(inputs):
        assert_same_bits(
            results[i], {"body": model.body(data).detach(), "head": model(data).detach()}
        )
    assert_unhooked(model)


def test_what_another_thread_does_with_the_model_is_not_taken() -> None:
    """A plain call in a thread that was there before runs to its end and adds nothing to the features."""
    model, data = Net().eval(), x()
    features = kedge.extract(model, "body")
    features(data)
    other: list[Tensor] = []
    inside, done = threading.Event(), threading.Event()

    def plain() -> None:
        inside.wait(10)
        other.append(model(data * 2))
        done.set()

    thread = threading.Thread(target=plain)
    thread.start()

    def meanwhile(value: Tensor, event: Any) -> None:
        if threading.current_thread() is not thread and not inside.is_set():
            inside.set()
            done.wait(10)

    with kedge.hook(model, "body.0", meanwhile):
        out = features(data)
    thread.join()
    assert_same_bits(out["body"], model.body(data).detach())
    assert_same_bits(other[0], model(data * 2))


def test_a_block_collects_every_pass() -> None:
    """Each pass adds a value under each name; what changes memory that is used again changes none of them."""
    model = Net().eval()
    features = kedge.extract(model, ["body.1", "head"], rename={"head": "logits"})
    inputs = [torch.randn(n, 3) for n in (2, 5, 5)]
    with features.collect() as taken:
        for i, data in enumerate(inputs):
            model(data)
            assert len(taken["logits"]) == i + 1
    model(inputs[0])
    assert list(taken) == ["body.1", "logits"]
    assert_same_bits(taken["logits"], [model(data).detach() for data in inputs])
    assert_same_bits(
        taken["body.1"], [model.body[1](model.body[0](data)).detach() for data in inputs]
    )
    assert_unhooked(model)


def test_a_block_that_collects_nothing_says_why() -> None:
    """Reading a name under which nothing came gives the cause."""
    model = Net().eval()
    features = kedge.extract(model, "body")
    with features.collect() as taken:
        pass
    assert len(taken) == 0
    with pytest.raises(NotRecorded, match="the model was not called"):
        taken["body"]
    with features.collect() as taken:
        model(x())
    with pytest.raises(NotRecorded, match="the names are body"):
        taken["head"]


def test_features_are_taken_within_a_block_that_collects() -> None:
    """A call of the features inside the block has its own values, and adds none to the block's."""
    model, data = Net().eval(), x()
    features = kedge.extract(model, "body")
    with features.collect() as taken:
        model(data)
        inner = features(data)["body"]
        model(data * 2)
    assert_same_bits(
        [*taken["body"], inner], [model.body(d).detach() for d in (data, data * 2, data)]
    )


def test_replicas_are_not_collected() -> None:
    """A block says that it cannot tell the passes of replicas apart."""
    split = Replicated(Net().eval(), 1)
    failures: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda args: failures.append(args.exc_value)
    try:
        with kedge.extract(split, "inner.body").collect(), pytest.raises(KeyError):
            split(x())
    finally:
        threading.excepthook = hook
    assert isinstance(failures[0].__cause__ or failures[0], (ExtractError, ActionError))
    assert "replicas" in str(failures[0])


def test_a_data_set_is_written_to_a_folder(tmp_path: Path) -> None:
    """``dataset`` is `extract_dataset` with these features: one row a sample, equal to those of the whole batch."""
    model, data = Net().eval(), torch.randn(10, 3)
    features = kedge.extract(model, ["body", "head"], rename={"head": "logits"})
    written = features.dataset(
        DataLoader(TensorDataset(data), batch_size=5), tmp_path / "features", progress=False
    )
    expected = [features(part) for part in data.split(5)]
    for name in ("body", "logits"):
        assert_same_bits(
            torch.as_tensor(written[name][:]), torch.cat([values[name] for values in expected])
        )
    with pytest.raises(TypeError, match="colour"):
        features.dataset([], tmp_path / "more", colour="blue")
    assert_unhooked(model)


@pytest.mark.filterwarnings("error")
def test_a_site_of_a_pattern_that_never_fires_is_reported_once() -> None:
    """The first whole forward warns about it, no other does."""
    model = Net().eval()
    model.spare = nn.Linear(2, 2)
    features = kedge.extract(model, "head, spare")
    with pytest.warns(NeverFiredWarning, match="spare"):
        features(x())
    features(x())
    features(torch.randn(2, 3))


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.down(x)
        return self.up(self(y, depth - 1)) if depth else y


def test_a_model_that_calls_itself_gives_every_call() -> None:
    """Each call of a recursion is a value of its own, in the first forward and in those that may end early."""
    model, x = Again(), torch.randn(3, 4)
    every, last = kedge.extract(model, ["down", "up"]), kedge.extract(model, "up#1")
    with torch.no_grad():
        downs = [model.down(x)]
        downs += [model.down(downs[0])]
        downs += [model.down(downs[1])]
        ups = [model.up(downs[2])]
        ups += [model.up(ups[0])]
    wanted = {f"down#{i}": v for i, v in enumerate(downs)} | {
        f"up#{i}": v for i, v in enumerate(ups)
    }
    for _ in range(3):
        assert_same_bits(every(x), wanted)
        assert_same_bits(last(x), {"up#1": ups[1]})


class Checkpointed(nn.Module):
    """Runs two layers in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=True))


def test_what_a_reentrant_checkpoint_returns_has_its_graph_every_time() -> None:
    """Such a value gets its graph behind its last module, so no later forward ends before that."""
    model, x = Checkpointed(), torch.randn(3, 4, requires_grad=True)
    features = kedge.extract(model, "block", no_grad=False)
    model.block(x).square().sum().backward()
    wanted = [p.grad for p in model.block.parameters()]
    for _ in range(3):
        model.zero_grad()
        features(x)["block"].square().sum().backward()
        assert_same_bits([p.grad for p in model.block.parameters()], wanted)


def test_what_lies_in_an_argument_stays_when_the_argument_is_filled_anew() -> None:
    """A program may load every batch into the same memory."""
    model = nn.Sequential(nn.Identity(), nn.Flatten(0), nn.ReLU())
    features, buffer = kedge.extract(model, [":in", "0", "1"]), torch.empty(2, 3)
    batches = [torch.randn(2, 3) for _ in range(3)]
    taken = [features(buffer.copy_(batch)) for batch in batches]
    assert_same_bits(
        [values[name] for values in taken for name in (":in", "0")],
        [b for b in batches for _ in range(2)],
    )
    assert_same_bits([values["1"] for values in taken], [batch.flatten() for batch in batches])
