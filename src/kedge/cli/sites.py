"""``kedge sites``: the sites of a program's models."""

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
from kedge.watch.run.options import WatchOptions

if TYPE_CHECKING:
    from kedge.inspect.operations import Listing
    from kedge.watch.watcher import Watcher


class SitesCommand:
    """List the sites of a program's models: every module and parameter, and the kinds of sites that it has.

    The program runs as under python until it has taken its first step, and is stopped
    there. Its output goes to stderr, so that stdout has only the list.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        ops = "list the operations inside each forward too, with their shapes and source lines"
        parser.add_argument("--ops", action="store_true", help=ops)
        add_program(parser)

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the first step and print the list."""
        program = program_of(args)
        program.check()
        held: list[Any] = ModelListings() if args.ops else []
        watching = Watching(FirstStepSink(), WatchOptions(every=1), messenger(), holding=held)
        watching.begin()
        with redirect_stdout(sys.stderr):
            ending = program.run()
        if watching.watch is None or not watching.watch.models.roots:
            messenger()("there is nothing to list: the program called no module")
            return ending if ending.status else 1
        print("\n\n".join(_tables(watching.watch, held)))
        return 0 if isinstance(ending.error, FirstStepTaken) else ending


class FirstStepTaken(SystemExit):
    """The end of the program after its first step."""


class FirstStepSink:
    """A sink that ends the program with the first recorded step."""

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Ignore the sites that fired; the list is read from the models."""

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:  # noqa: ARG002 - the step alone matters
        """End the program."""
        raise FirstStepTaken(0)

    def event(self, event: Mapping[str, Any]) -> None:
        """Ignore events."""


class ModelListings(list[Any]):
    """The models that a program calls, each with the list of the operations in its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, Listing] = {}

    def append(self, model: Any) -> None:
        """Add a model whose first call has begun."""
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
            if isinstance(held, ModelListings) and id(model) in held.operations:
                listing = held.operations[id(model)]
                listing.session.end(quiet=True)
                yield str(listing.operations())
