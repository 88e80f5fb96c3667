"""Blocks apart from similar ones: those with a line of their own beside a line that stands for the others."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.report.curves import ScaleSeries
from kedge.report.module_lines import FIGURES, FoldedLine, ModuleLine, folded, lines
from kedge.report.module_table import spread
from kedge.rules.rule import Finding
from kedge.short_text import listed
from kedge.sites.folding import outliers, pattern
from kedge.store.recording import Recording
from kedge.store.rows import Bools, Floats

#: The most blocks that a sentence names.
MOST_NAMED = 3
#: The figures that the table names otherwise.
_TITLES = {"gradient": "grad"}


@dataclass(frozen=True)
class ApartBlock:
    """A block with a line apart from those of similar blocks.

    Attributes:
        name: The path of the block.
        at_end: Whether it is the first or the last of its kind, which often differ from the others
            by nature.
        reason: The figure that is far from the others, in words; empty if it has a line of its own
            for another reason, such as a finding.
        distance: The distance of that figure from the others on a logarithmic scale.
    """

    name: str
    at_end: bool
    reason: str = ""
    distance: float = 0.0


def apart_blocks(made: Sequence[ModuleLine]) -> list[ApartBlock]:
    """Return the blocks with lines apart from similar blocks, in the order of a table, given its lines."""
    similar: dict[tuple[Hashable, str, str], list[ModuleLine]] = {}
    for line in made:
        if isinstance(line, FoldedLine):
            similar.setdefault(_kind(line), []).extend(line.members)
    groups = {kind: _Others(members) for kind, members in similar.items()}
    found: dict[str, ApartBlock] = {}
    for line in made:
        if not isinstance(line, FoldedLine) and (others := groups.get(_kind(line))) is not None:
            block = _block(line, others)
            found[block.name] = max(
                found.get(block.name, block), block, key=lambda one: one.distance
            )
    return [
        block
        for block in found.values()
        if not any(holder in found for holder in _holders(block.name))
    ]


def sentence(blocks: Sequence[ApartBlock]) -> str:
    """Return the blocks that are apart in words, with the reason of the furthest one; empty if there are none."""
    if not blocks:
        return ""
    furthest = max(blocks, key=lambda block: block.distance)
    names = listed([block.name for block in blocks], MOST_NAMED)
    what = f"{names} {'is' if len(blocks) == 1 else 'are'} apart from similar blocks"
    if not furthest.reason:
        return what
    return f"{what}{'; the furthest' if len(blocks) > 1 else ''}: {furthest.reason}"


def apart_in_short(recording: Recording, findings: Sequence[Finding]) -> str:
    """Return the blocks inside a model that are apart from similar ones, in a line; empty if there are none.

    Those with no more than a finding have been named with it, and the ends of a model often differ
    by nature.
    """
    blocks = apart_blocks(folded(lines(recording), findings))
    return sentence([block for block in blocks if block.reason and not block.at_end])


def _kind(line: ModuleLine) -> tuple[Hashable, str, str]:
    return pattern(line.path), line.type, line.shape


def _holders(name: str) -> Iterator[str]:
    """Yield the paths of what holds a block."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class _Others:
    """The similar lines that some lines are compared with; what is asked of all of them is found once."""

    def __init__(self, members: Sequence[ModuleLine]) -> None:
        self.members = members
        self._known: dict[str, Floats] = {}
        self._said: dict[str, str] = {}
        self._zeros: dict[str, Bools | None] = {}
        self._numbers: dict[int, tuple[int, int]] = {}

    def known(self, figure: str) -> Floats:
        """Return their newest finite values of a figure."""
        if figure not in self._known:
            values = (member.newest_finite(figure) for member in self.members)
            self._known[figure] = np.array([value for value in values if value is not None])
        return self._known[figure]

    def said(self, figure: str) -> str:
        """Return these values in words."""
        if figure not in self._said:
            self._said[figure] = spread(self.known(figure).tolist(), share=figure == "zero").plain
        return self._said[figure]

    def had_zeros(self, figure: str) -> Bools | None:
        """Return the steps in which any of them had only zeros; None if one has no course of the figure."""
        if figure not in self._zeros:
            sites, self._zeros[figure] = [member.scaled(figure) for member in self.members], None
            if None not in sites:
                scales = self.members[0].recording.matrix(sites, "rms")
                self._zeros[figure] = np.any(scales == 0, axis=0)
        return self._zeros[figure]

    def hold(self, name: str) -> bool:
        """Whether a block is, or has in it, one of them."""
        return name in self._holders

    @cached_property
    def _holders(self) -> frozenset[str]:
        paths = (member.path.split(".") for member in self.members)
        return frozenset(
            ".".join(parts[:end]) for parts in paths for end in range(1, len(parts) + 1)
        )

    def ends(self, place: int) -> tuple[int, int]:
        """Return the least and the greatest number that stands at one place of their paths."""
        if place not in self._numbers:
            numbers = [int(member.path.split(".")[place]) for member in self.members]
            self._numbers[place] = min(numbers), max(numbers)
        return self._numbers[place]


def _block(line: ModuleLine, others: _Others) -> ApartBlock:
    """Return the block that a line stands for: the outermost numbered one that holds none of the others."""
    parts = line.path.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    for place in numbered:
        name = ".".join(parts[: place + 1])
        if not others.hold(name):
            break
    first, last = others.ends(place)
    distance, reason = max(_reasons(line, others), key=lambda one: one[0], default=(0.0, ""))
    return ApartBlock(name, not first < int(parts[place]) < last, reason, distance)


def _reasons(line: ModuleLine, others: _Others) -> Iterator[tuple[float, str]]:
    """Yield the figures of a line that are far from those of others, in words, each with its distance."""
    for figure in FIGURES:
        own, known = line.newest_finite(figure), others.known(figure)
        distance = _distance(own, known, share=figure == "zero")
        if own is not None and distance:
            said = spread([own], share=figure == "zero").plain
            yield (
                distance,
                f"{line.label} has {_TITLES.get(figure, figure)} {said}, the others {others.said(figure)}",
            )
        else:
            yield from _zeros(line, others, figure)


def _distance(own: float | None, others: Floats, *, share: bool) -> float:
    """Return the distance of a figure from others, on a logarithmic scale; 0 if it is not far."""
    if own is None or not len(others):
        return 0.0
    middle, together = float(np.median(others)), np.append(own, others)
    if share:
        return abs(own - middle) if 0 in outliers(together, share=True) else 0.0
    if (own == 0) != (middle == 0):
        return math.inf
    return abs(math.log(own / middle)) if 0 in outliers(together) else 0.0


def _zeros(line: ModuleLine, others: _Others, figure: str) -> Iterator[tuple[float, str]]:
    """Yield that a line had only zeros in a step in which the others had not; as far as the least outlier."""
    own, had = getattr(line, figure), others.had_zeros(figure)
    if isinstance(own, ScaleSeries) and had is not None:
        steps = np.flatnonzero((own.rms == 0) & ~had)
        if len(steps):
            step = int(line.recording.steps[steps[0]])
            yield (
                1.0,
                f"{line.label} had {_TITLES.get(figure, figure)} 0 at step {step}, the others had not",
            )
