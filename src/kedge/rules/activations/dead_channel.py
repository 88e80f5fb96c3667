"""DEAD-CHANNEL: channels of an activation that never fire."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, places, said, said_share
from kedge.rules.gradients.grad_zero import GradZeroEvidence
from kedge.rules.naming import plain
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.trained import trained_sites
from kedge.rules.recorded.wiring import wire
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Bools, Ints


@dataclass(frozen=True, kw_only=True)
class DeadChannelEvidence(Evidence):
    """The dead channels of a site, and the sites that come after it."""

    dead: int = said("{} dead channels")
    channels: int = said("of {} channels")
    share: float | None = said_share("a share of {}")
    samples: int = said("{} measured steps")
    steps: int = said("steps {}")
    once_alive: int = said("{} of them were alive before")
    first_dead: Sequence[int] = said("dead channels {}")
    after_it: Mapping[str, float | None] = places("after it")


@dataclass(frozen=True)
class DeadChannel(Rule):
    """Channels of a ReLU are zero for every input: they compute nothing and cannot recover.

    Meaning:
        In many samples, a share of a layer's channels was never above zero. Their gradient is zero
        too, so no training step can revive them.

    Formula:
        A channel is dead if it was never above zero in the window. A layer is healthy if half of
        its values are zero, because each input silences other channels. Only a channel that no
        input activates is dead.

    Window:
        The last measured steps of the run that together contain samples values of every channel, at
        least min_steps of them. In a run with fewer values few_samples are enough, with less
        confidence. A layer in which no channel was above zero in the last all_dead values is judged
        by these. Steps in which the site had a NaN or an infinity are left out.

    Thresholds:
        - warning (0.5), error (0.75): the share of dead channels. smdebug reports a layer with 50 %
          or more inactive units. Plain ReLU networks that learned scikit-learn's digits well ended
          with 20 to 40 % in some layer (an autoencoder: 47 %, six layers at a learning rate of
          0.01: 52 %), and with none after batch normalisation, so a lower threshold would raise
          false alarms.
        - samples (10,000), few_samples (2,000): a channel that fires for one input in a thousand is
          missed in 10,000 with a probability of 5 in 100,000, in 2,000 with one of 14 %.
        - all_dead (100): a whole healthy layer is not silent a hundred times in a row.
        - min_steps (10): positions of one image or sentence are not independent samples.
        - min_dead (2): in a very small layer one channel is a large share.
        - starving (0.95): a layer with so many dead channels feeds constants to the layers after
          it, which silences some of their channels. The evidence names those layers, and they have
          no finding of their own.

    Evidence:
        The number of dead channels and of all, of samples and steps; how many of the dead channels
        were alive before, and the numbers of the first ones.

    Remedy:
        Lower the learning rate or warm it up (a large step that pushes the biases down kills units
        at once), use LeakyReLU or GELU, initialise the weights to fit ReLU
        (torch.nn.init.kaiming_normal_) and the biases with zeros, and normalise before the
        activation.

    Cannot see:
        Channels that fire only for inputs which were not measured; units of ReLU that the
        forward calls as a function, as no module returns them; whether the network does well
        all the same.
    """

    warning: float = 0.5
    error: float = 0.75
    samples: int = 10_000
    few_samples: int = 2_000
    all_dead: int = 100
    min_steps: int = 10
    min_dead: int = 2
    starving: float = 0.95

    code = "DEAD-CHANNEL"
    name = "channels that no input activates"
    severity = "error"
    of_training = True
    statistic = "zero"
    follows = (
        "NEVER-INITIALISED INPUT-SCALE INIT-SCALE GRADS-KEPT BATCH-OF-ONE "
        "RATE-TOO-LARGE NOT-OPTIMIZED GRAD-ZERO:all"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield one finding for every layer, except for layers that a layer before them starves."""
        found = [
            layer
            for site in trained_sites(recording, "out")
            if (layer := self._layer(recording, site))
        ]
        for _, layers in by_root(found, lambda layer: layer.site.root):
            starving = (i + 1 for i, layer in enumerate(layers) if layer.share >= self.starving)
            cut = next(starving, len(layers))
            yield from (self._finding(layer, []) for layer in layers[: cut - 1])
            yield self._finding(layers[cut - 1], layers[cut:])

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of values of the layer with the fewest; layers that are seldom called do not count."""
        seen = [
            a
            for site in trained_sites(recording, "out")
            if (a := _Activity.of(recording, site)) is not None
        ]
        most = max((len(activity.steps) for activity in seen), default=0)
        usual = [activity for activity in seen if 2 * len(activity.steps) >= most]
        if any(len(activity.steps) < self.min_steps for activity in usual):
            return Lack(
                self.code,
                "measured steps",
                min(len(activity.steps) for activity in usual),
                self.min_steps,
            )
        samples = [int(activity.samples.sum()) for activity in usual]
        fewest = min(samples, default=self.few_samples)
        if fewest < self.few_samples:
            return Lack(self.code, "values per channel", fewest, self.few_samples)
        return None

    def explains(self, recording: Recording, finding: Finding, other: Finding) -> bool:
        """Return whether dead channels can be the cause of another finding.

        Gradients are exactly zero only where all channels of a layer are dead, and only of the
        parameters before it and of those that take its output.
        """
        dead, zero = finding.evidence, other.evidence
        if not isinstance(dead, DeadChannelEvidence) or not isinstance(zero, GradZeroEvidence):
            return True
        silent = [site for site, share in dead.after_it.items() if share == 1]
        if dead.dead == dead.channels:
            silent.append(finding.site)

        places = {site.site: site.id for site in recording.of_kind("out")}
        modules = wire(recording).modules
        owners = {site.path: site.owner for site in recording.of_kind("param.grad")}
        known = [modules[owners[path]].position for path in zero.parameters if path in owners]
        nearer = math.inf
        if zero.next_with_gradient in owners:
            nearer = modules[owners[zero.next_with_gradient]].position
        first = min(known, default=0)
        return any(first <= places[site] < nearer for site in silent)

    def _layer(self, recording: Recording, site: SiteInfo) -> _Layer | None:
        """Return a site with dead channels; None if it is healthy or cannot be judged."""
        activity = _Activity.of(recording, site)
        start = None if activity is None else self._window(activity)
        if activity is None or start is None:
            return None
        dead = np.logical_not(activity.above[start:].any(axis=0))
        if dead.sum() < self.min_dead or dead.mean() <= self.warning:
            return None
        return _Layer(site, activity, start, dead)

    def _window(self, activity: _Activity) -> int | None:
        """Return the index of the window's first step; None if the run is too short."""
        backwards = np.cumsum(activity.samples[::-1])
        silent = self._silent_end(activity)
        if silent is not None or backwards[-1] < self.few_samples:
            return silent
        wanted = self.samples if backwards[-1] >= self.samples else self.few_samples
        length = max(int(np.searchsorted(backwards, wanted)) + 1, self.min_steps)
        if length <= len(backwards):
            return len(backwards) - length
        return None

    def _silent_end(self, activity: _Activity) -> int | None:
        """Return the index of the first step after any channel was above zero; None if too few values follow it."""
        lively = np.flatnonzero(activity.above.any(axis=1))
        start = 0
        if len(lively):
            start = int(lively[-1]) + 1
        steps = len(activity.samples) - start
        samples = activity.samples[start:].sum()
        if steps >= self.min_steps and samples >= self.all_dead:
            return start
        return None

    def _finding(self, layer: _Layer, after: list[_Layer]) -> Finding:
        samples, steps = layer.window
        reported = int(self.warning * len(layer.dead)) + 1
        first = max(self.min_dead, reported)
        since = layer.silent_since(first)
        last = layer.silent_since(layer.count)
        past = ", nor at any time before"
        remedy = _NEVER_ALIVE
        if layer.once_alive:
            past = f"; they fell silent by step {since}"
            if last > since:
                past = f"; {first} of them fell silent by step {since}, all by step {last}"
            remedy = _FELL_SILENT
        others = ""
        if after:
            behind = listed([other.site.site for other in after])
            others = f"; many channels after it are silent too, in {behind}"

        severity: Severity = "warning"
        if layer.share > self.error:
            severity = "error"
        confidence = 0.6
        if samples >= self.samples:
            confidence = 0.95
        return Finding(
            code=self.code,
            severity=severity,
            site=layer.site.site,
            step=since,
            message=f"{layer.count} of the {len(layer.dead)} channels of "
            f"{layer.site.site} ({layer.share:.0%}) were never above zero in the last "
            f"{samples:,} samples ({steps} measured steps){past}{others}.",
            evidence=DeadChannelEvidence(
                dead=layer.count,
                channels=len(layer.dead),
                share=plain(layer.share),
                samples=samples,
                steps=steps,
                once_alive=layer.once_alive,
                first_dead=np.flatnonzero(layer.dead)[:10].tolist(),
                after_it={other.site.site: plain(other.share) for other in after},
            ),
            confidence=confidence,
            remedy=remedy,
        )


