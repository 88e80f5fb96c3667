"""The shapes of a recording's manifest and sites: what readers rely on; see docs/reference/recording.md.

Those of the events are classes: `kedge.store.events`.
"""

from __future__ import annotations

from functools import partial

from kedge.frames import SourceLine
from kedge.json_input.classes import read_as
from kedge.json_input.shape import (
    anything,
    count,
    count_or_flag,
    fields,
    flag,
    list_of,
    nullable,
    number,
    text,
    total,
    whole,
)

MANIFEST = fields(
    {},
    {
        "format": whole,
        "kedge": nullable(text),
        "command": nullable(list_of(text)),
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
        "source": nullable(partial(read_as, SourceLine)),
        "copies": nullable(list_of(count)),
        "partial": flag,
    },
)

SITES = fields({"roots": list_of(ROOT), "sites": list_of(SITE)})
