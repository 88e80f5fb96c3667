"""Keepers of saved tensors: what they are asked, that nothing changes by it, and that nothing stays."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from kedge.hooks.saved.keeper import KeeperInForce, SavingPlace, keep
from kedge.hooks.saved.pairs import pair_stack

top = torch._C._autograd._top_saved_tensors_default_hooks


class Hoard:
    """A keeper that takes everything, as a copy."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.places: list[tuple[str | None, int, bool]] = []
        self.asked = 0

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        self.places.append((place.path, place.call, place.recompute))
        return {"mine": value.detach().clone()} if self.takes else None

    def unpack(self, packed: Any) -> Tensor:
        self.asked += 1
        found: Tensor = packed["mine"]
        return found

    @property
    def paths(self) -> list[str | None]:
        return [path for path, _, _ in self.places]


class Net(nn.Module):
    """Calls one layer twice, and computes something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.act(self.a(self.a(x))))
        return y.exp()


@contextmanager
def keeping(model: nn.Module, keeper: Any, **options: Any) -> Iterator[KeeperInForce]:
    """Put a keeper in force for a block."""
    with ExitStack() as stack:
        yield keep(stack, model, keeper, **{"ambient": True, **options})


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters."""
    model.zero_grad()
    run().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are the same to the last bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_each_saved_tensor_is_of_the_innermost_module_and_its_call() -> None:
    """For each tensor that autograd saves, a keeper learns in which call of which module that happens."""
    model, hoard = Net(), Hoard()
    x = torch.ones(2, 3)
    with keeping(model, hoard):
        model(x).pow(2).sum().backward()
        model(x)

    forward = [("a", 0), ("a", 1), ("a", 1), ("act", 0), ("b", 0), ("b", 0), ("", 0)]
    assert [place[:2] for place in hoard.places] == [*forward, (None, 0), *forward]
    assert hoard.asked == 8


@pytest.mark.parametrize("ambient", [True, False])
def test_without_ambient_only_what_modules_save_is_seen(ambient: bool) -> None:
    """Between module calls a keeper is asked only if that was asked for."""
    model, hoard = Net(), Hoard()
    with keeping(model, hoard, ambient=ambient):
        model(torch.ones(2, 3)).pow(2).sum().backward()
        assert (top(True) is not None) is ambient

    assert (None in hoard.paths) is ambient
    assert len(hoard.paths) == 7 + ambient


def test_a_place_says_whether_it_was_selected() -> None:
    """The keeper is asked everywhere, and told where it was meant to act."""
    selected: dict[str | None, bool] = {}

    class Asked(Hoard):
        def pack(self, value: Tensor, place: SavingPlace) -> None:
            selected[place.path] = place.selected

    with keeping(model := Net(), Asked(), places=lambda path: path.startswith("a"), outside=False):
        model(torch.ones(2, 3)).pow(2).sum().backward()

    assert selected == {"a": True, "act": True, "b": False, "": False, None: False}


@pytest.mark.parametrize("takes", [True, False])
def test_gradients_are_the_same_to_the_last_bit(takes: bool) -> None:
    """Whether a keeper takes everything or nothing, outputs and gradients do not change."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten()
    )
    model.append(nn.Linear(4 * 6 * 6, 2))
    x = torch.randn(5, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    def run() -> Tensor:
        torch.manual_seed(1)
        return nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 1]))

    plain = gradients(model, run)
    with keeping(model, Hoard(takes=takes)):
        kept = gradients(model, run)

    assert equal(plain, kept)


def _output() -> tuple[Tensor, Callable[[], Any]]:
    x = torch.ones(3, requires_grad=True).exp()
    return x, lambda: x.add_(1)


def _relu() -> tuple[Tensor, Callable[[], Any]]:
    x = torch.relu(torch.ones(3, requires_grad=True) * 2)
    return x.sin(), lambda: x.mul_(2)


def _buffer() -> tuple[Tensor, Callable[[], Any]]:
    buffer = torch.ones(3)
    return torch.ones(3, requires_grad=True) * buffer, lambda: buffer.zero_()


def _weight() -> tuple[Tensor, Callable[[], Any]]:
    weight = nn.Parameter(torch.ones(3))
    return torch.ones(3, requires_grad=True) * weight, lambda: weight.detach().sub_(1)


def _third() -> tuple[Tensor, Callable[[], Any]]:
    _, s, v = torch.linalg.svd(torch.eye(2).requires_grad_() * 2)
    return s + 0 * v.sum(), lambda: v.mul_(2)


def _stack() -> tuple[Tensor, Callable[[], Any]]:
    x = torch.ones(2, 2, requires_grad=True)
    part = x.softmax(0)
    return part, lambda: part.mul_(2)


CHANGED = [_output, _relu, _buffer, _weight, _third, _stack]


@pytest.mark.parametrize("make", CHANGED)
def test_what_was_changed_in_place_raises_what_autograd_raises(make: Callable[[], Any]) -> None:
    """What a keeper leaves alone is checked for changes in place, with autograd's own message."""
    y, change = make()
    change()
    with pytest.raises(RuntimeError) as plain:
        y.sum().backward()
    with keeping(nn.Identity(), Hoard(takes=False)):
        y, change = make()
        change()
        with pytest.raises(RuntimeError) as kept:
            y.sum().backward()

    assert "modified by an inplace operation" in str(plain.value)
    assert str(kept.value) == str(plain.value)


