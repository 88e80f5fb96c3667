"""The summary of one run, as a table of several runs has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from kedge.report.curves import Curve, losses_of, norms_of
from kedge.report.head import UNNAMED
from kedge.report.runs.options import options_of
from kedge.report.runs.smoothing import smoothed
from kedge.rules.recorded.optimizers import optimizers, rates_of
from kedge.rules.rule import SEVERITIES, Finding
from kedge.short_text import thousands
from kedge.shown_text import visible
from kedge.store.recording import Recording
from kedge.store.saved_account import newest

#: Circumstances of a run, by their names in a manifest.
CIRCUMSTANCES = {"device": "device", "torch": "torch", "python": "Python", "kedge": "Kedge"}


@dataclass(frozen=True)
class SmoothedEnd:
    """The end of a curve.

    Attributes:
        last: The smoothed value at the end; NaN or infinite if the last value is.
        best: The smallest smoothed value; None if no value is finite.
        best_step: Its step.
        broken: The number of steps with a value that is not finite.
    """

    last: float
    best: float | None
    best_step: int | None
    broken: int

    @classmethod
    def of(cls, curve: Curve) -> SmoothedEnd:
        """Return the end of a curve with at least one step."""
        values = np.where(curve.bad & np.isfinite(curve.values), np.nan, curve.values)
        even = smoothed(values)
        last = float(even[-1]) if np.isfinite(values[-1]) else float(values[-1])
        known = np.flatnonzero(np.isfinite(even))
        broken = int(np.count_nonzero(~np.isfinite(values)))
        if not len(known):
            return cls(last, None, None, broken)
        best = known[np.argmin(even[known])]
        return cls(last, float(even[best]), int(curve.steps[best]), broken)


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One of several runs.

    Attributes:
        name: Its name, which no other of them has.
        recording: Its recording.
        findings: The findings in it, the worst first.
        complete: Whether every rule could judge it.
        written: Whether a process still writes it; None if that is not known.
        wrote: When it was last written, in seconds since 1970; None if it does not matter.
    """

    name: str
    recording: Recording
    findings: tuple[Finding, ...]
    complete: bool = True
    written: bool | None = None
    wrote: float | None = None

    @cached_property
    def curves(self) -> tuple[Curve, ...]:
        """Its losses and norms, as far as they have values."""
        return tuple(
            curve
            for curve in (*losses_of(self.recording), *norms_of(self.recording))
            if len(curve.steps)
        )

    @cached_property
    def loss(self) -> SmoothedEnd | None:
        """The end of its first loss."""
        return self._end_of("loss")

    @cached_property
    def norm(self) -> SmoothedEnd | None:
        """The end of the norm of all gradients of its first model."""
        return self._end_of("norm")

    def _end_of(self, kind: str) -> SmoothedEnd | None:
        return next((SmoothedEnd.of(curve) for curve in self.curves if curve.kind == kind), None)

    @cached_property
    def options(self) -> Mapping[str, str]:
        """What it was started with: program, model, options, versions."""
        manifest = self.recording.manifest
        program = visible(str(manifest.get("script") or (manifest.get("command") or [UNNAMED])[0]))
        found = (
            {"program": program} | dict(self._models()) | options_of(manifest.get("command") or ())
        )
        found |= dict(self._training())
        found |= {
            said: str(manifest[key]) for key, said in CIRCUMSTANCES.items() if manifest.get(key)
        }
        return found | {
            "ranks": str(max(int(manifest.get("world") or 1), len(self.recording.ranks)))
        }

    def _models(self) -> Iterator[tuple[str, str]]:
        roots = self.recording.roots
        if roots:
            named = (
                f"{root.name} {thousands(root.parameters)}" if root.parameters else root.name
                for root in roots
            )
            yield "model", visible(", ".join(named))

    def _training(self) -> Iterator[tuple[str, str]]:
        types = [str(one.get("type", "an optimizer")) for one in optimizers(self.recording) or ()]
        rates = [
            rate
            for root in range(len(self.recording.roots))
            for rate in rates_of(self.recording, root)
        ]
        if types:
            yield "optimizer", visible(", ".join(dict.fromkeys(types)))
        if rates:
            yield "learning rate", ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))

    @property
    def started(self) -> datetime | None:
        """When it began."""
        try:
            return datetime.fromisoformat(str(self.recording.manifest.get("started")))
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """Its duration; of a run that goes on until it was last written, and None if it was killed."""
        end = self.recording.end
        if end is not None:
            return end.get("seconds")
        if not self.written or self.wrote is None or self.started is None:
            return None
        return max(self.wrote - self.started.timestamp(), 0.0)

    @cached_property
    def steps(self) -> int:
        """The number of its steps; without an end, the steps until the last with a value."""
        end = self.recording.end or {}
        seen = [self.recording.steps, *(curve.steps for curve in self.curves)]
        return int(
            end.get("steps") or max((int(steps[-1]) + 1 for steps in seen if len(steps)), default=0)
        )

    @property
    def pace(self) -> float | None:
        """The seconds for a step, over the whole run."""
        return self.seconds / self.steps if self.seconds and self.steps else None

    @property
    def saved(self) -> int | None:
        """The bytes that autograd kept for backward at its peak, if they were recorded."""
        event: Mapping[str, Any] = newest(self.recording.events) or {}
        peak = (event.get("course") or {}).get("peak")
        return peak if peak is not None else event.get("bytes")

    @property
    def counts(self) -> dict[str, int]:
        """The number of its findings of each severity."""
        return {
            severity: sum(one.severity == severity for one in self.findings)
            for severity in SEVERITIES
        }

    @property
    def ending(self) -> str:
        """How it ended, if that is not as it should be: it runs, was killed, or failed."""
        end = self.recording.end
        if end is None and self.recording.stopped is not None:
            return "not written to its end"
        if end is None:
            return {True: "running", False: "killed", None: "no end"}[self.written]
        return f"exit {end['exit']}" if end.get("exit") else ""


def told_apart(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: its last part without its suffix, and as many before it as tell it from the others."""
    parts = [
        [*path.replace("\\", "/").rstrip("/").removesuffix(".kedge").split("/")] for path in paths
    ]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(own[-length:]) for own, length in zip(parts, lengths, strict=True)]
        longer = [
            names.count(name) > 1 and lengths[i] < len(parts[i]) for i, name in enumerate(names)
        ]
        if not any(longer):
            return names
        lengths = [length + more for length, more in zip(lengths, longer, strict=True)]


def numbered(paths: Sequence[str]) -> list[str]:
    """Return a name for each path that does not tell its folder: its last part, with a number where several have the same."""
    ends = [told_apart([path])[0] for path in paths]
    before = [ends[:place].count(end) for place, end in enumerate(ends)]
    return [
        f"{end} ({count + 1})" if count else end for end, count in zip(ends, before, strict=True)
    ]
