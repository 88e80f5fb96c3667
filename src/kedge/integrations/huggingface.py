"""Kedge in the Trainer of Hugging Face transformers, and those of TRL.

``Trainer(..., callbacks=[HuggingFaceCallback()])`` is all that it takes.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.integrations.callback import WatchCallback


class HuggingFaceCallback(WatchCallback, TrainerCallback):
    """A callback that watches `Trainer.train`, from its first batch to its end.

    The trainer does not report an exception to its callbacks. After one, the watch ends with the
    program, with the next `train`, or with ``callback.end()``.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``HuggingFaceCallback(kedge.watch("run.kedge", every=50))``. None for the trainer's
            `output_dir`.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002 - the trainer's signature
        control: TrainerControl,  # noqa: ARG002 - as above
        **kwargs: Any,
    ) -> None:
        """Begin to watch."""
        self.begin(args.output_dir or ".", kwargs["model"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the trainer's signature
        """End the watch."""
        self.end()
