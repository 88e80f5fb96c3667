"""Models that come and go: what was watched is freed, and a long run keeps nothing of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from kedge.actions.measure.site_table import MeasuredSite
from kedge.hooks.firing.tap import Tap
from kedge.hooks.placing.concealed import KedgeHook
from kedge.watch.models.parameters import ParameterSites
from kedge.watch.models.roots import RootModule
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import (
    GUARDED,
    MEASURED,
    MIXED,
    Conv,
    Memory,
    Paced,
    at_levels,
    descend,
    net,
    train,
    watch,
    watched,
)


def kept(watch: Watcher) -> tuple[int, ...]:
    """Count what the watch keeps by model, by parameter and by step."""
    session = watch.session
    return (
        len(watch.models.roots),
        len(session.taps),
        len(session.targets),
        len(session.fired or ()),
    )


class Discarding(Memory):
    """A log that keeps nothing."""

    def stats(self, step: int, columns: Any) -> None:
        pass


def fold() -> weakref.ref[nn.Module]:
    """Train a new model with a new optimizer for four steps."""
    model = net()
    descend(model, 4)
    return weakref.ref(model)


@at_levels(MEASURED, GUARDED, MIXED)
def test_models_that_come_and_go_leave_nothing_in_memory(
    levels: tuple[StepKind, ...], paced: Paced
) -> None:
    """Of the steps of many models, each trained for four, nothing is kept but the names of the first few."""
    paced(*levels)
    models, counts, sizes = 50 * len(levels), [], []

    def program(watch: Watcher) -> None:
        for number in range(models):
            gone = fold()
            assert gone() is None
            if number % (models // 5) == models // 5 - 1:
                gc.collect()
                counts.append(kept(watch))
                sizes.append(
                    sum(issubclass(type(o), (KedgeHook, RootModule)) for o in gc.get_objects())
                )

    log = watched(program, Discarding())
    assert log.watch is not None
    assert log.watch.summary.steps == 4 * models
    assert not log.watch.failed
    assert all(now[0] == 8 for now in counts)
    assert all(b <= 32 for now in counts for b in now[1:])
    assert max(sizes) - min(sizes) < 100


def test_the_objects_of_a_long_run_do_not_grow(paced: Paced) -> None:
    """After two thousand steps of one model there are as many objects as after a thousand."""
    paced(StepKind.GUARDED, StepKind.SKIPPED, StepKind.MEASURED)
    model, sizes = net(), []

    def program(watch: Watcher) -> None:
        descend(
            model,
            2000,
            between=lambda step: sizes.append(objects()) if step in (1000, 1999) else None,
        )

    watched(program, Discarding())
    assert sizes[1] - sizes[0] < 100


def objects() -> int:
    """Count all objects, without handles and weak references, which come and go with graphs."""
    gc.collect()
    return sum(
        type(o).__name__ not in ("RemovableHandle", "ReferenceType") for o in gc.get_objects()
    )


@at_levels(MEASURED, GUARDED, MIXED)
def test_a_model_that_its_own_hooks_refer_to_is_freed(
    levels: tuple[StepKind, ...], paced: Paced
) -> None:
    """What is put up and taken down is known by weak references."""
    paced(*levels)

    def program(watch: Watcher) -> None:
        model = net()
        model.register_forward_hook(lambda *_, model=model: None)
        model[0].weight.register_hook(lambda grad, model=model: None)
        descend(model, 5)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    watched(program)


def test_a_model_that_is_deleted_is_freed_and_the_next_one_is_another() -> None:
    """A sweep over many models needs the memory of one; a new object at an old address is not mistaken for the old one."""
    alive: list[weakref.ref[Any]] = []

    def program() -> None:
        for _ in range(4):
            model = Conv()
            alive.extend(
                weakref.ref(thing) for thing in (model, *model.modules(), *model.parameters())
            )
            train(model, 2)
            del model
            gc.collect()
        assert [ref() for ref in alive if ref() is not None] == []

    log = watch(program, every=1)
    assert [r["prefix"] for r in log.roots] == ["", "model_2", "model_3", "model_4"]
    assert {f"{p}conv:out" for p in ("", "model_2.", "model_3.", "model_4.")} <= set(
        log.texts("out")
    )


@pytest.mark.parametrize("layers", [2, 20])
def test_the_end_leaves_no_hooks_to_the_garbage_collector(layers: int) -> None:
    """What was kept for each module, parameter and site is gone without a search for cycles."""
    kinds = (KedgeHook, Tap, MeasuredSite, ParameterSites)

    def alive() -> int:
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        watch(lambda: descend(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), 3))
        assert alive() - before < 8  # of the root alone, however many modules it has
    finally:
        gc.enable()
