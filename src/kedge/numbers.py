"""Figures as short text."""

from __future__ import annotations


def compact(value: float) -> str:
    """Write a figure in at most seven characters: ``0.0123``, ``4.56``, ``1235``, ``1.2e-7``, ``nan``."""
    size = abs(value)
    if size == 0:
        return "0"
    if 0.009995 <= size < 9999.5:
        power = int(f"{size:.2e}".partition("e")[2])
        return f"{value:.{max(2 - power, 0)}f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def thousands(number: int) -> str:
    """Write a count short: ``950``, ``12.3k``, ``4.56M``."""
    for limit, unit in ((1_000, ""), (1_000_000, "k"), (1_000_000_000, "M")):
        if number < 0.9995 * limit:
            return f"{number * 1000 / limit:.3g}{unit}" if unit else str(number)
    return f"{number / 1_000_000_000:.3g}G"


def percent(share: float) -> str:
    """Write a share: ``3.3 %``, and ``< 0.1 %`` for what is there but rounds to nothing."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share:.1%}".replace("%", " %")


def seconds(duration: float) -> str:
    """Write a duration: ``0.41 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if duration < 99.95:
        return f"{duration:.3g} s"
    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def sized(number: int) -> str:
    """Write a number of bytes: ``950 B``, ``12.3 kB``, ``1.09 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g} {unit}" if abs(number) < 999.5 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"
