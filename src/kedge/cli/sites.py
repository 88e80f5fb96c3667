"""``kedge sites``: the sites of a program's models."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from kedge.cli.output import make_writable, print_json
from kedge.cli.run import add_program, program_of
from kedge.cli.sites_option import add_sites
from kedge.cli.watch_options import check_selector
from kedge.cli.watching import Watching
from kedge.program.after_import import AfterImport
from kedge.program.ending import Ending, await_threads
from kedge.short_text import counted
from kedge.stderr import messenger
from kedge.watch.run.options import WatchOptions

if TYPE_CHECKING:
    from kedge.examination.model_inputs import ModelInputs
    from kedge.examination.module_costs import ModelCosts
    from kedge.inspection.function_operations import OutsideListing
    from kedge.inspection.operations import Listing
    from kedge.sites.table import SiteRow, Sites
    from kedge.store.events import RunEvent
    from kedge.watch.models.roots import RootModule
    from kedge.watch.watcher import Watcher


class SitesCommand:
    """List the sites of a program's models: each module and parameter, and the kinds of values that can be recorded there.

    The program runs as under python until the end of its first step, and is then stopped.
    Its output goes to stderr, so that stdout contains only the list. With --ops, a program
    that calls no module gets a list of its operations, with statistics of their results.
    With --costs, each model is called some times more with the inputs of its first call, for
    the parameters, output shapes, multiply-adds, bytes saved for backward and time of each module.

    --json prints a list of objects:
      [{"model", "parameters", "prefix",
        "sites": [{"path", "type", "shape", "kinds", "also", "trainable"}, ...]}, ...]
    and with --costs, in place of "sites":
      "costs": [{"path", "type", "calls", "parameters", "trainable", "outputs",
                 "multiply_adds", "saved", "forward"}, ...]
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        parser.add_argument(
            "--ops",
            action="store_true",
            help=(
                "also list the operations in each forward, "
                "or of a program without modules, with shapes and lines"
            ),
        )
        parser.add_argument(
            "--costs",
            action="store_true",
            help=(
                "what each module takes: parameters, output shapes, multiply-adds, "
                "bytes saved for backward, time of its forward"
            ),
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="print a list of objects, one for each model",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            help="list every module on its own line (default: similar blocks share a line)",
        )
        add_sites(parser, "list only these sites")
        add_program(parser)

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the first step and print the list."""
        if args.ops and args.json:
            args.parser.refuse("--json lists only sites: leave --ops out")
        if args.ops and args.sites:
            args.parser.refuse("--sites chooses no operations: leave --ops out")
        for name, given in (("--ops", args.ops), ("--sites", args.sites)):
            if args.costs and given:
                args.parser.refuse(f"--costs is about all modules of a model: leave {name} out")
        program = program_of(args)
        program.check()
        if args.sites is not None:
            check_selector(args.sites)
        held: list[Any] = []
        if args.ops:
            held = ModelListings()
        elif args.costs:
            held = ModelCalls()
        watching = Watching(FirstStepSink(), WatchOptions(every=1), messenger(), holding=held)
        watching.begin()
        outside = held.outside() if isinstance(held, ModelListings) else nullcontext()
        with redirect_stdout(sys.stderr), outside:
            ending = program.run()
            if not isinstance(ending.error, FirstStepTaken):  # a thread may still train
                await_threads()
        make_writable()
        if args.json:
            return _print_documents(watching.watch, held, args.sites, ending)
        tables = list(_tables(watching.watch, held, args.sites, folded=not args.all))
        if not tables:
            hint = ""
            if not args.ops:
                hint = "; with --ops, its operations are listed"
            return _nothing_listed(ending, hint)
        print("\n\n".join(tables))
        return 0 if isinstance(ending.error, FirstStepTaken) else ending


def _nothing_listed(ending: Ending, hint: str = "") -> int | Ending:
    """Say why the list is empty; returns the exit status, or how the program ended.

    Args:
        ending: How the program ended.
        hint: What to say to a program without a module.
    """
    why = f"the program called no module{hint}"
    if isinstance(ending.error, Exception):
        why = "the program failed before it called a module"
    messenger()(f"there is nothing to list: {why}")
    return ending if ending.status else 1


class FirstStepTaken(SystemExit):
    """The end of the program after its first step."""


def end_program() -> NoReturn:
    """End the program, or a thread of it that has taken the first step.

    There, Python prints all but a plain `SystemExit`.
    """
    if threading.current_thread() is threading.main_thread():
        raise FirstStepTaken(0)
    raise SystemExit(0)


class FirstStepSink:
    """A sink that ends the program with the first recorded step."""

    def sites(
        self,
        sites: Sequence[Mapping[str, Any]],
        roots: Sequence[Mapping[str, Any]],
    ) -> None:
        """Ignore the sites that fired; the list is read from the models."""

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:  # noqa: ARG002
        """End the program: the step alone matters."""
        end_program()

    def event(self, event: RunEvent) -> None:
        """Ignore events."""


class ModelListings(list[Any]):
    """The models that a program calls, each with the list of the operations in its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, Listing] = {}
        self.alone: OutsideListing | None = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """List the operations of this thread outside of modules.

        It begins with the import of torch, and ends when the first module is called.
        """
        torch = AfterImport("torch", self._begin)
        torch.install()
        try:
            yield
        finally:
            torch.remove()
            self._stop()

    def _begin(self) -> None:
        from kedge.inspection.function_operations import OutsideListing

        self.alone = OutsideListing(self._end_step).start()

    def _stop(self) -> None:
        if self.alone is not None:
            self.alone.stop()

    def _end_step(self) -> None:
        """End a program that has run its first backward, if no optimizer will end the step."""
        from kedge.watch.models.optimizers import any_optimizer

        if not any_optimizer():
            end_program()

    def append(self, model: Any) -> None:
        """Add a model whose first call has begun."""
        from kedge.inspection.operations import Listing

        super().append(model)
        self._stop()
        listing = self.operations[id(model)] = Listing()
        listing.add(model, begun=True)


