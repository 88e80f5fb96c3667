"""``:saved`` without a model: all that autograd saves on the thread of the block."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import (
    ActionDisabled,
    ActionError,
    NeverFired,
    NoSuchKind,
    NotRecorded,
    SavedAside,
    SeveralRecorded,
)

top = torch._C._autograd._top_saved_tensors_default_hooks


def leaf(*shape: int) -> Tensor:
    """Make a leaf that requires grad."""
    torch.manual_seed(0)
    return torch.rand(*(shape or (3,)), requires_grad=True)


def test_each_save_is_named_by_the_operation_that_made_the_tensor_and_its_number() -> None:
    """A record is read by the number, by the operation, or by both; leaves are called leaf."""
    x = leaf()
    with kedge.hook(":saved", kedge.record()) as acts:
        y = x.exp()
        (y * x).log_softmax(0).sum().backward()

    assert acts.session.timeline().sites == [
        "/exp#0:saved[0]",
        "/leaf#0:saved[1]",
        "/exp#1:saved[2]",
        "/log_softmax#0:saved[3]",
    ]
    assert torch.equal(acts[":saved[0]"], y)
    assert torch.equal(acts["/exp#1:saved"], y)
    assert torch.equal(acts["/leaf:saved[1]"], x)
    assert not acts["/leaf:saved"].requires_grad
    with pytest.raises(SeveralRecorded, match=r'read one of "/exp#0:saved\[0\]", "/leaf#0'):
        acts[":saved"]
    with pytest.raises(NotRecorded, match=r'the site has "/exp#0:saved\[0\]"'):
        acts[":saved[9]"]


def test_statistics_have_a_row_for_each_operation() -> None:
    """`measure` names them in the same way."""
    x = leaf()
    with kedge.hook(":saved", kedge.measure()) as stats:
        x.exp().sin().sum().backward()
    assert stats["/exp#0:saved"].max == pytest.approx(x.exp().max().item())
    assert stats["/exp#1:saved"].step == 0


def test_a_training_loop_has_a_pass_for_each_step() -> None:
    """The numbers begin again after each backward, also where the graph is kept or dropped without one; memory is bounded."""
    x, kept = leaf(), []
    with kedge.hook(":saved", kedge.record()) as acts:
        for step in range(4):
            out = x.exp().sum()
            if step < 2:
                out.backward(retain_graph=True)
                kept.append(out)
            del out
        x.exp().sum()
    assert [(e.pass_, str(e.site)) for e, _ in acts.session.timeline()] == [
        (p, "/exp#0:saved[0]") for p in range(5)
    ]
    assert len(acts.records(":saved")) == 1


def test_schedules_count_the_passes() -> None:
    """Every second pass."""
    x, seen = leaf(), []
    with kedge.hook(":saved", lambda value, event: seen.append(event.step), when=kedge.every(2)):
        for _ in range(5):
            x.exp().sum().backward()
    assert seen == [0, 2, 4]


def test_an_action_can_replace_or_pack_what_backward_uses() -> None:
    """As at the ``:saved`` of a module; one number alone can be chosen."""
    x = leaf()
    with kedge.hook(":saved[1]", torch.zeros_like):
        (x.exp() * x.detach()).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3))

    x.grad, halves = None, kedge.packed(lambda t: t.half(), lambda half: half.float())
    with kedge.hook(":saved", halves) as hooked:
        for _ in range(2):
            x.exp().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp().half().float())
    assert [e.pass_ for e, _ in hooked.session.timeline()] == [0, 1]


def test_the_hooks_are_gone_after_the_block_and_graphs_made_in_it_still_work() -> None:
    """Backward twice, and after the end; nothing is kept alive."""
    x = leaf()
    with kedge.hook(":saved", kedge.record()) as acts:
        y = x.exp()
    assert top(True) is None
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y)
    ref = weakref.ref(y)
    gc.collect()
    gc.disable()
    try:
        del y
        assert ref() is None
        storage = weakref.ref(acts[":saved"].untyped_storage())
        del acts
        gc.collect()
        assert storage() is None
    finally:
        gc.enable()


def test_changes_in_place_are_still_refused() -> None:
    """Autograd's own error names the operation."""
    x = leaf()
    with kedge.hook(":saved", kedge.measure()):
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def fail(value: Tensor) -> None:
    """Fail."""
    raise LookupError("mine")


def test_an_action_that_fails_ends_the_operation_or_is_switched_off() -> None:
    """The error has the place; the hooks are removed."""
    x = leaf()
    with pytest.raises(ActionError, match=r"fail at /exp#0:saved\[0\] .*LookupError: mine"):
        with kedge.hook(":saved", fail):
            x.exp()
    assert top(True) is None
    s = kedge.session(on_error="warn")
    s.hook(":saved", fail)
    with pytest.warns(ActionDisabled, match="mine"):
        x.exp().sum().backward()
    s.end(quiet=True)
    assert torch.equal(x.grad, x.exp())


