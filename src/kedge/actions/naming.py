"""The names by which recorded values are read, as in ``acts["layer4#1:out"]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from kedge.calls.arguments import described
from kedge.errors import WrongCall
from kedge.flow import Act, Event
from kedge.sites.language import Term, op_pattern
from kedge.sites.names import names_at
from kedge.sites.site import Site


def check_kept(name: str, keep: object) -> None:
    """Refuse a number of passes or steps to keep that keeps nothing.

    Raises:
        WrongCall: If it is not a number, or below 1.
    """
    if keep is None:
        return
    if not isinstance(keep, int):
        problem = f"{name}(keep={described(keep)}) is not a number"
    elif keep < 1:
        problem = f"{name}(keep={keep}) would keep nothing"
    else:
        return
    raise WrongCall(f"{problem}; use 1 or more, or None for all")


def meant(term: Term, hooked: Site) -> bool:
    """Whether a name fits values of a hooked site, which may match many operations."""
    if hooked.op is None or term.op is None:
        return term.names(hooked)
    pattern, number = hooked.op
    name, named_number = term.op
    if number is not None and named_number is not None and number != named_number:
        return False
    return hooked.path == term.literal and op_pattern(pattern).fullmatch(name) is not None


def names_of(events: Iterable[Event]) -> list[str]:
    """Return the names that read the values of some events, which came in one pass; see `names_at`."""
    return names_at(replace(event.site, call=event.call) for event in events)


def each_operation(site: Site, bind: Callable[[Site], Act]) -> Act:
    """Return the action of a site that matches operations, with a separate action for each operation.

    Args:
        site: The site.
        bind: Returns the action of one operation's site.
    """
    acts: dict[tuple[str, int | None] | None, Act] = {}

    def act(value: Tensor, event: Event) -> Tensor | None:
        own = acts.get(event.site.op)
        if own is None:
            own = acts.setdefault(event.site.op, bind(replace(site, op=event.site.op)))
        return own(value, event)

    return act
