"""Curves and findings in Weights & Biases: during a run, or from its recording.

# Note [The summary of a run]
Its rows are the columns of the table of runs. The curves of sites would add thousands, so only the
loss, the norm and the findings are in it, with names that are short enough for viewers that cut
them. What is defined for a pattern does not reach the summary of names with dots, since there a dot
means a key inside another one: those are defined one by one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from kedge.integrations.scalars import Scalars, text_of
from kedge.report.fitted_text import cut
from kedge.store.recording import Recording
from kedge.watch.run.replay import replay

_STEP = "kedge/step"
#: What the names of the curves of sites begin with.
_OF_SITES = "kedge_"
_COUNTS = {"error": "kedge/errors", "warning": "kedge/warnings", "info": "kedge/info"}
#: The longest title of an alert: their server takes less than 64 characters.
_TITLE = 63


class Wandb(Scalars):
    """A sink that logs curves to a run of Weights & Biases.

    It sends errors as alerts, and counts findings in the summary.
    ``kedge.watch("run.kedge").send_to(Wandb(wandb.init()))`` does so during the run. The curves
    have an axis of their own, ``kedge/step``.

    Args:
        run: The run; it is left open.
        statistics: The statistics of each site to log.
        commit: Whether each step is a row of its own. Without it, the numbers join the row that the
            program logs next: for a program that gives its own `step` to `run.log`, where rows of
            others would push the step ahead.
    """

    def __init__(
        self, run: wandb.Run, statistics: Sequence[str] = ("rms",), *, commit: bool = True
    ) -> None:
        super().__init__(statistics)
        self.run = run
        self.commit = commit
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._named: set[str] = set()
        self._logged: set[str] = set()
        run.define_metric(_STEP, hidden=True)
        run.define_metric("kedge/*", step_metric=_STEP)
        # See Note [The summary of a run].
        run.define_metric(f"{_OF_SITES}*", step_metric=_STEP, summary="none")

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        for name in numbers.keys() - self._logged:
            self._keep_out_of_summary(name)
        self._logged |= numbers.keys()
        self.run.log({**numbers, _STEP: step}, commit=self.commit)

    def send_finding(self, finding: Mapping[str, Any]) -> None:
        """Add a finding to the summary, and alert the user to an error."""
        code = finding["code"]
        severity = finding["severity"]
        self._counts[severity] += 1
        if code not in self._named:
            self._named.add(code)
            self.run.summary[f"kedge/{code}"] = text_of(finding)
        if severity == "error":
            self.run.alert(
                title=cut(f"{code} at {finding['site']}", _TITLE),
                text=text_of(finding),
                level="ERROR",
            )

    def _keep_out_of_summary(self, name: str) -> None:
        if name.startswith(_OF_SITES) and "." in name:
            self.run.define_metric(name.replace(".", "\\."), step_metric=_STEP, summary="none")

    def close(self) -> None:
        """Count the findings in the summary, so that runs can be sorted by them."""
        for severity, count in self._counts.items():
            self.run.summary[_COUNTS[severity]] = count


def export(
    recording: Recording | str | os.PathLike[str],
    run: wandb.Run,
    statistics: Sequence[str] = ("rms",),
) -> None:
    """Log the statistics and findings of a recording to a run of Weights & Biases.

    Args:
        recording: The recording, or its path.
        run: The run; it is left open.
        statistics: The statistics of each site to log.
    """
    replay(recording, Wandb(run, statistics))
