"""The rules that a project chose, with its thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from kedge.errors import ConfigError
from kedge.rules.rule import Rule

Thresholds = Mapping[str, int | float]
R = TypeVar("R", bound=Rule)


def thresholds(rule: Rule) -> dict[str, int | float]:
    """Return a rule's thresholds by name, in the order of its page."""
    return {name: getattr(rule, name) for name in _names(rule)}


def chosen(
    rules: Iterable[R], select: Sequence[str] | None, ignore: Sequence[str]
) -> tuple[R, ...]:
    """Return the rules that are selected and not ignored; all are selected if ``select`` is None."""
    return tuple(
        rule
        for rule in rules
        if (select is None or rule.code in select) and rule.code not in ignore
    )


def configured(rules: Sequence[Rule], table: Mapping[str, Any], where: str) -> tuple[Rule, ...]:
    """Return rules with the thresholds of a table: ``select``, ``ignore``, and ``rules`` with thresholds by code.

    Args:
        rules: All rules, with their default thresholds.
        table: The content of ``[tool.kedge]``.
        where: The file's name, for messages.

    Returns:
        All rules with their thresholds set; ``select`` and ``ignore`` are not applied yet.

    Raises:
        ConfigError: A key, code or threshold is unknown, or a value is of the wrong type.
    """
    _require_known("[tool.kedge]", table, KEYS, where)
    given = _table(table.get("rules", {}), "[tool.kedge.rules]", where)
    by_code = {_code(code, rules, f"[tool.kedge.rules.{code}]", where): code for code in given}
    configured = []
    for rule in rules:
        if rule.code in by_code:
            code = by_code[rule.code]
            own = _table(given[code], f"[tool.kedge.rules.{code}]", where)
            configured.append(_with(rule, own, where))
        else:
            configured.append(rule)
    return tuple(configured)


def codes(
    rules: Sequence[Rule], table: Mapping[str, Any], key: str, where: str
) -> list[str] | None:
    """Return a list of codes of a table; None if it has no such list.

    Raises:
        ConfigError: It is not a list, or names a rule that does not exist.
    """
    if key not in table:
        return None
    listed = table[key]
    if not isinstance(listed, list) or not all(isinstance(code, str) for code in listed):
        raise ConfigError(
            f"{where}: {key} in [tool.kedge] is {listed!r}; write a list of codes: "
            f'{key} = ["{rules[0].code}"]'
        )
    return [_code(code, rules, f"{key} in [tool.kedge]", where) for code in listed]


def toml(rules: Iterable[Rule], defaults: Iterable[Rule]) -> str:
    """Return the thresholds of rules in the form of ``pyproject.toml``; changed ones with their default."""
    usual = {rule.code: thresholds(rule) for rule in defaults}
    shown = [rule for rule in rules if thresholds(rule)]
    return "\n".join(_section(rule, usual.get(rule.code, {})) for rule in shown)


#: The keys of ``[tool.kedge]``.
KEYS = ("select", "ignore", "rules", "on")


def _section(rule: Rule, usual: Thresholds) -> str:
    lines = [f"[tool.kedge.rules.{rule.code}]"]
    for name, value in thresholds(rule).items():
        default = usual.get(name, value)
        line = f"{name} = {value!r}"
        if value != default:
            line += f"  # default: {default!r}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _names(rule: Any) -> list[str]:
    return [field.name for field in fields(rule)]


def _with(rule: Rule, given: Mapping[str, Any], where: str) -> Rule:
    name = f"[tool.kedge.rules.{rule.code}]"
    _require_known(name, given, _names(rule), where)
    values: Any = {
        key: _number(value, thresholds(rule)[key], f"{key} in {name}", where)
        for key, value in given.items()
    }
    changed: Any = rule
    return replace(changed, **values)  # type: ignore[no-any-return]


def _number(value: Any, default: float, name: str, where: str) -> float:
    """Return a threshold: a whole number where the default is one, any number elsewhere."""
    whole = isinstance(default, int)
    kind, fits = "number", isinstance(value, int | float)
    if whole:
        kind, fits = "whole number", isinstance(value, int)
    if isinstance(value, bool) or not fits or math.isnan(value):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a {kind}, such as {default!r}")
    if whole:
        return int(value)
    return float(value)


def _table(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a table")
    return value


def _code(code: str, rules: Sequence[Rule], name: str, where: str) -> str:
    known = [rule.code for rule in rules]
    if code.upper() not in known:
        raise ConfigError(
            f"{where}: {name}: there is no rule {code!r}; {_nearest(code.upper(), known)}"
        )
    return code.upper()


def _require_known(name: str, given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: {name} has an unknown key {key!r}; {_nearest(key, known)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=3, cutoff=0.4)
    if near:
        return f"the nearest are {', '.join(near)}"
    return f"the known ones are {', '.join(known)}"
