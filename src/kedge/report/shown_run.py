"""A recording as it is shown.

It is drawn by a terminal, a page, the live screen, a table of runs and a notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.text import Text

from kedge.report.curves import Curve, curves_of, early_end
from kedge.report.module_lines import ModuleLine, folded, lines
from kedge.report.module_table import marks_of
from kedge.report.what_ran import command_of
from kedge.rules.judgement import Judgement, judgement_of
from kedge.rules.rule import Finding, Rule
from kedge.store.recording import Recording


@dataclass(frozen=True, eq=False)
class ShownRun:
    """One recording with its findings; what several parts of it are drawn from is made once.

    Attributes:
        recording: The recording so far.
        findings: The findings of the rules, the worst first.
        rules: The rules that were run; all of them if None.
        written: Whether a process still writes the recording; None if that is not known.
        pace: Recent steps per second; None if that is not known.
    """

    recording: Recording
    findings: Sequence[Finding] = ()
    rules: Sequence[Rule] | None = None
    written: bool | None = None
    pace: float | None = None

    @cached_property
    def judgement(self) -> Judgement:
        """The findings, and the rules that could not judge."""
        judgement = judgement_of(self.recording, self.findings, self.rules)
        return replace(judgement, ended=self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded: the run has ended, or was killed."""
        return self.recording.end is not None or self.written is False

    @property
    def command(self) -> str:
        """The command of the run, or its script; empty if neither is known."""
        return command_of(self.recording.manifest)

    @cached_property
    def curves(self) -> tuple[Curve, ...]:
        """The losses, norms, learning rates, and what the program logged, also those without a value."""
        return tuple(curves_of(self.recording))

    @cached_property
    def drawn_curves(self) -> tuple[Curve, ...]:
        """Those that have a value."""
        return tuple(curve for curve in self.curves if len(curve.steps))

    @cached_property
    def losses(self) -> tuple[Curve, ...]:
        """The losses that have a value."""
        return tuple(curve for curve in self.drawn_curves if curve.kind == "loss")

    @cached_property
    def logged(self) -> tuple[Curve, ...]:
        """What the program logged."""
        return tuple(curve for curve in self.drawn_curves if curve.kind == "logged")

    @cached_property
    def early(self) -> str:
        """A sentence on curves that end long before the run; empty if they do not."""
        return early_end(self.recording, self.drawn_curves)

    @cached_property
    def lines(self) -> tuple[ModuleLine, ...]:
        """A line for each module, in data-flow order."""
        return lines(self.recording)

    @cached_property
    def folds(self) -> tuple[ModuleLine, ...]:
        """The same, with alike blocks in one line if there are many."""
        return tuple(folded(self.lines, self.findings))

    def marks(self, shown: Sequence[ModuleLine]) -> dict[str, Text]:
        """Return the marks before lines with findings, by label."""
        return marks_of(shown, self.findings)
