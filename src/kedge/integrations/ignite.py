"""Kedge in PyTorch-Ignite: ``IgniteHandler("run.kedge").attach(trainer, model)``."""

from __future__ import annotations

from ignite.engine import Engine, Events
from torch import nn

from kedge.integrations.callback import WatchCallback


class IgniteHandler(WatchCallback):
    """A handler that watches `Engine.run`, from its first batch to its end.

    It does not handle ``EXCEPTION_RAISED``, because an engine with a handler for it no longer
    raises the exception. After an exception, the watch ends with the program, with the next `run`,
    or with ``handler.end()``.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``IgniteHandler(kedge.watch("run.kedge", every=50))``. None for the current folder.
    """

    def attach(self, engine: Engine, model: nn.Module | None = None) -> None:
        """Watch each run of an engine.

        Args:
            engine: The engine that trains.
            model: The trained model; the paths of modules are those in it. None for those in the
                models that the engine calls.
        """
        engine.add_event_handler(Events.STARTED, lambda: self.begin(".", model))
        engine.add_event_handler(Events.TERMINATE | Events.COMPLETED, lambda: self.end())  # noqa: PLW0108 - else Ignite passes the engine
