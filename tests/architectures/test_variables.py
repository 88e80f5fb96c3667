"""On real architectures: variables of forwards are what the frames hold, and observing them changes no bit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from torch import Tensor, nn

pytest.importorskip("transformers")
import kedge
from kedge.flow import Event
from kedge.torch_internals.assigned_names import code_of
from tests.architectures.training import plain, same, seed, train, unlike
from tests.architectures.zoo import Architecture, architectures

pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
LEAST = 10
"""How many variables have to be compared in each architecture."""


@architectures
def test_observing_every_variable_changes_no_bit(architecture: Architecture) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    model = architecture.build()
    with kedge.hook(model, "**/*=:out, **/*=:out.grad", kedge.record()):
        watched = train(architecture, model)
    assert unlike(plain(architecture), watched) == []


@contextmanager
def final_values(model: nn.Module) -> Iterator[dict[tuple[str, str, int], tuple[int, Tensor]]]:
    """Read the variables of each forward when it returns, by the path, the name and the call, with their versions."""
    paths = {id(module): path for path, module in model.named_modules()}
    codes = {code_of(module.forward) for module in model.modules()}
    found: dict[tuple[str, str, int], tuple[int, Tensor]] = {}
    calls: Counter[str] = Counter()

    def begins(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in codes or id(frame.f_locals.get("self")) not in paths:
            return None
        frame.f_trace_lines = False
        return ends

    def ends(frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":
            path = paths[id(frame.f_locals["self"])]
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor):
                    found[path, name, calls[path]] = value._version, value.detach().clone()
            calls[path] += 1

    before = sys.gettrace()
    sys.settrace(begins)
    try:
        yield found
    finally:
        sys.settrace(before)


@architectures
def test_the_last_value_of_a_variable_is_what_the_frame_holds(architecture: Architecture) -> None:
    """To the bit, unless it changes in place; where it is not, the ledger names a line that assigns something else."""
    model = architecture.build()
    batch = architecture.inputs()
    last: dict[tuple[str, str, int], tuple[int, Tensor]] = {}

    def keep(value: Tensor, event: Event) -> None:
        site = event.site
        assert site.op is not None
        if site.leaf is None:
            name = site.op[0].removesuffix("=")
            last[site.path, name, event.call] = value._version, value.detach().clone()

    with kedge.hook(model, "**/*=", keep), final_values(model) as held:
        seed(2)
        model(**batch)

    compared = 0
    differing = set()
    for place in last.keys() & held.keys():
        version, value = last[place]
        later, expected = held[place]
        if version == later and same(value, expected):
            compared += 1
        elif version == later:
            differing.add(place[:2])
    assert compared >= LEAST

    for path, name in differing:
        with kedge.hook(model, f"{path}/{name}=", lambda value: None) as hooked:
            model(**batch)
            (entry,) = hooked.session.ledger()
        assert entry.unseen, f"{path}/{name}="
