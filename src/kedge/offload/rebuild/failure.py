"""Failing rules: the tensor stays in memory, and the program goes on.

# Note [Failing rules]
A rule reads fields of PyTorch's nodes, which another release may rename. So a rule that fails, for
whatever reason, does not apply. Only an error raised meanwhile by the program's own signal handler
belongs to the program, and propagates.
"""

from __future__ import annotations

import signal
import traceback


class RuleFailed(Exception):
    """An error in a rule, which should have returned a recipe or None.

    Attributes:
        rule: The rule's name.
        why: The error in words.
    """

    def __init__(self, rule: str, cause: Exception) -> None:
        first, _, _ = str(cause).partition("\n")
        self.rule = rule
        self.why = f"it raised {type(cause).__name__}: {first}"
        super().__init__(f"rule {rule}: {self.why}")


def is_the_programs(error: Exception) -> bool:
    """Whether an error comes from a signal handler, and not from the code that it interrupted."""
    codes = []
    for number in signal.valid_signals():
        code = getattr(signal.getsignal(number), "__code__", None)
        if code is not None:
            codes.append(code)
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
