"""What is called and not opened as a block, although other results of Kedge are blocks."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from kedge.errors import WrongCall


class NotABlock:
    """Base of the results of calls that a ``with`` is tried on by mistake: it says what to write."""

    _instead: ClassVar[str]

    def __enter__(self) -> NoReturn:
        """Refuse.

        Raises:
            WrongCall: Always; it says what to write instead.
        """
        raise WrongCall(f"this cannot be used in a with statement; {self._instead}")

    def __exit__(self, *_: object) -> None:
        """Python asks for this method before it enters the block."""
