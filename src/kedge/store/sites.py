"""What a recording says about the sites and roots it watched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SiteInfo:
    """One site of a recording.

    ``sources`` are the ids of the sites whose tensors came in, None for a tensor that no watched
    site made. ``owner`` is the path of the module that owns a parameter, and the path itself for a
    module's site. ``shape`` is the first one seen. ``source`` is the program's line that calls the
    module: ``file``, ``line``, ``function`` and ``text``.
    """

    id: int
    site: str
    path: str
    kind: str
    type: str
    root: int
    shape: tuple[int, ...]
    dtype: str
    channels: int | None
    sources: tuple[int | None, ...]
    owner: str
    node: str | None
    source: Mapping[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Root:
    """One module whose calls were watched from outside; ``prefix`` starts its paths.

    ``modules`` describes every module that it holds, and itself: ``path``, ``type``, ``file``, ``line``,
    ``parameters`` and ``trainable``. ``trained`` says whether an optimizer that has stepped holds a parameter of it;
    None in a recording that does not tell. ``steps`` counts the steps of its own optimizer.
    """

    name: str
    prefix: str
    parameters: int
    modules: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    trained: bool | None = None
    optimizers: tuple[int, ...] = ()
    steps: int = 0


def site_from(entry: Mapping[str, Any]) -> SiteInfo:
    """Read one entry of ``sites.json``; only ``id`` and ``site`` must be there."""
    path, _, kind = entry["site"].rpartition(":")
    path = entry.get("path", path)
    return SiteInfo(
        id=entry["id"],
        site=entry["site"],
        path=path,
        kind=entry.get("kind", kind),
        type=entry.get("type", ""),
        root=entry.get("root", 0),
        shape=tuple(entry.get("shape", ())),
        dtype=entry.get("dtype", "float32"),
        channels=entry.get("channels"),
        sources=tuple(entry.get("from", ())),
        owner=entry.get("owner", path),
        node=entry.get("node"),
        source=entry.get("source"),
    )


def root_from(entry: Mapping[str, Any]) -> Root:
    """Read one root of ``sites.json``."""
    return Root(
        entry["name"],
        entry.get("prefix", ""),
        entry.get("parameters", 0),
        tuple(entry.get("modules", ())),
        entry.get("trained"),
        tuple(entry.get("optimizers", ())),
        entry.get("steps", 0),
    )
