"""Kedge in the recipes of torchtune.

``metric_logger._component_=kedge.integrations.torchtune.TorchtuneLogger`` is all that it takes.
"""

from __future__ import annotations

from typing import Any

from torchtune.training.metric_logging import DiskLogger

from kedge.integrations.callback import WatchCallback


class TorchtuneLogger(WatchCallback, DiskLogger):
    """The `DiskLogger` of torchtune, which also watches the recipe, from its setup to its cleanup.

    Recipes for several processes make a logger on rank 0 alone, so only that rank is watched.

    Args:
        log_dir: The folder of the log.
        filename: The name of the log.
        recording: The path of the recording; None for `log_dir`.
        **options: Further arguments of the `DiskLogger`.
    """

    def __init__(
        self,
        log_dir: str,
        filename: str | None = None,
        recording: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(recording)
        DiskLogger.__init__(self, log_dir, filename, **options)
        self.begin(log_dir)

    def close(self) -> None:
        """End the watch, and close the log."""
        self.end()
        DiskLogger.close(self)
