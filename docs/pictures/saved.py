"""Draw `saved.png` and `flame.png`, the pictures of docs/how-to/saved.md, from a recording of a small GPT.

kedge run --saved -o gpt.kedge gpt.py
python docs/pictures/saved.py gpt.kedge
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
        page = browser.new_page(viewport={"width": 1240, "height": 1500}, color_scheme="light")
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        page.evaluate("document.querySelector('.bar').style.position = 'static'")
        page.locator("#saved").screenshot(path=Path(__file__).with_name("saved.png"))
        page.locator(".flame .box", has_text="BmmBackward0").first.hover()
        page.locator("#saved .memory").screenshot(path=Path(__file__).with_name("flame.png"))
        browser.close()


if __name__ == "__main__":
    main()
