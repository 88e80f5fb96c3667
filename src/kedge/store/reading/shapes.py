"""The shapes of a recording's documents: what readers rely on, checked when a file is read; see docs/reference/recording.md."""

from __future__ import annotations

from typing import Any

from kedge.json_input.shape import (
    Check,
    Misshapen,
    anything,
    count,
    count_or_flag,
    fields,
    flag,
    list_of,
    mapping,
    mapping_of,
    nullable,
    number,
    one_of,
    plain_name,
    text,
    total,
    tuple_of,
    whole,
)

TEXTS = list_of(text)
#: A line of the program.
LINE = {
    "file": nullable(text),
    "line": nullable(whole),
    "function": nullable(text),
    "text": nullable(text),
}
SOURCE = fields({"file": text, "line": whole, "function": text}, {"text": nullable(text)})

MANIFEST = fields(
    {},
    {
        "format": whole,
        "kedge": nullable(text),
        "command": nullable(TEXTS),
        "script": nullable(text),
        "python": nullable(text),
        "torch": nullable(text),
        "device": nullable(text),
        "started": nullable(text),
        "host": nullable(text),
        "pid": nullable(whole),
        "every": nullable(anything),
        "budget": nullable(number),
        "sites": nullable(text),
        "dump": nullable(flag),
        "rank": count,
        "world": count,
    },
)

ROOT = fields(
    {"name": text},
    {
        "prefix": text,
        "parameters": total,
        "modules": list_of(
            fields(
                {"path": text},
                {
                    "type": text,
                    "file": nullable(text),
                    "line": nullable(whole),
                    "parameters": total,
                    "trainable": nullable(count_or_flag),
                },
            )
        ),
        "trained": nullable(flag),
        "optimizers": list_of(count),
        "steps": count,
    },
)

SITE = fields(
    {"id": count, "site": text},
    {
        "path": text,
        "kind": text,
        "type": text,
        "root": whole,
        "shape": list_of(count),
        "dtype": text,
        "channels": nullable(count),
        "from": list_of(nullable(count)),
        "owner": text,
        "node": nullable(text),
        "source": nullable(SOURCE),
        "copies": nullable(list_of(count)),
        "partial": flag,
    },
)

SITES = fields({"roots": list_of(ROOT), "sites": list_of(SITE)})

_SUMS = dict.fromkeys(
    (
        "tensors",
        "packed",
        "bytes",
        "rebuild",
        "offload",
        "bf16",
        "int8",
        "checkpoint",
        "parameters",
        "inputs",
    ),
    count,
)
_MODULE_SUMS = list_of(fields({"path": nullable(text), "tensors": count, "bytes": count}, _SUMS))


def _course(value: Any) -> None:
    _COURSE(value)
    heights, at = value.get("bytes", []), value.get("at", [])
    if len(heights) != len(at) or (value.get("peak") and not at):
        raise Misshapen(f"has {len(heights)} heights at {len(at)} places")
    if len(value.get("seconds", at)) not in (0, len(at)):
        raise Misshapen(f"has {len(value['seconds'])} times at {len(at)} places")
    if value.get("tensors") is not None:
        try:
            _held(value["tensors"], len(at))
        except Misshapen as error:
            raise error.within(".tensors") from None


def _held(value: Any, moments: int) -> None:
    _HELD(value)
    sizes = [len(value[name]) for name in _KIND]
    if any(len(row) != len(sizes) or any(map(int.__ge__, row, sizes)) for row in value["kinds"]):
        raise Misshapen("has a number without a text").within(".kinds")
    if any(
        kind >= len(value["kinds"]) or not begin < end <= moments
        for kind, _, _, begin, end in value["spans"]
    ):
        raise Misshapen(f"has one without a kind, or outside of the {moments} moments").within(
            ".spans"
        )
    if len(value["rest"]) not in (0, moments):
        raise Misshapen(f"has {len(value['rest'])} sizes at {moments} moments").within(".rest")


_NULLABLE_TEXTS = list_of(nullable(text))
#: The columns of the kinds of tensors.
_KIND: dict[str, Check] = {
    "path": _NULLABLE_TEXTS,
    "node": _NULLABLE_TEXTS,
    "field": _NULLABLE_TEXTS,
    "shape": list_of(list_of(count)),
    "dtype": TEXTS,
    "origin": TEXTS,
    "line": _NULLABLE_TEXTS,
}
_HELD = fields(
    {
        **_KIND,
        "kinds": list_of(list_of(count)),
        "spans": list_of(list_of(count, 5)),
        "rest": list_of(count),
    }
)


