"""Runs written down by hand: a small model, and what every site showed in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from kedge.store.columns import COLUMNS
from kedge.store.recording import Recording
from kedge.store.writing.folder import RecordingWriter

FULL, LIGHT = 2, 1


@dataclass(frozen=True)
class Layer:
    """A module without others in it; layers of the same ``key`` compute the same."""

    path: str
    type: str
    weight: tuple[int, ...] = ()
    shape: tuple[int, ...] = (4, 8)
    key: str = ""

    @property
    def seed(self) -> str:
        return self.key or self.path


NET = (
    Layer("stem", "Linear", (8, 8)),
    Layer("relu", "ReLU"),
    Layer("mid", "Linear", (8, 8)),
    Layer("act", "ReLU"),
    Layer("head", "Linear", (3, 8), shape=(4, 3)),
)

Factor = Callable[[str, int], float]


@dataclass
class Story:
    """A run of layers one after another.

    ``factor`` tells by what the figures of a site are multiplied in a step; ``holders`` are the
    modules around the layers, from the outside in, each with its type; ``dtypes`` are those of
    sites that have another than float32.
    """

    layers: Sequence[Layer] = NET
    steps: Iterable[int] = range(4)
    factor: Factor = lambda text, step: 1.0
    holders: Sequence[tuple[str, str]] = (("", "Net"),)
    dtypes: Callable[[str], str] = lambda text: "float32"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    broken: Callable[[str, int], bool] = lambda text, step: False
    light: frozenset[int] = frozenset()

    def recording(self) -> Recording:
        """Make the recording in memory."""
        sites, seeds = self._sites()
        rows = [row for step in self.steps for row in self._rows(sites, seeds, step)]
        return Recording.build(sites, rows, roots=self._roots(), manifest=self.manifest)

    def write(self, writer: RecordingWriter) -> None:
        """Write it to disk as a run does."""
        sites, seeds = self._sites()
        writer.sites(sites, self._roots())
        for step in self.steps:
            rows = self._rows(sites, seeds, step)
            names = {name for row in rows for name in row} - {"step", "level"}
            writer.stats(
                step, {name: [row.get(name, COLUMNS[name][1]) for row in rows] for name in names}
            )

    def _roots(self) -> list[dict[str, Any]]:
        return [{"name": self.holders[0][1], "prefix": "", "parameters": 100}]

    def _rows(
        self, sites: Sequence[dict[str, Any]], seeds: Mapping[str, str], step: int
    ) -> list[dict[str, Any]]:
        light = step in self.light
        shown = [site for site in sites if not light or site["kind"] in ("grad.norm", "param.grad")]
        return [self._row(site, seeds[site["site"]], step) for site in shown]

    def _sites(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        sites: list[dict[str, Any]] = []
        seeds: dict[str, str] = {}

        def add(path: str, kind: str, seed: str, **entry: Any) -> int:
            text = f"{path}:{kind}"
            seeds[text] = f"{seed}:{kind}"
            entry = {
                "id": len(sites),
                "site": text,
                "path": path,
                "kind": kind,
                "dtype": self.dtypes(text),
                **entry,
            }
            sites.append(entry)
            return len(sites) - 1

        inner = self.holders[-1][0]
        for path, kind in self.holders:
            add(path, "in", "input", type=kind, shape=[4, 8], **{"from": [None]})
        before: int | None = None
        for layer in self.layers:
            path = ".".join(filter(None, (inner, layer.path)))
            source = "input" if before is None else f"{sites[before]['site']}"
            add(
                path,
                "in",
                seeds.get(source, source),
                type=layer.type,
                shape=[4, 8],
                **{"from": [before]},
            )
            before = add(path, "out", layer.seed, type=layer.type, shape=list(layer.shape))
        for path, kind in reversed(self.holders):
            add(
                path,
                "out",
                seeds[sites[before]["site"]],
                type=kind,
                shape=list(self.layers[-1].shape),
            )
        for layer in reversed(self.layers):
            path = ".".join(filter(None, (inner, layer.path)))
            add(path, "out.grad", layer.seed, type=layer.type, shape=list(layer.shape))
            if layer.weight:
                self._weight(add, path, layer, ["param.grad"])
        for layer in self.layers:
            if layer.weight:
                path = ".".join(filter(None, (inner, layer.path)))
                self._weight(add, path, layer, ["param", "update"])
        add("", "grad.norm", "root", type=self.holders[0][1], shape=[])
        return sites, seeds

    @staticmethod
    def _weight(add: Callable[..., int], path: str, layer: Layer, kinds: Sequence[str]) -> None:
        for kind in kinds:
            add(
                f"{path}.weight",
                kind,
                f"{layer.seed}.weight",
                type=layer.type,
                shape=list(layer.weight),
                owner=path,
            )

    def _row(self, site: Mapping[str, Any], seed: str, step: int) -> dict[str, Any]:
        random = np.random.default_rng(
            crc32(f"{seed} {step if site['kind'] != 'param' else 0}".encode())
        )
        scale, share = random.uniform(0.5, 2.0), random.uniform(-0.2, 0.2)
        scale *= self.factor(site["site"], step)
        count = int(np.prod(site["shape"])) or 1
        row: dict[str, Any] = {
            "step": step,
            "site": site["id"],
            "count": count,
            "sumsq": scale**2 * count,
        }
        row["level"] = LIGHT if step in self.light else FULL
        if site["kind"] in ("in", "out", "out.grad"):
            row |= {
                "sum": share * scale * count,
                "min": -2 * scale,
                "max": 1.5 * scale,
                "nonzero": count // 2,
            }
            row["nonfinite"] = 0
        if self.broken(site["site"], step):
            row |= {"sum": np.nan, "sumsq": np.nan, "min": np.nan, "max": np.nan, "nonfinite": 1}
        return row


def story(**changes: Any) -> Recording:
    """Write a run down that differs from the usual one."""
    return Story(**changes).recording()


def from_step(first: int, factor: float, *texts: str) -> Factor:
    """Multiply some sites from a step on; all of a kind where a text begins with a colon and a star before."""

    def given(text: str, step: int) -> float:
        hit = any(text.endswith(t[1:]) if t.startswith("*") else text == t for t in texts)
        return factor if hit and step >= first else 1.0

    return given
