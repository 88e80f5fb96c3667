"""What the callbacks of training loops share: when the watching begins, where its recording goes, when it ends."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from kedge.watch.run.block import Watched, default_name, watch


class Watching:
    """Begins and ends with somebody else's training loop.

    Args:
        what: What `kedge.watch` gives, or where the recording goes; None for the folder in which the
            training leaves its own results.
    """

    def __init__(self, what: Watched | str | os.PathLike[str] | None) -> None:
        self.watched = what if what is None or isinstance(what, Watched) else watch(what)

    def begin(self, results: str | os.PathLike[str], model: nn.Module) -> None:
        """Begin to watch, in the folder of the training's results if nothing else was asked for.

        Args:
            results: That folder.
            model: What the training trains; modules are called as it calls them.
        """
        if self.watched is None:
            Path(results).mkdir(parents=True, exist_ok=True)
            self.watched = watch(Path(results) / default_name())
        self.watched.naming(model).begin()

    def end(self, error: BaseException | None = None) -> None:
        """End, if it has begun."""
        if self.watched is not None:
            self.watched.end(error)
