"""Draw `page-light.png` and `page-dark.png`, the pictures of docs/how-to/page.md, from a recording.

kedge run -o demo.kedge examples/digits.py --model deep-sigmoid --steps 300
python docs/pictures/page.py demo.kedge
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
    """Write the pictures beside this file."""
    recording = Recording.open(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder, "page.html")
        file.write_text(render_page(recording, check(recording), ALL), encoding="utf-8")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS.split())
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1366, "height": 1000}, color_scheme=theme)
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            if theme == "dark":
                page.keyboard.press("j")
                page.keyboard.press("Enter")
            page.screenshot(path=Path(__file__).with_name(f"page-{theme}.png"))
        browser.close()


if __name__ == "__main__":
    main()