_COURSE = fields(
    {},
    {
        "bytes": list_of(count),
        "at": list_of(count),
        "peak": count,
        "peak_at": count,
        "backward": nullable(count),
        "holders": list_of(tuple_of(nullable(text), count)),
        "seconds": list_of(number),
        "tensors": nullable(mapping),
    },
)


def _producer(value: Any) -> None:
    _PRODUCER(value)
    if value.get("where") == "input":
        _FROM_OUTSIDE(value)


_PRODUCER = fields(
    {"step": whole},
    {
        **LINE,
        **dict.fromkeys(("operation", "node", "where", "detail", "module", "loss"), nullable(text)),
        "certain": flag,
        "among": list_of(fields({"operation": text}, LINE)),
        "of": count,
    },
)
_FROM_OUTSIDE = fields({"detail": text})

_NAMES = dict.fromkeys(("unheld", "graded", "replaced", "outside", "tensors"), TEXTS)
_COUNTS = {**dict.fromkeys(("passes", "foreign", "in_vain"), count), "unheld_elements": total}

#: The shape of each kind of event, besides that of `EVENT`.
EVENTS: dict[str, Check] = {
    "note": fields({}, {"text": text}),
    "saved": fields(
        {"bytes": count, "modules": _MODULE_SUMS, "step": whole},
        {
            "total": fields({}, _SUMS),
            "tree": _MODULE_SUMS,
            "lines": list_of(
                fields(
                    {},
                    {
                        **_SUMS,
                        "file": nullable(text),
                        "line": whole,
                        "function": text,
                        "text": nullable(text),
                    },
                )
            ),
            "items": list_of(mapping),
            "course": _course,
            "seconds": number,
        },
    ),
    "dump": fields(
        {"step": whole, "site": text, "folder": plain_name},
        {**dict.fromkeys(("module", "direction", "value"), nullable(text)), "reached": flag},
    ),
    "loss-graph": fields({}, {"site": text, "nodes": TEXTS, "dim": whole, "unscaled": flag}),
    "nonfinite-at-end": fields(
        {
            "step": whole,
            "count": count,
            "tensors": list_of(
                fields(
                    {"path": text, "of": one_of("param", "buffer"), "nan": count, "inf": count}, {}
                )
            ),
        }
    ),
    "loss-operation": fields(
        {"step": whole},
        {"loss": nullable(text), "node": nullable(text), "source": nullable(SOURCE)},
    ),
    "producer": _producer,
    "compiled": fields({"step": whole}),
    "modes": fields(
        {"step": whole, "root": count, "training": flag}, {"eval": TEXTS, "train": TEXTS}
    ),
    "grads-kept": fields({"step": whole, "kept": count, "checked": count}, {"optimizer": count}),
    "optimizers": fields(
        {
            "optimizers": list_of(
                fields(
                    {},
                    {
                        "type": text,
                        "steps": count,
                        "parameters": count,
                        "roots": list_of(count),
                        "rates": list_of(number),
                        "first_step": nullable(whole),
                    },
                )
            )
        }
    ),
    "not-optimized": fields(
        {}, {"root": nullable(count), "training": flag, "outside_fixed": flag, **_NAMES, **_COUNTS}
    ),
    "unseen": fields(
        {"what": text},
        {
            "detail": nullable(
                fields({}, {"steps": count, "seconds": number, "name": text, "cause": text})
            )
        },
    ),
    "operation": fields(
        {
            "folder": plain_name,
            "operations": list_of(
                fields({"site": text, "value": one_of("nan", "inf")}, {**LINE, "name": text})
            ),
        }
    ),
    "ledger": fields(
        {"sites": list_of(fields({"site": text, "fired": count}, {"cause": text, "remedy": text}))},
        {"sampled": count},
    ),
    "stopped": fields({"error": text}),
    "end": fields(
        {},
        {
            "exit": nullable(whole),
            "steps": count,
            "sampled": count,
            "levels": nullable(mapping_of(count)),
            **dict.fromkeys(("seconds", "watching", "slowdown"), nullable(number)),
            "error": nullable(text),
        },
    ),
}
_EVENT = fields({"kind": text}, {"step": whole, "rank": count})


def event(value: Any) -> None:
    """Check one line of the events."""
    _EVENT(value)
    check = EVENTS.get(value["kind"])
    if check is not None:
        check(value)
