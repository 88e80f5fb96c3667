"""Reading by name: what the text between the brackets of ``acts["layer4#1:out"]`` means."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from torch import Tensor

from kedge.flow import Act, Event
from kedge.sites.language import Term, op_pattern
from kedge.sites.site import Site


def meant(term: Term, hooked: Site) -> bool:
    """Whether a name may be that of a value which flowed at a hooked site, which may stand for many operations."""
    if hooked.op is None or term.op is None:
        return term.names(hooked)
    same = hooked.path == term.literal and hooked.op[1] in (
        None,
        term.op[1] if term.op[1] is not None else hooked.op[1],
    )
    return same and op_pattern(hooked.op[0]).fullmatch(term.op[0]) is not None


def kind_meant(term: Term, kinds: Collection[str]) -> str:
    """The kind that a name means: the one it says, else ``out``, else the only one there is."""
    return term.kind or ("out" if "out" in kinds or len(kinds) != 1 else next(iter(kinds)))


def each_operation(site: Site, bind: Callable[[Site], Act]) -> Act:
    """Make the action of a site that stands for operations: one of its own for each of them.

    Args:
        site: The site.
        bind: Makes the action of one operation's site.
    """
    acts: dict[tuple[str, int | None] | None, Act] = {}

    def act(value: Tensor, event: Event) -> Tensor | None:
        own = acts.get(event.site.op)
        if own is None:
            own = acts.setdefault(event.site.op, bind(replace(site, op=event.site.op)))
        return own(value, event)

    return act
