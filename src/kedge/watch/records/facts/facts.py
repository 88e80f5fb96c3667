"""All facts about a training, and the notes at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FrameType

from kedge.store.events import LedgerLine, NotOptimizedEvent, OptimizersEvent, RunEvent
from kedge.watch.models.backwards import BackwardPasses
from kedge.watch.models.optimizers import Optimizers
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule
from kedge.watch.records.facts.ever_rarer import EverRarer
from kedge.watch.records.facts.frozen import FrozenParameters
from kedge.watch.records.facts.kept_gradients import KeptGradients
from kedge.watch.records.facts.learning_rates import LearningRates
from kedge.watch.records.facts.modes import TrainingModes
from kedge.watch.records.facts.root_passes import RootPasses
from kedge.watch.records.facts.shared_parameters import SharedParameters
from kedge.watch.records.facts.unoptimized import UnoptimizedParameters
from kedge.watch.records.facts.unseen import UnseenWork
from kedge.watch.records.facts.unstepped import Unstepped
from kedge.watch.records.facts.used_gradients import UsedGradients


class Facts:
    """Collects notes for the recording; see docs/reference/recording.md for each kind.

    Attributes:
        modes: The modes of trained models.
        gradients: Gradients that were not set to zero.
        rates: The learning rates over the steps.
        passes: The forward passes of roots.
        used: The gradients that optimizers use, beside those that backward passes left.
        unoptimized: Parameters that no optimizer holds.
        frozen: Parameters that are not to be trained.
        shared: Parameters that two optimizers hold.
        unstepped: Optimizers that never step.
        unseen: Work that cannot be watched.

    Args:
        step: Returns the number of the current step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.modes = TrainingModes()
        self.gradients = KeptGradients()
        self.rates = LearningRates()
        self.passes = RootPasses(step)
        self.used = UsedGradients()
        self.unoptimized = UnoptimizedParameters()
        self.frozen = FrozenParameters(step)
        self.shared = SharedParameters()
        self.unstepped = Unstepped()
        self.unseen = UnseenWork()
        self._comparing = EverRarer()

    def backward_began(
        self,
        step: int,
        roots: Iterable[RootModule],
        passes: BackwardPasses,
        frame: FrameType | None,
    ) -> list[RunEvent]:
        """Return notes on the modes of trained models, and on gradients that were kept."""
        return [*self.modes.notes(step, roots, frame), *self.gradients.backward_began(step, passes)]

    def step_ended(
        self,
        optimizers: Optimizers,
        roots: Sequence[RootModule],
        places: WatchedParameters,
    ) -> None:
        """Compare models and optimizers, where this is due."""
        if self._comparing.is_due(len(optimizers.entries)):
            self.unoptimized.compare(optimizers, roots, places)
            self.frozen.compare(roots, places)
            self.shared.compare(optimizers, places)

    def at_end(
        self, optimizers: Optimizers, roots: Sequence[RootModule], places: WatchedParameters
    ) -> list[RunEvent]:
        """Return the notes that are known at the end of the run."""
        notes: list[RunEvent] = []
        if optimizers.entries or optimizers.by_hand:
            notes.append(OptimizersEvent(optimizers=optimizers.describe()))
        elif self.unstepped.in_vain:
            notes.append(NotOptimizedEvent(in_vain=self.unstepped.in_vain))
        notes += self.used.notes()
        notes += self.unoptimized.notes(optimizers, roots, places)
        notes += self.frozen.notes(roots, places)
        notes += self.shared.notes(optimizers)
        notes += self.passes.notes()
        notes += self.unseen.notes(trained=bool(optimizers.entries or optimizers.by_hand))
        return notes


def unused(places: WatchedParameters) -> list[LedgerLine]:
    """Return the parameters of trained models that never had a gradient, in the form of the ledger.

    Where the module of one was called without a graph, the entry says what ruled it out:
    ``ungraded``.
    """
    cause = "no observed backward pass reached it"
    remedy = "use it in the forward, or set requires_grad_(False)"
    entries = []
    for place in places.without_gradient():
        root = place.root
        if not root.optimizers:
            continue
        path = place.site.path.removeprefix(root.prefix).lstrip(".")
        module, _, _ = path.rpartition(".")
        line = LedgerLine(
            site=f"{place.site}.grad",
            fired=0,
            cause=cause,
            remedy=remedy,
            ungraded=root.hooks.ungraded(module) or None,
        )
        entries.append(line)
    return entries
