"""The words for a birth: what was seen, on what it rests, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.rules.births import Birth
from kedge.rules.moment import FINITE, NAN, Moment, has_nan
from kedge.rules.wiring import Wiring
from kedge.store.recording import Recording, Rows
from kedge.store.rows import FULL

#: How many sites a list in the evidence names.
NAMED = 6


@dataclass(frozen=True)
class Telling:
    """A birth with all that is needed to speak of it."""

    recording: Recording
    wiring: Wiring
    moment: Moment
    birth: Birth

    def message(self) -> str:
        """Say in one sentence what was born where."""
        return self._form().format(
            site=self.wiring.text(self.birth.site),
            value=self._value(),
            step=self.moment.step,
            near=self._list(self.birth.near),
            name=self._name(),
            parts=self._parts(),
        )

    def remedy(self) -> str:
        """Say what to do about it."""
        if self._largest() > self._huge():
            return _DIVERGED.format(largest=self._largest())
        return _REMEDIES[self.birth.how].format(name=self._name())

    def evidence(self) -> dict[str, Any]:
        """Give the figures of the site and of its neighbours, and what became of the value."""
        row, module = self._row(), self.birth.module
        healed = [m for m in self.wiring if self.moment.bad(m.ins) and self.moment.finite(m.outs)]
        return {
            "how": self.birth.how,
            "module": module.path if module else None,
            "type": module.type if module else None,
            "value": self._kind(),
            "nonfinite": row["nonfinite"],
            "count": row["count"],
            "near": {self.wiring.text(site): self._figures(site) for site in self.birth.near[:NAMED]},
            "propagated": int((self.moment.states > FINITE).sum()) - 1,
            "healed": [self.wiring.text(m.outs[0]) for m in healed[:NAMED]],
        }

    def _largest(self) -> float:
        """Give the largest value next to the birth."""
        figures = [self._figures(site) for site in self.birth.near]
        return max((abs(f[name]) for f in figures for name in ("min", "max") if name in f), default=0.0)

    def _huge(self) -> float:
        """Give the size from which a product of two values is in danger of overflow."""
        return 1e3 if self.wiring.sites[self.birth.site].dtype == "float16" else 1e15

    def _figures(self, site: int) -> dict[str, Any]:
        """Give the range of a site's values, in this step or when it was last measured in full."""
        rows = self.recording.rows(self.wiring.sites[site])
        full = np.flatnonzero((rows.level == FULL) & (rows.step <= self.moment.step))
        if not len(full):
            return {}
        row = _row(rows, int(full[-1]))
        return {name: row[name] for name in ("step", "min", "max", "rms") if row[name] is not None}

    def _row(self) -> dict[str, Any]:
        rows = self.recording.rows(self.wiring.sites[self.birth.site])
        return _row(rows, _latest(rows, self.moment.step))

    def _kind(self) -> str:
        """Say what kind of value the site held."""
        rows = self.recording.rows(self.wiring.sites[self.birth.site])
        at = _latest(rows, self.moment.step)
        if self.moment.states[self.birth.site] == NAN or has_nan(rows)[at]:
            return "NaN"
        below = rows.min[at] == -np.inf or rows.sum[at] == -np.inf
        above = rows.max[at] == np.inf or rows.sum[at] == np.inf
        if not below and not above:
            return "an infinite norm"
        return "inf and -inf" if below and above else "-inf" if below else "inf"

    def _value(self) -> str:
        row = self._row()
        return self._kind() + (f" ({row['nonfinite']} of {row['count']} elements)" if row["nonfinite"] else "")

    def _form(self) -> str:
        """Choose the sentence."""
        how, near = self.birth.how, self.birth.near
        if how == "gap" and not near:
            return _GAP_AT_THE_LOSS
        if how == "between" and not near:
            return _BETWEEN_AT_THE_START
        return _MESSAGES[how]

    def _list(self, sites: Iterable[int]) -> str:
        texts = [self.wiring.text(site) for site in sites]
        rest = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
        return ", ".join(texts[:NAMED]) + rest

    def _name(self) -> str:
        """Name the module that made it, or that holds the operation that did."""
        module = self.birth.module
        if module is None:
            return "the program"
        if module.path and module.type:
            return f"{module.path} ({module.type})"
        return module.path or module.type or "the model"

    def _parts(self) -> str:
        """Name what of a module was finite."""
        module = self.birth.module
        if module is None:
            return ""
        inputs = len(module.ins) or len(module.sources)
        given, verb = ("inputs", "were") if inputs > 1 else ("input", "was")
        held = any(m.params for m in (module, *self.wiring.inside(module)))
        if self.birth.sure < 0.8:
            return f"{given} and parameters were finite, as far as they were watched"
        if self.birth.stale:
            return f"{given} {verb} finite, and so were its parameters when they were last seen"
        if held:
            return f"{given} and parameters were finite"
        return f"{given} {verb} finite"


