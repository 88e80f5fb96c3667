"""Draw `saved.png` and `flame.png`, the pictures of docs/how-to/saved.md, from a recording of a small GPT.

kedge run --saved -o gpt.kedge gpt.py
python docs/pictures/saved.py gpt.kedge
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import opened

from kedge.report.page.render import render_page
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import ALL, check
from kedge.store.recording import Recording


def main() -> None:
    """Write the pictures beside this file."""
    recording = Recording.open(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(render_page(ShownRun(recording, check(recording), ALL)), encoding="utf-8")
        with opened(file, (1240, 1500, "light")) as [page]:
            page.evaluate("document.querySelector('.bar').style.position = 'static'")
            page.locator("#saved").screenshot(path=Path(__file__).with_name("saved.png"))
            page.locator(".flame .box", has_text="BmmBackward0").first.hover()
            page.locator("#saved .memory").screenshot(path=Path(__file__).with_name("flame.png"))


if __name__ == "__main__":
    main()
