"""Kedge in PyTorch Lightning: ``Trainer(callbacks=[KedgeCallback()])``."""

from __future__ import annotations

import os

from lightning.pytorch import Callback, LightningModule, Trainer

from kedge.integrations.callback import Watching
from kedge.watch.run.block import Watched


class KedgeCallback(Callback):
    """Watches `Trainer.fit`, from its first batch to its end, however it ends.

    Args:
        what: Where the recording goes, or what `kedge.watch` gives:
            ``KedgeCallback(kedge.watch("run.kedge", every=50))``. None for the folder of the logger,
            or the trainer's `default_root_dir` where there is none.
    """

    def __init__(self, what: Watched | str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.watching = Watching(what)

    @property
    def watched(self) -> Watched | None:
        """What `kedge.watch` gives: the place of the recording, and its findings."""
        return self.watching.watched

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self.watching.begin(trainer.log_dir or trainer.default_root_dir, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """End."""
        self.watching.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002 - as above
        """End, and record what ended the training."""
        self.watching.end(exception)
