"""The names under which values are returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from kedge.errors import ExtractError, NotRecorded, SelectorError
from kedge.features.capture import ValueKey
from kedge.sites.language import single
from kedge.sites.site import Site, short

_SHOWN = 8


def name_all(
    texts: tuple[str, ...], keys: Iterable[ValueKey], why: Callable[[int], str]
) -> dict[ValueKey, str]:
    """Return the names of values: the selector if it has a single value, else site and call.

    Args:
        texts: The selectors.
        keys: The values, in the order of capture.
        why: A function from a selector's number to the reason why it has no value.

    Raises:
        NotRecorded: If a selector has no value.
    """
    by_text: dict[int, list[ValueKey]] = {number: [] for number in range(len(texts))}
    for key in keys:
        by_text[key.number].append(key)
    named: dict[ValueKey, str] = {}
    for number, found in by_text.items():
        if not found:
            raise NotRecorded(f'nothing was captured at "{texts[number]}": {why(number)}')
        named |= {found[0]: texts[number]} if len(found) == 1 else named_apart(found)
    return named


def named_apart(keys: list[ValueKey]) -> dict[ValueKey, str]:
    """Return the names of several values of one selector, with call numbers if a module ran several times."""
    calls = Counter(key.site for key in keys)
    return {
        key: short(key.site.at(call=key.call) if calls[key.site] > 1 else key.site) for key in keys
    }


def renamed(named: Mapping[ValueKey, str], rename: Mapping[str, str]) -> dict[ValueKey, str]:
    """Return the names after renaming.

    Raises:
        ExtractError: If a name to change does not exist, or two values would get the same name.
    """
    unknown = [name for name in rename if name not in named.values()]
    if unknown:
        there = ", ".join(f'"{name}"' for name in list(named.values())[:_SHOWN])
        raise ExtractError(
            f'no value has the name "{unknown[0]}", to be called "{rename[unknown[0]]}"; the names are {there}'
        )
    names = {key: rename.get(name, name) for key, name in named.items()}
    _refuse_doubles(names.values())
    return names


def check(texts: tuple[str, ...], rename: Mapping[str, str], sites: list[list[Site]]) -> None:
    """Check names before the first forward, as far as possible.

    Raises:
        ExtractError: If a selector occurs twice, a name to change is impossible, or two values
            would get the same name.
    """
    _refuse_doubles(texts, "a selector is given twice")
    _refuse_doubles(rename.values())
    names = [
        name
        for text, of in zip(texts, sites, strict=True)
        for name in ([text] if len(of) == 1 else map(short, of))
    ]
    _refuse_doubles([rename.get(name, name) for name in names])
    paths = {site.path for of in sites for site in of}
    for name in rename:
        if name not in texts and not may_be(name, paths):
            shown = ", ".join(f'"{text}"' for text in texts[:_SHOWN])
            raise ExtractError(
                f'rename: no value can have the name "{name}"; the selectors are {shown}'
            )


def may_be(name: str, paths: Collection[str]) -> bool:
    """Whether a value of a module at one of these paths can have a name."""
    try:
        return single(name).literal in paths
    except SelectorError:
        return False


def _refuse_doubles(names: Iterable[str], what: str = "two values would have one name") -> None:
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise ExtractError(
            f'{what}: "{double[0]}"; rename={{...}} gives another, by selector or by site'
        )
