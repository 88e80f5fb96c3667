"""Kedge as a tracker of Accelerate: ``Accelerator(log_with=AccelerateTracker())``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from kedge.integrations.callback import WatchCallback
from kedge.logged import log_numbers
from kedge.watch.run.block import WatchBlock


class AccelerateTracker(WatchCallback, GeneralTracker):
    """A tracker that watches a program.

    It does so from `Accelerator.init_trackers` to `Accelerator.end_training`. Every process watches
    its own rank. Numbers passed to `Accelerator.log` are recorded as `kedge.log` does it.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``AccelerateTracker(kedge.watch("run.kedge", every=50))``. None for the current folder.
    """

    name = "kedge"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, what: WatchBlock | str | os.PathLike[str] | None = None) -> None:
        super().__init__(what)
        GeneralTracker.__init__(self)

    @property
    def tracker(self) -> WatchBlock | None:
        """The result of `kedge.watch`, which `Accelerator.get_tracker` returns."""
        return self.watched

    def start(self) -> None:
        """Begin to watch."""
        self.begin(".")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Ignore the configuration: other trackers keep it."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ARG002 - Accelerate's signature
        """Record the numbers among the values."""
        log_numbers(values)

    def finish(self) -> None:
        """End the watch."""
        self.end()
