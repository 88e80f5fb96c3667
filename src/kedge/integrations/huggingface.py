"""Kedge in the Trainer of Hugging Face transformers: ``Trainer(..., callbacks=[KedgeCallback()])``."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.integrations.callback import Watching
from kedge.watch.run.block import Watched


class KedgeCallback(TrainerCallback):
    """Watches `Trainer.train`, from its first batch to its end.

    The trainer does not tell its callbacks of an exception. After one, the watching ends with the
    program, with the next `train`, or with ``callback.watched.end()``.

    Args:
        what: Where the recording goes, or what `kedge.watch` gives:
            ``KedgeCallback(kedge.watch("run.kedge", every=50))``. None for the trainer's `output_dir`.
    """

    def __init__(self, what: Watched | str | os.PathLike[str] | None = None) -> None:
        self.watching = Watching(what)

    @property
    def watched(self) -> Watched | None:
        """What `kedge.watch` gives: the place of the recording, and its findings."""
        return self.watching.watched

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002 - the trainer's signature
        control: TrainerControl,  # noqa: ARG002 - as above
        **kwargs: Any,
    ) -> None:
        """Begin."""
        self.watching.begin(args.output_dir or ".", kwargs["model"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the trainer's signature
        """End."""
        self.watching.end()
