"""Draw `report.svg`, the picture of docs/how-to/nan.md, from a recording.

kedge run -o demo.kedge examples/digits.py --model log-of-zero --steps 160
python docs/pictures/report.py demo.kedge
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from kedge.report.shown_run import ShownRun
from kedge.report.terminal import render
from kedge.rules import check
from kedge.store.recording import Recording


def main() -> None:
    """Write the picture beside this file."""
    recording = Recording.open(sys.argv[1])
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=104, force_terminal=True, file=nowhere)
        render(ShownRun(recording, check(recording)), console)
    drawn = console.export_svg(title=f"kedge report {Path(sys.argv[1]).name}")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # no font from the network
    drawn = drawn.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    Path(__file__).with_name("report.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
