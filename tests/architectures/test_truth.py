"""On real architectures: what fires has the right value, and what does not says truly why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

pytest.importorskip("transformers")
import kedge
from tests.architectures.training import EVERYTHING, batch_of, bits, seed
from tests.architectures.witness import Witness, witnessed
from tests.architectures.zoo import Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")


Truth = Callable[[Witness, nn.Module, str, str], bool]
"""Whether a cause is true of a module (or parameter) and a kind, as the witness saw it."""


def owners(model: nn.Module, path: str, kind: str) -> set[str]:
    """The module of a site; for a parameter every module that holds it."""
    if kind.partition(".")[0] != "param":
        return {path}
    param = model.get_parameter(path)
    return {
        name
        for name, module in model.named_modules()
        for held in module.parameters(recurse=False)
        if held is param
    }


def _uncalled(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return not owners(model, path, kind) & w.called


def _no_tensor(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return path in w.called and not w.values[path, kind.partition(".")[0]]


def _no_grad(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return path in w.called and not any(
        t.requires_grad for t in w.values[path, kind.partition(".")[0]]
    )


def _not_reached(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    if kind == "param.grad":
        return model.get_parameter(path).grad is None
    return all(g is None for g in w.gradients[path, kind.partition(".")[0]])


def _overwritten_view(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    side = kind.partition(".")[0]
    return any(t._is_view() for t in w.values[path, side]) and not w.intact(path, side)


def _frozen(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    return not model.get_parameter(path).requires_grad


def _reads_without_calling(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    parents = {owner.rpartition(".")[0] for owner in owners(model, path, kind)}
    return _uncalled(w, model, path, kind) and bool(parents & w.called)


# The beginning of a cause, and what must then be true. A cause that nobody can check is a failure.
TRUTHS: tuple[tuple[str, Truth], ...] = (
    ("forward calls its .forward() directly", lambda w, m, p, k: False),  # no model here does that
    ("never called", _uncalled),
    ("bypassed", _reads_without_calling),
    ("its value contains no tensor", _no_tensor),
    ("its value requires no grad", _no_grad),
    ("the backward that ran did not reach it", _not_reached),
    ("its value is a view", _overwritten_view),
    ("it requires no grad", _frozen),
)


def ledger_of(architecture: Architecture) -> tuple[nn.Module, Any, Any]:
    """One step with everything recorded: the model, the ledger and the handle."""
    model = architecture.build()
    with kedge.session() as s:
        acts = s.hook(model, f"{EVERYTHING}, **:in, **:param", kedge.record(copy=True))
        seed(2)
        architecture.loss(model(**batch_of(architecture))).backward()
        return model, s.ledger(), acts


@architectures
def test_every_site_fired_or_has_a_cause_that_is_true(architecture: Architecture) -> None:
    """Where a site is silent, what the ledger says of it agrees with what plain PyTorch hooks saw."""
    model, ledger, _ = ledger_of(architecture)
    witness = witnessed(architecture)
    false = []
    for entry in ledger:
        if entry.fired:
            continue
        assert entry.cause is not None, entry
        assert entry.cause.remedy, entry
        truth = next((t for beginning, t in TRUTHS if entry.cause.why.startswith(beginning)), None)
        assert truth is not None, f"{entry} is a cause that this test cannot check"
        if not truth(witness, model, entry.site.path, entry.site.kind):
            false.append(str(entry))
    assert false == []


@architectures
def test_no_site_is_silent_that_plain_hooks_see(architecture: Architecture) -> None:
    """Every tensor and every gradient that plain PyTorch can show at a module has fired there."""
    model, ledger, _ = ledger_of(architecture)
    witness = witnessed(architecture)
    missed = [
        str(e) for e in ledger if not e.fired and visible(witness, model, e.site.path, e.site.kind)
    ]
    assert missed == []


def visible(w: Witness, model: nn.Module, path: str, kind: str) -> bool:
    """Whether plain PyTorch has something to show at a site."""
    side, _, gradient = kind.partition(".")
    if side == "param":
        return (
            model.get_parameter(path).grad is not None
            if gradient
            else not _uncalled(w, model, path, kind)
        )
    return any(t is not None for t in (w.gradients if gradient else w.values).get((path, side), []))


@architectures
def test_what_is_recorded_is_what_autograd_says(architecture: Architecture) -> None:
    """Outputs, inputs and their gradients are, to the last bit, those of plain hooks and `torch.autograd.grad`."""
    _, ledger, acts = ledger_of(architecture)
    witness = witnessed(architecture)
    wrong, compared = [], 0
    for entry in ledger:
        side, _, gradient = entry.site.kind.partition(".")
        if not entry.fired or side == "param" or not witness.intact(entry.site.path, side):
            continue
        expected = (witness.gradients if gradient else witness.values)[entry.site.path, side]
        got = [value for _, value in acts.records(str(entry.site))]
        if not same_set([t for t in expected if t is not None], got):
            wrong.append(str(entry.site))
        compared += len(got)
    assert wrong == []
    assert compared > 50


def same_set(expected: list[Tensor], got: list[Tensor]) -> bool:
    """Whether the same tensors are on both sides, in any order: gradients arrive last call first."""
    return sorted(map(key, expected)) == sorted(map(key, got))


def key(value: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """All that makes a tensor what it is."""
    return str(value.dtype), tuple(value.shape), bits(value).numpy().tobytes()
