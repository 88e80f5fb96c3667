"""Kedge in the Trainer of Hugging Face transformers, and those of TRL.

``Trainer(..., callbacks=[HuggingFaceCallback()])`` is all that it takes.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.integrations.callback import WatchCallback
from kedge.logged import log_numbers


class HuggingFaceCallback(WatchCallback, TrainerCallback):
    """A callback that watches `Trainer.train`, from its first batch to its end, and records what it logs.

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

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - as above
        state: TrainerState,  # noqa: ARG002 - as above
        control: TrainerControl,  # noqa: ARG002 - as above
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002 - as above
    ) -> None:
        """Record what the trainer logs, such as the loss of an evaluation, but for its epoch."""
        log_numbers({name: value for name, value in (logs or {}).items() if name != "epoch"})

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the trainer's signature
        """End the watch."""
        self.end()
