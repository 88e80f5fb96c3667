"""What it costs to look at every output and every gradient, in each step: beside hooks by hand.

First the time of the host for one value, over an empty hook: steps of a model so small that the
device is always done before the host. Then the ratio of a step to the bare step, in rounds: each
takes some steps of every case, in a new order, and a case's ratio is its time over that of the bare
steps of the same round.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import kedge
from on_card import trainings
from on_card.bench import Bench
from on_card.sheet import Table, rounds, spread
from on_card.trainings import Training

EVERYWHERE = "**:out, **:out.grad"
WARM = 4
"""The steps before the first that counts."""
AfterStep = Callable[[], Any]
Case = Callable[[nn.Module], contextlib.AbstractContextManager[AfterStep]]


def _nothing() -> None:
    pass


@contextlib.contextmanager
def bare(model: nn.Module) -> Iterator[AfterStep]:
    """Nothing."""
    yield _nothing


@contextlib.contextmanager
def seen_by(model: nn.Module, see: Callable[[Tensor], Any]) -> Iterator[None]:
    """Have a function called with each tensor that a module returns, and with its gradient."""

    def see_both(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            see(output)
            if output.requires_grad:
                output.register_hook(see)

    handles = [module.register_forward_hook(see_both) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def empty_hooks(model: nn.Module) -> Iterator[AfterStep]:
    """Hooks by hand that do nothing."""
    with seen_by(model, lambda value: None):
        yield _nothing


@contextlib.contextmanager
def norms_by_hand(model: nn.Module) -> Iterator[AfterStep]:
    """A norm of each value, and one copy to the host a step."""
    norms: list[Tensor] = []

    def copy() -> None:
        torch.stack([norm.float() for norm in norms]).cpu()
        norms.clear()

    with seen_by(model, lambda value: norms.append(torch.linalg.vector_norm(value.detach()))):
        yield copy


def kedged(where: str, action: Callable[[], Any], **options: Any) -> Case:
    """Return a case of `kedge.hook`."""

    @contextlib.contextmanager
    def case(model: nn.Module) -> Iterator[AfterStep]:
        with kedge.hook(model, where, action(), **options):
            yield _nothing

    return case


NORMS = kedged(EVERYWHERE, lambda: kedge.measure("norm"))
STATISTICS = kedged(EVERYWHERE, kedge.measure)
CASES: dict[str, Case] = {
    "bare again": bare,
    "empty hooks": empty_hooks,
    "norms by hand": norms_by_hand,
    "Kedge, norms": NORMS,
    "Kedge, all statistics": STATISTICS,
    "Kedge, record": kedged("**:out", kedge.record),
    "Kedge, off schedule": kedged(EVERYWHERE, kedge.measure, when=kedge.every(10**6)),
}
OF_THE_HOST: dict[str, Case] = {
    "empty hooks": empty_hooks,
    "norms by hand": norms_by_hand,
    "Kedge, norms": NORMS,
    "Kedge, all statistics": STATISTICS,
}


def looking(bench: Bench) -> None:
    """Fill both tables."""
    on, tiny = bench.on, bench.tiny
    made: dict[str, tuple[Callable[[], trainings.Made], int]] = {
        "MLP": (lambda: trainings.mlp(on), 60),
        "ResNet-50": (lambda: trainings.resnet(on, (3, 4, 6, 3), 128), 6),
        "GPT 12x768": (lambda: trainings.gpt_768(on), 12),
    }
    if tiny:
        made = {
            "MLP": (lambda: trainings.mlp(on, width=16, layers=2), 2),
            "images": (lambda: trainings.small_images(on), 2),
            "GPT": (lambda: trainings.small_gpt(on), 2),
        }
    with bench.sheet.trying("looking: host"):
        host_a_value(bench)
    on.clean()
    title = "Looking in each step: ratio to the bare step, median (lowest-highest)"
    table = bench.sheet.table(title)
    for name, (make, steps) in made.items():
        with bench.sheet.trying(f"looking: {name}"):
            ratios(bench, table, name, Training(on, *make()), steps)
        on.clean()


def ratios(bench: Bench, table: Table, name: str, training: Training, steps: int) -> None:
    """Fill a column of the second table."""
    tiny = bench.tiny
    for _ in range(WARM):
        training.step()
    values = values_in(training)
    found: dict[str, list[float]] = {case: [] for case in CASES}
    plain: list[float] = []
    order = random.Random(0)  # noqa: S311 - an order of cases
    try:
        for _ in rounds(seconds=28, least=1 if tiny else 3, most=1 if tiny else 7):
            taken = {}
            for case in order.sample(["bare", *found], 1 + len(found)):
                with bench.sheet.trying(f"looking: {name}, {case}"):
                    taken[case] = step_seconds(bench, training, CASES.get(case, bare), steps)
            plain.append(taken.pop("bare"))
            for case in list(found):
                if case in taken:
                    found[case].append(taken[case] / plain[-1])
                else:  # it failed, and would again
                    del found[case]
    finally:  # a part that is out of time has had some rounds
        milliseconds = spread([seconds * 1e3 for seconds in plain])
        table.head(name, f"{name}: {milliseconds} ms, {values} values, {len(plain)} rounds")
        for case, each in found.items():
            table.put(case, name, spread(each, 3))


def values_in(training: Training) -> int:
    """Return how many values, outputs and gradients, a step has."""
    with kedge.hook(training.model, EVERYWHERE, kedge.measure()) as found:
        training.step()
        training.step()
    return sum(found[site].calls for site in found)


def step_seconds(bench: Bench, training: Training, case: Case, steps: int) -> float:
    """Return the seconds of a step of one case."""
    with case(training.model) as after:

        def step() -> None:
            training.step()
            after()

        step()
        step()
        return bench.on.seconds(step, steps)


def host_a_value(bench: Bench) -> None:
    """Fill the first table: what a value costs the host."""
    on, tiny = bench.on, bench.tiny
    training = Training(on, *trainings.mlp(on, width=16, layers=2 if tiny else 10))
    for _ in range(WARM):
        training.step()
    values = values_in(training)
    steps = 2 if tiny else 20
    taken: dict[str, list[float]] = {case: [] for case in ("bare", *OF_THE_HOST)}
    order = random.Random(0)  # noqa: S311 - an order of cases
    behind = []
    for _ in rounds(seconds=12, least=1 if tiny else 7, most=2 if tiny else 15):
        for case in order.sample(list(taken), len(taken)):
            with OF_THE_HOST.get(case, bare)(training.model) as after:
                # What is done after a step waits for the device, so it is not part of it here.
                training.step()
                after()
                taken[case].append(on.host_seconds(training.step, steps))
        behind.append(on.seconds(training.step, steps) / taken["bare"][-1])
    title = f"Host time, {values} values of 128x16 in a step, {len(behind)} rounds"
    table = bench.sheet.table(title)
    column = "µs a value, median (lowest-highest)"
    over = {case: _differences(taken[case], taken["empty hooks"], values) for case in OF_THE_HOST}
    over["empty hooks"] = _differences(taken["empty hooks"], taken["bare"], values)
    for case, each in over.items():
        than = "the bare step" if case == "empty hooks" else "an empty hook"
        table.put(f"{case}, over {than}", column, spread(each))
    bare_step = spread([seconds * 1e6 for seconds in taken["bare"]], 0)
    ended = statistics.median(behind)
    bench.sheet.line(
        f"a bare step takes {bare_step} µs to queue, and {ended:.2f} times that to end"
    )


def _differences(more: list[float], less: list[float], values: int) -> list[float]:
    return [(a - b) / values * 1e6 for a, b in zip(more, less, strict=True)]
