"""The models of a recording that are trained: rules about training judge no others."""

from __future__ import annotations

import numpy as np

from kedge.rules.recorded.once import once
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints


@once
def trained_roots(recording: Recording) -> frozenset[int]:
    """Return the roots that an optimizer trains, or the program by hand.

    All of them, if the recording does not say. Older ones do not say what is trained by hand:
    without an optimizer it is what got gradients.
    """
    last = max((site.root for site in recording.sites), default=0)
    roots = range(max(len(recording.roots), 1 + last))
    known = {i: root.trained for i, root in enumerate(recording.roots)}
    trained = frozenset(i for i in roots if known.get(i) is not False)
    if trained:
        return trained
    grads = recording.of_kind("param.grad")
    graded = frozenset(site.root for site in grads if len(recording.rows(site)))
    said = {i for i, root in enumerate(recording.roots) if root.by_hand is not None}
    return graded - said


def trained_sites(recording: Recording, kind: str) -> list[SiteInfo]:
    """Return the sites of one kind that belong to trained models."""
    trained = trained_roots(recording)
    return [site for site in recording.of_kind(kind) if site.root in trained]


@once
def recorded_gradients(recording: Recording) -> list[SiteInfo]:
    """Return the gradients of trained models' parameters that have rows."""
    lengths = recording.all_rows.lengths
    return [site for site in trained_sites(recording, "param.grad") if lengths[site.id]]


def trains(recording: Recording) -> bool:
    """Whether a trained model got a gradient, or the program changed it by hand.

    The gradients that `torch.autograd.grad` returns are not recorded.
    """
    if recorded_gradients(recording):
        return True
    by_hand = {i for i, root in enumerate(recording.roots) if root.by_hand}
    lengths = recording.all_rows.lengths
    return any(site.root in by_hand and lengths[site.id] for site in recording.of_kind("update"))


def steps_of_training(recording: Recording, root: int) -> Ints:
    """Return the measured steps in which a root was trained: its parameters had gradients and an optimizer stepped.

    Gradients alone count if no optimizer ever stepped with it: a model that is trained no more may
    keep its last ones. All measured steps, if no gradient of the program was recorded.
    """
    graded = _measured(recording, root, "param.grad")
    stepped = _measured(recording, root, "update")
    lengths = recording.all_rows.lengths
    if not any(lengths[site.id] for site in recording.of_kind("param.grad")):
        return recording.steps
    if len(stepped):
        return np.intersect1d(graded, stepped)
    return graded


def _measured(recording: Recording, root: int, kind: str) -> Ints:
    every = recording.all_rows
    own = np.zeros(len(every.lengths), dtype=bool)
    own[[site.id for site in recording.of_kind(kind) if site.root == root]] = True
    return np.unique(every.rows.step[own[every.site] & (every.rows.level == FULL)])
