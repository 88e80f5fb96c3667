"""Running the actions of one event: their order, edits and failures.

# Note [The order of actions]
The actions at one site run in the order of their attachment, in forward and in backward alike, each
on the value that the one before left. An action that was removed, is off schedule, or belongs to
another leaf or call is skipped. In a recompute only actions run that have changed a value before,
or that ask for recomputes: an edit must be applied again, or the recomputed graph differs from the
one of the forward; an observer would see everything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor

from kedge.errors import ActionDisabled, ActionError, StopForward
from kedge.flow import Event
from kedge.hooks.firing.contract import check_edit
from kedge.hooks.firing.tap import Tap
from kedge.signals import came_by_signal
from kedge.sites.leaves import describe
from kedge.torch_internals.checkpoint import Stopped
from kedge.torch_internals.own_work import programs_work, under_way
from kedge.torch_internals.tensors import version_of

_NO_KERNEL = "Could not run 'aten::"


def fire(taps: Sequence[Tap], value: Tensor, event: Event) -> Tensor:
    """Run a value through the taps of its site; see Note [The order of actions].

    Returns:
        The value for the program: the given one, or the result of the last edit.
    """
    __tracebackhide__ = True
    for tap in taps:
        on = tap.repeats() if event.recompute else tap.on
        if on and (tap.broad or tap.means(event)):
            value = fire_one(tap, value, event)
    return value


def fire_one(tap: Tap, value: Tensor, event: Event) -> Tensor:
    """Run a value through one tap; returns the value for the program."""
    __tracebackhide__ = True
    version = version_of(value)
    tap.fired += 1  # already here, for the ledger of a session that the action itself ends
    try:
        if tap.own or not under_way:
            result = tap.act(value, event)
        else:
            with programs_work():
                result = tap.act(value, event)
        in_place = version_of(value) != version
        if result is not None or in_place:
            check_edit(value, result, tap.action, event.site, in_place=in_place)
    except StopForward:
        tap.note(event)
        raise
    except BaseException as error:
        tap.fired -= 1
        if isinstance(error, Stopped) or not isinstance(error, Exception):
            raise
        failed(tap, value, event, error)  # with its place in front
        return value
    tap.note(event)
    if result is None:
        return value
    tap.edited = True
    return result


def failed(tap: Tap, value: Tensor, event: Event, error: Exception) -> None:
    """Raise an action's failure with its place, or disable the action if the session's `on_error` is "warn"."""
    __tracebackhide__ = True
    if came_by_signal(error):
        raise error  # as it is: a signal handler of the program raised it meanwhile
    error = _in_a_line(error)
    kind: Callable[[str], Exception] = ActionError
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, ActionError):
        kind = type(error)
        what = str(error)
    tap.failed = "raised"
    message = f"{tap.label} at {event.site} ({_moment(event)}, {describe(value)}): {what}"
    if tap.owner.on_error == "raise":
        _raise(kind(message), error)
    tap.on = False
    tap.when = None
    tap.failed = "off"
    message += "; this action is off for the rest of the session"
    tap.owner.complain(ActionDisabled(message))


def _in_a_line(error: Exception) -> Exception:
    """Return an action's error.

    Without the table of PyTorch's dispatcher, of all that it could have run instead.
    """
    text = str(error)
    if not (isinstance(error, NotImplementedError) and text.startswith(_NO_KERNEL)):
        return error
    return NotImplementedError(text.partition(". ")[0]).with_traceback(error.__traceback__)


def _moment(event: Event) -> str:
    backward = f", backward {event.backward}" if event.backward >= 0 else ""
    return f"pass {event.pass_}, call {event.call}{backward}"


def _raise(error: Exception, cause: Exception) -> NoReturn:
    __tracebackhide__ = True
    raise error from (cause.__cause__ if isinstance(cause, ActionError) else cause)