_FELL_SILENT = (
    "Lower the learning rate or warm it up: a large step that pushes the biases down "
    "kills units at once. LeakyReLU or GELU cannot die; normalisation before the "
    "activation keeps the units in range."
)
_NEVER_ALIVE = (
    "Initialise the weights to fit ReLU (torch.nn.init.kaiming_normal_) and the "
    "biases with zeros, check the scale of the inputs, and normalise before the "
    "activation; LeakyReLU or GELU cannot die."
)


@dataclass(frozen=True)
class _Activity:
    """The channels of a site that were above zero, step by step."""

    steps: Ints
    samples: Ints
    above: Bools

    @classmethod
    def of(cls, recording: Recording, site: SiteInfo) -> _Activity | None:
        """Return the steps in which the site was finite; None if its channels were not tracked."""
        rows = recording.rows(site)
        if not site.channels:
            return None
        steps, samples, above = recording.active(site)
        usable = np.isin(steps, rows.step[rows.clean & (rows.count > 0)])
        if not usable.any():
            return None
        return cls(steps[usable], samples[usable], above[usable])


@dataclass(frozen=True)
class _Layer:
    """A site with dead channels, judged over the steps of its activity from ``start`` on."""

    site: SiteInfo
    activity: _Activity
    start: int
    dead: Bools

    @property
    def count(self) -> int:
        """The number of dead channels."""
        return int(self.dead.sum())

    @property
    def share(self) -> float:
        """The share of dead channels."""
        return float(self.dead.mean())

    @property
    def window(self) -> tuple[int, int]:
        """The number of samples and of steps that were judged."""
        samples = self.activity.samples[self.start :]
        return int(samples.sum()), len(self.activity.steps) - self.start

    @property
    def once_alive(self) -> int:
        """The number of dead channels that were above zero before the window."""
        return int(self.activity.above[:, self.dead].any(axis=0).sum())

    def silent_since(self, number: int) -> int:
        """Return the first step from which a number of the dead channels stayed silent."""
        silent = self.activity.above[:, self.dead]
        last = np.where(silent.any(axis=0), len(silent) - 1 - np.argmax(silent[::-1], axis=0), -1)
        return int(self.activity.steps[np.sort(last)[number - 1] + 1])