def test_a_result_may_lose_its_graph_before_backward_and_an_input_may_not() -> None:
    """Autograd lets an operation read a result of its own that the program has detached in place, and refuses an input."""
    refused = []
    for hold in (nullcontext(), keeping(nn.Identity(), Hoard(takes=False))):
        with hold:
            x = torch.ones(3, requires_grad=True)
            result = (x * 2).exp()
            loss = result.sum()
            result.detach_()
            loss.backward()
            assert torch.equal(x.grad, 2 * result)

            given = x * 2
            loss = given.sin().sum()
            given.detach_()
            with pytest.raises(RuntimeError, match="detached in-place") as error:
                loss.backward()
            refused.append(str(error.value))

    assert refused[0] == refused[1]


def test_a_step_between_forward_and_backward_raises() -> None:
    """An optimizer that steps before backward is found out, as it is without hooks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    with keeping(model, Hoard(takes=False)):
        loss = model(torch.ones(1, 2)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"FloatTensor \[2, 2\].*is at version"):
            loss.backward()


@pytest.mark.parametrize("takes", [True, False])
def test_a_graph_can_be_used_again(takes: bool) -> None:
    """retain_graph, a second loss, double backward and a look at a node's saved tensors all work."""
    x = torch.arange(1.0, 4.0, requires_grad=True)
    with keeping(nn.Identity(), Hoard(takes=takes)):
        y = x.pow(3)
        assert torch.equal(y.grad_fn._saved_self, x)
        assert torch.equal(y.grad_fn._saved_self, x)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum() * 2, x, create_graph=True)
        (second,) = torch.autograd.grad(again.sum(), x)

    assert torch.equal(first, 3 * x.detach() ** 2)
    assert torch.equal(again.detach(), 2 * first)
    assert torch.equal(second, 12 * x.detach())


def test_a_graph_that_never_runs_backward_is_freed_at_once() -> None:
    """What is kept by reference makes no cycle: with the graph the memory goes, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with keeping(nn.Identity(), Hoard(takes=False)):
            x = torch.ones(4, requires_grad=True).exp()
            y = x.sin().exp().tanh()
            memory = [weakref.ref(t.untyped_storage()) for t in (x, y)]
            del x, y
            assert [ref() for ref in memory] == [None, None]
    finally:
        gc.enable()


def test_what_was_packed_can_be_unpacked_after_the_end() -> None:
    """A backward pass after the block still gets its tensors."""
    model, hoard = Net(), Hoard()
    plain = gradients(model, lambda: model(torch.ones(2, 3)).sum())
    with keeping(model, hoard):
        loss = model(torch.ones(2, 3)).sum()
    model.zero_grad()
    loss.backward()

    assert hoard.asked == 7
    assert equal(plain, [p.grad for p in model.parameters() if p.grad is not None])


class Failing(nn.Module):
    """Raises inside, once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner, self.error, self.outer = nn.Linear(3, 3), error, nn.Linear(3, 3)
        self.fails = True
        self.outer.register_forward_pre_hook(self._raise)

    def _raise(self, *_: Any) -> None:
        if self.fails:
            self.fails = False
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.inner(x))
        return y


@pytest.mark.parametrize("ambient", [True, False])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_after_a_failure_the_next_call_is_reported_correctly(
    ambient: bool, error: BaseException, tables: Callable[..., dict[str, Any]]
) -> None:
    """An exception or an interrupt in a forward leaves no wrong place behind, and no hook after the block."""
    model, hoard = Failing(error), Hoard()
    before = tables(model)
    with keeping(model, hoard, ambient=ambient):
        with pytest.raises(type(error)):
            model(torch.ones(1, 3))
        hoard.places.clear()
        model(torch.ones(1, 3))

        assert hoard.places == [("inner", 0, False)] + [("outer", 0, False)] * 2
    assert tables(model) == before
    assert top(True) is None


