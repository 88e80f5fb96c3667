"""Figures and lists as short text, and values as JSON has them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def compact(value: float) -> str:
    """Return a figure in at most seven characters: ``0.0123``, ``4.56``, ``1235``, ``1.2e-7``, ``nan``."""
    size = abs(value)
    if size == 0:
        return "0"
    if 0.009995 <= size < 9999.5:
        power = int(f"{size:.2e}".partition("e")[2])
        return f"{value:.{max(2 - power, 0)}f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def brief(value: float) -> str:
    """Return a figure with two digits, in at most six characters: ``0.012``, ``4.6``, ``1235``, ``1.2e-7``."""
    size = abs(value)
    if 0.00995 <= size < 99.5:
        power = int(f"{size:.1e}".partition("e")[2])
        return f"{value:.{max(1 - power, 0)}f}"
    return f"{value:.0f}" if 99.5 <= size < 9999.5 else compact(value)


def thousands(number: int) -> str:
    """Return a short count: ``950``, ``12.3k``, ``4.56M``."""
    for limit, unit in ((1_000, ""), (1_000_000, "k"), (1_000_000_000, "M")):
        if number < 0.9995 * limit:
            return f"{number * 1000 / limit:.3g}{unit}" if unit else str(number)
    return f"{number / 1_000_000_000:.3g}G"


def percent(share: float) -> str:
    """Return a share: ``3.3 %``, and ``< 0.1 %`` if it is positive but rounds to zero."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %")


def seconds(duration: float) -> str:
    """Return a duration: ``0.41 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if duration < 99.95:
        return f"{duration:.3g} s"
    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def is_or_are(count: int) -> str:
    """Return the verb for so many."""
    return "is" if count == 1 else "are"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return some names with commas between, and the number of the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """Return names; those that are the same with their number among these before them: ``2nd Linear``."""
    seen: Counter[str] = Counter()
    numbers = Counter(names)
    told = []
    for name in names:
        seen[name] += 1
        if numbers[name] == 1:
            told.append(name)
        else:
            told.append(f"{ordinal(seen[name])} {name}")
    return tuple(told)


def ordinal(number: int) -> str:
    """Return a place in a row: ``1st``, ``2nd``, ``11th``."""
    ending = "th"
    if number % 100 not in (11, 12, 13):
        ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def spans(places: Sequence[int]) -> str:
    """Return numbers in their order as spans: ``0..3, 7``."""
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][1] + 1:
            found[-1][1] = place
        else:
            found.append([place, place])
    texts = []
    for first, last in found:
        texts.append(str(first) if first == last else f"{first}..{last}")
    return listed(texts)


def shortened(text: str, most: int = 80) -> str:
    """Return a text, cut in its middle if it is longer than this."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - most // 2 + 1 :]}"


_LONG_WORD = re.compile(r"\S{401,}")


def with_short_words(text: str) -> str:
    """Return a text whose names of more than 400 letters are cut in their middle."""
    return _LONG_WORD.sub(lambda found: shortened(found[0]), text)


def sized(number: int) -> str:
    """Write a number of bytes: ``950 B``, ``12.3 kB``, ``1.09 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(number) >= 0.9995 * size:
            return (
                f"{number / size:.3g} {unit}"
                if abs(number) < 999.5 * size
                else f"{number / size:,.0f} {unit}"
            )
    return f"{number} B"


def for_json(value: Any) -> Any:
    """Return a value as plain JSON values; numbers that JSON lacks, and objects of other types, become text."""
    if isinstance(value, Mapping):
        return {str(key): for_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [for_json(inner) for inner in value]
    if hasattr(value, "tolist"):
        return for_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
