"""Kedge in the recipes of torchtune.

``metric_logger._component_=kedge.integrations.torchtune.TorchtuneLogger`` is all that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune.training.metric_logging import DiskLogger

from kedge.integrations.callback import WatchCallback
from kedge.logged import log_numbers


class TorchtuneLogger(WatchCallback, DiskLogger):
    """The `DiskLogger` of torchtune, which also watches the recipe, from its setup to its cleanup, and records what it logs.

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

    def log(self, name: str, data: Any, step: int) -> None:
        """Log a value, and record it if it is a number."""
        log_numbers({name: data})
        DiskLogger.log(self, name, data, step)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Log values, and record the numbers among them."""
        log_numbers(payload)
        DiskLogger.log_dict(self, payload, step)

    def close(self) -> None:
        """End the watch, and close the log."""
        self.end()
        DiskLogger.close(self)
