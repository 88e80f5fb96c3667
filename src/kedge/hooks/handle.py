"""The handle of one hook: removes it, and reads its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self, SupportsIndex

from kedge.calls.missing_attributes import MissingAttributes
from kedge.flow import V_co
from kedge.hooks.attach import note_removal
from kedge.hooks.open_sessions import in_block
from kedge.hooks.recorded_values import Listed, RecordedValues
from kedge.notebook import SHOWN, Table
from kedge.short_text import counted, listed

_NAMED = 3


@dataclass(eq=False, repr=False)
class Hooked(MissingAttributes, RecordedValues[V_co]):
    """The handle of one hook, on one or many sites: removes it, and is a mapping of the values that it recorded.

    As a context it removes the hook at the end of its block. ``acts["layer4"]``, ``"layer4" in
    acts``, ``acts.items()`` and ``dict(acts)`` read the newest pass, in the order in which the
    values came, and do not copy them; so they can be read in the block, after it, and after a
    failure. With `kedge.record` a value is a tensor, detached, with the shape, dtype and device
    that the program gave it; with `kedge.measure` it is a `Statistics`, whose figures are plain
    numbers. ``print(acts)`` shows them as a table. A hook without a recording action has no values
    to read, and a handle is always true.

    Attributes:
        end: Ends the hook's own session; None if the hook belongs to a longer session.
    """

    _instead_of = dict.fromkeys(
        ("activation", "activations", "output", "tensor", "value"),
        'acts["layer4"] is a value, and print(acts) lists their names',
    ) | dict.fromkeys(("close", "detach", "off", "stop", "unhook"), "remove() removes the hook")

    end: Callable[..., None] | None = None

    def remove(self) -> None:
        """Remove this hook before its session ends; its records stay readable."""
        if self.end is not None:
            note_removal(self.taps)
            self.end()
        else:
            self.session.drop(self.taps)

    def __bool__(self) -> bool:
        """Return True: ``if handle: handle.remove()`` must not depend on whether a value came."""
        return True

    def __str__(self) -> str:
        """The values as a table; if there are none, the actions and their sites."""
        return "\n\n".join(table.text() for table in self._tables()) or self._heading()

    def __repr__(self) -> str:
        """The actions, their sites, and how often they ran there.

        Below, the first values as a table.
        """
        tables = [table.text(SHOWN) for table in self._tables()]
        return "\n".join([self._heading(), *tables])

    def _repr_html_(self) -> str:
        """The actions' own notebook output, such as statistics.

        The ledger if they have none.
        """
        tables = [table.html() for table in self._tables()]
        own = [action for action in self.actions if not isinstance(action, Listed)]
        shows = [action._repr_html_() for action in own if hasattr(action, "_repr_html_")]
        return "".join([*tables, *shows]) or self.ledger()._repr_html_()

    def _heading(self) -> str:
        fired: dict[str, int] = {}
        for tap in self.taps:  # the actions at one site run together
            fired[str(tap.site)] = max(fired.get(str(tap.site), 0), tap.fired)
        sites = listed(list(fired), _NAMED)
        labels = ", ".join(dict.fromkeys(tap.label for tap in self.taps))
        times = counted(sum(fired.values()), "time")
        return f"<hook {labels} at {sites}: fired {times}>"

    def _tables(self) -> list[Table]:
        listing = (action for action in self.actions if isinstance(action, Listed))
        tables = [action.table() for action in listing]
        return [table for table in tables if table.rows]

    def __copy__(self) -> Self:
        """Return this handle: another one would remove the same hook."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "the handle of a hook cannot be copied deeply or pickled, because it "
            "holds hooks of this process; dict(handle) has its values, for "
            "torch.save as well. If a module holds the handle, keep it outside of "
            "the module"
        )

    def __enter__(self) -> Self:
        """Begin a block that removes the hook at its end."""
        if self.end is not None:
            in_block(self.session)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        """Remove the hook."""
        if self.end is not None:
            self.end(quiet=kind is not None)
        else:
            self.session.drop(self.taps)
