"""Watching the program that runs in this process, from its first import of torch to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.program.after_import import AfterImport
from kedge.stderr import give_up
from kedge.torch_internals.corners import COMPILER
from kedge.watch.hush import hush
from kedge.watch.options import Order

if TYPE_CHECKING:
    from kedge.watch.roots import RunSink, Summary
    from kedge.watch.watcher import Watcher


class Watching:
    """Watches a program without ever ending it: whatever fails here is told, and the program goes on.

    Args:
        log: Where records go.
        order: What is to be watched, and how often.
        complain: Tells the user.
        holding: Takes the models, to look at them when the program has ended.
        strict: Let what fails here end the program after all.

    Attributes:
        place: The recording, where there is to be one.
    """

    def __init__(
        self,
        log: RunSink,
        order: Order,
        complain: Callable[[str], None],
        *,
        holding: list[Any] | None = None,
        strict: bool = False,
    ) -> None:
        self.log, self.order, self.complain, self.strict = log, order, complain, strict
        self.place: Path | None = None
        self._failed = False
        self.watch: Watcher | None = None
        self.holding = holding
        self._import = AfterImport("torch", self._begin)
        self._dynamo = AfterImport(COMPILER, hush)
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
            self._fail(f"the watching ended badly: {error!r}", "the recording may lack its end")
        summary = self.watch.summary  # before that call: what takes place after the program is no part of its time
        if self.watch.record.dump is not None:
            self.watch.record.dump.run_again()
        return summary

    @property
    def failed(self) -> bool:
        """Whether something failed, here or in a hook."""
        watch = self.watch
        return self._failed or (watch is not None and (watch.failed or watch.record.first_step.failed))

    def _begin(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            from kedge.watch.begin import make_watch

            self.watch = make_watch(self.log, self.order, self.place)
            self.watch.models.holding = self.holding
            self.watch.__enter__()
        except Exception as error:  # noqa: BLE001 - this runs inside the program's own import of torch
            self._fail(f"cannot watch: {error!r}", "the program goes on unwatched")

    def _fail(self, what: str, instead: str) -> None:
        self._failed = True
        give_up(what, instead, self.complain, strict=self.strict)
