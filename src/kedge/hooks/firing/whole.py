"""Actions that answer with the whole value of a call, and the gates of modules, which alone have such actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kedge.flow import Event
from kedge.hooks.firing.contract import Whole
from kedge.hooks.firing.fire import fire, fire_one
from kedge.hooks.firing.gate import Found, Gate
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Tap
from kedge.sites.site import Site


class ModuleGate(Gate):
    """The taps of one session on one side of one module, some of which may answer with a whole value.

    Attributes:
        whole: Whether some do.
        plain: Whether a value that is one tensor needs its taps alone: none answers so, and no
            gradient tap is on.
    """

    def __init__(self, owner: Owner, passes: PassCounter, path: str) -> None:
        super().__init__(owner, passes, path)
        self.whole = False
        self.plain = True

    def retime(self) -> None:
        """Update what the taps need, and whether any answers with a whole value."""
        super().retime()
        self.whole = any(tap.whole for taps in self.taps.values() for tap in taps)
        self.plain = not (self.backward or self.whole)

    def through_whole(
        self, kind: str, found: Found, call: int, recompute: bool
    ) -> dict[str, Tensor]:
        """Run every leaf through the taps of a kind, as `through` does, where some answer with a whole value."""
        new: dict[str, Tensor] = {}
        events = [self.passes.event(self.site(kind, leaf), call, recompute) for leaf, _ in found]
        for together in _rounds(self.taps[kind]):
            if together[0].whole:
                values = [new.get(leaf, tensor) for leaf, tensor in found]
                new.update(
                    zip(
                        (leaf for leaf, _ in found),
                        fire_whole(together[0], values, events),
                        strict=True,
                    )
                )
                continue
            for (leaf, tensor), event in zip(found, events, strict=True):
                new[leaf] = fire(together, new.get(leaf, tensor), event)
        return {
            leaf: new[leaf] for leaf, tensor in found if leaf in new and new[leaf] is not tensor
        }

    def without_tensors(self, kind: str, call: int, recompute: bool) -> None:
        """Run the taps of a kind that answer with a whole value in a call without a tensor."""
        if not self.whole:
            return
        for tap in self.taps[kind]:
            if tap.whole:
                site = Site(self.passes.label(self.path), kind)
                event = self.passes.event(site, call, recompute)
                fire_whole(tap, (None,), (event,))


def fire_whole(tap: Tap, values: Sequence[Any], events: Sequence[Event]) -> Sequence[Any]:
    """Run the leaves of one call through a tap that answers for all of them, also if it is removed meanwhile.

    Args:
        tap: The tap.
        values: The leaves; one None for a call without any.
        events: Their events.

    Returns:
        The leaves for the program.
    """
    __tracebackhide__ = True
    first = events[0]
    action: Whole = tap.action  # type: ignore[assignment]
    on = tap.repeats() if first.recompute else tap.on
    if not (on and (tap.broad or tap.means(first))):
        return values
    new = []
    with action.one_call(events):
        for value, event in zip(values, events, strict=True):
            new.append(value if tap.failed == "off" else fire_one(tap, value, event))
    return new


def _rounds(taps: Sequence[Tap]) -> list[Sequence[Tap]]:
    """Split taps so that every leaf has passed those before one that answers with the whole value, which is alone."""
    rounds: list[Sequence[Tap]] = []
    begin = 0
    for i, tap in enumerate(taps):
        if tap.whole:
            if i > begin:
                rounds.append(taps[begin:i])
            rounds.append(taps[i : i + 1])
            begin = i + 1
    if begin < len(taps):
        rounds.append(taps[begin:])
    return rounds
