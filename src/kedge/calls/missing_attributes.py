"""Attributes that are tried on a result and that it lacks: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class MissingAttributes:
    """Base of results on which people try attributes of other tools: the error says what to write."""

    _instead_of: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker knows the attributes that there are

        def __getattr__(self, name: str) -> Any:
            """Raise the error about an attribute that there is not.

            Raises:
                AttributeError: Always. A property that failed by one is read again, for its own.
            """
            instead = self._instead_of.get(name)
            if instead is None:
                return object.__getattribute__(self, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {instead}",
                name=name,
                obj=self,
            )
