"""Draw the page of a recording: `page-light.png` and `page-dark.png` of docs/how-to/page.md, or `page-nan.png` of README.md.

kedge run -o demo.kedge --budget none examples/digits.py --model deep-sigmoid --steps 300
python docs/pictures/page.py demo.kedge page-light page-dark

kedge run -o demo.kedge examples/digits.py --model log-of-zero --steps 160
python docs/pictures/page.py demo.kedge page-nan
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
    """Write the named pictures beside this file."""
    recording, names = Recording.open(sys.argv[1]), sys.argv[2:]
    themes = ["dark" if name.endswith("-dark") else "light" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(render_page(ShownRun(recording, check(recording), ALL)), encoding="utf-8")
        with opened(file, *((1366, 1000, theme) for theme in themes)) as pages:
            for name, theme, page in zip(names, themes, pages, strict=True):
                if theme == "dark":
                    page.keyboard.press("j")
                    page.keyboard.press("Enter")
                page.screenshot(path=Path(__file__).with_name(f"{name}.png"))


if __name__ == "__main__":
    main()
