"""The three ways in which ``abroad.py`` asks Kedge about a program.

* run: ``kedge run`` and ``kedge check``, at defaults;
* examine: ``kedge examine``. What counts is what it says beyond what it says of the program without
  the fault;
* against: ``kedge check RUN --against GOOD``. The good run is the program without the fault, with
  another seed, and half as long again.

Each gives one of these words:

* named: the fault is named. Of an examination: by a trial that the table has, with that verdict;
  "weaker" is one that only says where to look, though it is certain. Of a good run: by a departure
  of a kind that the table has; "other" are departures of other kinds alone;
* partly: a true symptom was found;
* missed: nothing of it was said;
* nothing: the table says that it cannot be shown in this way, and nothing is said;
* FALSE: something is said that is false;
* quiet, ALARM: a program without a fault got neither warning nor error, or got one.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trials
from abroad_cases import Case, read
from against import reseeded
from examine import Spoken, shown, spoken, weighed

WAYS = ("run", "examine", "against")
NAMING = frozenset({"named", "weaker"})
"The words of a fault that is named."
SHOWABLE = NAMING | {"partly", "missed", "other", "FALSE"}
"The words of a fault that can be shown in a way."
OTHER_SEED = 100
LONGER = 1.5
"What the good run has more of: its seed is so much higher, and it has so many times the steps."
LOOP = re.compile(r"(for (?:step|epoch) in range\()(\d+)")


@dataclass(frozen=True)
class Answer:
    """What was said of a program in one way.

    Attributes:
        word: What it counts as.
        said: The codes, trials or kinds.
    """

    word: str
    said: str = "-"


NOT_ASKED = Answer("-")


@dataclass
class Workplace:
    """Where programs run, each in a folder of its own, and what came of them so far.

    Attributes:
        programs: The folder with the programs.
        folder: The folder of their runs.
        table: The table that they are from.
    """

    programs: Path
    folder: Path
    table: Path
    _spoken: dict[str, Spoken] = field(default_factory=dict)

    def ask(self, way: str, case: Case) -> Answer:
        """Return what is said of a case in one of `WAYS`.

        Raises:
            RuntimeError: A program, or Kedge's command, failed.
        """
        if way == "run":
            return self._of_run(case)
        if not (case.examine or case.against or self._is_twin(case)):
            return NOT_ASKED
        if way == "examine":
            return self._of_examination(case)
        return self._against_good(case)

    def _is_twin(self, case: Case) -> bool:
        return any(other.twin == case.title for other in read(self.table))

    def _of_run(self, case: Case) -> Answer:
        found = trials.findings(self._recorded(case))
        return Answer(case.verdict(found), coded(found))

    def _of_examination(self, case: Case) -> Answer:
        if case.ranks > 1:
            return Answer("nothing", "several ranks")
        said = self._examined(case)
        if not case.fault:
            wrong = any(verdict == "wrong" for verdict, _ in said)
            return Answer("ALARM" if wrong else "quiet", shown(said) or "-")
        beside = frozenset(("look", trial) for trial in case.examine.get("beside", ()))
        if case.twin:
            beside |= self._examined(self._twin(case))
        word, right, false = weighed(case.examine, said, beside)
        parts = [shown(right)] if right else []
        parts += [f"false: {shown(false)}"] if false else []
        return Answer(word.replace("MISSED", "missed"), "; ".join(parts) or "-")

    def _examined(self, case: Case) -> Spoken:
        if case.title not in self._spoken:
            self._spoken[case.title] = spoken(
                Path(case.program).name, *case.arguments, place=self._place(case)
            )
        return self._spoken[case.title]

    def _against_good(self, case: Case) -> Answer:
        if not case.fault:
            return self._repeated(case)
        if not case.twin:
            return Answer("nothing", "no twin")
        found = departed(self._recorded(case), self._good(self._twin(case)))
        kinds = {each["evidence"]["kind"] for each in found}
        said = " ".join(sorted(kinds)) or "-"
        if kinds & set(case.against.get("kinds", ())):
            return Answer("named", said)
        if kinds:
            return Answer("other", said)
        return Answer("missed" if case.against.get("kinds") else "nothing")

    def _repeated(self, case: Case) -> Answer:
        """Ask a program without a fault against its good run, and that against it."""
        runs = self._recorded(case), self._good(case)
        found = [*departed(*runs), *departed(*reversed(runs))]
        said = " ".join(dict.fromkeys(each["evidence"]["kind"] for each in found)) or "-"
        return Answer("ALARM" if found else "quiet", said)

    def _twin(self, case: Case) -> Case:
        return next(each for each in read(self.table) if each.title == case.twin)

    def _recorded(self, case: Case) -> Path:
        return recorded(case, self._place(case))

    def _good(self, twin: Case) -> Path:
        """Return the recording of a program without a fault, with another seed and length."""
        place = self._place(twin, "good")
        program = place / Path(twin.program).name
        if not (place / "run.kedge").exists():
            source = (self.programs / twin.program).read_text(encoding="utf-8")
            program.write_text(longer(reseeded(source, OTHER_SEED)), encoding="utf-8")
        return recorded(twin, place)

    def _place(self, case: Case, *more: str) -> Path:
        """Return a folder of its own for a case, with a copy of its program."""
        place = self.folder / re.sub(r"\W+", "-", " ".join((case.title, *more)))
        if not place.exists():
            shutil.copytree((self.programs / case.program).parent, place)
        return place


def recorded(case: Case, place: Path) -> Path:
    """Run a case as a user would, in its folder, and return its recording.

    Raises:
        RuntimeError: The program failed.
    """
    recording = place / "run.kedge"
    if recording.exists():
        return recording
    arguments = ("run", "-o", recording.name, Path(case.program).name, *case.arguments)
    if case.ranks > 1:
        result = trials.on_ranks(case.ranks, arguments, place)
    else:
        result = trials.command(*arguments, place=place)
    (place / "printed.txt").write_text(result.stdout, encoding="utf-8")
    (place / "messages.txt").write_text(result.stderr, encoding="utf-8")
    if result.returncode:
        raise RuntimeError(f"exit status {result.returncode}: {trials.last_line(result.stderr)}")
    return recording


def departed(recording: Path, good: Path) -> list[dict[str, Any]]:
    """Return what departs in a recording from a good run."""
    found = trials.findings(recording, "--against", str(good.resolve()))
    return [each for each in found if each["code"] == "DEPARTS"]


def longer(source: str) -> str:
    """Return a program with more steps or epochs: those of the first loop over either."""
    return LOOP.sub(lambda loop: f"{loop[1]}{round(int(loop[2]) * LONGER)}", source, count=1)


def coded(findings: Sequence[dict[str, Any]]) -> str:
    """Return the codes of findings, with their severities and how often they were found."""
    codes = Counter(f"{each['code']} ({each['severity']})" for each in findings)
    counted = [f"{code} x{count}" if count > 1 else code for code, count in codes.items()]
    return ", ".join(counted) or "-"