def _latest(rows: Rows, step: int) -> int:
    """Find the row of a step, or the last one before it."""
    return max(int(np.searchsorted(rows.step, step, side="right")) - 1, 0)


def _row(rows: Rows, at: int) -> dict[str, Any]:
    """Give the figures of one row that were measured, as plain JSON values."""
    numbers: dict[str, Any] = {name: plain(rows.statistic(name)[at]) for name in ("min", "max", "rms")}
    nonfinite = int(rows.nonfinite[at])
    known = {"nonfinite": None if nonfinite < 0 else nonfinite, "count": int(rows.count[at])}
    return {"step": int(rows.step[at]), **numbers, **known}


def plain(number: float) -> float | None:
    """Round a figure to six digits for a finding's evidence; None in place of what JSON cannot hold."""
    return float(f"{number:.6g}") if np.isfinite(number) else None


_FIRST = "{site} was the first to hold {value} at step {step}; "
_GRADIENT = "{site} was the first gradient to hold {value} at step {step}; "

_MESSAGES = {
    "module": _FIRST + "its {parts}.",
    "own": _FIRST + "the modules inside it returned finite values, so an operation in its own forward made it.",
    "between": "{site} was the first to hold {value} at step {step}, although {near} before it was finite: "
    "an operation in the forward of {name} made it, outside any watched module.",
    "entry": "{site} was the first to hold {value} at step {step}: it came in from outside the model, "
    "with the batch or from what the program computed before this call.",
    "unclear": _FIRST + "so did what came in, or that was not watched: which call or operation made it cannot be told.",
    "parameter": "{site} held {value} already when the forward of step {step} used it, and nothing was seen to do so "
    "before: it came from the initialisation, a checkpoint or an optimizer step that was not watched.",
    "update": "{site} was the first to hold {value} at step {step}; "
    "the parameter and its gradient were finite, so the optimizer's step made it.",
    "backward": _GRADIENT + "the gradient that arrived at {name} was finite, so its backward made it.",
    "either": _GRADIENT
    + "the gradient that arrived at {name} was finite: its backward made it, or that of an operation "
    "outside any watched module that uses the same value.",
    "gap": _GRADIENT + "{near}, nearer to the loss, was finite: a backward between the two made it.",
    "loss": _GRADIENT + "there the gradient enters the model: the loss, computed outside any watched module, made it.",
}
_GAP_AT_THE_LOSS = (
    "{site} held {value} at step {step}, and so did every gradient nearer to the loss, while the outputs were finite: "
    "the loss or a backward made it, and clipping by norm spreads it to all gradients."
)
_BETWEEN_AT_THE_START = (
    "{site} was the first to hold {value} at step {step}: "
    "an operation in the forward of {name} made it, outside any watched module."
)

_OPERATION = (
    "look at the range of the inputs in the evidence: log, division, sqrt, pow, exp and acos leave the finite numbers "
    "at 0, at 1 or for large values; clamp what goes in, add an epsilon, or use the stable form "
    "(log_softmax, logsumexp, softplus, *_with_logits)"
)
_DIVERGED = (
    "The values next to it had grown to {largest:.1e}: the run had diverged before, and this is where it left the range "
    "of the dtype. Lower the learning rate or warm it up, clip gradients, and look at the steps before."
)
_REMEDIES = {
    "module": "In {name}, " + _OPERATION + ".",
    "own": "In the forward of {name}, after its modules, " + _OPERATION + ".",
    "between": "In the forward of {name}, " + _OPERATION + ".",
    "entry": "Check the batch before the model sees it: torch.isfinite(x).all(); missing values, a division by a zero "
    "standard deviation and a bad file are the usual causes.",
    "unclear": "Watch more sites (the default selector watches all modules), or every step (--every 1), and run again.",
    "parameter": "Check the checkpoint and the initialisation with torch.isfinite; if the parameter was finite before, "
    "lower the learning rate.",
    "update": "Lower the learning rate, raise the optimizer's eps, and check its state if it came from a checkpoint.",
    "backward": "In {name}, look for an operation whose derivative is infinite where its value is not: sqrt or norm at "
    "0, pow below 1 at 0, a division, or torch.where, which multiplies the branch not taken by zero: infinity times "
    "zero is NaN. Change its input, not its output (clamp or where before the operation).",
    "either": "Look, there and in the forward around it, for an operation whose derivative is infinite: sqrt or norm at "
    "0, a division, or torch.where around one of them. Change its input, not its output.",
    "gap": "Look at the operations between these sites for one whose derivative is infinite: sqrt or norm at 0, "
    "a division, or torch.where around one of them. Change its input, not its output.",
    "loss": "Look at the loss and what it is computed from: log of 0, division by a zero count (an empty mask), sqrt "
    "at 0, or a loss scale that is too large.",
}
