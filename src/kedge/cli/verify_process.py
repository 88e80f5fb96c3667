"""The process that `kedge run --verify` starts: a program whose digests are written to a file.

``python -m kedge.cli.verify_process FILE (plain | watched) ...`` runs the words after ``plain`` as
python would, and the words after ``watched`` as `kedge run` would; the digests go to FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.main import main as command_line
from kedge.hooks.placing.own_warnings import ignore_warnings
from kedge.program.after_import import AfterImport
from kedge.program.program import Program

if TYPE_CHECKING:
    from kedge.verify.digests import DigestLog


def main() -> int:
    """Run the program; this process ends as the program does."""
    file, side, *words = sys.argv[1:]
    end = _begin(Path(file))
    try:
        return _plain(words) if side == "plain" else command_line(["run", *words])
    finally:
        end()


def _plain(words: list[str]) -> int:
    is_module = words[0] == "-m"
    target, *args = words[1:]
    program = Program(target, is_module, args)
    program.check()
    program.run().leave()


def _begin(place: Path) -> Callable[[], None]:
    """Start writing digests when the program has imported torch; return a function that ends it."""
    begun: list[DigestLog] = []

    def begin() -> None:
        from kedge.verify.digests import DigestLog

        begun.append(DigestLog(place))
        begun[0].begin()

    waiting = AfterImport("torch", begin)

    def end() -> None:
        waiting.remove()
        for log in begun:
            log.end()

    ignore_warnings()
    waiting.install()
    return end


if __name__ == "__main__":
    sys.exit(main())
