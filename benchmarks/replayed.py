"""Run the last steps of programs again: do they repeat to the bit?

    python benchmarks/replayed.py [FOLDER ...] [--only PROGRAM]

Each program of ``programs/``, and of the folders that are named, runs under ``kedge run
--keep-steps 2``, with no other option, and each pass of its last two steps is run again by ``kedge
replay``. Three figures count:

* same: the passes whose loss has the bits of the recorded one;
* leads on: those of them that end in the parameters of the next kept pass, to the bit;
* kept: the programs of which a step was kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
LIMIT = 300.0
"""Seconds that one command may take."""


@dataclass(frozen=True)
class Pass:
    """A pass that ran again, or did not.

    Attributes:
        program: The program.
        step: The step and the pass, as ``STEP.PASS``.
        found: The JSON of ``kedge replay``; None if it could not be run.
        said: What it said on stderr.
    """

    program: str
    step: str
    found: dict[str, Any] | None
    said: str

    def line(self) -> str:
        """Format it in a line."""
        if self.found is None:
            return f"FAILED   {self.program:28} {self.step:8} {self.said}"
        verdict = "same" if self.found["same"] else "OTHER"
        onward = {True: "leads on", False: "not on", None: ""}[self.found["leads_on"]]
        lacking = ", ".join(self.found["lacking"]) or self.found["again"]["error"] or ""
        return f"{verdict:8} {self.program:28} {self.step:8} {onward:10} {lacking}"


def kedge(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "kedge", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def again(script: Path, folder: Path) -> list[Pass]:
    """Run a program, and each of its last passes again; none if no step was kept."""
    recording = folder / f"{script.stem}.kedge"
    kedge("run", "-q", "-o", str(recording), "--keep-steps", "2", str(script), folder=folder)
    passes = []
    for kept in sorted(recording.glob("step-*-*")):
        _, step, number = kept.name.split("-")
        words = ("replay", str(recording), "--json", "--step", step, "--pass", number)
        done = kedge(*words, folder=folder)
        found = json.loads(done.stdout) if done.returncode in (0, 1) else None
        last = (done.stderr.strip().splitlines() or [""])[-1]
        passes.append(Pass(script.stem, f"{step}.{number}", found, last))
        print(passes[-1].line(), flush=True)
    if not passes:
        print(f"-        {script.stem:28} no step was kept", flush=True)
    return passes


def main() -> int:
    """Run all programs; return 1 if a pass could not be run again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="more programs")
    parser.add_argument("--only", metavar="PROGRAM", default="*", help="only these programs")
    args = parser.parse_args()
    scripts = [
        script
        for place in (PROGRAMS, *args.folders)
        for script in sorted(place.resolve().glob("*.py"))
        if fnmatch.fnmatch(script.stem, args.only)
    ]
    with tempfile.TemporaryDirectory() as passing:
        found = [again(script, Path(passing)) for script in scripts]
    passes = [each for of_one in found for each in of_one]
    ran = [each.found for each in passes if each.found is not None]
    same = [each for each in ran if each["same"]]
    onward = [each["leads_on"] for each in same if each["leads_on"] is not None]
    print(f"\nkept: {sum(map(bool, found))} of {len(scripts)} programs")
    print(f"same: {len(same)} of {len(passes)} passes; leads on: {sum(onward)} of {len(onward)}")
    return int(len(ran) < len(passes))


if __name__ == "__main__":
    raise SystemExit(main())
