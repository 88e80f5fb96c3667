"""What is to be done at which findings: ``--on NAN-BORN=stop``, ``watch(on={"NAN-BORN": "stop"})``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from kedge.errors import ConfigError, WrongCall
from kedge.program.project_file import project_table
from kedge.rules.registry import by_code
from kedge.rules.rule import SEVERITIES, Finding

Orders = Mapping[str, tuple[str, ...]]
"""The actions by the code of a rule, or a severity."""

SNAPSHOT, SKIP, RAISE, STOP = "snapshot", "skip", "raise", "stop"
ACTIONS = (STOP, RAISE, SKIP, SNAPSHOT)

BEFORE_STEP = ("NAN-BORN",)
"""The rules whose errors are known before the step of an optimizer that they would spoil.

They are looked for in every step, and not in the recording. All others are judged from that, so
they are known some steps later.
"""

LEVELS = ("error", "warning")
"""The severities that can be named; ``warning`` stands for warnings and errors."""


def orders_of(given: Mapping[Any, Any], asked: str = "on=") -> Orders:
    """Return orders as they are carried out, in the usual spelling of codes.

    Args:
        given: An action, or several, by the code of a rule or a severity; several as a list, or as
            a text with commas.
        asked: What the user wrote, for messages.

    Raises:
        WrongCall: A code, a severity or an action does not exist, or cannot be ordered together.
    """
    if not isinstance(given, Mapping):
        raise WrongCall(
            f"{asked}{given!r}: give a dict of actions by the code of a rule or a severity, "
            'such as on={"NAN-BORN": "stop"}'
        )
    orders: dict[str, tuple[str, ...]] = {}
    for key, actions in given.items():
        known = _key(key, asked)
        orders[known] = (*orders.get(known, ()), *_actions(known, actions, asked))
    for key, ordered in orders.items():
        orders[key] = tuple(action for action in ACTIONS if action in ordered)
        ends = [action for action in orders[key] if action != SNAPSHOT]
        if len(ends) > 1:
            raise WrongCall(
                f"{asked}{key}: {' and '.join(ends)} exclude each other; "
                "choose one of them, beside snapshot"
            )
    return orders


def with_those_of_project(orders: Orders) -> Orders:
    """Return orders beside those of the project, in ``[tool.kedge.on]``; of one code these here hold.

    Raises:
        ConfigError: Those of the project cannot be carried out.
    """
    where, table = project_table()
    try:
        own = orders_of(table.get("on", {}), f"{where}: on in [tool.kedge]: ")
    except WrongCall as error:
        raise ConfigError(str(error)) from error
    return {**own, **orders}


def _key(key: Any, asked: str) -> str:
    codes = list(by_code())
    text = str(key)
    if text.lower() in LEVELS:
        return text.lower()
    if text.upper() in codes:
        return text.upper()
    raise WrongCall(
        f"{asked}{text}: there is no such rule or severity; {_near(text.upper(), codes)}; "
        f"the severities are {' and '.join(LEVELS)}"
    )


def _actions(key: str, given: Any, asked: str) -> tuple[str, ...]:
    names: Iterable[Any] = given
    if isinstance(given, str):
        names = given.split(",")
    if not isinstance(names, Iterable) or not (actions := [str(name).strip() for name in names]):
        raise WrongCall(f"{asked}{key}={given!r}: name an action: {', '.join(ACTIONS)}")
    for action in actions:
        if action not in ACTIONS:
            raise WrongCall(
                f"{asked}{key}={action}: there is no such action; {_near(action, ACTIONS)}"
            )
    if SKIP in actions and key not in BEFORE_STEP:
        raise WrongCall(
            f"{asked}{key}=skip: its findings are known only after the step that they are about; "
            f"steps can be skipped for {', '.join(BEFORE_STEP)}; for {key} choose stop, raise or "
            "snapshot"
        )
    return tuple(actions)


def _near(word: str, known: Iterable[str]) -> str:
    choice = list(known)
    near = get_close_matches(word, choice, n=3, cutoff=0.4)
    if near:
        return f"the nearest are {', '.join(near)}"
    return f"there are {', '.join(choice)}"


def actions_for(orders: Orders, finding: Finding) -> tuple[str, ...]:
    """Return what is to be done at a finding; its code goes before its severity.

    A hint (``info``) is never acted on, as it is no fault or follows from another one.
    """
    if finding.severity not in LEVELS:
        return ()
    if finding.code in orders:
        return orders[finding.code]
    at_least = SEVERITIES[SEVERITIES.index(finding.severity) :]
    return next((orders[level] for level in at_least if level in orders), ())


def looks_before_steps(orders: Orders) -> bool:
    """Whether something is to be done at findings that are known before a step."""
    return any(key in orders for key in (*BEFORE_STEP, *LEVELS))


def judges(orders: Orders) -> bool:
    """Whether something is to be done at findings that only the recording shows."""
    return any(key not in BEFORE_STEP for key in orders)
