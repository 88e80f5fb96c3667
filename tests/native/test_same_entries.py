"""Whether dicts have the same names and values as before, compiled and without the compiled part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from kedge import native
from tests.native.ways import COMPILED

Tables = list[dict[Any, Any]]
Same = Callable[[Tables, list[Any], list[Any]], bool]
WAYS = pytest.mark.parametrize(
    "same",
    [
        pytest.param(native._same_entries, id="python"),
        pytest.param(native.same_entries, id="compiled", marks=COMPILED),
    ],
)


def made() -> Tables:
    """Return tables as a module has them."""
    hooks = OrderedDict([(7, "a hook"), (8, "another")])
    hooks.move_to_end(8, last=False)
    return [{"training": True, "rate": 1000.5}, {}, {"weight": [1.0]}, hooks]


def entries(tables: Tables) -> tuple[list[Any], list[Any]]:
    """Return the names and the values of tables."""
    pairs = [pair for table in tables for pair in dict.items(table)]
    return [name for name, _ in pairs], [value for _, value in pairs]


CHANGES: dict[str, Callable[[Tables], Any]] = {
    "another value": lambda tables: tables[0].update(training=False),
    "an equal value": lambda tables: tables[2].update(weight=[1.0]),
    "one more": lambda tables: tables[0].update(more=1),
    "one in an empty table": lambda tables: tables[1].update(more=1),
    "one less": lambda tables: tables[2].clear(),
    "another name": lambda tables: tables[2].update(bias=tables[2].pop("weight")),
    "a hook less": lambda tables: tables[3].pop(7),
}


@WAYS
def test_tables_are_the_same_until_one_is_changed(same: Same) -> None:
    """A value that is put back is the same again."""
    tables = made()
    names, values = entries(tables)
    assert same(tables, names, values)
    tables[0]["training"] = False
    assert not same(tables, names, values)
    tables[0]["training"] = True
    assert same(tables, names, values)
    assert same([], [], [])


@WAYS
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(same: Same, change: str) -> None:
    """A value counts as changed if it is another object, and so does a name."""
    tables = made()
    names, values = entries(tables)
    CHANGES[change](tables)
    assert not same(tables, names, values)


@COMPILED
def test_other_things_than_dicts_are_refused() -> None:
    """An object with a method of that name is no table whose content is known."""
    with pytest.raises(TypeError, match="dicts"):
        native.same_entries([[("training", True)]], ["training"], [True])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="each name needs a value"):
        native.same_entries([{}], ["training"], [])
