"""Kedge in PyTorch Lightning: ``Trainer(callbacks=[LightningCallback()])``."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from kedge.integrations.callback import WatchCallback


class LightningCallback(WatchCallback, Callback):
    """A callback that watches `Trainer.fit`, from its first batch to its end or its exception.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``LightningCallback(kedge.watch("run.kedge", every=50))``. None for the folder of the
            logger, or the trainer's `default_root_dir` if there is no logger.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        self.begin(trainer.log_dir or trainer.default_root_dir, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """End the watch."""
        self.end()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - as above
        pl_module: LightningModule,  # noqa: ARG002 - as above
        exception: BaseException,
    ) -> None:
        """End the watch, and record the exception."""
        self.end(exception)