def test_only_the_thread_of_the_block_counts() -> None:
    """Another thread is left alone, and a block may end on it."""
    x = leaf()
    hooked = kedge.hook(":saved", kedge.record())
    thread = threading.Thread(target=lambda: x.exp().sum().backward())
    thread.start()
    thread.join()
    x.sin()
    assert hooked.session.timeline().sites == ["/leaf#0:saved[0]"]
    thread = threading.Thread(target=hooked.remove)
    thread.start()
    thread.join()
    x.sin().sum().backward()
    assert len(hooked.session.timeline()) == 1
    assert top(True) is None


def test_a_pause_takes_the_hooks_out() -> None:
    """And brings them back; more hooks join in order."""
    x, seen = leaf(), []
    with kedge.session() as s:
        s.hook(":saved", lambda value: seen.append("a"))
        s.pause()
        assert top(True) is None
        x.exp()
        s.hook(":saved", lambda value: seen.append("b"))
        assert top(True) is None
        s.resume()
        x.exp()
    assert seen == ["a", "b"]


def test_a_hook_that_fails_to_attach_leaves_nothing() -> None:
    """All or none."""
    with kedge.session() as s:
        with pytest.raises(ActionError):
            s.hook(":saved", kedge.record(), lambda: None)
        assert top(True) is None
        assert s.clock.leader is None
        s.hook(":saved", kedge.record())
        leaf().exp()


