"""``kedge sites``: list what a program's models offer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from kedge.cli.run import add_program, program_of
from kedge.cli.watching import Watching
from kedge.program.ending import Ending
from kedge.stderr import messenger
from kedge.watch.run.options import Order

if TYPE_CHECKING:
    from kedge.inspect.operations import Listing
    from kedge.watch.watcher import Watcher


class Sites:
    """List what a program's models offer: every module and parameter, and what can be hooked there.

    The program runs as python would run it until it has taken its first step, and is
    stopped there. What it prints goes to stderr, so that stdout has the list alone.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what can be typed after the command."""
        ops = "list the operations inside each forward too, with their shapes and source lines"
        parser.add_argument("--ops", action="store_true", help=ops)
        add_program(parser)

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the first step and print the list."""
        program = program_of(args)
        program.check()
        held: list[Any] = Held() if args.ops else []
        watching = Watching(FirstStep(), Order(every=1), messenger(), holding=held)
        watching.begin()
        with redirect_stdout(sys.stderr):
            ending = program.run()
        if watching.watch is None or not watching.watch.models.roots:
            messenger()("there is nothing to list: the program called no module")
            return ending if ending.status else 1
        print("\n\n".join(_tables(watching.watch, held)))
        return 0 if isinstance(ending.error, FirstStepTaken) else ending


class FirstStepTaken(SystemExit):
    """Ends the program: there is nothing more to learn from it."""


class FirstStep:
    """Takes what is recorded of the first step, and ends the program."""

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Take the list of sites that fired; the models themselves tell more."""

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:  # noqa: ARG002 - it is enough that it happened
        """End the program."""
        raise FirstStepTaken(0)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take no notes."""


class Held(list[Any]):
    """The models that a program calls, each with the list of the operations that its forwards make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, Listing] = {}

    def append(self, model: Any) -> None:
        """Take a model whose first call has begun."""
        from kedge.inspect.operations import Listing

        super().append(model)
        listing = self.operations[id(model)] = Listing()
        listing.add(model, begun=True)


def _tables(watch: Watcher, held: list[Any]) -> Iterator[str]:
    from kedge.numbers import counted
    from kedge.sites.table import sites

    for root in watch.models.roots:
        model = root.module()
        if model is not None:
            prefix = f", recorded as {root.prefix}.*" if root.prefix else ""
            yield f"{root.types['']} ({counted(root.parameters, 'parameter')}{prefix})\n\n{sites(model)}"
            if isinstance(held, Held) and id(model) in held.operations:
                listing = held.operations[id(model)]
                listing.session.end(quiet=True)
                yield str(listing.operations())
