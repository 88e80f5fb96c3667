"""Write what is made of the rules: their golden pairs, and their pages in ``docs/reference``.

    python -m tests.rules.goldens

A golden pair is a recording in which a rule fires and one in which it does not, each with what all
rules find in it now. A function in the rule's test makes both, marked by `golden`. Read the
difference before you keep it.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tests.rules
from kedge.rules.registry import ALL, check
from kedge.store.recording import Recording
from tests.rules import page
from tests.rules.scenes import Course

FOLDER = Path(__file__).parents[1] / "golden"
SAMPLES = range(0, 300, 10)

Golden = dict[str, list[Any]]
Maker = Callable[..., Golden]

_MAKERS: dict[str, Maker] = {}


#: The number of samples that a rule has, and the number that it needs, in a run of one healthy step.
LACKS: dict[str, tuple[int, int]] = {}


def golden(code: str, lacks: tuple[int, int] | None = None) -> Callable[[Maker], Maker]:
    """Mark the function that makes the golden pair of a rule, in any test of `tests.rules`.

    It takes ``fires``, whether the rule has a finding, and returns what `Recording.build` takes.

    Args:
        code: The code of the rule.
        lacks: What the rule lacks in a run of one healthy step: the samples that it has, and those
            that it needs; None if it can judge such a run.
    """
    if lacks is not None:
        LACKS[code] = lacks

    def marked(maker: Maker) -> Maker:
        _MAKERS[code] = maker
        return maker

    return marked


def makers() -> dict[str, Maker]:
    """Return what makes the golden pair of each rule, in the order of the rules."""
    for module in pkgutil.walk_packages(tests.rules.__path__, "tests.rules."):
        if (
            module.name.rpartition(".")[2].startswith("test_")
            and module.name != "tests.rules.test_rules"
        ):
            importlib.import_module(module.name)
    order = [rule.code for rule in ALL]
    return dict(sorted(_MAKERS.items(), key=lambda made: order.index(made[0])))


def load(path: Path) -> tuple[Recording, list[dict[str, Any]]]:
    """Read a golden recording and the findings expected of it; "nan" and "inf" are written as text."""
    pair = json.loads(path.read_text())
    expected = pair.pop("findings")
    pair["rows"] = [{key: _number(value) for key, value in row.items()} for row in pair["rows"]]
    return Recording.build(**pair), expected


def findings(recording: Recording) -> list[dict[str, Any]]:
    """Return what all rules find, as plain JSON."""
    return json.loads(json.dumps([finding.entry() for finding in check(recording)]))


def written(course: Course) -> Golden:
    """Return what a course holds."""
    events = {"events": course.events} if course.events else {}
    return {"roots": course.roots, "sites": course.sites, "rows": course.rows, **events}


def write(folder: Path, made: Mapping[str, Maker]) -> None:
    """Write golden pairs."""
    for code, make in made.items():
        (folder / code).mkdir(parents=True, exist_ok=True)
        for name, fires in (("fires", True), ("clean", False)):
            pair = make(fires=fires)
            pair["findings"] = findings(Recording.build(**pair))
            (folder / code / f"{name}.json").write_text(_text(pair))


def _text(pair: Golden) -> str:
    """Write one entry a line, so that a difference can be read."""
    parts = []
    for key, entries in pair.items():
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
    from tests.rules.goldens import makers  # the tests know the module by this name

    write(FOLDER, makers())
    page.write()
