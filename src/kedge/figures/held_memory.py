"""The memory that autograd holds over a step: `memory`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from kedge.calls.arguments import called_as
from kedge.errors import CannotDraw
from kedge.figures.canvas import ACCENT, QUIET, TEXT, Axes, Drawing, dress, plain
from kedge.report.fitted_text import cut
from kedge.report.held import HeldNode, held_tree
from kedge.short_text import sized

_HOLDERS = 10
_LONGEST_NAME = 34
_WARM = "#d55e00"
_SCALES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@runtime_checkable
class HeldOverTime(Protocol):
    """The bytes held over a step, as in the timeline of a memory report or the account of a recording."""

    @property
    def bytes(self) -> Sequence[int]:
        """The bytes held after each save and each release."""

    @property
    def at(self) -> Sequence[int]:
        """The number of the save or release of each entry in `bytes`, from 1."""

    @property
    def peak(self) -> int:
        """The largest number of bytes."""

    @property
    def peak_at(self) -> int:
        """The number of the save or release that reached the peak."""

    @property
    def backward(self) -> int | None:
        """The number of the first release; None without releases."""

    @property
    def holders(self) -> Sequence[tuple[str | None, int]]:
        """The modules that hold bytes at the peak: paths and bytes, the largest first."""


@called_as("figures.memory(kedge.saved(model, backward=True)(images))")
def memory(held: Any, *, title: str = "") -> Drawing:
    """Draw the bytes that autograd holds for backward over a step.

    Beside them are the modules that hold most at the peak. In a model of more than 40 modules,
    blocks that hold the same share a bar, as in ``h.0-11.mlp``.

    Args:
        held: A memory report, ``kedge.saved(model, backward=True)(x)``, or the `course` of a
            recording's account.
        title: The title of the figure.

    Returns:
        The figure. The horizontal axis counts saves and releases.

    Raises:
        CannotDraw: If nothing is held, or `held` is of another kind.

    Examples:
        >>> figure = figures.memory(kedge.saved(model, backward=True)(images))
    """
    course = getattr(held, "timeline", held)
    if not isinstance(course, HeldOverTime) or not course.bytes or not course.peak:
        raise CannotDraw(
            f"memory(...) got a {type(held).__name__} that holds nothing; "
            "it takes the account "
            "kedge.saved(model, backward=True)(x) of a model that saves something"
        )

    divisor, unit = next((scale, name) for scale, name in _SCALES if course.peak >= scale)
    holders = _holders(course)[:_HOLDERS]
    figure = Drawing(max(2.9, 0.22 * len(holders) + 1.1))
    over, who = figure.subplots(1, 2, width_ratios=(3, 2))
    _over_time(over, course, divisor, unit)
    _at_peak(who, holders, course.peak, divisor, unit)
    if title:
        figure.suptitle(plain(title), fontsize=10, x=0.01, ha="left")
    return figure


def _over_time(axes: Axes, course: HeldOverTime, divisor: float, unit: str) -> None:
    at = [0, *course.at]
    heights = [0.0, *(size / divisor for size in course.bytes)]
    axes.fill_between(at, heights, step="post", color=ACCENT, alpha=0.25, lw=0)
    axes.step(at, heights, where="post", color=ACCENT, lw=1.3)

    peak = course.peak / divisor
    axes.plot([course.peak_at], [peak], "o", color=_WARM, ms=5)
    side, apart = ("right", -7) if course.peak_at > max(at) / 4 else ("left", 7)
    axes.annotate(
        f"peak {sized(course.peak)}",
        (course.peak_at, peak),
        (apart, 3),
        textcoords="offset points",
        ha=side,
        fontsize=TEXT,
        color=_WARM,
    )
    if course.backward is not None:
        axes.axvline(course.backward - 0.5, color=QUIET, lw=0.9, ls=(0, (4, 3)))
        axes.text(course.backward, peak * 0.04, " backward", fontsize=TEXT - 1, color=QUIET)
    axes.set_ylim(0, peak * 1.15)
    axes.set_xlim(0, max(at))
    dress(axes, "over the step", x="saves and releases", y=f"held for backward, {unit}")


def _holders(course: HeldOverTime) -> list[tuple[str, int]]:
    """Return the names and bytes of what holds memory at the peak, the largest first.

    These are modules, or blocks of alike ones.
    """
    tensors = getattr(course, "tensors", None)
    if not tensors or not tensors.kinds:
        named = {None: "outside all modules", "": "the model itself"}
        return [(named.get(path, str(path)), size) for path, size in course.holders]

    moment = course.at.index(course.peak_at)
    held: Counter[str] = Counter()
    for path, size in _own(held_tree(tensors, moment)):
        held[path or "the model itself"] += size
    return [(name, size) for name, size in held.most_common() if size]


def _own(node: HeldNode, path: str = "") -> Iterator[tuple[str, int]]:
    yield path, sum(inner.bytes for inner in node.inside.values() if inner.level != "module")
    for inner in node.inside.values():
        if inner.level == "module":
            yield from _own(inner, f"{path}.{inner.label}".lstrip("."))


def _at_peak(
    axes: Axes, holders: Sequence[tuple[str, int]], peak: int, divisor: float, unit: str
) -> None:
    places = range(len(holders))
    sizes = [size / divisor for _, size in holders]
    names = [plain(cut(name, _LONGEST_NAME)) for name, _ in holders]
    axes.barh(places, sizes, color=ACCENT, alpha=0.75, height=0.65)
    axes.set_yticks(places, names, fontsize=TEXT - 1)
    axes.invert_yaxis()

    label = unit
    rest = peak - sum(size for _, size in holders)
    if rest > 0:
        label += f"; {sized(rest)} in others"
    dress(axes, "at the peak, by module", x=label)
    axes.tick_params(axis="y", length=0)
