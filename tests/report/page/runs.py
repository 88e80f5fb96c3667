"""Recordings written for the page: everything that one can hold, on a few layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.store.events import SavedEvent, event_from
from kedge.store.exponents import BUCKETS, LOWEST, encode
from kedge.store.saved_account import Sums
from kedge.store.writing.folder import RecordingWriter, create

MANIFEST = {
    "kedge": "0.1.0",
    "command": ["/home/ada/secret/train.py", "--lr", "1"],
    "script": "/home/ada/secret/train.py",
    "python": "3.11.7",
    "torch": "2.13.0",
    "device": "cpu",
    "started": "2026-11-21T07:00:00+00:00",
    "pid": 4711,
    "every": 1,
    "sites": "**",
    "budget": 0.03,
}
SOURCE = {
    "file": "/home/ada/secret/net.py",
    "line": 12,
    "function": "forward",
    "text": "x = self.block(x)  # <b>",
}


class Run:
    """A chain of layers, each an output, its gradient, a weight, its gradient and its update; and a loss.

    Args:
        folder: Where the recording is to be.
        names: What the layers are called.
        types: The class of each.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], types: Sequence[str] = (), **manifest: Any
    ) -> None:
        self.writer: RecordingWriter = create(folder, MANIFEST | manifest, force=False)
        self.names = list(names)
        self.types = list(types) or ["Linear"] * len(names)
        self.entries: list[dict[str, Any]] = []
        for layer in range(len(self.names)):
            self._layer(layer)
        self.entry("loss:out", "CrossEntropyLoss", [], root=1)
        self.entry(":grad.norm", "", [])
        modules = [
            {
                "path": "",
                "type": "Net",
                "file": "/home/ada/secret/net.py",
                "line": 3,
                "parameters": 0,
            }
        ]
        modules += [
            {
                "path": name,
                "type": kind,
                "file": "/usr/lib/linear.py",
                "line": 1,
                "parameters": 72,
                "trainable": True,
            }
            for name, kind in zip(self.names, self.types, strict=True)
        ]
        self.roots = [
            {"name": "Net", "prefix": "", "parameters": 72 * len(self.names), "modules": modules},
            {"name": "CrossEntropyLoss", "prefix": "loss", "parameters": 0, "modules": []},
        ]
        self.writer.sites(self.entries, self.roots)

    def entry(self, site: str, kind: str, shape: list[int], **more: Any) -> int:
        """Describe one site."""
        path, _, form = site.rpartition(":")
        given = {
            "id": len(self.entries),
            "site": site,
            "path": path,
            "kind": form,
            "type": kind,
            "root": 0,
        }
        given |= {
            "shape": shape,
            "dtype": "float32",
            "channels": None,
            "from": [],
            "owner": path,
            "node": None,
        }
        self.entries.append(given | more)
        return len(self.entries) - 1

    def _layer(self, layer: int) -> None:
        name, kind = self.names[layer], self.types[layer]
        before = [len(self.entries) - 1] if layer else [None]
        self.entry(f"{name}:in", kind, [8, 8], **{"from": before})
        for form in ("param", "param.grad", "update"):
            self.entry(f"{name}.weight:{form}", kind, [8, 8], owner=name)
        self.entry(f"{name}:out.grad", kind, [8, 8])
        self.entry(f"{name}:out", kind, [8, 8], source=SOURCE)

    def step(self, step: int, scales: Mapping[str, float] | None = None) -> None:
        """Write one step; ``scales`` gives the rms of single sites, NaN for one that is not finite."""
        scales = scales or {}
        size = np.array([scales.get(entry["site"], _usual(entry, step)) for entry in self.entries])
        one = np.array([entry["shape"] == [] for entry in self.entries])
        count = np.where(one, 1, 64)
        saturating = np.array(
            [entry["type"] == "Tanh" and entry["kind"] == "out" for entry in self.entries]
        )
        self.writer.stats(
            step,
            {
                "site": np.arange(len(size)),
                "count": count,
                "sum": np.where(one, size, size * 6.4),
                "sumsq": size**2 * count,
                "min": -2 * size,
                "max": 3 * size,
                "nonzero": np.where(one, 1, 48),
                "nonfinite": np.where(np.isfinite(size), 0, 5),
                "sampled": np.where(one, -1, 64),
                "saturated": np.where(saturating, 16, -1),
                "exponents": [b"" if one[i] else histogram(size[i]) for i in range(len(size))],
            },
        )

    def end(self, **more: Any) -> None:
        """Write how the run ended."""
        saved = tuple(
            Sums(path=name, bytes=1000 * (i + 1), tensors=2) for i, name in enumerate(self.names)
        )
        total = sum(sums.bytes for sums in saved)
        self.writer.event(SavedEvent(step=0, bytes=total, modules=saved))
        given = {
            "kind": "end",
            "exit": 0,
            "steps": 9,
            "sampled": 9,
            "seconds": 2.0,
            "watching": 0.1,
            "error": None,
        }
        self.writer.event(event_from(given | more))
        self.writer.close()


def _usual(entry: Mapping[str, Any], step: int) -> float:
    """Return a size that depends on the site and the step, so that a mistaken cell shows."""
    base = {
        "out": 1.0,
        "in": 0.9,
        "out.grad": 1e-3,
        "param": 0.5,
        "param.grad": 1e-2,
        "update": 5e-4,
    }
    return base.get(entry["kind"], 2.0) * (1 + entry["id"] / 10) * (1 + 0.05 * math.sin(step))


def histogram(size: float) -> bytes:
    """Spread 64 elements over four powers of two below a size."""
    counts = np.zeros(BUCKETS, dtype=np.int64)
    if math.isfinite(size) and size > 0:
        top = math.floor(math.log2(size)) - LOWEST + 2
        counts[max(top - 3, 0) : top + 1] = 16
    return encode(counts)
