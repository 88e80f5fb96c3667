"""Write what is made of the rules: their golden pairs and their pages in ``docs/rules.md``.

    python tests/rules/goldens.py

A golden pair is a recording in which a rule fires and one in which it does not, each with what all
rules find in it now. Read the difference before you keep it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scenes import ALL_GRADIENTS, INF, NAN, Course, chain, size, steady

from kedge.rules.registry import check, markdown
from kedge.store.recording import Recording

FOLDER = Path(__file__).parents[1] / "golden"
DOCS = Path(__file__).parents[2] / "docs" / "rules.md"
SAMPLES = range(0, 300, 10)

Golden = dict[str, list[Any]]


def load(path: Path) -> tuple[Recording, list[dict[str, Any]]]:
    """Read a golden recording and the findings expected of it; "nan" and "inf" are written as text."""
    golden = json.loads(path.read_text())
    expected = golden.pop("findings")
    golden["rows"] = [{key: _number(value) for key, value in row.items()} for row in golden["rows"]]
    return Recording.build(**golden), expected


def findings(recording: Recording) -> list[dict[str, Any]]:
    """Give what all rules find, as plain JSON."""
    return json.loads(json.dumps([asdict(finding) for finding in check(recording)]))


def nan_born(*, fires: bool) -> Golden:
    """Make log produce -inf at step 20, or a mask that the next module heals."""
    scene = chain(loss=True)
    scene.step(0)
    spread = {"head:out": -INF, ":out": -INF, "Loss:in": -INF, "Loss:out": INF} | dict.fromkeys(ALL_GRADIENTS, NAN)
    scene.step(20, {"log:out": -INF, "head:in": -INF} | (spread if fires else {}))
    return {"roots": scene.roots, "sites": scene.sites, "rows": scene.rows}


def grad_explode(*, fires: bool) -> Golden:
    """Let the gradients' norm leave its past for good, or for one bad batch."""
    course = Course(SAMPLES)
    high = range(26, 30) if fires else range(26, 27)
    course.weight("fc", lambda i: (0.1, 9.0 if i in high else 0.1 + 0.01 * (i % 3), 0.02 if i in high else 1e-4, None))
    return _written(course)


def grad_vanish(*, fires: bool) -> Golden:
    """Fade the gradient by ten from layer to layer, or by less than two."""
    course = Course(SAMPLES[:20])
    for i in range(6):
        gradient = 1e-2 * (0.1 if fires else 0.6) ** (5 - i)
        course.weight(f"l{i}", steady(0.1, gradient, gradient / 100))
    return _written(course)


def dead_units(*, fires: bool) -> Golden:
    """Silence six of eight channels from the third sample on, or another half of them in every step."""
    bits = [[c > 5 or i < 2 for c in range(8)] if fires else [(c + i) % 2 == 0 for c in range(8)] for i in range(14)]
    rows = [{"step": 10 * i, "site": "relu:out", "count": 2048, "sum": 1.0, "active": b} for i, b in enumerate(bits)]
    return {
        "roots": [],
        "sites": [{"site": "relu:out", "type": "ReLU", "channels": 8, "shape": [256, 8]}],
        "rows": rows,
    }


def update_ratio(*, fires: bool) -> Golden:
    """Change one weight by a half of its size in every step, or by a thousandth."""
    course = Course(SAMPLES[:20])
    course.weight("fc", steady(0.1, 1e-3, 0.05 if fires else 1e-4))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    return _written(course)


def never_fired(*, fires: bool) -> Golden:
    """List a trainable module that was never called, or a frozen parameter."""
    uncalled = {"fired": 0, "cause": "never called while the hook was there", "remedy": "call it"}
    unreached = {"fired": 0, "cause": "the backward that ran did not reach it", "remedy": "use it"}
    frozen = {"fired": 0, "cause": "it requires no grad, or did not when it was hooked", "remedy": "leave it"}
    missed = [{"site": "aux:out", **uncalled}, {"site": "aux.weight:param.grad", **unreached}]
    sites = missed if fires else [{"site": "old.weight:param.grad", **frozen}]
    rows = [size(0, "fc:out", 1.0)]
    return {"roots": [], "sites": [{"site": "fc:out"}], "rows": rows, "events": [{"kind": "ledger", "sites": sites}]}


MAKERS: dict[str, Callable[..., Golden]] = {
    "NAN-BORN": nan_born,
    "GRAD-EXPLODE": grad_explode,
    "GRAD-VANISH": grad_vanish,
    "DEAD-UNITS": dead_units,
    "UPDATE-RATIO": update_ratio,
    "NEVER-FIRED": never_fired,
}


def write() -> None:
    """Write all golden pairs."""
    for code, make in MAKERS.items():
        (FOLDER / code).mkdir(parents=True, exist_ok=True)
        for name, fires in (("fires", True), ("clean", False)):
            golden = make(fires=fires)
            golden["findings"] = findings(Recording.build(**golden))
            (FOLDER / code / f"{name}.json").write_text(_text(golden))


def _written(course: Course) -> Golden:
    return {"roots": course.roots, "sites": course.sites, "rows": course.rows}


def _text(golden: Golden) -> str:
    """Write one entry a line, so that a difference can be read."""
    parts = []
    for key, entries in golden.items():
        lines = ",\n  ".join(json.dumps(_plain(entry), allow_nan=False) for entry in entries)
        parts.append(f' "{key}": [\n  {lines}\n ]' if entries else f' "{key}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _plain(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: _plain(value) for key, value in entry.items()}
    if isinstance(entry, float):
        return float(f"{entry:.9g}") if math.isfinite(entry) else str(entry)
    return entry


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


if __name__ == "__main__":
    write()
    DOCS.write_text(markdown())
