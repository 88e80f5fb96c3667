"""Watching the program that runs in this process, from its first import of torch to its end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from kedge.cli.imports import AfterImport

if TYPE_CHECKING:
    from kedge.hooks.roots import Log, Summary
    from kedge.hooks.watch import Watch


class Watching:
    """Watches a program without ever ending it: whatever fails here is told, and the program goes on.

    Args:
        log: Where records go.
        sites: A selector.
        every: One step in this many is measured in full.
        complain: Tells the user.
        holding: Keep the models alive, to look at them when the program has ended.
    """

    def __init__(
        self, log: Log, sites: str, every: int, complain: Callable[[str], None], *, holding: bool = False
    ) -> None:
        self.log, self.sites, self.every, self.complain = log, sites, every, complain
        self.watch: Watch | None = None
        self.holding = holding
        self._import = AfterImport("torch", self._begin)
        self._dynamo = AfterImport("torch._dynamo.eval_frame", hush)
        self._pid = os.getpid()

    def begin(self) -> None:
        """Watch as soon as the program has imported torch."""
        self._import.install()
        self._dynamo.install()

    def finish(self) -> Summary | None:
        """Remove every hook.

        Returns:
            What came out; None if the program never imported torch.
        """
        self._import.remove()
        self._dynamo.remove()
        if self.watch is None:
            return None
        try:
            self.watch.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the program has ended well; its exit status is not Kedge's to change
            self.complain(f"the watching ended badly: {error!r}")
        return self.watch.summary

    def _begin(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            from kedge.actions.measure import Meter
            from kedge.hooks.watch import Watch

            self.watch = Watch(Meter(), self.log, sites=self.sites, n=self.every)
            self.watch.holding = [] if self.holding else None
            self.watch.__enter__()
        except Exception as error:  # noqa: BLE001 - this runs inside the program's own import of torch
            self.complain(f"cannot watch: {error!r}; the program goes on unwatched")


def hush() -> None:
    """Keep torch.compile from warning the program about what is Kedge's: a hook on all modules, and how Dynamo reads ours."""
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    warnings.filterwarnings("ignore", message=r".*torch.autograd.function.Function.* should not be instantiated")
