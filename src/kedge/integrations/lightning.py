"""Kedge in PyTorch Lightning: ``Trainer(callbacks=[LightningCallback()])``."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kedge.integrations.callback import WatchCallback
from kedge.logged import log_numbers
from kedge.watch.run.block import WatchBlock


class LightningCallback(WatchCallback, Callback):
    """A callback that watches `Trainer.fit`, from its first batch to its end or its exception, and records what `self.log` logs.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``LightningCallback(kedge.watch("run.kedge", every=50))``. None for the folder of the
            logger, or the trainer's `default_root_dir` if there is no logger.
    """

    def __init__(self, what: WatchBlock | str | os.PathLike[str] | None = None) -> None:
        super().__init__(what)
        self._recorded: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        self.begin(trainer.log_dir or trainer.default_root_dir, pl_module)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Record what was logged in a step."""
        self._record(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Record what was logged in an evaluation, except in the one before the training."""
        if not trainer.sanity_checking:
            self._record(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Record the last epoch's means, and end the watch."""
        self._record(trainer)
        self.end()

    def _record(self, trainer: Trainer) -> None:
        """Record the logged values that are new: the trainer keeps those of earlier steps."""
        values = trainer.callback_metrics
        log_numbers(
            {name: value for name, value in values.items() if value is not self._recorded.get(name)}
        )
        self._recorded = dict(values)

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - as above
        pl_module: LightningModule,  # noqa: ARG002 - as above
        exception: BaseException,
    ) -> None:
        """End the watch, and record the exception."""
        self.end(exception)
