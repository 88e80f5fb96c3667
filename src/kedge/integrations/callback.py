"""The watch behind the callbacks of training loops: its start, the place of its recording, and its end."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from kedge.watch.run.block import WatchBlock, default_name, watch


class WatchCallback:
    """A watch that begins and ends with a training loop.

    Args:
        what: The result of `kedge.watch`, or the path of the recording; None for the folder with the
            training's own results.
    """

    def __init__(self, what: WatchBlock | str | os.PathLike[str] | None) -> None:
        self.watched = what if what is None or isinstance(what, WatchBlock) else watch(what)

    def begin(self, results: str | os.PathLike[str], model: nn.Module) -> None:
        """Begin to watch; without a path, the recording goes to the folder of the training's results.

        Args:
            results: That folder.
            model: The trained model; the paths of modules are those in it.
        """
        if self.watched is None:
            Path(results).mkdir(parents=True, exist_ok=True)
            self.watched = watch(Path(results) / default_name())
        self.watched.naming(model).begin()

    def end(self, error: BaseException | None = None) -> None:
        """End the watch, if it has begun."""
        if self.watched is not None:
            self.watched.end(error)