def test_modules_and_their_own_sites_are_seen_in_the_block() -> None:
    """What a model saves counts, under checkpoints as elsewhere nothing does; a model in the session has its own sites."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = leaf(2, 3)
    with kedge.session() as s:
        s.hook(":saved", kedge.record())
        s.hook(model, "1:saved", kedge.record())
        model(x).sum().backward()
        assert set(s.timeline().sites) == {
            "/leaf#0:saved[0]",
            "/t#0:saved[1]",
            "/tanh#0:saved[2]",
            "1:saved[0]",
        }
    with kedge.hook(":saved", kedge.record()) as acts:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert set(acts.session.timeline().sites) == {"/leaf#0:saved[0]"}


def test_the_programs_own_hooks_go_first() -> None:
    """The actions see what ``save_on_cpu`` takes, and cannot replace it."""
    x = leaf()
    with save_on_cpu(), kedge.hook(":saved", kedge.record()) as acts:
        x.exp().sum().backward()
    assert torch.equal(acts[":saved"], x.exp())


def test_dynamos_setting_stays() -> None:
    """No module is hooked, so compiled code need not check for hooks, neither in the block nor after it."""
    config = pytest.importorskip("torch._dynamo.config")
    with kedge.hook(":saved", kedge.record()):
        leaf().exp().sum().backward()
        assert config.skip_nnmodule_hook_guards
    assert config.skip_nnmodule_hook_guards


def test_a_transform_of_torch_func_is_left_alone() -> None:
    """With a warning, as for modules."""
    with kedge.hook(":saved", kedge.record()) as acts:
        with pytest.warns(SavedAside):
            torch.func.grad(lambda t: t.exp().sum())(torch.ones(2))
        leaf().exp()
    assert torch.equal(acts[":saved"], leaf().exp())


@pytest.mark.parametrize("graded", [True, False])
def test_what_never_fired_has_its_cause(graded: bool) -> None:
    """Nothing requires grad, or grad is off; or no pass had so many saves."""
    x = leaf()
    with pytest.raises(
        NeverFired,
        match=r":saved: no tensor that autograd saved on this thread came here; compute in the",
    ):
        with kedge.session(strict=True) as s, torch.set_grad_enabled(graded):
            s.hook(":saved", kedge.record())
            (x.detach() if graded else x).exp()
    with pytest.raises(NeverFired, match=r":saved\[3\]: no pass of the block saved a tensor \[3\]"):
        with kedge.session(strict=True) as s:
            s.hook(":saved[3]", kedge.record())
            x.exp()


def test_views_and_copies_are_seen_as_they_are() -> None:
    """A view has the name of the view; a deep copy of a leaf is a leaf."""
    x = leaf(2, 3)
    with kedge.hook(":saved", kedge.record()) as acts:
        (x[0] * copy.deepcopy(x)[1]).sum().backward()
    assert acts.session.timeline().sites == ["/select#0:saved[0]", "/select#1:saved[1]"]


class Double(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Double it."""
        out = x * 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return twice the gradient."""
        return grad * 2


def test_a_function_of_the_program_has_its_own_name() -> None:
    """And a second derivative saves tensors in the backward, in the same pass."""
    x = leaf()
    with kedge.hook(":saved", kedge.record()) as acts:
        y = Double.apply(x)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        grad.sum().backward()
    sites = acts.session.timeline().sites
    assert sites[:2] == ["/Double#0:saved[0]", "/Double#1:saved[1]"]
    assert len(sites) > 2
    assert {e.pass_ for e, _ in acts.session.timeline()} == {0}


def test_other_kinds_do_not_join_it() -> None:
    """A mixture is refused, with the remedy."""
    with pytest.raises(NoSuchKind, match="hook those separately"):
        kedge.hook(":saved, a:out", kedge.record())


def test_a_session_that_a_gradient_hook_ends_leaves_nothing_on_the_thread() -> None:
    """Autograd puts the thread's hook pairs back after a backward pass; the next save removes the ended session's."""
    w, s = leaf(), kedge.session()
    s.hook(":saved", kedge.record())
    y = w.exp().sum()
    w.register_hook(lambda g: s.end(quiet=True))
    y.backward()
    leaf().exp()
    assert top(True) is None

    other, w = kedge.session(), leaf()
    other.hook(":saved", kedge.record())
    y = w.exp().sum()
    w.register_hook(lambda g: other.end(quiet=True))
    y.backward()
    with kedge.hook(":saved", kedge.record()) as acts:
        for _ in range(3):
            leaf().exp().sum().backward()
    assert acts.names() == ["/exp:saved[0]"]
    assert top(True) is None


def test_a_session_that_a_gradient_hook_ends_leaves_the_pairs_of_others_in_force() -> None:
    """The program's pair below, and another session's, work on after the backward pass and go with their blocks."""
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        inner = kedge.session()
        with kedge.hook(":saved", kedge.record(keep=None)) as acts:
            inner.hook(":saved", kedge.record())
            w = leaf()
            y = w.exp().sum()
            w.register_hook(lambda g: inner.end(quiet=True))
            y.backward()
            leaf().exp().sum().backward()
            leaf().exp().sum().backward()
            assert acts.ledger()[":saved"].fired == len(packed) == 3
        leaf().exp()
        assert len(packed) == 4
        assert top(True) is not None
    assert top(True) is None


def test_a_session_that_a_gradient_hook_pauses_goes_on_after_the_backward_pass() -> None:
    """The pair that it put back within the pass stands for the one that autograd puts back."""
    with kedge.session() as s:
        acts = s.hook(":saved", kedge.record(keep=None))
        w = leaf()

        def rest(gradient: Tensor) -> None:
            s.pause()
            leaf().exp()
            s.resume()

        w.register_hook(rest)
        w.exp().sum().backward()
        for _ in range(2):
            leaf().exp().sum().backward()
        assert acts.ledger()[":saved"].fired == 3
    assert top(True) is None


def test_a_pair_that_comes_back_and_is_popped_for_the_programs_takes_that_with_it() -> None:
    """A block of the program that ends then pops the ended session's pair, and its own stays until the next session."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        w, s = leaf(), kedge.session()
        s.hook(":saved", kedge.record())
        y = w.exp().sum()
        w.register_hook(lambda g: s.end(quiet=True))
        y.backward()
    with kedge.hook(":saved", kedge.record()):
        leaf().exp().sum().backward()
    assert top(True) is None


def test_a_pair_opened_inside_the_block_hides_the_saves_and_the_cause_says_so() -> None:
    """PyTorch asks the innermost pair alone; hooked inside it, the saves are seen."""
    session = kedge.session()
    acts = session.hook(":saved", kedge.record())
    with save_on_cpu():
        leaf().exp()
    why = str(acts.ledger())
    with pytest.raises(
        NotRecorded, match="a pair of hooks that opens inside the block, such as save_on_cpu, takes"
    ):
        acts[":saved"]
    session.end(quiet=True)
    assert "no tensor that autograd saved on this thread came here" in why
    with save_on_cpu(), kedge.hook(":saved", kedge.record()) as acts:
        leaf().exp()
    assert acts.names() == ["/exp:saved[0]"]


def test_an_operation_is_no_selector_of_saves() -> None:
    """The name of a save reads it; as a selector it would mean models."""
    for wrong in ("/exp:saved", "/exp#0:saved[2]", [":saved", "/exp:saved"]):
        with pytest.raises(
            NoSuchKind, match='saved tensors cannot be hooked by operation; hook ":saved"'
        ):
            kedge.hook(wrong, kedge.record())
