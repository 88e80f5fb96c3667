"""Runs a kept call once more in a process of its own, to name the operation at fault.

# Note [A process of its own]
A forward of the program may print, count, draw random numbers or wait for other ranks. Run again
inside the program it would change what the program does, so it runs in another process, after the
watcher has ended. That process gets no place in a distributed run and little time, and a failure
there only means that the operation is not named. It does the same as ``replay.py``, with Kedge's
own operation sites. It discards the output of the program's code, does not wait for processes that
this code starts, and does not run its exit handlers a second time. If its parent has died, because
the program was killed, it ends by itself.

# Note [No name is better than a wrong one]
Inputs, parameters and random numbers are the same again, but the program around the call is
missing. So a name counts only if as many elements of a value of the same size went wrong as in the
program; and in a backward, if the arriving gradients are finite and every node involved belongs to
an operation that was seen. Named are the operations that made infinities of inputs without any, or
NaN of inputs without any: the first of each, up to the first NaN. An operation that puts a given
infinity in place, as the making of a mask does, has computed none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kedge.flow import Act, Event
from kedge.inspection.operations import Listing
from kedge.json_input.classes import as_json, read_as
from kedge.repro.finiteness import Bad, counts
from kedge.sites.site import Site
from kedge.store.events import BadOperation
from kedge.torch_internals.autograd_nodes import between
from kedge.torch_internals.graph_task import current_node

PATIENCE = 60.0
"""Most seconds that a call may take; most of them go to importing torch and the program's modules."""

_PLACING = frozenset(
    {
        "masked_fill",
        "masked_fill_",
        "where",
        "setitem",
        "full",
        "full_like",
        "new_full",
        "fill_",
    }
)
_MARK = "kedge found: "
_PLACE_IN_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

Key = tuple[int, Site]


