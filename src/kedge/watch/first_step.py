"""What is looked at once, when a root is first called: where the program calls its modules, and what they save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.hooks.placing.concealed import Own
from kedge.stderr import Shield
from kedge.torch_internals import dynamo
from kedge.torch_internals.source_lines import call_site
from kedge.watch.roots import Root
from kedge.watch.saved_by_module import SavedBill


class SavedTensorBill(Protocol):
    """What writes down every tensor that is saved in a step, where that is asked for.

    Attributes:
        seconds: What it has taken of the program's time.
    """

    seconds: float

    def add(self, module: nn.Module, root: Root) -> None:
        """Follow a root whose call is under way."""

    def close(self, step: int) -> Mapping[str, Any] | None:
        """Hear that a step is over; returns what the recording says of it, once there is something to say."""

    def stop(self) -> None:
        """Take everything off."""


class FirstStep:
    """Hooks for the length of one step on the modules of roots that are new in it.

    Attributes:
        sources: Where the program calls a module, by the path that it is recorded under.
        shield: Reports the first failure, after which nothing more is surveyed.
        taker: Set to what takes the bill of the first step in full.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}
        self._bill: SavedBill | None = None
        self._modules: list[dict[str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self.shield = Shield("recording saved tensors", "they are not recorded", on_failure=self._modules.clear)
        self.taker: SavedTensorBill | None = None
        self._took = 0.0

    @property
    def seconds(self) -> float:
        """What taking a bill has taken of the program's time."""
        return self._took + (self.taker.seconds if self.taker is not None else 0.0)

    def add(self, module: nn.Module, root: Root) -> None:
        """Survey a root whose call is under way, too late for a hook of its own before it.

        What is compiled is left out: it would compile again when the hooks come down.
        """
        if any(map(dynamo.compiles, module.modules())):
            return
        bill = self._bill = self._bill or SavedBill()
        self.see(root.label(""), module)
        bill.begin(root.label(""))
        for name, inner in module.named_modules():
            if name not in root.types:
                continue
            self._handles.append(inner.register_forward_pre_hook(BeforeCall(self, bill, root.label(name))))
            if inner is not module:
                self._handles.append(
                    inner.register_forward_hook(AfterCall(self, bill, root.label(name)), always_call=True)
                )
        self._handles.append(module.register_forward_hook(RootReturned(self, bill, root.label("")), always_call=True))
        if self.taker is not None:
            self.shield(self.taker.add, module, root)

    def see(self, path: str, module: nn.Module) -> None:
        """Take down where a module is called from, when it is called first."""
        if path not in self.sources:
            site = call_site(module)
            self.sources[path] = asdict(site) if site is not None else None

    def account(self, bill: SavedBill, output: Any, module: nn.Module) -> None:
        """Add up what the forwards of this step have saved so far."""
        self._modules[:] = bill.account(output, module)

    def close(self, step: int) -> list[Mapping[str, Any]]:
        """Take the hooks down.

        Returns:
            What the recording says of saved tensors; nothing if none were.
        """
        while self._handles:
            self._handles.pop().remove()
        modules, self._bill = list(self._modules), None
        self._modules.clear()
        if (taken := self._taken(step)) is not None:
            return [taken]
        total = sum(m["bytes"] for m in modules)
        return [{"kind": "saved", "step": step, "bytes": total, "modules": modules}] if modules else []

    def _taken(self, step: int) -> Mapping[str, Any] | None:
        """Have the bill of the step that is over, if one was taken; there is one in a run."""
        if (taker := self.taker) is None:
            return None
        taken = self.shield(taker.close, step)
        if self.shield.off or taken is not None:
            taker.stop()
            self.taker, self._took = None, taker.seconds
        return taken


class BeforeCall(Own):
    """The hook before a module."""

    def __init__(self, first_step: FirstStep, bill: SavedBill, path: str) -> None:
        self.first_step, self.bill, self.path = first_step, bill, path

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Be a forward-pre hook."""
        if not torch.compiler.is_compiling():
            self.first_step.shield(self.first_step.see, self.path, module)
            self.first_step.shield(self.bill.begin, self.path)


class AfterCall(Own):
    """The hook behind a module."""

    def __init__(self, first_step: FirstStep, bill: SavedBill, path: str) -> None:
        self.first_step, self.bill, self.path = first_step, bill, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if not torch.compiler.is_compiling():
            self.first_step.shield(self.bill.end, self.path)


class RootReturned(Own):
    """The hook behind a root."""

    def __init__(self, first_step: FirstStep, bill: SavedBill, path: str) -> None:
        self.first_step, self.bill, self.path = first_step, bill, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be a forward hook."""
        if not torch.compiler.is_compiling():
            self.first_step.shield(self.bill.end, self.path)
            self.first_step.shield(self.first_step.account, self.bill, output, module)
