"""A rule that fails where it looks for a way: the tensor stays where it is, and the program goes on.

# Note [Whatever fails]
A rule reads what PyTorch's nodes keep, which another release may name otherwise. So a rule that fails, for whatever
reason, is a rule that does not apply. Only what the program's own signal handler raises meanwhile is the program's, and
goes on.
"""

from __future__ import annotations

import signal
import traceback


class RuleFailed(Exception):
    """A rule raised an error instead of saying whether it applies.

    Attributes:
        rule: The rule's name.
        why: What it raised, in words.
    """

    def __init__(self, rule: str, cause: Exception) -> None:
        first = str(cause).partition("\n")[0]
        self.rule, self.why = rule, f"it raised {type(cause).__name__}: {first}"
        super().__init__(f"rule {rule}: {self.why}")


def is_the_programs(error: Exception) -> bool:
    """Whether an error comes out of a signal handler, and so is none of the code that it came through."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = [code for each in handlers if (code := getattr(each, "__code__", None)) is not None]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
