"""An offload in force: for the length of a block, or of a layer's calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from kedge.calls.arguments import described
from kedge.errors import OffloadError
from kedge.hooks.placing.module_calls import hear
from kedge.hooks.saved.keeper import keep
from kedge.offload.codecs import codec_of
from kedge.offload.destination import Cpu, Destination, Disk, Rebuild
from kedge.offload.engine.engine import Engine
from kedge.offload.engine.policy import Policy
from kedge.offload.outcomes import OffloadAccount
from kedge.offload.plan.limits import bytes_of, planner_for
from kedge.offload.rebuild import find
from kedge.offload.recompute.allowed import check_can_run_again
from kedge.offload.recompute.modules import RecomputedModules
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.disk import DiskStore
from kedge.offload.stores.store import Store
from kedge.sites.select import select
from kedge.torch_internals.checkpoint import can_begin
from kedge.torch_internals.dynamo import untraced, unwrap
from kedge.torch_internals.own_work import own_work

EVERYTHING = "**"
_TWO_PAIRS = "hooks have already been set"
"""Of PyTorch's error for ``register_hooks`` of a saved tensor that has hooks."""
_TAKES = {
    "where": "kedge.offload takes every tensor saved while a module runs",
    "recompute": "kedge.offload runs whole modules again",
}


@dataclass(frozen=True)
class OffloadSettings:
    """The arguments of `kedge.offload` besides the model; see there."""

    where: str = EVERYTHING
    to: Destination = field(default_factory=Rebuild)
    min_bytes: str | int = 65536
    codec: str | None = None
    max_memory: str | int | None = None
    max_slowdown: float | None = None
    recompute: str | None = None

    def policy(self) -> Policy:
        """Return the policy of a new engine.

        Raises:
            OffloadError: An argument is invalid.
        """
        to = self.to
        if not isinstance(to, (Rebuild, Cpu, Disk)):
            raise OffloadError(
                f"to={described(to)}: use kedge.Rebuild(), kedge.Cpu() or kedge.Disk()"
            )
        least = bytes_of("min_bytes", self.min_bytes)
        rebuilds = isinstance(to, Rebuild) or to.rebuild
        codec = None
        if self.codec is not None:
            codec = codec_of(self.codec)
        planner = planner_for(self.max_memory, self.max_slowdown)
        if self.recompute is not None:
            self._check_recompute()

        policy = Policy(least=least, codec=codec, planner=planner)
        if rebuilds:
            policy = replace(policy, find=find)
        return policy

    def _check_recompute(self) -> None:
        if not isinstance(self.recompute, str):
            raise OffloadError(
                f'recompute={described(self.recompute)}: use a selector of modules, such as "blocks.*"'
            )
        if self.codec is not None:
            raise OffloadError(
                f"recompute={self.recompute!r} with codec={self.codec!r}: the codec rounds the "
                "inputs of the modules that are run again, so they would compute another forward; "
                "use one of the two, or an offload of other modules for the codec"
            )
        if not can_begin():
            raise OffloadError(
                f"recompute={self.recompute!r}: this PyTorch, {torch.__version__}, has no "
                "torch.utils.checkpoint._checkpoint_without_reentrant_generator, by which Kedge "
                "runs modules again; use torch.utils.checkpoint.checkpoint in the model"
            )

    def check_without_model(self) -> None:
        """Raise OffloadError for an argument that needs a model."""
        for name in ("max_memory", "max_slowdown"):
            limit = getattr(self, name)
            if limit is not None:
                raise OffloadError(
                    f"{name}={limit!r} without a model: a plan is for a step, "
                    "and only the calls of a model show where one begins; "
                    f"use kedge.offload(model, {name}={limit!r})"
                )
        if self.recompute is not None:
            raise OffloadError(
                f"recompute={self.recompute!r} without a model: it selects modules of one; "
                f"use kedge.offload(model, recompute={self.recompute!r})"
            )
        if self.where != EVERYTHING:
            raise OffloadError(
                f"where={self.where!r} without a model: it selects modules of one; "
                f"use kedge.offload(model, {self.where!r})"
            )

    def __str__(self) -> str:
        """The settings as arguments, without those that have their default."""
        plain = OffloadSettings()
        text = ""
        for name, value in vars(self).items():
            if value != getattr(plain, name):
                text += f", {name}={value!r}"
        return text


