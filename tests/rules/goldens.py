"""Write what is made of the rules: their golden pairs and their pages in ``docs/reference/rules.md``.

    python -m tests.rules.goldens

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

from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests.rules.page import markdown
from tests.rules.scenes import ALL_GRADIENTS, INF, NAN, Course, chain, histogram, size, steady

FOLDER = Path(__file__).parents[1] / "golden"
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "rules.md"
SAMPLES = range(0, 300, 10)

Golden = dict[str, list[Any]]


def load(path: Path) -> tuple[Recording, list[dict[str, Any]]]:
    """Read a golden recording and the findings expected of it; "nan" and "inf" are written as text."""
    golden = json.loads(path.read_text())
    expected = golden.pop("findings")
    golden["rows"] = [{key: _number(value) for key, value in row.items()} for row in golden["rows"]]
    return Recording.build(**golden), expected


def findings(recording: Recording) -> list[dict[str, Any]]:
    """Return what all rules find, as plain JSON."""
    return json.loads(json.dumps([asdict(finding) for finding in check(recording)]))


def nan_born(*, fires: bool) -> Golden:
    """Make log produce -inf at step 20, or a mask that the next module heals."""
    scene = chain(loss=True)
    scene.step(0)
    spread = {"head:out": -INF, ":out": -INF, "Loss:in": -INF, "Loss:out": INF} | dict.fromkeys(
        ALL_GRADIENTS, NAN
    )
    scene.step(20, {"log:out": -INF, "head:in": -INF} | (spread if fires else {}))
    return {"roots": scene.roots, "sites": scene.sites, "rows": scene.rows}


def grad_explode(*, fires: bool) -> Golden:
    """Make the norm of the gradients leave its past range for good, or for one bad batch."""
    course = Course(SAMPLES)
    high = range(26, 30) if fires else range(26, 27)
    course.weight(
        "fc",
        lambda i: (
            0.1,
            9.0 if i in high else 0.1 + 0.01 * (i % 3),
            0.02 if i in high else 1e-4,
            None,
        ),
    )
    return _written(course)


def grad_vanish(*, fires: bool) -> Golden:
    """Fade the gradient by ten from layer to layer, or by less than two."""
    course = Course(SAMPLES[:20])
    for i in range(6):
        gradient = 1e-2 * (0.1 if fires else 0.6) ** (5 - i)
        course.weight(f"l{i}", steady(0.1, gradient, gradient / 100))
    return _written(course)


def dead_channel(*, fires: bool) -> Golden:
    """Silence six of eight channels from the third sample on, or another half of them in every step."""
    bits = [
        [c > 5 or i < 2 for c in range(8)] if fires else [(c + i) % 2 == 0 for c in range(8)]
        for i in range(14)
    ]
    rows = [
        {"step": 10 * i, "site": "relu:out", "count": 2048, "sum": 1.0, "active": b}
        for i, b in enumerate(bits)
    ]
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


def near_overflow(*, fires: bool) -> Golden:
    """Make a float16 activation reach half of 65,504, or stay three doublings below it."""
    rows = [
        size(step, "fc:out", 100.0) | {"min": -9.0, "max": (3e4 if fires else 8e3) + step}
        for step in range(0, 50, 10)
    ]
    return {"roots": [], "sites": [{"site": "fc:out", "dtype": "float16"}], "rows": rows}


def underflow(*, fires: bool) -> Golden:
    """Put a tenth of float16 gradients below 2^-14, or a hundredth."""
    names = ["fc:out.grad", "head:out.grad"]
    drawn = histogram({-16: 10, -10: 90} if fires else {-16: 1, -10: 99})
    rows = [size(step, name, 1e-3) | {"exponents": drawn} for step in range(12) for name in names]
    return {
        "roots": [],
        "sites": [{"site": name, "dtype": "float16"} for name in names],
        "rows": rows,
    }


def grad_zero(*, fires: bool) -> Golden:
    """Cut the gradient before the first of two layers, in all of twenty samples or in nineteen."""
    course = Course(SAMPLES[:20])
    course.weight("fc", lambda i: (0.1, 0.0 if fires or i else 1e-3, 0.0, 0.0))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    return _written(course)


def spike(*, fires: bool) -> Golden:
    """Make the loss of one unsampled step unlike any before it, or only double it."""
    jump = {33: 9.0 if fires else 0.55}
    losses = [2.0 / (1 + i / 4) + 0.01 * (i % 3) if i not in jump else jump[i] for i in range(50)]
    rows = [
        {"step": i, "site": "Loss:out", "count": 1, "sum": x, "level": 1 + (i % 10 == 0)}
        for i, x in enumerate(losses)
    ]
    return {
        "roots": [{"name": "Net", "prefix": ""}, {"name": "Loss", "prefix": "Loss"}],
        "sites": [{"site": "Loss:out", "root": 1, "shape": []}],
        "rows": rows,
    }


def saturated(*, fires: bool) -> Golden:
    """Drive two thirds of a hidden tanh to its ends, or a third."""
    rows = [
        size(step, "tanh:out", 0.9) | {"sampled": 30, "saturated": 20 if fires else 10}
        for step in range(10)
    ]
    rows += [size(step, "head:out", 0.9) for step in range(10)]
    return {
        "roots": [],
        "sites": [{"site": "tanh:out", "type": "Tanh"}, {"site": "head:out"}],
        "rows": rows,
    }


def init_scale(*, fires: bool) -> Golden:
    """Multiply the scale by four from layer to layer, or by a half."""
    course = Course(SAMPLES[:3])
    for i in range(6):
        course.weight(f"l{i}", steady(0.1, 1e-3, 1e-4), out=(4.0 if fires else 0.5) ** i)
    return _written(course)


def scale_drift(*, fires: bool) -> Golden:
    """Double an output every hundred steps without end, or bring it to rest."""
    course = Course(range(0, 600, 10))
    course.weight(
        "fc", steady(0.1, 1e-3, 1e-4), out=lambda i: 2.0 ** (i / 8 if fires else 6 * i / (i + 10))
    )
    return _written(course)


def unused_param(*, fires: bool) -> Golden:
    """Pass one of two weights that get gradients to the optimizer, or both."""
    course = Course(SAMPLES[:4])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.weight("head", steady(0.1, 1e-3, 1e-4))
    left_out = {"head.weight:param", "head.weight:update"} if fires else set()
    course.sites = [
        site for site in course.sites if f"{site.get('path')}:{site.get('kind')}" not in left_out
    ]
    course.rows = [row for row in course.rows if row["site"] not in left_out]
    return _written(course)


def never_called(*, fires: bool) -> Golden:
    """List a trainable module that was never called, or a frozen parameter."""
    uncalled = {
        "fired": 0,
        "cause": "never called while the hook was attached",
        "remedy": "call it",
    }
    unreached = {"fired": 0, "cause": "the backward that ran did not reach it", "remedy": "use it"}
    frozen = {
        "fired": 0,
        "cause": "it requires no grad, or did not when it was hooked",
        "remedy": "leave it",
    }
    missed = [{"site": "aux:out", **uncalled}, {"site": "aux.weight:param.grad", **unreached}]
    sites = missed if fires else [{"site": "old.weight:param.grad", **frozen}]
    rows = [size(0, "fc:out", 1.0)]
    return {
        "roots": [],
        "sites": [{"site": "fc:out"}],
        "rows": rows,
        "events": [{"kind": "ledger", "sites": sites}],
    }


def saved_memory(*, fires: bool) -> Golden:
    """Make one module save most of a large total, or of a tiny one."""
    mib = 2**20 if fires else 2**10
    modules = [
        {"path": "attn", "bytes": 300 * mib, "tensors": 3},
        {"path": "mlp", "bytes": 50 * mib, "tensors": 2},
    ]
    saved = {"kind": "saved", "step": 0, "bytes": 350 * mib, "modules": modules}
    return {
        "roots": [],
        "sites": [{"site": "attn:out"}],
        "rows": [size(0, "attn:out", 1.0)],
        "events": [saved],
    }


def rank_departs(*, fires: bool) -> Golden:
    """Make one of four ranks diverge from step 30 on, or only see different data."""
    sites = [{"site": "fc:out", "type": "Linear", "shape": [8, 16]}]
    sites += [
        {
            "site": f"fc.weight:{kind}",
            "path": "fc.weight",
            "kind": kind,
            "owner": "fc",
            "shape": [4, 4],
        }
        for kind in ("param", "param.grad")
    ]
    sites.append({"site": ":grad.norm", "shape": [16]})
    rows: list[dict[str, Any]] = []
    for rank in range(4):
        for step in range(0, 60, 10):
            own = 1.001 if fires and rank == 2 and step >= 30 else 1.0
            rows.append({"rank": rank, **size(step, "fc:out", 1 + 0.1 * rank, 128)})
            rows.append({"rank": rank, **size(step, "fc.weight:param", 0.25 * own)})
            rows.append({"rank": rank, **size(step, "fc.weight:param.grad", 1e-3 * (1 + rank))})
            rows.append({"rank": rank, **size(step, ":grad.norm", 2.5e-3)})
    return {
        "roots": [{"name": "Net", "prefix": "", "parameters": 16}],
        "sites": sites,
        "rows": rows,
    }


def not_optimized(*, fires: bool) -> Golden:
    """Replace a head after the optimizer was made, or before."""
    course = Course(SAMPLES[:4])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.roots[0]["trained"] = True
    course.events = [
        {
            "kind": "optimizers",
            "optimizers": [{"index": 0, "type": "SGD", "roots": [0], "rates": [0.1]}],
        }
    ]
    if fires:
        lost = {
            "unheld": ["head.weight"],
            "unheld_elements": 40,
            "graded": ["head.weight"],
            "replaced": ["head.weight"],
        }
        course.events.append({"kind": "not-optimized", "root": 0, **lost})
    return _written(course)


def grads_kept(*, fires: bool) -> Golden:
    """Keep the gradients in three measured steps in a row, or in two of them."""
    course = Course(SAMPLES[:6])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    kept = {"kind": "grads-kept", "optimizer": 0, "checked": 4, "kept": 4}
    course.events = [{**kept, "step": step} for step in (10, 20, 30 if fires else 50)]
    return _written(course)


def never_initialised(*, fires: bool) -> Golden:
    """Start two layers in a row from ones, or the second alone."""
    course = Course(SAMPLES[:3])
    for i in range(3):
        course.weight(f"l{i}", steady(1.0, 1e-3, 1e-4))
    alike = {"l1.weight:param", "l2.weight:param"} if fires else {"l2.weight:param"}
    course.rows = [
        row | ({"min": 1.0, "max": 1.0} if row["site"] in alike else {"min": -1.5, "max": 1.5})
        if row["site"].endswith(":param")
        else row
        for row in course.rows
    ]
    return _written(course)


def rate_too_large(*, fires: bool) -> Golden:
    """Take steps of ten times the weights' size that raise the loss, or ones of a hundredth that lower it."""
    course = Course(range(12))
    for i in range(3):
        course.weight(
            f"l{i}",
            lambda n: (
                (0.1 if n == 0 else 1 + 0.1 * n, 1e-2, 1.0 / (1 + n), None)
                if fires
                else (0.1, 1e-2, 1e-3, None)
            ),
        )
    course.loss([2.3] + [20.0 - n if fires else 2.2 - 0.1 * n for n in range(11)])
    return _written(course)


