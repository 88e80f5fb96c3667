"""Draw the page of a recording: `page-light.png` and `page-dark.png` of docs/how-to/page.md, or `page-nan.png` of README.md.

kedge run -o demo.kedge --budget none examples/digits.py --model deep-sigmoid --steps 300
python docs/pictures/page.py demo.kedge page-light page-dark

kedge run -o demo.kedge examples/digits.py --model log-of-zero --steps 160
python docs/pictures/page.py demo.kedge page-nan
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from kedge.report.page.render import render_page
from kedge.rules.registry import ALL, check
from kedge.store.recording import Recording

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


def main() -> None:
    """Write the named pictures beside this file."""
    recording, names = Recording.open(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder, "page.html")
        file.write_text(render_page(recording, check(recording), ALL), encoding="utf-8")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS.split())
        for name in names:
            theme = "dark" if name.endswith("-dark") else "light"
            page = browser.new_page(viewport={"width": 1366, "height": 1000}, color_scheme=theme)
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            if theme == "dark":
                page.keyboard.press("j")
                page.keyboard.press("Enter")
            page.screenshot(path=Path(__file__).with_name(f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main()
