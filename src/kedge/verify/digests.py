"""The neutral digest log: digests of the values that a program computes, watched or not.

# Note [The digest log]
`kedge run --verify` compares a watched run of a program with an unwatched one. Both have this log
and nothing else in common with Kedge, so a difference between them comes from the watching. It uses
only global hooks, which leave nothing on a module, and it only reads: it keeps no tensor and makes
no autograd node.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kedge.files.own_file import FRESH, OwnFile, write_all
from kedge.frames import OWN
from kedge.hooks.placing.module_calls import CallTracker, OpenCalls, is_repeated
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.torch_internals import modes
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.module_tables import buffers_in, parameters_in
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.source_lines import TORCH
from kedge.torch_internals.storages import parts

LENGTH = 16
"""Hexadecimal digits that are kept of a tensor's SHA-256."""


class DigestLog:
    """Writes digests: a line for each output of a root module, three for each optimizer step.

    A root is a module called while no other one runs. A line has its step, its subject, and the
    digests of tensors; an earlier line, written once, has the names of these tensors.

    Args:
        place: The file to write.
    """

    def __init__(self, place: Path) -> None:
        self._file = OwnFile(place, FRESH)
        self._undo = ExitStack()
        self._roots: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._tables: dict[tuple[str, ...], int] = {}
        self._step = 0
        self._shield = Shield("the digest log", "the runs cannot be compared", tell=self._failed)
        self._calls: CallTracker[None, nn.Module] = CallTracker(
            self._entered, self._left, shield=self._shield
        )
        self._undo.callback(self._calls.close)

    def begin(self) -> None:
        """Install the hooks."""
        self._calls.follow_all(None)
        for handle in (
            register_optimizer_step_pre_hook(self._shielded(self._before)),
            register_optimizer_step_post_hook(self._shielded(self._after)),
        ):
            self._undo.callback(handle.remove)

    def end(self) -> None:
        """Remove the hooks and close the file."""
        if os.getpid() == self._shield.pid:
            self._undo.close()
            self._file.close()

    def _shielded(self, work: Callable[[Optimizer], None]) -> Callable[..., None]:
        """Return an optimizer hook that never ends the program; a failure is written to the log."""

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and not modes.is_under_jit():
                with torch.no_grad(), own_work():
                    self._shield(work, optimizer)

        return hook

    def _failed(self, text: str) -> None:
        self._line(step=self._step, failed=text)

    # -- modules ---------------------------------------------------------------------------------

    def _entered(
        self, calls: OpenCalls[nn.Module], subject: None, module: nn.Module, given: Any
    ) -> nn.Module | None:
        if calls.called and module is not calls.called[0]:  # a root may call itself
            return None
        if not calls.called and (_is_left_out(module) or _is_called_by_kedge()):
            return None
        return module

    def _left(
        self,
        calls: OpenCalls[nn.Module],
        module: nn.Module,
        output: Any,
    ) -> None:
        if not calls.called:
            with torch.no_grad():
                self._digests(f"output of {self._name(module)}", leaves.find(output))

    def _name(self, module: nn.Module) -> str:
        known = self._roots.get(id(module))
        if known is not None:
            ref, name = known
            if ref() is module:
                return name

        used = {name for _, name in self._roots.values()}
        kind = type(module).__name__
        name = kind
        numbers = count(2)
        while name in used:
            name = f"{kind}_{next(numbers)}"
        self._roots[id(module)] = weakref.ref(module), name
        return name

    # -- steps -----------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer) -> None:
        parameters = self._parameters(optimizer)
        gradients = [(name, p.grad) for name, p in parameters if p.grad is not None]
        self._digests("gradient", gradients)

    def _after(self, optimizer: Optimizer) -> None:
        self._digests("parameter", self._parameters(optimizer))
        held: list[tuple[str, Tensor]] = []
        for name, root in self._living():
            for path, buffer in buffers_in(root).items():
                held.append((f"{name}.{path}", buffer))
        for place, state in generator_states().items():
            name = "random generator"
            if place != "cpu":
                name += f" of {place}"
            held.append((name, state))
        self._digests("buffer", held)
        self._step += 1

    def _living(self) -> Iterator[tuple[str, nn.Module]]:
        for ref, name in self._roots.values():
            root = ref()
            if root is not None:
                yield name, root

    def _parameters(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        named: dict[int, tuple[str, Tensor]] = {}
        for name, root in self._living():
            for path, p in parameters_in(root).items():
                named[id(p)] = f"{name}.{path}", p
        number = count()
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = f"{type(optimizer).__name__}[{next(number)}]"
                named.setdefault(id(p), (name, p))
        return [(name, p) for name, p in named.values() if not is_lazy(p)]

    # -- writing ---------------------------------------------------------------------------------

    def _digests(self, what: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        found = dict(tensors)
        names = tuple(found)
        if names not in self._tables:
            self._tables[names] = len(self._tables)
            self._line(table=self._tables[names], names=names)
        digests = "".join(map(digest, found.values()))
        self._line(step=self._step, what=what, table=self._tables[names], digests=digests)

    def _line(self, **content: Any) -> None:
        write_all(self._file, (json.dumps(content) + "\n").encode())


def _is_left_out(module: nn.Module) -> bool:
    return is_repeated(module) or modes.is_under_jit()


def _is_called_by_kedge() -> bool:
    """Whether Kedge calls a module, not the program.

    Then the first caller outside of PyTorch is a Kedge frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OWN)


def digest(tensor: Tensor) -> str:
    """Return the beginning of the SHA-256 of a tensor's dtype, shape and bytes.

    Under ``vmap``, it is that of all samples.
    """
    sha = hashlib.sha256()
    with modes.without_wrapping():  # else values inside a transform would be wrapped again
        for part in parts(leaves.untransformed(tensor).detach()):
            sha.update(f"{part.dtype}{list(part.shape)}".encode())
            for content in _contents(part):
                sha.update(content)
    return sha.hexdigest()[:LENGTH]


def _contents(tensor: Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor in logical order; nothing if it has no memory."""
    if tensor.is_meta or not tensor.numel():
        return
    whole = tensor.int_repr() if tensor.is_quantized else tensor
    whole = whole.resolve_conj().resolve_neg()
    yield whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