class Offloading:
    """An offload of saved tensors: a context that returns the running account.

    Args:
        model: The model; None: of all that this thread saves, whatever saves it.
        settings: The settings.

    Attributes:
        settings: The settings.
        account: The outcome of all saved tensors, in all blocks and calls.
    """

    def __init__(self, model: nn.Module | None, settings: OffloadSettings) -> None:
        policy = settings.policy()
        if model is None:
            settings.check_without_model()
        self.settings = settings
        self._model = model
        self._policy = policy
        self._paths: frozenset[str] | None = None
        if model is not None and settings.where != EVERYTHING:
            self._paths = frozenset(_modules(model, "where", settings.where))

        self._lock = threading.Lock()
        self._block: ExitStack | None = None
        self._calls = 0
        self._calling = ExitStack()
        self._store: Store | None = None
        self._close: weakref.finalize[..., Offloading] | None = None
        with own_work():
            root = nn.Module() if model is None else unwrap(model)
            self._engine = Engine(policy.equipped(), root)
        self.account = self._engine.account
        self._recomputed: RecomputedModules | None = None
        if model is not None and settings.recompute is not None:
            modules = _modules(model, "recompute", settings.recompute)
            check_can_run_again(model, modules, settings.recompute)
            plan = None
            if policy.planner is not None:
                plan = self._engine.plan_call
            self._recomputed = RecomputedModules(modules, self.account, plan)

    def __enter__(self) -> OffloadAccount:
        """Offload the tensors saved on this thread from now on, and on others while they call the model."""
        if self._block is not None:
            raise OffloadError(
                "this kedge.offload block is open already; create another one to nest them"
            )
        self._block = ExitStack()
        try:
            self._put_in_force(self._block, ambient=True)
        except BaseException:
            self._block = None
            raise
        return self.account

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the block; saved tensors can be read as long as they are needed."""
        explain(error)
        if self._block is not None:
            block = self._block
            self._block = None
            block.close()
        with self._lock:
            if self._close is not None and not self._calls:
                self._close()
                self._store = self._close = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form: an offload of its own, with an account of its own."""
        return Offloading, (self._model, self.settings)

    def __repr__(self) -> str:
        """The call that makes an offload without a model."""
        return f"kedge.offload({str(self.settings).removeprefix(', ')})"

    def of(self, layer: nn.Module) -> Offloading:
        """Return an offload of another layer with the same settings."""
        return Offloading(layer, self.settings)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of a call of the model: offload the tensors saved in it.

        Calls that overlap share what is put in force.
        """
        self._begin_call()
        try:
            yield
        except BaseException as error:
            explain(error)
            raise
        finally:
            self._end_call()

    def _begin_call(self) -> None:
        with self._lock:
            if not self._calls:
                self._put_in_force(self._calling, ambient=False)
            self._calls += 1

    def _end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._calling.close()

    def _put_in_force(self, stack: ExitStack, *, ambient: bool) -> None:
        if self._store is None:
            self._open()
        with own_work(), ExitStack() as undo:
            model = nn.Module() if self._model is None else self._model
            hear(undo, model, self._begin)
            kept = keep(
                undo,
                model,
                self._engine,
                places=self._selects,
                outside=self._paths is None,
                ambient=ambient,
            )
            if self._recomputed is not None:
                self._recomputed.put_in_force(undo, kept)
            stack.push(undo.pop_all())

    def _begin(self, inputs: Any) -> None:
        """Called when the model is called, with its inputs."""
        self._engine.begin(inputs)
        if self._recomputed is not None:
            self._recomputed.begin_forward()

    def _open(self) -> None:
        """Open the store of the destination; `Rebuild` has none."""
        store: Store
        match self.settings.to:
            case Rebuild():
                return
            case Cpu(pin=pin):
                store = CpuStore(pin=pin)
            case Disk(path=path, uncached=uncached, checksum=checksum):
                store = self.account.file = DiskStore(path, uncached=uncached, checksum=checksum)
        self._store = store
        self._close = weakref.finalize(self, store.close)
        self._engine.work_by(replace(self._policy, store=store).equipped())

    def _selects(self, path: str) -> bool:
        return self._paths is None or path in self._paths


def explain(error: BaseException | None) -> None:
    """Explain PyTorch's error for a second pair of hooks on one saved tensor: reason and remedy."""
    if not isinstance(error, RuntimeError) or _TWO_PAIRS not in str(error):
        return
    if getattr(error, "__notes__", None):
        return
    error.add_note(
        "kedge.offload has hooks on every tensor that autograd saves here, "
        "and PyTorch allows one pair for each. Leave this code outside of the block, "
        "or give your pair to torch.autograd.graph.saved_tensors_hooks, "
        "around this operation: it then receives its tensors first."
    )


def _modules(model: nn.Module, name: str, text: str) -> dict[str, nn.Module]:
    """Return the modules that a selector matches, by their paths.

    Args:
        model: The model.
        name: The name of the argument, for errors.
        text: The selector; an empty one for the model itself.
    """
    if text == "" and name == "recompute":
        return {"": unwrap(model)}
    if not isinstance(text, str):
        raise OffloadError(f'{name}={text!r}: use a selector of modules, such as "layer[34].**"')
    selector = select(text)
    for term in selector.terms:
        if term.kind or term.leaf or term.op or term.call is not None:
            path = ".".join(term.path)
            raise OffloadError(
                f'{name}="{text}": "{term}" selects more than a module; {_TAKES[name]}, '
                f'so name modules alone: "{path}"'
            )
    return {place.site.path: place.module for place in selector.on(unwrap(model)).places}


untraced(Offloading._begin_call, Offloading._end_call)
