"""Curves and findings in TensorBoard: during a run, or from its recording."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from kedge.files.given_path import given_path
from kedge.integrations.scalars import FINDINGS, Scalars
from kedge.store.recording import Recording
from kedge.watch.run.replay import replay


class TensorBoard(Scalars):
    """A sink that writes curves and findings for TensorBoard.

    ``kedge.watch("run.kedge").send_to(TensorBoard("runs/1"))`` writes them during the run.

    Args:
        logdir: A folder, or the program's own `SummaryWriter`, which is left open.
        statistics: The statistics of each site to write.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | SummaryWriter,
        statistics: Sequence[str] = ("rms",),
    ) -> None:
        super().__init__(statistics)
        self.given = logdir
        self._own: SummaryWriter | None = None
        self._texts: list[str] = []
        self._waits = False
        self._found = 0  # the newest step of a finding

    @property
    def writer(self) -> SummaryWriter:
        """The writer; its own one, which has a thread, is made when first needed."""
        if isinstance(self.given, SummaryWriter):
            return self.given
        if self._own is None:
            self._own = SummaryWriter(str(given_path(self.given)))
        return self._own

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        self._write_findings()
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def send_finding(self, finding: Mapping[str, Any]) -> None:
        """Add a finding to the text, which is written as a whole.

        Of many texts, TensorBoard shows ten drawn at random.
        """
        head = f"**{finding['code']}** ({finding['severity']}) at {finding['site']}"
        if finding["step"] >= 0:
            head += f", step {finding['step']}"
        paragraphs = [head, finding["message"], finding["remedy"]]
        self._texts.append("\n\n".join(filter(None, paragraphs)))
        self._found = max(self._found, finding["step"])
        self._waits = True

    def _write_findings(self) -> None:
        if self._waits:
            self.writer.add_text(FINDINGS, "\n\n---\n\n".join(self._texts), self._found)
            self._waits = False

    def close(self) -> None:
        """Write everything that waits."""
        if not self._texts:
            nothing = "no findings; `kedge check` lists the rules that could judge"
            self.writer.add_text(FINDINGS, nothing, self.step)
        self._write_findings()
        self.writer.flush()
        if self._own is not None:
            self._own.close()
            self._own = None


def export(
    recording: Recording | str | os.PathLike[str],
    logdir: str | os.PathLike[str] | SummaryWriter,
    statistics: Sequence[str] = ("rms",),
) -> None:
    """Write the statistics and findings of a recording for TensorBoard.

    Args:
        recording: The recording, or its path.
        logdir: A folder, or a `SummaryWriter`.
        statistics: The statistics of each site to write.
    """
    replay(recording, TensorBoard(logdir, statistics))
