"""The names of the values that fire while a model runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kedge.flow import Event

_CALL = re.compile(r"(?<!\\)#\d+")


def name_of(event: Event) -> str:
    """Return the name of a value of one call, which is also a selector of it alone."""
    return str(event.site.at(call=event.call))


def without_call(name: str) -> str:
    """Return a name without its call."""
    return _CALL.sub("", name)


def shortened(names: Iterable[str]) -> list[str]:
    """Return the names, without the call if there is only one."""
    names = list(names)
    plain = [without_call(name) for name in names]
    return [
        short if plain.count(short) == 1 else name for name, short in zip(names, plain, strict=True)
    ]