@pytest.mark.parametrize("ambient", [True, False])
def test_an_interrupt_inside_a_block_of_the_program_leaves_no_pair(ambient: bool) -> None:
    """A pair that an interrupt left on top of the program's own does not make that one stay."""
    model = Failing(KeyboardInterrupt())
    with keeping(model, Hoard(), ambient=ambient), pytest.raises(KeyboardInterrupt), save_on_cpu():
        model(torch.ones(1, 3))

    assert top(True) is None
    assert pair_stack.pairs == pair_stack.lives == []


def test_an_error_of_the_keeper_comes_out_as_it_is() -> None:
    """An OSError in pack or in unpack reaches the program, and nothing stays in force."""

    class Full(Hoard):
        def pack(self, value: Tensor, place: SavingPlace) -> Any:
            raise OSError("no room")

    class Gone(Hoard):
        def unpack(self, packed: Any) -> Tensor:
            raise OSError("unreadable")

    model = Net()
    with pytest.raises(OSError, match="no room"), keeping(model, Full()):
        model(torch.ones(2, 3))
    assert top(True) is None
    with keeping(model, Gone()):
        loss = model(torch.ones(2, 3)).sum()
        with pytest.raises(OSError, match="unreadable"):
            loss.backward()
    assert top(True) is None


def test_blocks_may_end_in_any_order() -> None:
    """Of two keepers the outer one may end first; the other is asked on, and in the end nothing is left."""
    model, first, second = Net(), Hoard(takes=False), Hoard(takes=False)
    one, other = ExitStack(), ExitStack()
    keep(one, model, first, ambient=True)
    keep(other, model, second, ambient=True)
    model(torch.ones(2, 3))
    one.close()
    model(torch.ones(2, 3))
    other.close()
    model(torch.ones(2, 3))

    assert (len(first.places), len(second.places)) == (7, 14)
    assert top(True) is None


def test_a_block_of_the_program_may_end_before_or_after() -> None:
    """Ends that cross those of the program's own pair leave neither in force."""
    model, hoard, theirs = Net(), Hoard(takes=False), save_on_cpu()
    theirs.__enter__()
    stack = ExitStack()
    keep(stack, model, hoard, ambient=True)
    theirs.__exit__()  # takes off the innermost, which is ours
    stack.close()
    assert top(True) is None

    stack = ExitStack()
    keep(stack, model, hoard, ambient=True)
    theirs.__enter__()
    stack.close()
    assert top(True)[0] is theirs.pack_hook
    theirs.__exit__()
    assert top(True) is None


def test_an_end_in_the_middle_of_a_call_ends_everything() -> None:
    """A keeper that is ended while a module runs is not asked again."""
    model, hoard, stack = Net(), Hoard(), ExitStack()
    model.act.register_forward_hook(lambda *_: stack.close())
    keep(stack, model, hoard, ambient=False)
    model(torch.ones(2, 3)).sum().backward()

    assert hoard.paths == ["a", "a", "a", "act"]
    assert top(True) is None


def test_an_end_in_another_thread_is_heard_at_the_next_save() -> None:
    """A block that another thread ends leaves a pair that does nothing and takes itself off."""
    model, hoard, stack = Net(), Hoard(), ExitStack()
    keep(stack, model, hoard, ambient=True)
    thread = threading.Thread(target=stack.close)
    thread.start()
    thread.join()
    torch.ones(2, requires_grad=True).exp().sum().backward()

    assert hoard.places == []
    assert top(True) is None


def test_a_generator_may_hold_the_block() -> None:
    """A block inside a generator is in force until the generator is closed."""
    model, hoard = Net(), Hoard()

    def steps() -> Iterator[Tensor]:
        with keeping(model, hoard):
            while True:
                yield model(torch.ones(1, 3)).sum()

    running = steps()
    next(running).backward()
    next(running).backward()
    running.close()

    assert len(hoard.places) == 2 * 7
    assert top(True) is None


def test_copies_of_the_model_are_not_hooked() -> None:
    """Deepcopy and pickle of a model under a keeper give a model that knows nothing of it."""
    model, hoard = Net(), Hoard()
    x = torch.ones(2, 3)
    with keeping(model, hoard, ambient=False):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in copies:
            twin(x).sum().backward()
    for twin in copies:
        assert not [
            hook
            for module in twin.modules()
            for hook in module._forward_hooks.values()
            if "kedge" in str(hook)
        ]

    assert hoard.places == []


def test_nothing_stays_on_the_model(tables: Callable[..., dict[str, Any]]) -> None:
    """After the block the hook tables and attributes of all modules are what they were."""
    model = Net()
    before = tables(model)
    with keeping(model, Hoard()):
        model(torch.ones(1, 3))
        assert tables(model) != before
    assert tables(model) == before