def double_softmax(*, fires: bool) -> Golden:
    """Pass what softmax returned to cross-entropy, or logits."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3, 2.2, 2.1], every=10, source={"file": "train.py", "line": 12})
    nodes = [
        "NllLossBackward0",
        "LogSoftmaxBackward0",
        *(["SoftmaxBackward0"] if fires else []),
        "AddmmBackward0",
    ]
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    return _written(course)


def eval_mode(*, fires: bool) -> Golden:
    """Train the whole model in evaluation mode, or its frozen statistics alone."""
    course = Course(SAMPLES[:5])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    modes = {
        "kind": "modes",
        "step": 0,
        "root": 0,
        "training": not fires,
        "eval": ["norm"],
        "train": [] if fires else ["drop"],
    }
    course.events = [modes]
    return _written(course)


def loss_below_zero(*, fires: bool) -> Golden:
    """Make nll_loss fall below zero, or the squared error that a program subtracts from something."""
    course = Course(SAMPLES[:3])
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([0.1, -0.2, -0.9], every=10, source={"file": "train.py", "line": 12})
    nodes = ["NllLossBackward0", "LogBackward0"] if fires else ["SubBackward0", "MseLossBackward0"]
    course.events = [{"kind": "loss-graph", "step": 0, "site": "loss", "nodes": nodes}]
    return _written(course)


def batch_of_one(*, fires: bool) -> Golden:
    """Pass a single sample to batch normalisation twice, or never fewer than two."""
    course = Course(SAMPLES[:5])
    course.sites.append({"site": "norm:out", "type": "BatchNorm2d", "shape": [32, 4, 2, 2]})
    course.sites.append({"site": "head:out", "type": "Linear", "shape": [32, 10]})
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    samples = [32, 1, 32, 1, 32] if fires else [32, 2, 32, 2, 32]
    course.rows += [
        size(step, "head:out", 1.0, 10 * n) for step, n in zip(course.steps, samples, strict=True)
    ]
    course.rows += [
        size(step, "norm:out", 1.0, 16 * n) for step, n in zip(course.steps, samples, strict=True)
    ]
    return _written(course)


def input_scale(*, fires: bool) -> Golden:
    """Feed pixels from 0 to 255, or the same divided by that."""
    course = Course(SAMPLES[:4])
    course.sites.append({"site": "fc:in", "type": "Linear"})
    course.weight("fc", steady(0.1, 1e-2 if fires else 1e-4, 1e-4), out=40.0 if fires else 0.5)
    course.weight("head", steady(0.1, 1e-4, 1e-4), out=0.5)
    course.rows += [size(step, "fc:in", 85.0 if fires else 0.33) for step in course.steps]
    return _written(course)


def no_learning(*, fires: bool) -> Golden:
    """Make the loss swing around its first value, or fall below it."""
    course = Course(range(0, 60, 10))
    course.weight("fc", steady(0.1, 1e-3, 1e-4))
    course.loss([2.3 + 0.05 * (i * 7 % 5 - 2) - (0.0 if fires else 0.02 * i) for i in range(60)])
    return _written(course)


MAKERS: dict[str, Callable[..., Golden]] = {
    "NAN-BORN": nan_born,
    "NOT-OPTIMIZED": not_optimized,
    "GRADS-KEPT": grads_kept,
    "NEVER-INITIALISED": never_initialised,
    "RATE-TOO-LARGE": rate_too_large,
    "NEAR-OVERFLOW": near_overflow,
    "UNDERFLOW": underflow,
    "GRAD-EXPLODE": grad_explode,
    "GRAD-VANISH": grad_vanish,
    "GRAD-ZERO": grad_zero,
    "SPIKE": spike,
    "DEAD-CHANNEL": dead_channel,
    "SATURATED": saturated,
    "DOUBLE-SOFTMAX": double_softmax,
    "LOSS-BELOW-ZERO": loss_below_zero,
    "EVAL-MODE": eval_mode,
    "BATCH-OF-ONE": batch_of_one,
    "INPUT-SCALE": input_scale,
    "UPDATE-RATIO": update_ratio,
    "INIT-SCALE": init_scale,
    "SCALE-DRIFT": scale_drift,
    "UNUSED-PARAM": unused_param,
    "NEVER-CALLED": never_called,
    "NO-LEARNING": no_learning,
    "SAVED-MEMORY": saved_memory,
    "RANK-DEPARTS": rank_departs,
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
    events = {"events": course.events} if course.events else {}
    return {"roots": course.roots, "sites": course.sites, "rows": course.rows, **events}


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
