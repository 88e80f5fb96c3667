"""Draw `live.svg`, the picture of docs/how-to/live.md, from a recording.

kedge run -o demo.kedge examples/digits.py --model log-of-zero --steps 160
python docs/pictures/live.py demo.kedge
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from kedge.report.live.app import LiveApp
from kedge.report.live.board import Board
from kedge.store.recording import Recording


async def screen(path: Path) -> str:
    """Open the screen on a recording, choose the last module but one and show it in detail."""
    app = LiveApp(path)
    async with app.run_test(size=(112, 34)) as pilot:
        while not app.query_one(Board).modules.shown:
            await pilot.pause(0.1)
        await pilot.press("end", "up", "enter")
        await pilot.pause(0.2)
        return app.export_screenshot(title=f"kedge live {path.name}")


def main() -> None:
    """Write the picture beside this file."""
    path = Recording.open(
        sys.argv[1]
    ).path  # an error if it is not there, which the screen would wait for
    drawn = asyncio.run(screen(path))
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # no font from the network
    drawn = drawn.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    Path(__file__).with_name("live.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