class ModelCalls(list[Any]):
    """The models that a program calls, each with the inputs of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, ModelInputs] = {}

    def append(self, model: Any) -> None:
        """Add a model whose first call has begun."""
        from kedge.examination.model_inputs import ModelInputs
        from kedge.hooks.placing.module_calls import given_to

        super().append(model)
        call = given_to(model)
        if call:
            self.inputs[id(model)] = ModelInputs.of_call(model, *call).apart()

    def costs(self, root: RootModule) -> ModelCosts | None:
        """Return what the modules of a root take; None if it has no module, or was not called."""
        from kedge.examination.module_costs import costs_of

        model = root.module()
        inputs = self.inputs.get(id(model))
        if model is None or inputs is None:
            return None
        return costs_of(model, inputs.args, dict(inputs.kwargs))


def _tables(
    watch: Watcher | None, held: list[Any], text: str | None, *, folded: bool
) -> Iterator[str]:
    if watch is None:  # the program has not imported torch, and so Kedge has not
        return
    for root, rows in _listed(watch, text):
        model = root.module()
        about = counted(root.parameters, "parameter")
        if root.prefix:
            about += f", recorded as {root.prefix}.*"
        head = f"{root.types['']} ({about})"
        if isinstance(held, ModelCalls):
            costs = held.costs(root)
            if costs is not None:
                yield f"{head}\n\n{costs.table(folded=folded)}"
        elif rows:
            yield f"{head}\n\n{rows.table(folded=folded)}"
            if isinstance(held, ModelListings) and id(model) in held.operations:
                listing = held.operations[id(model)]
                listing.session.end(quiet=True)
                yield str(listing.operations())
    if isinstance(held, ModelListings) and not held and held.alone is not None:
        listed = held.alone.operations()
        if listed:
            yield f"operations outside of modules, with statistics of their results\n\n{listed}"


def _print_documents(
    watch: Watcher | None,
    held: list[Any],
    text: str | None,
    ending: Ending,
) -> int | Ending:
    """Print the list as JSON, also if it is empty; returns the exit status, or how the program ended."""
    documents = list(_documents(watch, held, text))
    print_json(documents)
    if not documents:
        return _nothing_listed(ending)
    return 0 if isinstance(ending.error, FirstStepTaken) else ending


def _documents(
    watch: Watcher | None, held: list[Any], text: str | None
) -> Iterator[dict[str, Any]]:
    if watch is None:  # as in `_tables`
        return
    for root, rows in _listed(watch, text):
        about = {
            "model": root.types[""],
            "parameters": root.parameters,
            "prefix": root.prefix or None,
        }
        if not isinstance(held, ModelCalls):
            yield {**about, "sites": [asdict(row) for row in rows]}
            continue
        costs = held.costs(root)
        if costs is not None:
            yield {**about, "costs": [asdict(row) for row in costs]}


@dataclass(frozen=True, eq=False)
class RowSite:
    """A site of a row, as a filter asks for it, under the names that a recording has."""

    row: SiteRow
    path: str
    kind: str
    type: str
    owner: str

    @property
    def site(self) -> str:
        """Its text."""
        return f"{self.path}:{self.kind}"


def _listed(watch: Watcher, text: str | None) -> list[tuple[RootModule, Sites]]:
    """Return the rows of each model; if a text chooses some, without the models that have none of them.

    Raises:
        NoSuchSite: A part of the text selects nothing.
    """
    from kedge.sites.filters import chosen_sites
    from kedge.sites.table import Sites, sites_of

    listed: list[tuple[RootModule, Sites]] = []
    every: list[RowSite] = []
    for root in watch.models.roots:
        model = root.module()
        rows = Sites(tuple(_loose(watch, root))) if model is None else sites_of(model)
        listed.append((root, rows))
        every += _row_sites(root, rows)
    if text is None or not every:
        return listed

    matching = chosen_sites(text, every, "the models of this program")
    kept = {id(site.row) for site in matching}
    chosen: list[tuple[RootModule, Sites]] = []
    for root, rows in listed:
        rows_kept = tuple(row for row in rows if id(row) in kept)
        if rows_kept:
            chosen.append((root, Sites(rows_kept)))
    return chosen


def _row_sites(root: RootModule, rows: Sites) -> Iterator[RowSite]:
    types = {row.path: row.type for row in rows if row.shape is None}
    for row in rows:
        owner = row.path if row.shape is None else row.path.rpartition(".")[0]
        type_ = types.get(owner, row.type)
        for kind in row.kinds:
            yield RowSite(row, root.label(row.path), kind, type_, root.label(owner))


def _loose(watch: Watcher, root: RootModule) -> Iterator[SiteRow]:
    """Yield the tensors of a root that has no module."""
    from kedge.sites.site import TENSOR_KINDS
    from kedge.sites.table import SiteRow

    for place in watch.models.places:
        tensor = place.param()
        if place.root is root and tensor is not None:
            yield SiteRow(
                place.site.path,
                "Tensor",
                tuple(tensor.shape),
                TENSOR_KINDS,
                trainable=tensor.requires_grad,
            )
