"""The programs of ``abroad.toml``, and what each way of judging them has to say."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LISTS = ("arguments", "codes", "says", "partly", "never")
"The keys of the table whose values are lists."


@dataclass(frozen=True)
class Case:
    """A program, and what has to be said of it: a row of the table.

    Attributes:
        examine: What ``kedge examine`` has to say; empty if that is not stated.
        against: What departs from a good run; empty if that is not stated.
        twin: The title of the case without the fault; empty if there is none.
    """

    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    fault: str = ""
    codes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    only_diff: str = ""
    twin: str = ""
    examine: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The program and its arguments."""
        return titled(self.program, *self.arguments)

    def verdict(self, findings: Sequence[dict[str, Any]]) -> str:
        """Return what the findings of a run count as."""
        if any(re.search(pattern, told(each)) for each in findings for pattern in self.never):
            return "FALSE"
        if not self.fault:
            loud = any(each["severity"] != "info" for each in findings)
            return "ALARM" if loud else "quiet"
        if any(self.is_named_by(each) for each in findings):
            return "named"
        if any(each["code"] in (*self.codes, *self.partly) for each in findings):
            return "partly"
        return "hidden" if self.only_diff else "missed"

    def is_named_by(self, finding: dict[str, Any]) -> bool:
        """Whether a finding names the fault."""
        text = told(finding)
        return finding["code"] in self.codes and all(
            re.search(pattern, text) for pattern in self.says
        )


def titled(program: str, *arguments: str) -> str:
    """Return the title of a program with some arguments."""
    return " ".join((program.removesuffix(".py"), *arguments))


def told(finding: dict[str, Any]) -> str:
    """Return all that a finding says."""
    return " ".join((finding["site"], finding["message"], finding["remedy"]))


def read(table: Path) -> list[Case]:
    """Return all cases of a table."""
    every = []
    for row in tomllib.loads(table.read_text(encoding="utf-8"))["run"]:
        values = {key: tuple(value) if key in LISTS else value for key, value in row.items()}
        twin = row.get("twin", "").split()
        every.append(Case(**values | {"twin": titled(*twin) if twin else ""}))
    return every


def cases(table: Path, pattern: str) -> list[Case]:
    """Return the cases of a table whose title or code matches a pattern; plain text matches what holds it."""
    wanted = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    return [
        case
        for case in read(table)
        if any(fnmatch.fnmatch(text, wanted) for text in (case.title, *case.codes))
    ]
