"""The entry point `kedge.offload`, for the length of a block or of one call."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn

from kedge.errors import OffloadError
from kedge.hooks.placing.model_inputs import hear
from kedge.hooks.saved.keeper import keep
from kedge.offload.account import OffloadAccount
from kedge.offload.codecs import codec_of
from kedge.offload.destination import Cpu, Destination, Disk, Rebuild
from kedge.offload.engine.engine import Engine
from kedge.offload.engine.policy import Policy
from kedge.offload.plan.limits import bytes_of, planner_for
from kedge.offload.rebuild import find
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.disk import DiskStore
from kedge.offload.stores.store import Store
from kedge.sites.select import select
from kedge.torch_internals.dynamo import unwrap

EVERYTHING = "**"
_REBUILD = Rebuild()


class Offload:
    """An offload of a model's saved tensors: a context that returns the running account, or a wrapper of the model.

    Attributes:
        account: The outcome of all saved tensors, in all blocks and calls.
    """

    def __init__(self, model: nn.Module, where: str, to: Destination, policy: Policy) -> None:
        self._model, self._to, self._policy = model, to, policy
        self._paths = None if where == EVERYTHING else _paths(model, where)
        self._lock = threading.Lock()
        self._block: ExitStack | None = None
        self._calls, self._calling = 0, ExitStack()
        self._store: Store | None = None
        self._close: weakref.finalize[..., Offload] | None = None
        self._engine = Engine(policy.equipped(), unwrap(model))
        self.account = self._engine.account

    def __enter__(self) -> OffloadAccount:
        """Offload the tensors saved on this thread from now on, and on others while they call the model."""
        if self._block is not None:
            raise OffloadError("this kedge.offload block is open already; create another one to nest them")
        self._block = ExitStack()
        try:
            self._put_in_force(self._block, ambient=True)
        except BaseException:
            self._block = None
            raise
        return self.account

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the block; saved tensors can be read as long as they are needed."""
        block, self._block = self._block, None
        if block is not None:
            block.close()
        with self._lock:
            if self._close is not None and not self._calls:
                self._close()
                self._store = self._close = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and offload the tensors saved in this call."""
        with self._lock:
            if not self._calls:
                self._put_in_force(self._calling, ambient=False)
            self._calls += 1
        try:
            return self._model(*args, **kwargs)
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._calling.close()

    def _put_in_force(self, stack: ExitStack, *, ambient: bool) -> None:
        if self._store is None and (store := _open(self._to)) is not None:
            self._store = store
            self.account.file = store if isinstance(store, DiskStore) else None
            self._close = weakref.finalize(self, store.close)
            self._engine.work_by(replace(self._policy, store=store).equipped())
        with ExitStack() as undo:
            hear(undo, self._model, self._engine.begin)
            keep(undo, self._model, self._engine, places=self._selects, outside=self._paths is None, ambient=ambient)
            stack.push(undo.pop_all())

    def _selects(self, path: str) -> bool:
        return self._paths is None or path in self._paths


def offload(
    model: nn.Module,
    where: str = EVERYTHING,
    *,
    to: Destination = _REBUILD,
    min_bytes: str | int = 65536,
    codec: str | None = None,
    max_memory: str | int | None = None,
    max_slowdown: float | None = None,
) -> Offload:
    """An offload that reduces the memory of the tensors that autograd saves; gradients are the same to the last bit.

    Each storage is kept once; a tensor that can be computed again exactly from other saved ones is not kept; and with a
    destination the rest is moved there. Parameters, buffers and the model's inputs stay where they are::

        with kedge.offload(model, to=kedge.Disk()) as account:
            loss_fn(model(x), y).backward()
        print(account)

    or, for the tensors that one module saves, wherever it is called: ``offloaded = kedge.offload(layer)``, ``offloaded(x)``.

    Args:
        model: The model.
        where: A selector of modules: only tensors saved while one of them is the innermost one. ``"**"``: all tensors
            saved on this thread while the block lasts, and on others while they call the model.
        to: `kedge.Rebuild`, `kedge.Cpu` or `kedge.Disk`.
        min_bytes: Smaller tensors stay where they are; bytes, or a text such as ``"64 KiB"``.
        codec: ``"bf16"``, ``"fp8"`` or ``"int8"`` store tensors in fewer bits; the gradients are then close, not equal.
        max_memory: The memory that saved tensors may take, ``"2 GB"`` or bytes; Kedge does no more than that needs.
        max_slowdown: The factor by which a step may take longer, such as 1.05; Kedge does as much as fits.

    Raises:
        OffloadError: An argument is invalid; the message lists the valid ones.
        NoSiteMatched: `where` selects no module.
        NoSuchCodec: There is no such codec.
    """
    if not isinstance(model, nn.Module):
        raise OffloadError(f"kedge.offload takes a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(to, (Rebuild, Cpu, Disk)):
        raise OffloadError(f"to={to!r}: use kedge.Rebuild(), kedge.Cpu() or kedge.Disk()")
    policy = Policy(
        least=bytes_of("min_bytes", min_bytes),
        find=find if isinstance(to, Rebuild) or to.rebuild else None,
        codec=None if codec is None else codec_of(codec),
        planner=planner_for(max_memory, max_slowdown),
    )
    return Offload(model, where, to, policy)


def _paths(model: nn.Module, where: str) -> frozenset[str]:
    """Return the paths of the modules that a selector matches."""
    if not isinstance(where, str):
        raise OffloadError(f'where={where!r}: use a selector of modules, such as "layer[34].**"')
    selector = select(where)
    for term in selector.terms:
        if term.kind or term.leaf or term.op or term.call is not None:
            raise OffloadError(
                f'where="{where}": "{term}" selects more than a module; kedge.offload takes every tensor saved while '
                f'a module runs, so name modules alone: "{".".join(term.path)}"'
            )
    return frozenset(site.path for site in selector.on(unwrap(model)))


def _open(to: Destination) -> Store | None:
    """Return a new store for a destination; None for `Rebuild`."""
    match to:
        case Cpu():
            return CpuStore(pin=to.pin)
        case Disk():
            return DiskStore(to.path, uncached=to.uncached, checksum=to.checksum)
        case Rebuild():
            return None
