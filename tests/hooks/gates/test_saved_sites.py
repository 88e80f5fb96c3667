"""The ``:saved`` sites: what autograd saves in each module, to look at, to change, and to pack in one's own way."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.actions.packed import packed
from kedge.errors import (
    ActionError,
    EditError,
    InPlaceEdit,
    NeverFired,
    NoSuchKind,
    NotRecorded,
    SavedAside,
)

top = torch._C._autograd._top_saved_tensors_default_hooks
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Net(nn.Module):
    """Calls one layer twice, and computes something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.act(self.a(self.a(x))))
        return y.exp()


class Around(nn.Module):
    """Runs a network under a checkpoint or another function."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.call = Net(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.net, x) * 2


def gradients(model: nn.Module, x: Tensor = X) -> list[Tensor]:
    """Return the gradients of the parameters."""
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_each_save_is_an_event_of_the_innermost_module() -> None:
    """The site names the module, the leaf which save of the call it is, and the event the call."""
    model = Net()
    with kedge.session() as s:
        acts = s.hook(model, "a:saved, act:saved, b:saved, :saved", kedge.record())
        y = model(X)
        y.sum().backward()
        model(X)

    assert s.timeline().sites[:7] == [
        *(
            "a:saved[0]",
            "a:saved[0]",
            "a:saved[1]",
            "act:saved[0]",
            "b:saved[0]",
            "b:saved[1]",
            ":saved[0]",
        )
    ]
    assert [(e.call, e.pass_) for e, _ in s.timeline()] == [
        *((c, 0) for c in (0, 1, 1, 0, 0, 0, 0)),
        *((c, 1) for c in (0, 1, 1, 0, 0, 0, 0)),
    ]
    assert torch.equal(acts["a#0:saved"], X)
    assert torch.equal(acts["a#1:saved[1]"], model.a.weight.t())
    assert torch.equal(acts[":saved"], y)
    assert not acts[":saved"].requires_grad
    assert {str(e.site): e.fired for e in s.ledger()} == {
        "a:saved": 6,
        "act:saved": 2,
        "b:saved": 4,
        ":saved": 2,
    }


def test_a_leaf_and_a_call_may_be_asked_for() -> None:
    """Only the save and the call that the selector names fire."""
    with kedge.session() as s:
        s.hook(model := Net(), "a#1:saved[0], b:saved[1]", kedge.record())
        model(X)

    assert s.timeline().sites == ["a:saved[0]", "b:saved[1]"]


@pytest.mark.parametrize("action", [kedge.record, kedge.measure, lambda: lambda value, event: None])
def test_looking_changes_no_bit_and_no_check(action: Callable[[], Any]) -> None:
    """Outputs and gradients are the same to the last bit, and changes in place are found out as without Kedge."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.4)
    )
    x = torch.randn(3, 1, 5, 5)
    torch.manual_seed(3)
    plain = gradients(model, x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with kedge.hook(model, "**:saved", action()) as hooked:
        found = gradients(model, x)
        assert torch.equal(torch.get_rng_state(), state)
        loss = model(x).sum()
        with torch.no_grad():
            model[0].weight.add_(1)
            model[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        hooked.session.end(quiet=True)

    assert all(map(torch.equal, plain, found))


def test_measuring_gives_a_row_for_each_save() -> None:
    """Statistics of saved tensors are read by the site's name."""
    with kedge.hook(model := Net(), "act:saved", kedge.measure()) as stats:
        y: list[Tensor] = []
        model.act.register_forward_hook(lambda m, args, out: y.append(out.detach()))
        model(X)

    assert stats["act:saved"].rms == pytest.approx(y[0].pow(2).mean().sqrt().item())


def test_a_returned_tensor_is_what_backward_sees() -> None:
    """An edit at ``:saved`` changes the gradient, and not the output."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**2

    x = torch.randn(5, requires_grad=True)
    with kedge.hook(square := Square(), ":saved", kedge.scale(3), kedge.add(1)):
        y = square(x)
        y.sum().backward()

    assert torch.equal(y, x**2)
    assert torch.equal(x.grad, 2 * (x.detach() * 3 + 1))


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda v: v[0], EditError, "a saved tensor must keep its shape, dtype and device"),
        (
            kedge.replace(lambda v: v.double(), reshape=True),
            EditError,
            "a saved tensor must keep its shape, dtype and device",
        ),
        (lambda v: v.mul_(2), InPlaceEdit, "changed the value in place"),
        (lambda v: v.nope, ActionError, "AttributeError"),
    ],
)
def test_an_edit_keeps_the_contract(action: Any, error: type[Exception], message: str) -> None:
    """Shape, dtype and device are kept, the old tensor is not changed, and the message names the site."""
    with (
        pytest.raises(error, match=message) as raised,
        kedge.hook(model := Net(), "act:saved", action),
    ):
        model(X)

    assert "act:saved[0] (pass 0, call 0" in str(raised.value)
    assert top(True) is None


def test_a_pair_of_ones_own_is_an_action_like_any() -> None:
    """packed() runs on a schedule, at the leaves that are asked for, and among other actions."""
    log: list[str] = []

    def pack(value: Tensor) -> Any:
        log.append("pack")
        assert not value.requires_grad
        return value.double()

    def unpack(value: Tensor) -> Tensor:
        log.append("unpack")
        return value.float()

    model = Net()
    plain = gradients(model)
    with kedge.hook(model, "a:saved[0]", packed(pack, unpack), when=kedge.at(1)):
        for _ in range(3):
            assert all(map(torch.equal, plain, gradients(model)))

    assert log == ["pack", "pack", "unpack", "unpack"]


def test_pairs_work_inside_each_other() -> None:
    """Each packs what the one before made, as long as that is a tensor; unpacking goes the other way."""
    log: list[str] = []

    def pair(name: str, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Any:
        def there(value: Tensor) -> Any:
            log.append(f"{name} packs {value.dtype}")
            return pack(value)

        def back(made: Any) -> Tensor:
            log.append(f"{name} unpacks")
            found: Tensor = unpack(made)
            return found

        return packed(there, back)

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    x = torch.randn(3, requires_grad=True)
    seen: list[torch.dtype] = []
    with kedge.session() as s:
        model = Sine()
        s.hook(model, ":saved", pair("wide", lambda t: t.double(), lambda t: t.float()))
        s.hook(model, ":saved", lambda v: seen.append(v.dtype))
        s.hook(
            model,
            ":saved",
            pair("list", lambda t: t.tolist(), lambda t: torch.tensor(t, dtype=torch.double)),
        )
        s.hook(model, ":saved", pair("last", lambda t: t, lambda t: t))
        model(x).sum().backward()
        s.end(quiet=True)

    assert log == [
        "wide packs torch.float32",
        "list packs torch.float64",
        "list unpacks",
        "wide unpacks",
    ]
    assert seen == [torch.float64]
    assert torch.equal(x.grad, x.detach().cos())


def test_a_pair_must_give_back_what_it_got() -> None:
    """An unpack that returns another shape is refused with the site's name."""
    with kedge.hook(model := Net(), "act:saved", packed(lambda t: t, lambda t: t[0])):
        loss = model(X).sum()
        with pytest.raises(
            EditError,
            match=r"act:saved\[0\]: unpack returned float32\[3\], but the packed tensor was float32\[2, 3\]",
        ):
            loss.backward()


def test_a_pair_is_for_saved_tensors_alone() -> None:
    """packed() elsewhere is an error that names the site to hook, and nothing stays hooked."""
    with pytest.raises(NoSuchKind, match='hook "act:saved"'):
        kedge.hook(Net(), "act:out", packed(lambda t: t, lambda t: t))


@pytest.mark.parametrize("after", ["list", "program"])
def test_what_is_taken_already_cannot_be_replaced(after: str) -> None:
    """Behind another pair an action may look, and an edit is an error."""
    with kedge.session() as s:
        model = Around(lambda net, x: net(x))
        if after == "list":
            s.hook(model, "net.act:saved", packed(lambda t: t.tolist(), torch.tensor))
        else:

            def on_cpu(net: nn.Module, x: Tensor) -> Tensor:
                with save_on_cpu():
                    y: Tensor = net(x)
                    return y

            model.call = on_cpu
        acts = s.hook(model, "net.act:saved", kedge.record())
        model(X).sum().backward()
        assert acts["net.act:saved"].shape == (2, 3)
        s.hook(model, "net.act:saved", kedge.scale(2))
        with pytest.raises(EditError, match="cannot be replaced"):
            model(X)


def in_checkpoint(reentrant: bool) -> Around:
    """A network in a checkpoint."""
    return Around(lambda net, x: checkpoint(net, x, use_reentrant=reentrant))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputes_are_seen_if_asked_for(reentrant: bool) -> None:
    """Inside a checkpoint tensors are saved in the recompute alone: observers see that if made so, with the forward's call."""
    model = in_checkpoint(reentrant)
    x = X.clone().requires_grad_()
    plain = gradients(model, x)
    with kedge.session() as s:
        asked = s.hook(model, "net.**:saved", kedge.record(recomputes=True))
        silent = s.hook(model, "net.**:saved", kedge.record())
        found = gradients(model, x)
        assert {e.recompute for e, _ in s.timeline()} == {True}
        assert [e.call for e, _ in s.timeline() if e.site.path == "net.a"] == [0, 0, 1, 1]
        assert asked["net.act:saved"].shape == (2, 3)
        with pytest.raises(NotRecorded, match="checkpoint"):
            silent["net.act:saved"]
        s.end(quiet=True)

    assert all(map(torch.equal, plain, found))
    assert top(True) is None


def _scripted(model: nn.Module) -> None:
    model(X).sum().backward()


def _no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def _transformed(model: nn.Module) -> None:
    params = {n: p.detach() for n, p in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(params)


CAUSES: list[tuple[Callable[[], nn.Module], str, Callable[[nn.Module], None], str]] = [
    (Net, "unused:saved", _scripted, "never called while the hook was attached"),
    (Net, "a:saved", lambda model: None, "the model was not called"),
    (Net, "act:saved", _no_grad, "it ran without grad, so nothing was saved"),
    (Net, "act:saved[3]", _scripted, r"it never saved a tensor [3]"),
    (Net, "act#2:saved", _scripted, "no forward called it 3 times"),
    (
        lambda: nn.Sequential(Net()),
        ":saved",
        _scripted,
        "nothing was saved while it was the innermost module",
    ),
    (
        lambda: in_checkpoint(reentrant=False),
        "net.a:saved",
        _scripted,
        "it ran in a checkpoint, which saves nothing",
    ),
    (
        lambda: in_checkpoint(reentrant=True),
        "net.a:saved",
        lambda m: gradients(m, X.clone().requires_grad_()),
        "checkpoint",
    ),
    (Net, "act:saved", _transformed, "it ran only in a torch.func transform"),
]


@pytest.mark.parametrize(("make", "selector", "run", "why"), CAUSES)
def test_a_site_that_never_fired_has_its_cause(
    make: Callable[[], nn.Module], selector: str, run: Callable[[nn.Module], Any], why: str
) -> None:
    """The ledger says of each silent site why nothing was saved there."""
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SavedAside)
        with pytest.raises(NeverFired) as raised, kedge.session(strict=True) as s:
            s.hook(model, selector, lambda value: None)
            run(model)

    assert why in str(raised.value)


def test_compiled_code_is_named_as_the_cause(compiled: Callable[..., Any]) -> None:
    """Of a compiled model it is said at once that nothing is seen inside, and again in the ledger."""
    fast = compiled(Net(), backend="aot_eager")
    with (
        pytest.warns(SavedAside, match="compiled"),
        pytest.raises(NeverFired, match="it is compiled"),
    ):
        with kedge.session(strict=True) as s:
            s.hook(fast, "a:saved", lambda value: None)
            fast(X).sum().backward()


def test_off_schedule_nothing_is_in_force() -> None:
    """In a step in which no action at ``:saved`` is due, the program runs under no pair of hooks."""
    pairs: list[bool] = []
    model = Net()
    model.act.register_forward_hook(lambda *_: pairs.append(top(True) is not None))
    with kedge.hook(model, "a:saved", lambda value: None, when=kedge.every(2)) as hooked:
        for _ in range(4):
            model(X)
        hooked.remove()
        model(X)

    assert pairs == [True, False, True, False, False]


def test_a_hook_that_cannot_be_attached_leaves_nothing(
    tables: Callable[..., dict[str, Any]],
) -> None:
    """All or nothing holds for ``:saved``, too, and a later hook of the session works."""
    model, seen = Net(), []
    before = tables(model)
    with kedge.session() as s:
        with pytest.raises(NoSuchKind):
            s.hook(model, "act:saved, act:out", packed(lambda t: t, lambda t: t))
        assert tables(model) == before
        s.hook(model, "act:saved", lambda value: seen.append(1))
        model(X)
    assert seen == [1]
    assert tables(model) == before


def test_threads_and_replicas_are_labelled() -> None:
    """A model that several threads call has events of each, with the thread's name and its own calls."""
    model = Net()
    with kedge.session() as s:
        acts = s.hook(model, "a:saved", kedge.record(keep=None))
        work = [
            threading.Thread(
                target=lambda i=i: model(torch.full((1, 3), float(i))).sum().backward(),
                name=f"worker-{i}",
            )
            for i in range(3)
        ]
        for thread in work:
            thread.start()
            thread.join()

    events = [(event.replica, event.call, event.site.leaf) for event, _ in acts.records("a:saved")]
    assert events == [
        (f"worker-{i}", call, leaf)
        for i in range(3)
        for call, leaf in ((0, "0"), (1, "0"), (1, "1"))
    ]


def test_a_new_module_is_hooked_when_it_is_asked_for() -> None:
    """A module that came to the model in the middle of a session has sites like the others."""
    model = nn.Sequential(nn.Linear(3, 3))
    with kedge.session() as s:
        s.hook(model, "**{Linear}:saved", lambda value: None)
        model.append(nn.Tanh())
        acts = s.hook(model, "1:saved", kedge.record())
        y = model(X)
        assert torch.equal(acts["1:saved"], y)


def test_every_module_has_the_kind() -> None:
    """`sites` lists ``:saved`` for each module that can be called."""
    assert ":saved" in str(kedge.sites(Net()))
    assert all("saved" in row.kinds for row in kedge.sites(Net()) if row.shape is None)
