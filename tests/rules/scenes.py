"""Small recordings written down by hand: which modules there are, who feeds whom, and what went wrong when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kedge.rules.rule import Finding
from kedge.store.exponents import BUCKETS, LOWEST, SMALLEST_NORMAL
from kedge.store.recording import Recording

NAN, INF = math.nan, math.inf
FULL, FINITENESS = 2, 1


def made_at(finding: Finding) -> str:
    """Return where the value of a NAN-BORN was made, and how certain that is: ``forward, seen``."""
    return f"{finding.evidence.how}, {finding.evidence.certainty}"


class Scene:
    """A model as a list of modules in the order of the flow, and the steps it was watched in.

    Every module has an input, an output, an output gradient and, with ``weight``, a parameter
    with its gradient and update. All values are finite unless a step says otherwise.
    """

    def __init__(self, *, name: str = "Net") -> None:
        self.sites: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.roots = [{"name": name, "prefix": "", "parameters": 100}]
        self.events: list[dict[str, Any]] = []

    def site(self, text: str, **entry: Any) -> int:
        """Add a site."""
        self.sites.append({"id": len(self.sites), "site": text, "shape": [8, 4], **entry})
        return len(self.sites) - 1

    def root(self, name: str) -> int:
        """Add a root whose sites begin with its name."""
        self.roots.append({"name": name, "prefix": name, "parameters": 0})
        return len(self.roots) - 1

    def module(
        self, path: str, kind: str = "Linear", of: Sequence[str | None] = (None,), **entry: Any
    ) -> None:
        """Add a module; ``of`` are the modules whose outputs it takes, None for anything else."""
        weight, entry = entry.pop("weight", False), {"type": kind, **entry}
        self.site(
            f"{path}:in",
            **entry,
            **{"from": [self.id(f"{p}:out") if p is not None else None for p in of]},
        )
        self.close(path, kind, weight=weight, **{k: v for k, v in entry.items() if k != "type"})

    def open(
        self, path: str, kind: str = "Sequential", of: Sequence[str | None] = (None,), **entry: Any
    ) -> None:
        """Add the input of a module that holds those added next."""
        sources = [self.id(f"{p}:out") if p is not None else None for p in of]
        self.site(f"{path}:in", type=kind, **{"from": sources}, **entry)

    def close(
        self, path: str, kind: str = "Sequential", *, weight: bool = False, **entry: Any
    ) -> None:
        """Add the output of a module."""
        self.site(f"{path}:out", type=kind, **entry)
        self.site(f"{path}:out.grad", type=kind, **entry)
        for form in ("param", "param.grad", "update") if weight else ():
            parameter = f"{path}.weight" if path else "weight"
            self.site(
                f"{parameter}:{form}", type=kind, owner=path, path=parameter, kind=form, **entry
            )

    def id(self, text: str) -> int:
        """Return the id of a site."""
        return next(site["id"] for site in self.sites if site["site"] == text)

    def step(
        self,
        step: int,
        bad: Mapping[str, float] | None = None,
        *,
        level: int = FULL,
        without: Iterable[str] = (),
    ) -> None:
        """Add the rows of one step; ``bad`` sites hold one element with the given value."""
        bad, without = bad or {}, set(without)
        for site in self.sites:
            text = site["site"]
            if text in without or (level == FINITENESS and text.endswith((":out.grad", ":update"))):
                continue
            values = [0.5, -0.25, 0.0, bad.get(text, 0.25)]
            self.rows.append(row(step, text, values, level=level))

    def recording(self) -> Recording:
        """Make the recording."""
        return Recording.build(self.sites, self.rows, roots=self.roots, events=self.events)


def row(
    step: int, site: str, values: Sequence[float], *, level: int = FULL, **columns: Any
) -> dict[str, Any]:
    """Measure some values as a run does, on schedule or off."""
    total, squares = sum(values), sum(value * value for value in values)
    if level == FINITENESS:
        measured = {"sumsq": squares} if ":param" in site else {"sum": total}
        return {
            "step": step,
            "site": site,
            "count": len(values),
            "level": level,
            **measured,
            **columns,
        }
    broken = any(math.isnan(value) for value in values)
    return {
        "step": step,
        "site": site,
        "count": len(values),
        "sum": total,
        "sumsq": squares,
        "min": NAN if broken else min(values),
        "max": NAN if broken else max(values),
        "nonzero": sum(value != 0 for value in values),
        "nonfinite": sum(not math.isfinite(value) for value in values),
        **columns,
    }


def size(step: int, site: str, rms: float, count: int = 16) -> dict[str, Any]:
    """Describe a row of which only the size is of interest."""
    return {"step": step, "site": site, "count": count, "sumsq": rms * rms * count}


def histogram(counts: Mapping[int, int]) -> list[int]:
    """Write down a histogram of exponents: how many of the drawn elements have which power of two."""
    buckets = [0] * BUCKETS
    for power, number in counts.items():
        buckets[power - LOWEST + 2 if power >= LOWEST else int(power >= SMALLEST_NORMAL)] = number
    return buckets


def chain(*, loss: bool = False) -> Scene:
    """Net: fc (with a weight), relu, log, head (with a weight), and a loss module if asked for."""
    scene = Scene()
    scene.open("", "Net")
    scene.module("fc", weight=True)
    scene.module("relu", "ReLU", ["fc"])
    scene.module("log", "Log", ["relu"])
    scene.module("head", of=["log"], weight=True)
    scene.close("", "Net")
    if loss:
        scene.module("Loss", "Loss", ["head"], root=scene.root("Loss"), shape=[])
    return scene


#: What follows in the forward of `chain` when log makes a NaN, and in the step's backward.
AFTER_LOG = ("log:out", "head:in", "head:out", ":out")
ALL_GRADIENTS = (
    "fc:out.grad",
    "relu:out.grad",
    "log:out.grad",
    "head:out.grad",
    ":out.grad",
    "fc.weight:param.grad",
    "head.weight:param.grad",
)
EVERYTHING = (
    "fc:out",
    "relu:in",
    "relu:out",
    "log:in",
    *AFTER_LOG,
    *ALL_GRADIENTS,
    "fc.weight:param",
    "head.weight:param",
)


def all_of(sites: Iterable[str], value: float) -> dict[str, float]:
    """Set the same value at some sites."""
    return dict.fromkeys(sites, value)


class Course:
    """The weights of a model over many steps, each given by four sizes: itself, gradient, update, what arrived."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.sites: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.roots: list[dict[str, Any]] = [{"name": "Net", "prefix": "", "parameters": 100}]
        self.events: list[dict[str, Any]] = []

    def weight(self, path: str, figures: Figures, **entry: Any) -> None:
        """Add a module and its weight; ``figures`` gives (weight, gradient, update, arriving) for each sample.

        ``out`` is the size of the module's output, in every sample or as a function of it.
        """
        out = entry.pop("out", None)
        self.sites.append({"site": f"{path}:out", "type": "Linear", **entry})
        self.sites.append({"site": f"{path}:out.grad", **entry})
        for kind in ("param", "param.grad", "update"):
            own = {"path": f"{path}.weight", "kind": kind, "owner": path, "shape": [4, 4], **entry}
            self.sites.append({"site": f"{path}.weight:{kind}", **own})
        names = (
            f"{path}.weight:param",
            f"{path}.weight:param.grad",
            f"{path}.weight:update",
            f"{path}:out.grad",
        )
        for i, step in enumerate(self.steps):
            for name, rms in zip(names, figures(i), strict=True):
                if rms is not None:
                    self.rows.append(size(step, name, rms))
            if out is not None:
                self.rows.append(size(step, f"{path}:out", out(i) if callable(out) else out))

    def recording(self) -> Recording:
        """Make the recording."""
        return Recording.build(self.sites, self.rows, roots=self.roots, events=self.events)

    def loss(self, values: Sequence[float], *, every: int = 1, **entry: Any) -> None:
        """Add what the program called backward on, with its values in steps from the first on."""
        site = {
            "site": "loss",
            "path": "loss",
            "kind": "loss",
            "type": "",
            "root": -1,
            "shape": [],
            **entry,
        }
        self.sites.append(site)
        for i, value in enumerate(values):
            at = {
                "step": i * every,
                "site": site["site"],
                "count": 1,
                "level": FULL if i * every in self.steps else 1,
            }
            self.rows.append(
                {
                    **at,
                    "sum": value,
                    "sumsq": value * value,
                    "nonfinite": int(not math.isfinite(value)),
                }
            )


Figures = Callable[[int], tuple[float | None, float | None, float | None, float | None]]


def steady(weight: float, gradient: float, update: float, arriving: float | None = None) -> Figures:
    """The same figures in every sample; what arrives is as large as the gradient unless told otherwise."""
    return lambda i: (weight, gradient, update, gradient if arriving is None else arriving)


def trained(*events: dict[str, Any], steps: Sequence[int] = range(12)) -> Recording:
    """Record a model of two weights that Adam trains, and some events."""
    made = Course(steps)
    made.weight("fc", steady(0.1, 1e-3, 1e-4))
    made.weight("head", steady(0.1, 1e-3, 1e-4))
    made.roots[0]["trained"] = True
    adam = {"index": 0, "type": "Adam", "roots": [0], "rates": [0.001], "steps": 9}
    made.events = [{"kind": "optimizers", "optimizers": [adam]}, *events]
    return made.recording()
