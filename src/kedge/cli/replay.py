"""``kedge replay``: run a kept step of a run again, as it was and with something different."""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kedge.cli.output import make_writable, print_json
from kedge.cli.recordings import add_recording, recording_named
from kedge.cli.sites_option import add_sites
from kedge.errors import NotARecording, RecordingExists
from kedge.program.after_import import AfterImport
from kedge.program.ending import Ending, text_of
from kedge.program.program import Program
from kedge.short_text import for_json
from kedge.stderr import lasting_messenger

if TYPE_CHECKING:
    from kedge.replaying.program_again import ProgramAtPass
    from kedge.replaying.step import Replayed, StepOutcome
    from kedge.replaying.what_if import WhatIf
    from kedge.repro.kept.kept_pass import KeptPass

CANNOT = 2
OTHER = 1
_LARGEST_SEED = 2**64 - 1


class ReplayCommand:
    """Run a kept step of a run again, as it was and with something different.

    kedge run keeps the steps whose loss is NaN or jumps, and with --keep-steps N the last N steps.
    The program of the recording is run until it comes to the same line, with the arguments that it
    had. There its parameters, buffers, optimizers, random numbers and batch become those of the
    step, and the step runs: its loss has to be the recorded one, to the bit. Then it runs with what
    is different, and the process ends: the program does not go on.

    Exits with 1 if the step is not the same.

    --json prints one object:
      {"step": N, "pass": N, "line": TEXT, "recorded": LOSS, "same": true | false,
       "again": OUTCOME, "what_if": TEXT, "other": OUTCOME | null, "lacking": [TEXT, ...],
       "leads_on": true | false | null, "origin": TEXT | null}
    An outcome is {"loss", "gradient", "loss_after", "error"}.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        add_recording(parser)
        parser.add_argument(
            "--step",
            metavar="N",
            type=int,
            help="the step (default: the first bad one, else the last one that was kept)",
        )
        parser.add_argument(
            "--pass",
            metavar="N",
            type=int,
            dest="number",
            help="the backward pass of the step, from 0 (default: its last one)",
        )
        parser.add_argument("--list", action="store_true", help="list the kept steps, and run none")
        what_if = parser.add_argument_group("what is different")
        what_if.add_argument("--rate", metavar="R", type=_rate, help="another learning rate")
        what_if.add_argument(
            "--clip", metavar="NORM", type=_norm, help="clip the gradients to this norm"
        )
        what_if.add_argument(
            "--without-rows",
            metavar="ROWS",
            type=_rows,
            default=(),
            help="leave out rows of the batch, from 0 (numbers separated by commas)",
        )
        what_if.add_argument("--double", action="store_true", help="compute in float64")
        what_if.add_argument(
            "--autocast", choices=("bf16", "fp16"), help="compute under autocast with this type"
        )
        what_if.add_argument("--seed", metavar="N", type=_seed, help="draw other random numbers")
        parser.add_argument(
            "-o",
            metavar="NAME.kedge",
            dest="output",
            help="record the step, as it was or with what is different, with every value",
        )
        add_sites(parser, "record only these sites")
        parser.add_argument("--json", action="store_true", help="print one object")

    def run(self, args: argparse.Namespace) -> int | Ending:
        """Run the program, and the step."""
        recording = Path(recording_named(args.recording))
        if args.list:
            return _list(recording)
        if args.output is not None and os.path.lexists(args.output):
            raise RecordingExists(
                f"cannot create the recording {args.output}: there is one already; name another place"
            )
        folder = _chosen(recording, args.step, args.number).absolute()
        if args.output is not None:
            args.output = os.path.abspath(args.output)
        program = _program_of(recording.absolute())
        program.check()
        return _replay(program, folder, args)


def _rows(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no rows, such as 3,17")
    return tuple(map(int, parts))


def _rate(text: str) -> float:
    rate = _number(text)
    if not 0 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no learning rate, such as 0.01")
    return rate


def _norm(text: str) -> float:
    norm = _number(text)
    if not 0 < norm < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no norm above zero")
    return norm


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed, from 0 to {_LARGEST_SEED}")
    return int(text)


def _list(recording: Path) -> int:
    from kedge.repro.kept.kept_pass import KeptPass

    for folder in _kept(recording):
        kept = KeptPass.read(folder)
        line = kept.inputs.line
        text = f"step {kept.step}, pass {kept.number}: {line}"
        if line.text:
            text += f": {line.text}"
        print(text)
    return 0


def _kept(recording: Path) -> list[Path]:
    from kedge.repro.kept.kept_pass import kept_in
    from kedge.store.reading.json_files import read_manifest

    read_manifest(recording)
    folders = kept_in(recording)
    if not folders:
        raise NotARecording(
            f"{recording} has no kept step: keep the last ones with kedge run --keep-steps 2; "
            "without it only steps whose loss is NaN or jumps are kept, if they are small"
        )
    return folders


def _chosen(recording: Path, step: int | None, number: int | None) -> Path:
    """Return the folder of the pass that was asked for."""
    from kedge.repro.kept.kept_pass import first_to_see, place_of

    folders = _kept(recording)
    by_step: dict[int, dict[int, Path]] = {}
    for folder in folders:
        at, index = place_of(folder)
        by_step.setdefault(at, {})[index] = folder
    if step is None:
        step, first = first_to_see(folders)
        if number is None:
            number = first
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise NotARecording(f"{recording} has not kept step {step}; it has {steps}")
    passes = by_step[step]
    if number is None:
        number = max(passes)
    if number not in passes:
        kept = ", ".join(map(str, sorted(passes)))
        raise NotARecording(
            f"{recording} has not kept backward pass {number} of step {step}; it has {kept}"
        )
    return passes[number]


def _program_of(recording: Path) -> Program:
    """Return the recorded program, in the folder that it ran in, as far as that is there.

    Where the program is not there any more, or has changed, it is that in the recording.
    """
    from kedge.repro.kept.sources import FOLDER, changed_since
    from kedge.store.reading.json_files import read_manifest

    manifest = read_manifest(recording)
    ran_in = manifest.get("folder")
    if isinstance(ran_in, str) and os.path.isdir(ran_in):
        os.chdir(ran_in)
    first, *rest = manifest.get("command") or [""]
    if first == "-m":
        return Program(rest[0], is_module=True, args=rest[1:])
    script = Path(first)
    copy = recording / FOLDER / script.name
    if not copy.is_file():
        return Program(first, is_module=False, args=rest)
    changed = changed_since(recording, script)
    if not changed:
        return Program(first, is_module=False, args=rest)
    tell = lasting_messenger()
    why = f"{changed[0]} is another one than it was in the run"
    if not (script.parent / changed[0]).is_file():
        why = f"{script.parent / changed[0]} is not there"
    tell(f"{why}: the recorded one is run, {copy}")
    return Program(str(copy), is_module=False, args=rest)


def _replay(program: Program, folder: Path, args: argparse.Namespace) -> int | Ending:
    tell = lasting_messenger()
    report = ReplayReport(args.json, sys.stdout)

    def begin() -> None:
        from kedge.replaying.program_again import ProgramAgain
        from kedge.repro.kept.kept_pass import KeptPass

        kept = KeptPass.read(folder)

        def reached(at: ProgramAtPass) -> NoReturn:
            try:
                status = _replayed(kept, folder, at, args, report)
            except Exception as error:  # noqa: BLE001 - told, and the process ends
                tell(f"the step could not run again: {text_of(error)}")
                status = CANNOT
            # Without the program's own end, which would save what the step has left.
            os._exit(status)

        ProgramAgain(kept, reached).begin()

    AfterImport("torch", begin).install()
    with redirect_stdout(sys.stderr):
        ending = program.run()
    make_writable()
    why = "the program did not come to the line of the step"
    if ending.error is not None:
        why = f"the program ended before the line of the step: {text_of(ending.error)}"
    tell(f"nothing ran again: {why}")
    if ending.status:
        return ending
    return CANNOT


def _replayed(
    kept: KeptPass, folder: Path, at: ProgramAtPass, args: argparse.Namespace, report: ReplayReport
) -> int:
    """Run the step, and print what came; returns the exit status."""
    from kedge.replaying.put_back import KeptState, following_models
    from kedge.replaying.step import StepReplay
    from kedge.replaying.what_if import WhatIf

    what_if = WhatIf(args.rate, args.clip, args.without_rows, args.double, args.autocast, args.seed)
    state = KeptState.of(kept, folder, at.models, at.optimizers)
    step = StepReplay(state, at, following_models(folder))
    result = step.run(what_if, lambda: _watching(args))
    report.print(kept, what_if, result)
    if result.is_same:
        return 0
    return OTHER


def _watching(args: argparse.Namespace) -> AbstractContextManager[object]:
    if args.output is None:
        return nullcontext()
    from kedge.watch.run.block import watch

    return watch(
        args.output, sites=args.sites or "**", every=1, budget=None, rerun=False, keep_steps=0
    )


class ReplayReport:
    """Prints what came to the stdout that was there before the program.

    Args:
        as_json: Whether it prints JSON.
        out: That stdout.
    """

    def __init__(self, as_json: bool, out: TextIO) -> None:
        self._as_json = as_json
        self._out = out

    def print(self, kept: KeptPass, what_if: WhatIf, result: Replayed) -> None:
        """Print what a step has come to."""
        from kedge.replaying.text import as_text, words_of_origin

        if self._as_json:
            print_json(
                {
                    "step": kept.step,
                    "pass": kept.number,
                    "line": str(kept.inputs.line),
                    "recorded": for_json(result.recorded),
                    "same": result.is_same,
                    "again": _entry(result.again),
                    "what_if": str(what_if),
                    "other": _entry(result.other),
                    "lacking": list(result.lacking),
                    "leads_on": result.leads_on,
                    "origin": words_of_origin(result.origin),
                },
                self._out,
            )
        else:
            print(as_text(kept, what_if, result), file=self._out)
        self._out.flush()


def _entry(outcome: StepOutcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {name: for_json(value) for name, value in asdict(outcome).items()}
