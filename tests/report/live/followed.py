"""A run that is followed: a recording written step by step, as the test wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kedge.store.events import event_from
from kedge.store.writing.folder import RecordingWriter, create

MANIFEST = {
    "command": ["train.py", "--lr", "1"],
    "script": "train.py",
    "device": "cpu",
    "every": 10,
    "budget": 0.03,
}
PATHS = ("embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head")
SCALES = dict(zip(PATHS, (1.0, 8.0, 2.0, 32.0, 4.0, 16.0), strict=True))


def described() -> list[dict[str, Any]]:
    """Describe an output and a gradient of each module."""
    sites = []
    for kind in ("out", "out.grad"):
        for path in PATHS:
            own = {
                "site": f"{path}:{kind}",
                "path": path,
                "kind": kind,
                "type": "Block",
                "owner": path,
            }
            source = {
                "file": "net.py",
                "line": 7,
                "function": "forward",
                "text": f"x = self.{path}(x)",
            }
            sites.append(
                {"id": len(sites), "shape": [2, 5], "from": [None], "source": source, **own}
            )
    return sites


class Run:
    """A run that continues when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: RecordingWriter | None = None
        self.step = 0

    def begin(self, force: bool = False) -> None:
        """Make the recording."""
        self.writer = create(self.path, MANIFEST, force=force)
        self.writer.sites(described(), [{"name": "Net", "prefix": "", "parameters": 12}])
        self.step = 0

    def go_on(self, steps: int = 1, broken: str | None = None) -> None:
        """Write some measured steps; the output of a module may not be finite in them."""
        assert self.writer is not None
        for _ in range(steps):
            scale = np.array([*SCALES.values(), *(value / 100 for value in SCALES.values())])
            many = len(scale)
            if broken is not None:
                scale[PATHS.index(broken)] = np.nan
            columns = {
                "site": np.arange(many),
                "count": np.full(many, 10),
                "sum": scale * 5,
                "sumsq": scale**2 * 10,
            }
            columns |= {"min": -scale, "max": scale, "nonzero": np.full(many, 10)}
            self.writer.stats(
                self.step, {**columns, "nonfinite": np.where(np.isfinite(scale), 0, 10)}
            )
            self.step += 10

    def end(self, status: int = 0, error: str | None = None) -> None:
        """End it."""
        assert self.writer is not None
        end = {
            "kind": "end",
            "exit": status,
            "steps": self.step,
            "seconds": 4.0,
            "watching": 0.1,
            "error": error,
        }
        self.writer.event(event_from(end))
        self.close()

    def close(self) -> None:
        """Close the recording without an end, as a kill does."""
        if self.writer is not None:
            self.writer.close()
