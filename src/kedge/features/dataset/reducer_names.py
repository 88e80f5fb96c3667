"""Whether reducers stand for values that there are: under another name they would count nothing, and nobody would know.

# Note [When names are known]
By what name a value goes can depend on the first batch: `"encoder"` is a name if the module ran once, `"encoder#0"` if it
ran several times. A name that is none in any case is refused before there is a batch; the others when the first one is
computed, before anything is written. Later batches must have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kedge.errors import ExtractionFailed
from kedge.features.value_names import may_be

_SHOWN = 8


def must_be_possible(features: Any, reduce: Iterable[str]) -> None:
    """See, before there is a batch, that values can go by these names, as far as features of Kedge say.

    Raises:
        ExtractionFailed: No value can go by one of them.
    """
    wanted, work = getattr(features, "wanted", None), getattr(features, "work", None)
    if wanted is None or work is None:
        return
    given = {wanted.rename.get(text, text) for text in wanted.texts} | set(wanted.rename.values())
    paths = {tap.site.path for hooked in work.hooks for tap in hooked.taps}
    for name in reduce:
        if name not in given and (name in wanted.rename or not may_be(name, paths)):
            raise _nobody(name, features.names, wanted.rename.get(name))


def must_be_names(reduce: Iterable[str], names: Iterable[str]) -> None:
    """See that values go by these names.

    Raises:
        ExtractionFailed: None goes by one of them.
    """
    there = list(names)
    for name in reduce:
        if name not in there:
            raise _nobody(name, there)


def _nobody(name: str, names: Iterable[str], new: str | None = None) -> ExtractionFailed:
    there = list(names)
    shown = ", ".join(map(repr, there[:_SHOWN])) + (f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else "")
    renamed = f", as it was renamed to {new!r}" if new else ""
    return ExtractionFailed(
        f"reduce: no value goes by the name {name!r}{renamed}; the names are {shown}: give the reducer one of these"
    )
