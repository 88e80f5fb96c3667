"""What it costs that operations inside a forward are sites: microseconds for each, beside the same forward without hooks.

Each round runs every case once, in a shuffled order; a figure is the median over the rounds of the
difference to the bare forward of the same round, for each operation or call.

    python benchmarks/ops.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kedge

NUMBER = 200


class Chain(nn.Module):
    """Takes the sine of a small tensor again and again."""

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        for _ in range(NUMBER):
            x = torch.sin(x)
        return x


class Calls(nn.Module):
    """Calls a module that takes one sine again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        for _ in range(NUMBER):
            x = self.child(x)
        return x


class Beside(nn.Module):
    """A chain, and a module whose operations are asked for instead."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.other = Chain(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Call both."""
        return self.other(self.chain(x))


@dataclass(frozen=True)
class Case:
    """One thing to be measured: a model, and what is hooked in it; nothing for the bare forward."""

    name: str
    model: Callable[[], nn.Module]
    sites: str = ""
    action: Callable[[], object] = lambda: lambda value: None


CASES = (
    Case("an operation observed (/sin)", Chain, "/sin"),
    Case("an operation recorded (/sin, record)", Chain, "/sin", kedge.record),
    Case("an operation's input and output (/*:in, /*:out)", Chain, "/*:in, /*:out"),
    Case("an operation passed over (/cos)", Chain, "/cos"),
    Case("one of many observed (/sin#7)", Chain, "/sin#7"),
    Case("an operation of another module (other/relu)", Beside, "other/relu"),
    Case("a child's call in a hooked forward (/cos)", Calls, "/cos"),
    Case("a module's call observed (child)", Calls, "child"),
)


def timed(model: nn.Module, x: Tensor) -> float:
    """Microseconds of one forward, for each of its operations."""
    begun = time.perf_counter()
    model(x)
    return (time.perf_counter() - begun) / NUMBER * 1e6


def measure(rounds: int) -> dict[Case, list[tuple[float, float]]]:
    """Time every case beside the bare forward: pairs of figures, one a round."""
    x = torch.ones(4)
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in CASES}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        models = {case: (case.model(), case.model()) for case in CASES}
        for case, (_, hooked) in models.items():
            session = stack.enter_context(kedge.session())
            session.hook(hooked, case.sites, case.action())
            stack.callback(session.end, quiet=True)
        for n in range(rounds):
            for case in random.sample(CASES, len(CASES)):
                bare, hooked = models[case]
                pair = (
                    (timed(bare, x), timed(hooked, x))
                    if n % 2
                    else tuple(reversed((timed(hooked, x), timed(bare, x))))
                )
                found[case].append(pair)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    measure(5)
    print(f"{'':50}  {'bare':>6}  {'added':>6}  quartiles, microseconds each")
    for case, pairs in measure(rounds).items():
        added = [hooked - bare for bare, hooked in pairs]
        low, middle, high = statistics.quantiles(added, n=4)
        bare = statistics.median(bare for bare, _ in pairs)
        print(f"{case.name:50}  {bare:6.2f}  {middle:6.2f}  [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
