"""Until when: what ends removes everything of its own and nothing else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import (
    ActionArity,
    ActionError,
    NeverFiredWarning,
    NoSiteMatched,
    NoSuchKind,
    SessionEnded,
)

EVERYTHING = (
    "**:out, **:in, **:out.grad, **:in.grad, **:in.share, **:param, **:param.grad, **:param.acc"
)


def randn() -> Tensor:
    """Make an input whose gradient is wanted."""
    return torch.randn(2, 3, requires_grad=True)


class Net(nn.Module):
    """Two layers, of which the second may raise in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(3, 3), nn.Linear(3, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.fails == "forward":
            raise RuntimeError("forward broke")
        if self.fails == "backward":
            x.register_hook(fail)
        return self.b(x)


def fail(*_: Any) -> None:
    """A hook or an action that raises."""
    raise RuntimeError("it broke")


@pytest.mark.parametrize("where", ["forward", "backward", "user hook", "action", "gradient action"])
def test_whatever_raises_the_tables_are_as_before(where: str, tables: Callable[..., Any]) -> None:
    """An exception in forward, in backward, in a user's hook or in an action leaves no hook, and is not covered by warnings."""
    model = Net()
    model.fails = where
    if where == "user hook":
        model.b.register_forward_hook(fail)
    before = tables(model)
    with (
        pytest.raises(RuntimeError if "action" not in where else ActionError, match="broke"),
        kedge.session() as s,
    ):
        s.hook(model, EVERYTHING, kedge.record())
        if "action" in where:
            s.hook(model, "a" if where == "action" else "a:out.grad", fail)
        model(randn()).sum().backward()

    assert tables(model) == before


def test_after_an_exception_the_next_forward_counts_anew() -> None:
    """A forward that raised half-way does not shift the calls and passes of the next."""
    model = Net()
    with kedge.session() as s:
        acts = s.hook(model, "a, b", kedge.record(keep=None))
        model.fails = "forward"
        with pytest.raises(RuntimeError, match="forward broke"):
            model(randn())
        model.fails = ""
        model(randn())

    assert [(r.event.pass_, r.event.call) for r in acts.records("a")] == [(0, 0), (1, 0)]
    assert [(r.event.pass_, r.event.call) for r in acts.records("b")] == [(1, 0)]


def test_a_call_that_raised_and_was_caught_keeps_its_number() -> None:
    """Inputs and outputs of one call bear the same index, also after a call that raised inside the same forward."""

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fc(x)
            except RuntimeError:
                return self.fc(x[:, :3])

    with kedge.session() as s:
        h = s.hook(model := Tries(), "fc:in, fc:out", kedge.record())
        model(torch.randn(2, 5))

    assert [r.event.call for r in h.records("fc:in")] == [0, 1]
    assert [r.event.call for r in h.records("fc:out")] == [1]


def test_sessions_nest_and_end_in_any_order(tables: Callable[..., Any]) -> None:
    """Each end removes its own hooks: the other sessions go on until theirs."""
    model, x = Net(), randn()
    before = tables(model)
    seen: list[str] = []
    one, two, three = kedge.session(), kedge.session(), kedge.session()
    for name, s in (("one", one), ("two", two), ("three", three)):
        s.hook(model, "a, b:out.grad", lambda v, name=name: seen.append(name))
    model(x).sum().backward()
    one.end()
    model(x).sum().backward()
    three.end()
    model(x).sum().backward()
    two.end()
    model(x).sum().backward()

    assert seen == ["one", "two", "three"] * 2 + ["two", "three"] * 2 + ["two"] * 2
    assert tables(model) == before


def test_ending_and_removing_twice_does_nothing(tables: Callable[..., Any]) -> None:
    """A second end or removal is no error and removes nothing more."""
    model = Net()
    before = tables(model)
    with kedge.session() as s:
        handle = s.hook(model, "a", kedge.record())
        other = s.hook(model, "a", kedge.record())
        handle.remove()
        handle.remove()
        x = model(randn())
        assert other.ledger()["a"].fired == 1
    s.end()
    handle.remove()
    alone = kedge.hook(model, "a", kedge.record())
    model(x)
    alone.remove()
    alone.remove()

    assert tables(model) == before


def test_a_removed_hook_no_longer_acts_and_can_still_be_read() -> None:
    """What a hook recorded before it was removed stays; nothing comes after."""
    model, x = Net(), randn()
    with kedge.session() as s:
        acts = s.hook(model, "a", kedge.record(keep=None))
        edit = s.hook(model, "b", kedge.zero())
        assert model(x).count_nonzero() == 0
        acts.remove()
        edit.remove()
        assert model(x).count_nonzero() > 0

    assert torch.equal(acts["a"], model.a(x))
    assert len(acts.records("a")) == 1


@pytest.mark.parametrize("selector", ["a:out", "a:in", "a:out.grad", "a.weight:param.grad"])
def test_a_hook_may_be_removed_inside_itself(selector: str) -> None:
    """An action that removes its own hook runs once; the actions behind it run this time too."""
    model, seen = Net(), []
    with kedge.session() as s:

        def once(value: Tensor) -> None:
            seen.append("once")
            handle.remove()

        handle = s.hook(model, selector, once)
        s.hook(model, selector, lambda v: seen.append("always"))
        for _ in range(2):
            model(randn()).sum().backward()

    assert seen == ["once", "always", "always"]


def test_a_session_may_end_inside_one_of_its_actions(tables: Callable[..., Any]) -> None:
    """An action may end the session: what follows in this forward and its backward is left alone."""
    model, seen = Net(), []
    before = tables(model)
    s = kedge.session()

    def end(value: Tensor) -> None:
        seen.append("end")
        s.end(quiet=True)

    s.hook(model, "a", end, lambda v: seen.append("behind"))
    s.hook(model, "b, a:out.grad", lambda v: seen.append("later"))
    model(randn()).sum().backward()

    assert seen == ["end"]
    assert tables(model) == before


@pytest.mark.parametrize(
    ("selector", "action", "error"),
    [
        ("nowhere", kedge.zero(), NoSiteMatched),
        ("a:param", kedge.zero(), NoSuchKind),
        ("a, b.weight:param.grad, b:in.share", lambda a, b, c: None, ActionArity),
        ("a, nowhere", kedge.zero(), NoSiteMatched),
    ],
)
def test_a_hook_that_cannot_be_attached_leaves_nothing(
    selector: str, action: Any, error: type[Exception], tables: Callable[..., Any]
) -> None:
    """`kedge.hook` that fails has put nothing on the model, its parameters or PyTorch."""
    model = Net()
    before = tables(model)
    with pytest.raises(error):
        kedge.hook(model, selector, action)

    assert tables(model) == before


def test_a_second_hook_that_cannot_be_attached_leaves_the_first_alone(
    tables: Callable[..., Any],
) -> None:
    """In a session a failed call takes back all of its own hooks, on modules and parameters, and none of the others'."""
    model, x, seen = Net(), randn(), []
    before = tables(model)
    with kedge.session() as s:
        acts = s.hook(model, "a", kedge.record())
        with pytest.raises(ActionArity):
            s.hook(
                model,
                "b, b:in.grad, **:param.grad, b:in.share",
                lambda v: seen.append(1),
                lambda a, b, c: None,
            )
        model(x).sum().backward()
        assert len(s.ledger()) == 1

    assert seen == []
    assert torch.equal(acts["a"], model.a(x))
    assert tables(model) == before


def test_a_failed_hook_takes_itself_back_at_once(tables: Callable[..., Any]) -> None:
    """The tables after a failed call within a session are those before it."""
    model = Net()
    with kedge.session() as s:
        s.hook(model, "a", kedge.zero())
        before = tables(model)
        with pytest.raises(ActionArity):
            s.hook(model, "b, b.weight:param.grad", kedge.zero(), lambda a, b, c: None)
        assert tables(model) == before
        model(torch.ones(1, 3))


def test_of_several_tensors_all_are_hooked_or_none(tables: Callable[..., Any]) -> None:
    """A dict of tensors in which one needs no grad hooks none of them."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    before = tables(x, y)
    with pytest.raises(NoSuchKind), kedge.session() as s:
        s.hook({"x": x, "y": y}, kedge.scale(2))

    assert tables(x, y) == before
    with pytest.raises(NoSuchKind):
        kedge.hook({"x": x, "y": y}, kedge.scale(2))
    assert tables(x, y) == before
    x.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_tensor_of_a_failed_hook_is_free_within_the_session() -> None:
    """Of a failed call on several tensors none acts while the session goes on."""
    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True)
    with kedge.session() as s:
        s.hook({"z": z}, kedge.scale(3))
        with pytest.raises(NoSuchKind):
            s.hook({"x": x, "y": y}, kedge.scale(2))
        (x + z).sum().backward()

    assert torch.equal(x.grad, torch.ones(2))
    assert torch.equal(z.grad, torch.full((2,), 3.0))


def test_the_users_hooks_stay_in_place_and_in_order(tables: Callable[..., Any]) -> None:
    """Hooks that were there run before and after as they did, and their handles still remove them."""
    model, seen = Net(), []
    handles = [
        model.a.register_forward_hook(lambda m, i, o: seen.append("first")),
        model.a.register_forward_pre_hook(lambda m, i: seen.append("pre")),
        model.a.register_forward_hook(lambda m, i, o: seen.append("second")),
        model.a.weight.register_hook(lambda g: seen.append("grad")),
        model.a.register_full_backward_hook(lambda m, i, o: seen.append("full")),
    ]
    before, x = tables(model), randn()
    with kedge.session() as s:
        s.hook(model, EVERYTHING, kedge.record())
        s.hook(model, "a", lambda v: seen.append("kedge"))
        model(x).sum().backward()
    assert [n for n in seen if n != "full"] == ["pre", "first", "second", "kedge", "grad"]
    assert tables(model) == before
    for handle in handles:
        handle.remove()
    seen.clear()
    model(x).sum().backward()

    assert seen == []


def test_a_users_hook_may_come_and_go_within_the_block(tables: Callable[..., Any]) -> None:
    """Handles of the user's hooks, older and younger than the session's, work within the block and after it."""
    model, x, seen = Net(), randn(), []
    before = tables(model)
    old = model.a.register_forward_hook(lambda m, i, o: seen.append("old"))
    with kedge.session() as s:
        acts = s.hook(model, "a", kedge.record())
        young = model.a.register_forward_hook(lambda m, i, o: seen.append("young"))
        old.remove()
        model(x)
    model(x)
    young.remove()
    model(x)

    assert seen == ["young", "young"]
    assert torch.equal(acts["a"], model.a(x))
    assert tables(model) == before


@pytest.mark.parametrize(
    "how", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: reload(m)]
)
def test_a_copy_of_a_hooked_model_is_not_hooked(
    how: Callable[[nn.Module], nn.Module], tables: Callable[..., Any]
) -> None:
    """Copies, pickled or saved in the block, work like the model and carry none of its hooks."""
    model, x, seen = Net(), randn(), []
    plain = tables(how(model))
    with kedge.session() as s:
        s.hook(model, EVERYTHING, kedge.record())
        s.hook(model, "**", lambda v: seen.append(1))
        twin = how(model)
        assert list(tables(twin)) == list(plain)
        if (
            how is not copy.copy
        ):  # which shares the model's children and hook tables, as without Kedge
            assert {k: v for k, v in tables(twin).items() if "_global" not in k} == {
                k: v for k, v in plain.items() if "_global" not in k
            }
            out = twin(x)
            assert seen == []
            assert torch.equal(out, model(x))
        else:
            assert twin._forward_hooks is model._forward_hooks
            assert twin._forward_pre_hooks is model._forward_pre_hooks
            twin(x)
        model(x).sum().backward()


def reload(model: nn.Module) -> nn.Module:
    """Save a model and load it again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("dump", ["pickle", "torch"])
def test_the_bytes_of_a_hooked_model_are_those_of_an_unhooked_one(dump: str) -> None:
    """Pickle and `torch.save` write the same bytes while hooks are on, after they fired, and when they are gone."""
    model = Net()

    def to_bytes() -> bytes:
        if dump == "pickle":
            return pickle.dumps(model)
        torch.save(model, file := io.BytesIO())
        return file.getvalue()

    before = to_bytes()
    with kedge.session() as s:
        s.hook(model, "**:out, **:in, **:out.grad", kedge.record())
        assert to_bytes() == before
        model(randn()).sum().backward()
        model.zero_grad()
        assert to_bytes() == before
    assert to_bytes() == before


def test_a_copy_keeps_the_users_hooks() -> None:
    """Of a hooked model with hooks of the user's own, the copy has the user's."""
    model, x = Net(), randn()
    model.b.register_forward_hook(torch_double)
    with kedge.hook(model, "**", kedge.record()):
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        out = model(x)

    for other in (twin, again):
        assert torch.equal(other(x), out)
        assert len(other.b._forward_hooks) == 1


def torch_double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A user's hook that edits."""
    return output * 2


def test_the_state_dict_of_a_hooked_model_is_its_own() -> None:
    """A state dict taken in the block has the same keys and tensors, and one can be loaded there."""
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with kedge.session() as s:
        s.hook(model, EVERYTHING, kedge.record())
        model(randn()).sum().backward()
        inside = model.state_dict()
        model.load_state_dict(before)

    assert list(inside) == list(before)
    assert all(torch.equal(inside[k], before[k]) for k in before)


def test_a_model_that_is_deleted_within_the_block_is_freed_at_its_end() -> None:
    """The ended session, its handle and its records hold no model."""
    model = Net()
    dead = weakref.ref(model)
    with kedge.session() as s:
        acts = s.hook(model, EVERYTHING, kedge.record())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model(randn()).sum().backward()
        del model
    gc.collect()

    assert dead() is None
    assert acts["a"].shape == (2, 3)
    assert len(s.ledger()) > 0


@pytest.mark.parametrize(
    "change", [lambda m: delattr(m, "b"), lambda m: setattr(m, "b", nn.Identity())]
)
def test_a_module_that_leaves_the_model_within_the_block_is_unhooked(
    change: Callable[[nn.Module], None], tables: Callable[..., Any]
) -> None:
    """Deleting or replacing hooked modules in the block hinders neither the end nor the removal of any hook."""
    model = Net()
    model.b = nn.Sequential(nn.Linear(3, 3))
    gone = model.b
    before, others = tables(gone), tables(model.a)
    with pytest.warns(NeverFiredWarning), kedge.session() as s:
        s.hook(model, EVERYTHING, kedge.record())
        change(model)

    assert tables(gone) == before
    assert tables(model.a) == others
    assert not model._forward_hooks


def test_a_model_is_freed_with_its_last_session() -> None:
    """A hooked model that nobody holds any more goes with the session object, whether or not it was called."""
    model = Net()
    dead = weakref.ref(model)
    s = kedge.session()
    handle = s.hook(model, EVERYTHING, kedge.zero())
    del model
    s.end(quiet=True)
    del s, handle
    gc.collect()

    assert dead() is None


def test_two_hundred_training_passes_keep_a_flat_number_of_objects() -> None:
    """Recording values and gradients in every pass piles up neither tensors nor handles."""
    model, counts = Net(), []
    with kedge.session() as s:
        s.hook(model, "**:out, **:out.grad, **:in.grad, **:in.share, **:param.grad", kedge.record())
        for i in range(200):
            model(randn()).sum().backward()
            model.zero_grad()
            if i in (99, 199):
                gc.collect()
                counts.append(
                    (
                        sum(issubclass(type(o), Tensor) for o in gc.get_objects()),
                        len(s.installed._passing),
                    )
                )

    (tensors, kept), (tensors_later, kept_later) = counts
    assert tensors_later <= tensors
    assert kept_later <= kept < 100


@pytest.mark.parametrize("selector", [":in.grad", "a:in.grad", "a:in"])
def test_passes_over_the_same_input_pile_up_nothing(selector: str) -> None:
    """An input that lives longer than one pass is listened to once, not once more with every pass."""
    model, x = Net(), randn()
    with kedge.session() as s:
        acts = s.hook(model, selector, kedge.record(copy=True, keep=None))
        for _ in range(5):
            model(x).sum().backward()

        assert len(x._backward_hooks or {}) <= 1
        assert [r.event.pass_ for r in acts.records(selector)] == [0, 1, 2, 3, 4]


def test_an_ended_session_hooks_nothing_more() -> None:
    """The message says what to do."""
    with kedge.session() as s:
        pass
    with pytest.raises(SessionEnded) as caught:
        s.hook(Net(), "a", kedge.zero())

    assert str(caught.value) == "this session has ended and its hooks are gone; open a new one"


def test_a_backward_after_the_end_is_not_seen() -> None:
    """The graph of a forward within the block carries no hook once the session has ended."""
    model, seen = Net(), []
    with kedge.session() as s:
        s.hook(model, "a", lambda v: seen.append("out"))
        s.hook(
            model,
            "a, a:out.grad, a:in.grad",
            lambda v, event: seen.append(event.site.kind),
            when=kedge.every(1),
        )
        loss = model(randn()).sum()
        s.end(quiet=True)
    loss.backward()

    assert seen == ["out", "out"]


@pytest.mark.filterwarnings("error::kedge.errors.NeverFiredWarning")
@pytest.mark.parametrize("selector", ["a", "a:out.grad", "/add", "a.bias:param.grad"])
def test_an_action_may_remove_its_own_hook(selector: str) -> None:
    """Its first call counts as a firing, although the ledger is written while it runs; a failed call does not."""
    model, handles = AddsTwo(), []
    handles.append(kedge.hook(model, selector, lambda value: handles[0].remove()))
    model(torch.ones(3)).sum().backward()
    model(torch.ones(3)).sum().backward()
    (entry,) = handles[0].ledger()
    assert (entry.fired, entry.cause) == (1, None)


class AddsTwo(nn.Module):
    """A layer, and operations of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.arange(3)


@pytest.mark.parametrize(
    ("selector", "when", "remove_first", "cause"),
    [
        ("a", None, True, "the hook was removed before the model was called"),
        ("a", kedge.at(0), False, "never called in the steps of its schedule"),
        ("/arange:in", None, False, "its value contains no tensor: its arguments hold no tensor"),
    ],
)
def test_only_an_action_that_failed_is_said_to_be_switched_off(
    selector: str, when: Any, *, remove_first: bool, cause: str
) -> None:
    """Other reasons for silence after a call are named."""
    model, s = AddsTwo(), kedge.session()
    hooked = s.hook(model, selector, kedge.record(), when=when)
    if remove_first:
        hooked.remove()
        s.hook(model, selector, kedge.record())
    if when is not None:
        s.clock.end_step()
    model(torch.ones(3))
    assert [entry.cause.why for entry in hooked.ledger()] == [cause]
    s.end(quiet=True)


class Fails(nn.Module):
    """Raises after its operation, at first."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.errors = [error]

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        if self.errors:
            raise self.errors.pop()
        return x


@pytest.mark.filterwarnings("ignore::kedge.errors.AttachedTwice")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_sessions_that_end_inside_an_operation_let_the_programs_error_through(
    error: type[BaseException],
) -> None:
    """The model can be pickled, and nothing stays: after an interrupt, when PyTorch calls no hook, from the next call on."""
    model, sessions = Fails(error), [kedge.session(), kedge.session()]

    def end(value: Tensor) -> None:
        for s in sessions:
            s.end(quiet=True)

    for s in sessions:
        s.hook(model, "/relu", end)
    with pytest.raises(error):
        model(torch.ones(3))
    pickle.dumps(model)
    if error is KeyboardInterrupt:
        model(torch.ones(3))
    assert torch._C._len_torch_function_stack() == 0
    assert not model._forward_hooks


def test_what_an_action_hooks_when_it_is_attached_goes_with_a_failed_attachment() -> None:
    """The session is as before, and the next attachment works."""
    model, other, s, seen = AddsTwo(), nn.Sequential(nn.Linear(3, 3)), kedge.session(), []

    class Binds:
        """An action that hooks another model at its first site, and fails at its third."""

        sites = 0

        def bind(self, site: Any) -> Callable[..., None]:
            self.sites += 1
            if self.sites == 1:
                s.hook(other, "0", kedge.record())
            if self.sites == 3:
                raise RuntimeError("no")
            return lambda value, event: None

    s.hook(model, "a:in", kedge.record())
    with pytest.raises(RuntimeError, match="no"):
        s.hook(model, "a:out, /add, :out", Binds())
    assert len(s.targets) == len(s.taps) == 1
    assert not other[0]._forward_hooks

    s.hook(model, "/add", seen.append)
    model(torch.ones(3))
    assert len(seen) == 1
    s.end()


@pytest.mark.parametrize("how", ["end", "pause"])
def test_a_session_that_ends_inside_an_operation_leaves_no_mode_behind(how: str) -> None:
    """PyTorch itself puts the mode back on its stack after the operation."""
    model, s, seen = AddsTwo(), kedge.session(), []

    def action(value: Tensor) -> None:
        seen.append(value)
        getattr(s, how)()

    s.hook(model, "/add", action)
    model(torch.ones(3))
    assert torch._C._len_torch_function_stack() == 0
    model(torch.ones(3))
    assert len(seen) == 1
    if how == "pause":
        s.resume()
        model(torch.ones(3))
        assert len(seen) == 2
        assert torch._C._len_torch_function_stack() == 0
    s.end()
