"""Writing beside computing: one thread takes features from a queue that holds no more than so many bytes.

An error of the thread is raised where the next features are handed over, or at the end.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Self

import torch

from kedge.recipes.dataset.batch import Columns
from kedge.recipes.dataset.shards import Shards


class Writer:
    """Hands features to shards in a thread; used as a context manager.

    However the block ends, what was handed over is written, unless writing itself failed.

    Args:
        shards: What takes them.
        limit: How many bytes may wait; one batch always may.
    """

    def __init__(self, shards: Shards, limit: int) -> None:
        self._shards, self._limit = shards, limit
        self._waiting: deque[Columns | None] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="kedge-writes-features", daemon=True)

    def put(self, columns: Columns) -> None:
        """Hand features over; wait while too many are on their way.

        Raises:
            KedgeError: Writing failed; or whatever a reducer raised.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or not self._waiting or self._held + columns.size <= self._limit
            )
            self._raise()
            self._waiting.append(columns)
            self._held += columns.size
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._waiting.append(None)
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self._raise()
        elif self._failed is not None and self._failed is not error:
            error.add_note(f"and what was computed before could not be written: {self._failed}")

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    @torch.no_grad()
    def _work(self) -> None:
        try:
            while (columns := self._next()) is not None:
                self._shards.add(columns)
                with self._changed:
                    self._held -= columns.size
                    self._changed.notify_all()
                del columns  # or its memory would be kept while the next one is awaited
            self._shards.write()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that computes
            with self._changed:
                self._failed = error
                self._waiting.clear()
                self._changed.notify_all()

    def _next(self) -> Columns | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()
