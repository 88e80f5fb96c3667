"""``kedge sites``: the sites of a program's models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kedge.cli.output import make_writable, print_json
from kedge.cli.run import add_program, program_of
from kedge.cli.watching import Watching
from kedge.numbers import counted
from kedge.program.after_import import AfterImport
from kedge.program.ending import Ending
from kedge.stderr import messenger
from kedge.watch.run.options import WatchOptions

if TYPE_CHECKING:
    from kedge.inspect.function_operations import OutsideListing
    from kedge.inspect.operations import Listing
    from kedge.sites.table import SiteRow
    from kedge.watch.models.roots import RootModule
    from kedge.watch.watcher import Watcher


class SitesCommand:
    """List the sites of a program's models: each module and parameter, and the kinds of values that can be recorded there.

    The program runs as under python until the end of its first step, and is then stopped.
    Its output goes to stderr, so that stdout contains only the list. With --ops, a program
    that calls no module gets a list of its operations, with statistics of their results.

    --json prints a list of objects:
      [{"model", "parameters", "prefix", "sites": [{"path", "type", "shape", "kinds", "also", "trainable"}, ...]}, ...]
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        ops = "also list the operations in each forward, or of a program without modules, with shapes and lines"
        parser.add_argument("--ops", action="store_true", help=ops)
        parser.add_argument("--json", action="store_true", help="print a list of objects, one for each model")
        parser.add_argument(
            "--all",
            action="store_true",
            help="list every module on its own line (default: similar blocks share a line)",
        )
        add_program(parser)

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the first step and print the list."""
        if args.ops and args.json:
            args.parser.refuse("--json lists only sites: leave --ops out")
        program = program_of(args)
        program.check()
        held: list[Any] = ModelListings() if args.ops else []
        watching = Watching(FirstStepSink(), WatchOptions(every=1), messenger(), holding=held)
        watching.begin()
        with redirect_stdout(sys.stderr), held.outside() if isinstance(held, ModelListings) else nullcontext():
            ending = program.run()
        make_writable()
        if args.json:
            return _print_documents(watching.watch, ending)
        tables = list(_tables(watching.watch, held, folded=not args.all))
        if not tables:
            messenger()(
                _NOTHING if isinstance(held, ModelListings) else f"{_NOTHING}; with --ops, its operations are listed"
            )
            return ending if ending.status else 1
        print("\n\n".join(tables))
        return 0 if isinstance(ending.error, FirstStepTaken) else ending


_NOTHING = "there is nothing to list: the program called no module"


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
        self.alone: OutsideListing | None = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """List the operations of this thread outside of modules, from the import of torch until the first module is called."""
        torch = AfterImport("torch", self._begin)
        torch.install()
        try:
            yield
        finally:
            torch.remove()
            self._stop()

    def _begin(self) -> None:
        from kedge.inspect.function_operations import OutsideListing

        self.alone = OutsideListing(self._end_step).start()

    def _stop(self) -> None:
        if self.alone is not None:
            self.alone.stop()

    def _end_step(self) -> None:
        """End a program that has run its first backward, if no optimizer will end the step."""
        from kedge.watch.models.optimizers import any_optimizer

        if not any_optimizer():
            raise FirstStepTaken(0)

    def append(self, model: Any) -> None:
        """Add a model whose first call has begun."""
        from kedge.inspect.operations import Listing

        super().append(model)
        self._stop()
        listing = self.operations[id(model)] = Listing()
        listing.add(model, begun=True)


def _tables(watch: Watcher | None, held: list[Any], *, folded: bool) -> Iterator[str]:
    if watch is None:  # the program has not imported torch, and so Kedge has not
        return
    from kedge.sites.table import Sites, sites

    for root in watch.models.roots:
        model = root.module()
        prefix = f", recorded as {root.prefix}.*" if root.prefix else ""
        head = f"{root.types['']} ({counted(root.parameters, 'parameter')}{prefix})"
        if model is not None:
            yield f"{head}\n\n{sites(model).table(folded=folded)}"
            if isinstance(held, ModelListings) and id(model) in held.operations:
                listing = held.operations[id(model)]
                listing.session.end(quiet=True)
                yield str(listing.operations())
        elif rows := tuple(_loose(watch, root)):
            yield f"{head}\n\n{Sites(rows).table(folded=folded)}"
    alone = held.alone if isinstance(held, ModelListings) and not held else None
    if alone is not None and (listed := alone.operations()):
        yield f"operations outside of modules, with statistics of their results\n\n{listed}"


def _print_documents(watch: Watcher | None, ending: Ending) -> int | Ending:
    """Print the list as JSON, also if it is empty; returns the exit status, or how the program ended."""
    documents = list(_documents(watch))
    print_json(documents)
    if not documents:
        messenger()(_NOTHING)
        return ending if ending.status else 1
    return 0 if isinstance(ending.error, FirstStepTaken) else ending


def _documents(watch: Watcher | None) -> Iterator[dict[str, Any]]:
    """Yield what is known of each model, as plain values."""
    if watch is None:  # as in `_tables`
        return
    from kedge.sites.table import sites

    for root in watch.models.roots:
        model = root.module()
        rows = [asdict(row) for row in (_loose(watch, root) if model is None else sites(model))]
        about = {"model": root.types[""], "parameters": root.parameters, "prefix": root.prefix or None}
        yield {**about, "sites": rows}


def _loose(watch: Watcher, root: RootModule) -> Iterator[SiteRow]:
    """Yield the tensors of a root that has no module."""
    from kedge.sites.site import TENSOR_KINDS
    from kedge.sites.table import SiteRow

    for place in watch.models.places:
        tensor = place.param()
        if place.root is root and tensor is not None:
            yield SiteRow(place.site.path, "Tensor", tuple(tensor.shape), TENSOR_KINDS, trainable=tensor.requires_grad)