def test_a_keeper_that_sleeps_costs_no_pair() -> None:
    """While a keeper has nothing to look at, calls of modules put nothing in force."""
    model, hoard = Net(), Hoard()
    with keeping(model, hoard, ambient=False) as kept:
        kept.idle = True
        model(torch.ones(1, 3))
        kept.idle = False
        model(torch.ones(1, 3))

    assert len(hoard.places) == 7


def test_a_keeper_that_cannot_begin_leaves_nothing(tables: Callable[..., dict[str, Any]]) -> None:
    """If a module cannot be decided on, no hook of the keeper stays on any."""
    model = Net()
    before = tables(model)

    def places(path: str) -> bool:
        if path == "b":
            raise ValueError("no")
        return True

    with pytest.raises(ValueError, match="no"), keeping(model, Hoard(), places=places):
        pass

    assert tables(model) == before
    assert top(True) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "path"),
    [(torch.jit.script, ""), (lambda m: torch.jit.trace(m, torch.ones(2, 3)), "0")],
)
def test_scripted_modules_save_as_the_module_around(
    make: Callable[[nn.Module], Any], path: str
) -> None:
    """A scripted module takes no hooks, so what it saves is of the module that calls it; a traced one has its own."""
    model, hoard = nn.Sequential(make(nn.Linear(3, 3)), nn.Tanh()), Hoard(takes=False)
    with keeping(model, hoard):
        model(torch.ones(2, 3)).sum().backward()

    assert set(hoard.paths) == {path, "1"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_can_be_captured_in_the_block() -> None:
    """Tracing, scripting, export and FX see a model under a keeper as if there were none."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)
    plain = str(torch.export.export(model, (x,)).graph), str(torch.fx.symbolic_trace(model).graph)
    with keeping(model, Hoard(takes=False)):
        captured = (
            str(torch.export.export(model, (x,)).graph),
            str(torch.fx.symbolic_trace(model).graph),
        )
        programs = [torch.jit.trace(model, x), torch.jit.script(model)]

    assert captured == plain
    assert all(torch.equal(program(x), model(x)) for program in programs)


def test_what_torch_keeps_to_itself_is_there() -> None:
    """The stack of pairs can be read, and taken off from inside a pack; the node that is run can be asked for."""
    autograd = torch._C._autograd
    seen: list[Any] = []

    def pack(value: Tensor) -> Tensor:
        autograd._pop_saved_tensors_default_hooks()
        return value.detach()

    def unpack(value: Tensor) -> Tensor:
        seen.append(torch._C._current_autograd_node())
        return value

    autograd._push_saved_tensors_default_hooks(pack, unpack)
    assert top(True) == (pack, unpack)
    y = torch.ones(2, requires_grad=True).exp()
    assert top(True) is None
    y.sum().backward()
    assert [node.name() for node in seen] == ["ExpBackward0"]
    assert autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert "self" in nn.Module._call_impl.__code__.co_varnames


class Product(torch.autograd.Function):
    """Saves its factors, and tells what it reads in backward."""

    read: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        Product.read = ctx.saved_tensors
        return grads[0] * Product.read[1], None


def test_a_function_reads_the_very_tensor_that_needs_no_gradient() -> None:
    """What a custom function saves may have attributes of the program's; autograd returns the same object."""
    x, factor = torch.ones(2, requires_grad=True), torch.ones(2)
    with keeping(nn.Identity(), Hoard(takes=False)):
        Product.apply(x, factor).sum().backward()
    assert Product.read[1] is factor


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_leaf_whose_data_was_replaced_is_read_as_autograd_reads_it(requires_grad: bool) -> None:
    """Binarized weights are swapped by `.data` between forward and backward: backward uses the present ones."""

    def gradient() -> Tensor:
        x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=requires_grad)
        y = x * weight
        weight.data = torch.full((2,), 3.0)
        (found,) = torch.autograd.grad(y.sum(), x)
        return found

    plain = gradient()
    with keeping(nn.Identity(), Hoard(takes=False)):
        assert torch.equal(gradient(), plain)
    assert plain.tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_was_changed_in_place_raises_what_autograd_raises() -> None:
    """A nested tensor has no one shape; the message names those of its parts."""
    with keeping(nn.Identity(), Hoard(takes=False)):
        x = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], requires_grad=True).clone()
        y = x.sum(-1, keepdim=True)
        x.add_(x)
        with pytest.raises(
            RuntimeError,
            match=r"modified by an inplace operation: \[torch.FloatTensor \[\(2,\), \(3,\)\]\]",
        ):
            y.backward(torch.nested.nested_tensor([torch.rand(1), torch.rand(1)]))
