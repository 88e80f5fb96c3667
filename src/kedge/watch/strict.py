"""What becomes of a watched program when Kedge fails."""

from __future__ import annotations

from collections.abc import Callable

STATUS = 2
"""With what a program ends that was to be watched strictly and could not be."""


def give_up(what: str, instead: str, complain: Callable[[str], None], *, strict: bool) -> None:
    """Tell of a failure of Kedge's own; the program goes on, unless it was to be watched strictly.

    Args:
        what: What has failed.
        instead: What happens then, if the program goes on.
        complain: Tells the user.
        strict: Whether the program ends.

    Raises:
        SystemExit: It ends. This passes by `except Exception`, and a program has its `finally` blocks run.
    """
    complain(f"{what}; {'the program ends here, because of --strict' if strict else instead}")
    if strict:
        raise SystemExit(STATUS)
