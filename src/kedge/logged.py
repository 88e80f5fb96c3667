"""Values that a program says about itself: `kedge.log`.

They go to every watch of the process. Without one, nothing happens, and torch is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from kedge.calls.arguments import called_as, described
from kedge.errors import WrongCall

_EXAMPLE = 'kedge.log(accuracy=0.93), or kedge.log({"val/accuracy": 0.93})'


class LogReceiver(Protocol):
    """What takes logged values: a watch."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Take numbers by name: floats, and tensors of one element."""


receivers: list[LogReceiver] = []
"""The active watches."""


@called_as(_EXAMPLE)
def log(values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
    """Record numbers of this step, such as an accuracy, under names.

    Under `kedge run` and in `kedge.watch` they are drawn over the steps, beside the losses; see
    ``recording.logged``. Elsewhere nothing happens.

    A value belongs to the step whose backward has begun, or else to the last step that has ended.
    Of several values of one name and step the last one counts.

        >>> kedge.log(accuracy=0.93)
        >>> kedge.log({"val/loss": torch.tensor(0.5)})

    Args:
        values: Numbers by name, for names that are no Python names.
        **named: Numbers by name: Python's, NumPy's, or tensors of one element. Nothing waits for a
            tensor on a device.

    Raises:
        WrongCall: A value is no number.
    """
    if values is not None and not isinstance(values, Mapping):
        raise WrongCall(f"log({described(values)}): give numbers by name, as in {_EXAMPLE}")
    numbers = {}
    for name, value in {**(values or {}), **named}.items():
        if not isinstance(name, str) or not name:
            raise WrongCall(f"log({{{name!r}: ...}}): a name is a text, as in {_EXAMPLE}")
        number = _number(value)
        if number is None:
            raise WrongCall(
                f"log({name}={described(value)}): a value is a number or a tensor of one element, "
                "such as correct.float().mean()"
            )
        numbers[name] = number
    _pass_on(numbers)


def log_numbers(values: Mapping[str, Any]) -> None:
    """Record those values that are numbers, of what a library logs."""
    if receivers:
        numbers = {str(name): _number(value) for name, value in values.items()}
        _pass_on({name: number for name, number in numbers.items() if number is not None})


def _pass_on(numbers: Mapping[str, Any]) -> None:
    for receiver in tuple(receivers):
        receiver.log(numbers)


def _number(value: Any) -> Any:
    """Return a number as a float, and a tensor of one element as it is; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value
        return None
    if not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an array, or an integer beyond all floats
        return None
