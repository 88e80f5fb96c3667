"""The process that `kedge diff --deep` starts: a recorded program once more, up to the end of one step.

``python -m kedge.cli.second_run_process FILE STEP RECORDING SITES (-m | --) PROGRAM ...`` records
the program as `kedge run` would, with step STEP measured in full, sees the operations of that step,
writes them to FILE, and ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.run import Output, recorder_of
from kedge.cli.watching import Watching
from kedge.program.ending import await_threads
from kedge.program.program import Program
from kedge.stderr import lasting_messenger
from kedge.watch.run.options import WatchOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from kedge.examination.written_files import WrittenFiles
    from kedge.repro.step.operations_seen import OperationsSeen
    from kedge.watch.watcher import Watcher

_SEEN_STEPS = 2
"""Steps whose operations are seen: the last one, and that in which its data may have been made."""


class SecondRunProcess:
    """The program of this process, up to the end of a step.

    Args:
        program: The program.
        step: The last step.
        place: The recording.
        sites: The selector of the recorded run.
        result: The file that gets what was seen of the step.
    """

    def __init__(self, program: Program, step: int, place: str, sites: str, result: Path) -> None:
        self._program = program
        self._step = step
        self._result = result.absolute()
        tell = lasting_messenger()
        # Without a limit, steps 0 and STEP are measured, and none between.
        order = WatchOptions(sites, every=max(step, 1), budget=None, rerun=False)
        self._recorder = recorder_of(program, order, Output(place, True, True, False), tell)
        self._watching = Watching(self._recorder, order, tell)
        self._watching.begun = self._begun
        self._failures: list[str] = []
        self._operations: OperationsSeen | None = None
        self._files: WrittenFiles | None = None
        self._watch: Watcher | None = None

    def run(self) -> None:
        """Run the program; this process ends with the step, or after the program."""
        self._program.check()
        self._watching.begin()
        ending = self._program.run()
        await_threads()
        if self._watch is not None and self._watch.step() == self._step and not ending.status:
            self._end()  # the last forward pass of a program that only infers ends no step
        ending.leave()

    def _begun(self, watch: Watcher) -> None:
        from kedge.examination.written_files import WrittenFiles
        from kedge.repro.step.operations_seen import OperationsSeen

        self._watch = watch
        self._files = WrittenFiles()
        self._files.install()
        self._operations = OperationsSeen(self._failures.append)
        if self._step < _SEEN_STEPS:
            self._operations.begin()
        watch.steps.on_step.append(self._step_ended)

    def _step_ended(self, step: int) -> None:
        if step >= self._step:
            self._end()
        elif step == self._step - _SEEN_STEPS and self._operations is not None:
            self._operations.begin()

    def _end(self) -> None:
        """Write what was seen, and end without the program's own end, which has not been reached."""
        from kedge.compare.operations.seen import SeenStep

        assert self._operations is not None  # noqa: S101 - as there is a step
        assert self._files is not None  # noqa: S101 - as above
        self._operations.end()
        operations = tuple(self._operations.seen(self._labels()))
        seen = SeenStep(operations, self._written(), "; ".join(self._failures))
        self._watching.finish()
        self._recorder.close()
        self._result.write_text(json.dumps(seen.entry()), encoding="utf-8")
        os._exit(0)

    def _labels(self) -> Callable[[nn.Module | None], str]:
        """Return what returns the recorded path of a module; the type in brackets of one without."""
        from kedge.torch_internals.module_tables import modules_in

        assert self._watch is not None  # noqa: S101 - as there is a step
        labels: dict[int, str] = {}
        for root in self._watch.models.roots:
            model = root.module()
            if model is not None:
                for path, module in modules_in(model).items():
                    labels.setdefault(id(module), root.label(path))

        def label(module: nn.Module | None) -> str:
            if module is None:
                return ""
            return labels.get(id(module), f"({type(module).__name__})")

        return label

    def _written(self) -> tuple[str, ...]:
        """Return the files that the program has written, without those of this run."""
        assert self._files is not None  # noqa: S101 - as there is a step
        own = str(self._result.parent)
        return tuple(name for name in self._files.named() if not name.startswith(own))


def main() -> None:
    """Run the program; this process ends with the step, or as the program does."""
    result, step, place, sites, kind, target, *args = sys.argv[1:]
    program = Program(target, kind == "-m", args)
    SecondRunProcess(program, int(step), place, sites, Path(result)).run()


if __name__ == "__main__":
    main()
