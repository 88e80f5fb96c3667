"""The watch behind the callbacks of training loops: its start, its recording, and its end."""

from __future__ import annotations

import os

from torch import nn

from kedge.files.given_path import given_path
from kedge.watch.run.block import WatchBlock, default_name, watch


class WatchCallback:
    """A watch that begins and ends with a training loop; the callback of each library derives from it.

    Args:
        what: The path of the recording, or the result of `kedge.watch`:
            ``kedge.watch("run.kedge", every=50)``. None for the folder with the training's own
            results.

    Attributes:
        watched: The result of `kedge.watch`: the place of the recording, and its findings. None
            before the training begins, if `what` is None.
    """

    def __init__(self, what: WatchBlock | str | os.PathLike[str] | None = None) -> None:
        if what is not None and not isinstance(what, WatchBlock):
            what = watch(what)
        self.watched = what

    def begin(self, results: str | os.PathLike[str], model: nn.Module | None = None) -> None:
        """Begin to watch.

        Without a path, the recording goes to the folder of the training's results.

        Args:
            results: That folder.
            model: The trained model; the paths of modules are those in it. None for those in the
                models that the program calls.
        """
        if self.watched is None:
            folder = given_path(results)
            folder.mkdir(parents=True, exist_ok=True)
            self.watched = watch(folder / default_name())
        if model is not None:
            self.watched.naming(model)
        self.watched.begin()

    def end(self, error: BaseException | None = None) -> None:
        """End the watch, if it has begun."""
        if self.watched is not None:
            self.watched.end(error)
