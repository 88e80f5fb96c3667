"""Reading by name: what the text between the brackets of ``acts["layer4#1:out"]`` means."""

from __future__ import annotations

from collections.abc import Collection

from kedge.errors import SelectorError
from kedge.sites.language import Term, parse


def single(name: str) -> Term:
    """Read the name of one site.

    Raises:
        SelectorError: If it could mean several.
    """
    terms = parse(name)
    if len(terms) != 1 or terms[0].literal is None:
        raise SelectorError(
            f'"{name}" may stand for several sites; records are read by the name of one, such as "layer4"'
        )
    return terms[0]


def kind_meant(term: Term, kinds: Collection[str]) -> str:
    """The kind that a name means: the one it says, else ``out``, else the only one there is."""
    return term.kind or ("out" if "out" in kinds or len(kinds) != 1 else next(iter(kinds)))
