"""A writer thread that takes features from a queue of limited size in bytes, while the main thread computes.

An error in the writer thread is raised at the next hand-over of features, or at the end.

# Note [Bunches]
Waking the writer thread takes the computing thread longer than a small batch. So batches are handed
over in bunches: of a megabyte, or of a quarter of a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

import torch

from kedge.features.dataset.folder.shards import Shards
from kedge.features.dataset.samples.batch import Columns

_BUNCH, _SECONDS = 1 << 20, 0.25


class ShardWriter:
    """Context manager with a thread that adds features to shards.

    However the block ends, all features handed over are written, unless writing itself fails.

    Args:
        shards: The shards.
        limit: The number of bytes that may wait; a single bunch may exceed it.
    """

    def __init__(self, shards: Shards, limit: int) -> None:
        self._shards, self._limit, self._bunch = shards, limit, min(_BUNCH, limit // 8)
        self._gathered: list[Columns] = []
        self._size, self._since = 0, 0.0
        self._waiting: deque[list[Columns] | None] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="kedge-writes-features", daemon=True
        )

    def put(self, columns: Columns) -> None:
        """Add features to the next bunch, and hand it over if it is due; wait while too many bytes are in the queue.

        Raises:
            KedgeError: Writing failed, or a reducer raised an error.
        """
        now = time.monotonic()
        self._since = self._since if self._gathered else now
        self._gathered.append(columns)
        self._size += columns.size
        if self._failed is not None or self._size >= self._bunch or now - self._since >= _SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        """Put the current bunch in the thread's queue; see Note [Bunches]."""
        bunch, size = self._gathered, self._size
        self._gathered, self._size = [], 0
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or not self._waiting or self._held + size <= self._limit
            )
            self._raise()
            self._waiting.append(bunch)
            self._held += size
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._waiting += [self._gathered, None]
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self._raise()
        elif self._failed is not None and self._failed is not error:
            error.add_note(f"and the features computed before could not be written: {self._failed}")

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    @torch.no_grad()
    def _work(self) -> None:
        try:
            while (bunch := self._next()) is not None:
                size = sum(columns.size for columns in bunch)
                while bunch:  # pop, so that no reference remains here while a shard is written
                    self._shards.add(bunch.pop(0))
                with self._changed:
                    self._held -= size
                    self._changed.notify_all()
            self._shards.write()
        except BaseException as error:  # noqa: BLE001 - raised again in the computing thread
            with self._changed:
                self._failed = error
                self._waiting.clear()
                self._changed.notify_all()

    def _next(self) -> list[Columns] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()