def operations_of(folder: Path) -> list[BadOperation]:
    """Run the call of a dump again, and return the operations that made its non-finite values.

    Args:
        folder: The dump's folder.

    Returns:
        The operations in their order; empty if they are not known.
    """
    if not sys.executable:
        return []
    environment = dict(os.environ)
    for name in _PLACE_IN_RUN:
        environment.pop(name, None)
    folders = [each or os.curdir for each in sys.path if isinstance(each, str)]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, "-B", "-P", "-m", "kedge.repro.rerun", str(folder)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        ended = subprocess.run(  # noqa: S603 - this very Python, on a folder of this process
            command,
            env=environment,
            stdout=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
            encoding="utf-8",
            errors="replace",
            **quiet,
        )
        _, mark, found = ended.stdout.rpartition(_MARK)
        if not mark:
            return []
        return [read_as(BadOperation, each) for each in json.loads(found)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    except KeyboardInterrupt:  # an interrupt ends the waiting too
        return []


def rerun(folder: Path) -> list[BadOperation]:
    """Run the call of a dump again in this process; see `operations_of`."""
    script = _load(folder / "replay.py")
    seen = _seen(folder)
    if seen is None or not script.is_here(script.DEVICE):
        return []
    sys.path += [each for each in script.FOLDERS if each not in sys.path]
    for name, tensor in load_file(folder / "tensors.safetensors").items():
        script.TENSORS[name] = tensor.to(script.DEVICE)
    module = script.build()
    args, kwargs = script.arguments()
    if script.LACKING:
        return []
    listing = BadOperationListing()
    listing.add(module)
    script.set_random(script.DEVICE)
    with contextlib.ExitStack() as stack:
        stack.callback(listing.session.end, quiet=True)
        stack.enter_context(torch.autograd.set_grad_enabled(script.GRAD))
        for kind, dtype in script.AUTOCAST.items():
            stack.enter_context(torch.autocast(kind, dtype))
        output = module(*args, **kwargs)
    if script.DIRECTION == "backward":
        return listing.described(_spoiled(script, listing, output), script.SITE, "in.grad")
    own = [counts(tensor) for _, tensor in script.leaves(output, "")]
    if seen not in (*listing.counted, *own):
        return []
    return listing.described(listing.made, script.SITE, "out")


class BadOperationListing(Listing):
    """Lists operations, and those of them that made non-finite values of finite ones.

    Attributes:
        made: Those operations, each with the kind of its value: "inf" or "nan".
        counted: The counts of every result that was not finite.
        nodes: The operation that made each autograd node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Bad, Key]] = []
        self.counted: list[dict[str, int]] = []
        self.nodes: dict[Any, Key] = {}
        self._given: dict[Key, tuple[set[Bad | None], set[Any]]] = {}

    def bind(self, site: Site) -> Act:
        """Return a function that lists the operations of one module, and checks their values."""
        listed = super().bind(site)

        def act(value: Tensor, event: Event) -> None:
            listed(value, event)
            self._check(value.detach(), value.grad_fn, event)

        return act

    def described(
        self,
        made: list[tuple[Bad, Key]],
        label: str,
        kind: str,
    ) -> list[BadOperation]:
        """Describe the first operation that made infinities, and the first that made NaN.

        Args:
            made: Operations, each with the kind of its value.
            label: The path of the module that was called.
            kind: The kind of their sites.
        """
        first: dict[Bad, Key] = {}
        for value, key in made:
            first.setdefault(value, key)
            if value == "nan":  # what comes after it are its consequences
                break

        listed = self.operations()
        found = []
        for value, key in first.items():
            row = self._rows[key]
            name = listed.name(row)
            if label and not name.startswith("/"):
                name = f".{name}"
            operation = BadOperation(
                site=f"{label}{name}:{kind}",
                name=_name_of(row.site),
                value=value,
            )
            if row.source is not None:
                operation = replace(operation, **vars(row.source))
            found.append(operation)
        return found

    def _check(self, value: Tensor, node: Any, event: Event) -> None:
        own = replace(event.site, kind="out", leaf=None, call=event.call)
        key = event.pass_, own
        kinds, before = self._given.setdefault(key, (set(), set()))
        kind = _bad(value)
        if event.site.kind == "in":
            kinds.add(kind)
            before.add(node)
            return
        if kind:
            self.counted.append(counts(value))
            is_placed = kind == "inf" and _name_of(own) in _PLACING
            if kind not in kinds and not is_placed:
                self.made.append((kind, key))
        for each in between(node, before):
            self.nodes.setdefault(each, key)


def _name_of(site: Site) -> str:
    if site.op is None:
        return ""
    return site.op[0]


def _spoiled(
    script: Any,
    listing: BadOperationListing,
    output: Any,
) -> list[tuple[Bad, Key]]:
    """Run the backward, and return the operations with non-finite gradients.

    Nothing is returned if any of them is unknown.
    """
    outputs, gradients = script.paired(output)
    if any(map(_bad, gradients)):
        return []

    class Nodes(script.FirstBadOperations):  # type: ignore[misc]
        """Records nodes in place of texts."""

        def described(self, name: str, made: Tensor, before: list[str]) -> Any:
            return current_node()

    with Nodes() as seen:
        torch.autograd.backward(outputs, gradients)
    spoiled = []
    for kind, node in seen.found:
        key = listing.nodes.get(node)
        if key is None:
            return []
        spoiled.append((kind, key))
    return spoiled


def _bad(value: Tensor) -> Bad | None:
    if not (value.is_floating_point() or value.is_complex()):
        return None
    found = counts(value)
    if found["nan"]:
        return "nan"
    if found["inf"]:
        return "inf"
    return None


def _seen(folder: Path) -> dict[str, int] | None:
    """Return the counts of the non-finite value that were saved with the call, if any."""
    with safe_open(folder / "tensors.safetensors", "pt") as file:
        seen = (file.metadata() or {}).get("seen")
    if seen is None:
        return None
    return dict(json.loads(seen))


def _load(path: Path) -> Any:
    """Import a dump's script without running it."""
    spec = importlib.util.spec_from_file_location("kedge_replayed", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Entry point of the other process; see Note [A process of its own]."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with (
            os.fdopen(os.dup(1), "w", encoding="utf-8") as out,
            Path(os.devnull).open("w") as nowhere,
        ):
            os.dup2(nowhere.fileno(), 1)
            found = rerun(Path(sys.argv[1]))
            out.write(f"{_MARK}{json.dumps(as_json(found))}\n")
    finally:
        os._exit(0)  # in any case: exit handlers of the program's code must not run here


if __name__ == "__main__":
    main()
