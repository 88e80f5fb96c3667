"""Blocks apart from similar ones.

Such a block has a line of its own beside a line that stands for the others.
"""

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
    """Return the blocks of a table's lines that are apart from similar ones, in its order."""
    similar: dict[tuple[Hashable, str, str], list[ModuleLine]] = {}
    for line in made:
        if isinstance(line, FoldedLine):
            similar.setdefault(_kind(line), []).extend(line.members)
    groups = {kind: _Others(members) for kind, members in similar.items()}
    found: dict[str, ApartBlock] = {}
    for line in made:
        others = groups.get(_kind(line))
        if others is None or isinstance(line, FoldedLine):
            continue
        block = _block(line, others)
        known = found.get(block.name)
        if known is None or block.distance > known.distance:
            found[block.name] = block

    # A block inside one that is apart itself is left out.
    names = found.keys()
    return [block for block in found.values() if names.isdisjoint(_holders(block.name))]


def sentence(blocks: Sequence[ApartBlock]) -> str:
    """Return the blocks in words, with the reason of the furthest one; empty without a block."""
    if not blocks:
        return ""
    furthest = max(blocks, key=lambda block: block.distance)
    names = listed([block.name for block in blocks], MOST_NAMED)
    if len(blocks) == 1:
        what = f"{names} is apart from similar blocks"
        before_reason = ": "
    else:
        what = f"{names} are apart from similar blocks"
        before_reason = "; the furthest: "
    if not furthest.reason:
        return what
    return f"{what}{before_reason}{furthest.reason}"


def apart_in_short(recording: Recording, findings: Sequence[Finding]) -> str:
    """Return the blocks inside a model that are apart from similar ones, in a line.

    It is empty if there are none. Those with no more than a finding have been named with it, and
    the ends of a model often differ by nature.
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
    """The similar lines that some lines are compared with; each question is answered once."""

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
        """Return the steps in which any had only zeros; None if one has no course of the figure."""
        if figure not in self._zeros:
            self._zeros[figure] = None
            sites = [member.scaled(figure) for member in self.members]
            if None not in sites:
                scales = self.members[0].recording.matrix(sites, "rms")
                self._zeros[figure] = np.any(scales == 0, axis=0)
        return self._zeros[figure]

    def hold(self, name: str) -> bool:
        """Whether a block is, or has in it, one of them."""
        return name in self._holders

    @cached_property
    def _holders(self) -> frozenset[str]:
        paths = {member.path for member in self.members}
        return frozenset(paths.union(*map(_holders, paths)))

    def ends(self, place: int) -> tuple[int, int]:
        """Return the least and the greatest number that stands at one place of their paths."""
        if place not in self._numbers:
            numbers = [int(member.path.split(".")[place]) for member in self.members]
            self._numbers[place] = min(numbers), max(numbers)
        return self._numbers[place]


def _block(line: ModuleLine, others: _Others) -> ApartBlock:
    """Return the block that a line stands for: the outermost numbered one without any other."""
    parts = line.path.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    for place in numbered:
        name = ".".join(parts[: place + 1])
        if not others.hold(name):
            break
    first, last = others.ends(place)
    at_end = not first < int(parts[place]) < last
    distance, reason = max(_reasons(line, others), key=lambda one: one[0], default=(0.0, ""))
    return ApartBlock(name, at_end, reason, distance)


def _reasons(line: ModuleLine, others: _Others) -> Iterator[tuple[float, str]]:
    """Yield the figures of a line that are far from those of others, each with its distance."""
    for figure in FIGURES:
        title = _TITLES.get(figure, figure)
        own = line.newest_finite(figure)
        distance = _distance(own, others.known(figure), share=figure == "zero")
        if own is not None and distance:
            said = spread([own], share=figure == "zero").plain
            reason = f"{line.label} has {title} {said}, the others {others.said(figure)}"
            yield distance, reason
            continue

        # Only zeros in a step in which the others had not: as far as the least outlier.
        scale = getattr(line, figure)
        had = others.had_zeros(figure)
        if isinstance(scale, ScaleSeries) and had is not None:
            steps = np.flatnonzero((scale.rms == 0) & ~had)
            if len(steps):
                step = int(line.recording.steps[steps[0]])
                yield 1.0, f"{line.label} had {title} 0 at step {step}, the others had not"


def _distance(own: float | None, others: Floats, *, share: bool) -> float:
    """Return the distance of a figure from others, on a logarithmic scale; 0 if it is not far."""
    if own is None or not len(others):
        return 0.0
    middle = float(np.median(others))
    if not share and (own == 0) != (middle == 0):
        return math.inf
    is_far = 0 in outliers(np.append(own, others), share=share)
    if not is_far:
        return 0.0
    if share:
        return abs(own - middle)
    return abs(math.log(own / middle))
