"""Which models of a recording are trained: rules about training speak of no other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kedge.store.recording import Recording, Root, SiteInfo
from kedge.store.rows import FULL, Ints


def trained_roots(recording: Recording) -> frozenset[int]:
    """Return the roots that an optimizer trains.

    A recording that does not tell has them all. Without an optimizer, as where the program updates the weights itself,
    they are those that got gradients.
    """
    roots = range(max(len(recording.roots), 1 + max((site.root for site in recording.sites), default=0)))
    told = {i: root.trained for i, root in enumerate(recording.roots)}
    trained = frozenset(i for i in roots if told.get(i) is not False)
    return trained or frozenset(site.root for site in recording.of_kind("param.grad") if len(recording.rows(site)))


def trained_sites(recording: Recording, kind: str) -> list[SiteInfo]:
    """List the sites of one kind that belong to trained models."""
    trained = trained_roots(recording)
    return [site for site in recording.of_kind(kind) if site.root in trained]


def trains(recording: Recording) -> bool:
    """Whether a trained model got a gradient."""
    return any(len(recording.rows(site)) for site in trained_sites(recording, "param.grad"))


def steps_of_training(recording: Recording, root: int) -> Ints:
    """Return the measured steps in which a root was trained: its parameters had gradients, and an optimizer stepped.

    Gradients alone count where no optimizer ever stepped with it: what is trained no more may keep its last ones. All
    measured steps, if no gradient of the program was recorded.
    """
    graded, stepped = (_measured(recording, root, kind) for kind in ("param.grad", "update"))
    if not any(len(recording.rows(site)) for site in recording.of_kind("param.grad")):
        return recording.steps
    return np.intersect1d(graded, stepped) if len(stepped) else graded


def _measured(recording: Recording, root: int, kind: str) -> Ints:
    rows = [recording.rows(site) for site in recording.of_kind(kind) if site.root == root]
    steps = [own.step[own.level == FULL] for own in rows]
    return np.unique(np.concatenate(steps)) if steps else np.zeros(0, dtype=np.int64)


def tells_training(recording: Recording) -> bool:
    """Whether a recording says which models are trained, as all do since gradients and modes are looked at too."""
    return any(root.trained is not None for root in recording.roots)


def root_of(recording: Recording, path: str) -> int:
    """Return the root that a path belongs to: the one with the longest prefix of it; -1 for what none of them holds."""
    if not recording.roots:
        return 0
    fitting = [i for i, root in enumerate(recording.roots) if _within(path, root.prefix.rstrip("."))]
    found = max(fitting, key=lambda i: len(recording.roots[i].prefix), default=-1)
    return found if found >= 0 and _holds(recording.roots[found], path) else -1


def names_of(recording: Recording, roots: Iterable[int]) -> str:
    """Return the names of some roots, with commas between."""
    return ", ".join(recording.roots[root].name for root in roots if 0 <= root < len(recording.roots)) or "the model"


def _holds(root: Root, path: str) -> bool:
    """Whether a root has a child that a path begins with, as far as its modules are described."""
    prefix = root.prefix.rstrip(".")
    child, _, rest = path[len(prefix) :].lstrip(".").partition(".")
    children = {str(module["path"])[len(prefix) :].lstrip(".").partition(".")[0] for module in root.modules}
    # What has no dot is a parameter or a child of the root itself, which may have got it later.
    return not rest or not root.modules or child in children


def _within(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(f"{prefix}.")
