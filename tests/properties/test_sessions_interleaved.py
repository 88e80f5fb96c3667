"""For all interleavings of sessions, hooks and removals: the tables end as they were, and what is on acts in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optimizers

import kedge
from kedge.errors import ActionArity, NeverFiredWarning

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SELECTORS = [
    "a",
    "**",
    "a:in, b:out.grad",
    "b:in.grad, b:in.share",
    "**:param.grad",
    "a.bias:param.acc, a.weight:param",
    "b#0",
]

pytestmark = pytest.mark.filterwarnings(
    "ignore::kedge.errors.AttachedTwice"
)  # the same actions in several open sessions


class Net(nn.Module):
    """Two layers with hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.register_forward_hook(lambda m, i, o: None)
        self.a.weight.register_hook(lambda g: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def tables(model: nn.Module) -> dict[str, Any]:
    """Every hook on the model, its parameters and PyTorch, in order."""
    found: dict[str, Any] = {}
    for owner in (nn_module, optimizers):
        found |= {
            n: list(t.items())
            for n, t in vars(owner).items()
            if n.startswith("_global_") and isinstance(t, dict)
        }
    for name, module in model.named_modules():
        found |= {
            f"{name}.{n}": list(t.items())
            for n, t in vars(module).items()
            if "hooks" in n and isinstance(t, dict)
        }
        found[f"{name}.__dict__"] = list(vars(module))
    for name, param in model.named_parameters():
        found[name] = [
            list((getattr(param, t) or {}).items())
            for t in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
    return found


moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["hook", "hook", "hook", "bad hook", "remove", "end", "forward", "train", "raise"]
        ),
        st.integers(0, 2),
        st.sampled_from(SELECTORS),
    ),
    max_size=14,
)


def fail(value: Tensor) -> None:
    """An action that raises."""
    raise RuntimeError


@few
@given(moves, st.permutations(range(3)))
def test_any_interleaving_leaves_the_tables_as_they_were(
    script: list[tuple[str, int, str]], ends: list[int]
) -> None:
    """Sessions that hook, fail to hook, remove, run, raise and end in any order put every table back."""
    model = Net()
    before = tables(model)
    sessions = [kedge.session() for _ in range(3)]
    handles: list[list[Any]] = [[], [], []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)
        for move, n, selector in script:
            play(move, sessions[n], handles[n], selector, model)
        for n in ends:
            sessions[n].end()

    assert tables(model) == before


def play(move: str, session: Any, handles: list[Any], selector: str, model: nn.Module) -> None:
    """Make one move."""
    if move == "end":
        session.end()
    elif move == "remove" and handles:
        handles.pop().remove()
    elif move == "forward":
        model(torch.ones(1, 2))
    elif move == "train":
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    elif session.ended:
        return
    elif move == "hook":
        handles.append(session.hook(model, selector, kedge.record()))
    elif move == "bad hook":
        try:
            session.hook(model, selector, kedge.record(), lambda a, b, c: None)
        except ActionArity:
            return
    elif move == "raise":
        handle = session.hook(model, "a", fail)
        try:
            model(torch.ones(1, 2))
        except kedge.errors.ActionError:
            handle.remove()


EDITS: list[Callable[[Tensor], Tensor | None]] = [
    lambda v: v + 1,
    lambda v: v * 2,
    lambda v: -v,
    lambda v: None,
    torch.relu,
]


@few
@given(
    st.lists(st.tuples(st.integers(0, len(EDITS) - 1), st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from(
        ["a:out", "a:in", "a:out.grad", "a:in.grad", "a.bias:param.grad", "b:in.share"]
    ),
    st.sets(st.integers(0, 5), max_size=2),
)
def test_actions_compose_in_order(
    edits: list[tuple[int, int]], selector: str, removed: set[int]
) -> None:
    """The value that goes on is what the remaining actions make of it one after the other, in forward and backward."""
    model, x, first, last = Net(), torch.randn(3, 2, requires_grad=True), [], []
    sessions = [kedge.session() for _ in range(3)]
    sessions[0].hook(model, selector, lambda v: first.append(v.clone()))
    handles = [sessions[n].hook(model, selector, EDITS[e]) for e, n in edits]
    sessions[2].hook(model, selector, lambda v: last.append(v.clone()))
    for i in removed & set(range(len(handles))):
        handles[i].remove()
    model(x).square().sum().backward()
    for s in sessions:
        s.end(quiet=True)

    expected = first[0]
    for i, (e, _) in enumerate(edits):
        if i not in removed:
            result = EDITS[e](expected)
            expected = expected if result is None else result
    assert torch.equal(last[0], expected)
