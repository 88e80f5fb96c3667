"""What the page costs: condensing a large recording, the size of the file, and the time and memory it takes to use it.

Writes a recording of many sites and steps, with a spike and a NaN in single steps, makes its page,
opens it in Chromium, and does what a reader does: look at the heat-map, choose another statistic,
open a site, filter.

    python benchmarks/page.py [--sites 1000] [--steps 10000] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from kedge.report.page.document import condense
from kedge.report.page.render import page_of
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import ALL, check
from kedge.store.events import EndEvent
from kedge.store.exponents import BUCKETS, LOWEST, encode
from kedge.store.recording import Recording
from kedge.store.writing.folder import create

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-precise-memory-info"
)
KINDS = ("in", "out", "out.grad", "param", "param.grad", "update")


def entries(sites: int) -> list[dict[str, Any]]:
    """Describe the sites of a chain of layers, six for each."""
    made: list[dict[str, Any]] = []
    for number in range(sites):
        layer, kind = number // len(KINDS), KINDS[number % len(KINDS)]
        name = f"blocks.{layer // 8}.layer{layer % 8}"
        path = f"{name}.weight" if kind in {"param", "param.grad", "update"} else name
        made.append(
            {
                "id": number,
                "site": f"{path}:{kind}",
                "path": path,
                "kind": kind,
                "type": "Linear",
                "root": 0,
            }
            | {
                "shape": [32, 512],
                "dtype": "float32",
                "from": [number - 5] if kind == "in" and number else [],
            }
            | {"owner": name}
        )
    return made


def write(folder: Path, sites: int, steps: int) -> None:
    """Write the recording: scales that drift and are noisy, a spike, and a NaN."""
    random = np.random.default_rng(0)
    described = entries(sites)
    drift = random.normal(0, 1, sites)
    shapes = histograms(random)
    with create(
        folder, {"kedge": "0", "script": "synthetic.py", "every": 1}, force=False
    ) as writer:
        writer.sites(described, [{"name": "Net", "prefix": "", "parameters": sites * 512}])
        for step in range(steps):
            scale = np.exp(drift + 0.3 * np.sin(step / 500 + drift) + random.normal(0, 0.05, sites))
            if step == steps // 3:
                scale[1] *= 1e4
            if step == steps // 2:
                scale[7] = np.nan
            writer.stats(step, columns(scale, shapes, step))
        writer.event(EndEvent(exit=0, steps=steps, sampled=steps, seconds=1e4, watching=1e2))


def columns(scale: np.ndarray[Any, Any], shapes: list[bytes], step: int) -> dict[str, Any]:
    """Give the rows of one step."""
    count = np.full(len(scale), 32 * 512)
    return {
        "site": np.arange(len(scale)),
        "count": count,
        "sum": 0.1 * scale * count,
        "sumsq": scale**2 * count,
        "min": -3 * scale,
        "max": 3 * scale,
        "nonzero": count - 100,
        "nonfinite": np.where(np.isfinite(scale), 0, 3),
        "sampled": np.full(len(scale), 256),
        "saturated": np.full(len(scale), step % 256),
        "exponents": [shapes[(site + step) % len(shapes)] for site in range(len(scale))],
    }


def histograms(random: np.random.Generator) -> list[bytes]:
    """Give some histograms of 256 elements."""
    made = []
    for _ in range(64):
        powers = np.floor(np.log2(np.abs(random.normal(0, 1, 256)))).astype(int) - LOWEST + 2
        made.append(encode(np.bincount(powers, minlength=BUCKETS)))
    return made


def tell(what: str, figure: float, unit: str) -> None:
    """Print one line."""
    print(f"{what:<52} {figure:8.2f} {unit}", flush=True)


def timed(what: str, act: Callable[[], Any]) -> Any:
    """Do something and say how long it took."""
    begun = time.perf_counter()
    result = act()
    tell(what, time.perf_counter() - begun, "s")
    return result


DRAWN = "() => new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"
ACTS = {
    "another statistic": """() => {
        const quantity = document.getElementById('quantity');
        quantity.value = 'absmax.grad';
        quantity.dispatchEvent(new Event('change'));
    }""",
    "a site's panel": """() => {
        const cells = document.getElementById('cells');
        cells.focus();
        for (const key of ['ArrowRight', 'Enter']) cells.dispatchEvent(new KeyboardEvent('keydown', { key }));
    }""",
    "the next site": "() => document.getElementById('panel-after').click()",
    "the other theme": "() => document.getElementById('theme').click()",
}


def use(page_file: Path) -> None:
    """Open the page in Chromium and use it; print times and memory."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=FLAGS.split()
        )
        page = browser.new_page(viewport={"width": 1366, "height": 768})
        session = page.context.new_cdp_session(page)
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        tell("from its address to the first picture", page.evaluate(DRAWN) / 1e3, "s")
        for what, script in ACTS.items():
            begun = page.evaluate("() => performance.now()")
            page.evaluate(script)
            tell(what, (page.evaluate(DRAWN) - begun) / 1e3, "s")
        tell(
            "JavaScript heap, with garbage",
            page.evaluate("() => performance.memory.usedJSHeapSize") / 1e6,
            "MB",
        )
        session.send("HeapProfiler.collectGarbage")
        kept = session.send("Runtime.getHeapUsage")
        tell(
            "  without, array buffers included",
            (kept["usedSize"] + kept.get("backingStorageSize", 0)) / 1e6,
            "MB",
        )
        tell("private memory of the tab beyond an empty one's", private_memory(browser) / 1e6, "MB")
        browser.close()


def private_memory(browser: Any) -> int:
    """Give the private memory of the renderer with the page, less that of one with nothing in it."""
    browser.new_context().new_page().goto("data:text/html,")
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    found = [private_of(process["id"]) for process in processes if process["type"] == "renderer"]
    return max(found) - min(found)


def private_of(process: int) -> int:
    """Ask the kernel how much memory a process has to itself."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def main() -> None:
    """Write, condense, open, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--keep", type=Path, help="leave the recording and its page in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        run = folder / f"large-{args.sites}-{args.steps}.kedge"
        if not run.exists():
            timed("writing the recording", lambda: write(run, args.sites, args.steps))
        tell("the recording", sum(file.stat().st_size for file in run.iterdir()) / 1e6, "MB")
        recording = timed("opening it", lambda: Recording.open(run))
        findings = timed("running the rules", lambda: check(recording, ALL))
        document = timed("condensing it", lambda: condense(ShownRun(recording, findings, ALL)))
        page = page_of(document)
        file = folder / "page.html"
        file.write_text(page, encoding="utf-8")
        data = sum(map(len, document.tables.values())) + len(json.dumps(document.described))
        tell(
            "memory of this process at its largest",
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "MB",
        )
        tell("the page", len(page) / 1e6, "MB")
        tell("  without data", (len(page) - data) / 1e6, "MB")
        use(file)


if __name__ == "__main__":
    main()
