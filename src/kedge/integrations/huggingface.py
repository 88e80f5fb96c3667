"""Kedge in the Trainer of Hugging Face transformers: ``Trainer(..., callbacks=[HuggingFaceCallback()])``."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.integrations.callback import WatchCallback
from kedge.watch.run.block import WatchBlock


class HuggingFaceCallback(TrainerCallback):
    """A callback that watches `Trainer.train`, from its first batch to its end.

    The trainer does not report an exception to its callbacks. After one, the watch ends with the
    program, with the next `train`, or with ``callback.watched.end()``.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``HuggingFaceCallback(kedge.watch("run.kedge", every=50))``. None for the trainer's `output_dir`.
    """

    def __init__(self, what: WatchBlock | str | os.PathLike[str] | None = None) -> None:
        self.watching = WatchCallback(what)

    @property
    def watched(self) -> WatchBlock | None:
        """The result of `kedge.watch`: the place of the recording, and its findings."""
        return self.watching.watched

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002 - the trainer's signature
        control: TrainerControl,  # noqa: ARG002 - as above
        **kwargs: Any,
    ) -> None:
        """Begin to watch."""
        self.watching.begin(args.output_dir or ".", kwargs["model"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the trainer's signature
        """End the watch."""
        self.watching.end()
