"""What a finding rests on: each rule has a class for its evidence, which stands beside the rule.

    @dataclass(frozen=True, kw_only=True)
    class RestlessEvidence(Evidence):
        height: float | None = said("height {}")
        came_back: bool = said("it came back", no="it did not come back")
        shares: Mapping[str, float | None] = places("share at each site")
        dtype: str = unsaid()

The fields are what is written as JSON, in this order. What the page makes of a field stands beside
it: words, a curve, or figures of several places. A field without any of these is written with its
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from kedge.frames import SourceLine
from kedge.json_input.classes import as_json, left_out
from kedge.short_text import compact, percent

#: The most entries of a list that is written in words.
MOST_NAMES = 8

#: The key of a field's metadata that has its `Shown`.
SHOWN = "shown"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the page makes of one field.

    Attributes:
        words: The words for its value; none if the message or the figure shows it.
        no: Of a yes or no, the words for no.
        least: The least number that is written.
        is_share: Whether it is a share, which is written in per cent.
        limit: The name of a limit that the curve of a finding is compared with.
        caption: The words above figures of several places.
        preferred: Whether these are drawn rather than the curve of the finding's site.
        is_axis: Whether it has the steps of the curves in this evidence.
        is_curve: Whether it has the values of such a curve.
    """

    words: str = ""
    no: str = ""
    least: int | None = None
    is_share: bool = False
    limit: str = ""
    caption: str = ""
    preferred: bool = False
    is_axis: bool = False
    is_curve: bool = False


def said(
    words: str,
    *,
    no: str = "",
    least: int | None = None,
    limit: str = "",
    unless: Any = MISSING,
) -> Any:
    """Return a field that is written in words: ``"{} dead channels"``.

    Args:
        words: The words; braces stand for the value. Of a yes or no, the words for yes.
        no: The words for no.
        least: The least number that is written.
        limit: The name of the limit, if the curve of a finding is compared with it.
        unless: The value with which the field is left out of the JSON; without it, it never is.
    """
    return _field(Shown(words=words, no=no, least=least, limit=limit), unless)


def said_share(words: str) -> Any:
    """Return a field with a share, which is written in words and in per cent."""
    return _field(Shown(words=words, is_share=True))


def unsaid(*, unless: Any = MISSING) -> Any:
    """Return a field that is not written in words, because the message or the figure shows it.

    Args:
        unless: The value with which the field is left out of the JSON; without it, it never is.
    """
    return _field(Shown(), unless)


def places(caption: str, *, preferred: bool = False) -> Any:
    """Return a field with figures of several places: ``{"conv1.weight": 1e-9, ...}``.

    Args:
        caption: The words above their drawing.
        preferred: Whether they are drawn rather than the curve of the finding's site.
    """
    return _field(Shown(caption=caption, preferred=preferred))


def axis(words: str) -> Any:
    """Return a field with the steps of the curves in this evidence, which are written in words, too."""
    return _field(Shown(words=words, is_axis=True))


def curve() -> Any:
    """Return a field with the values of a curve, one for each step of the axis."""
    return _field(Shown(is_curve=True))


def _field(shown: Shown, unless: Any = MISSING) -> Any:
    metadata = {SHOWN: shown}
    if unless is MISSING:
        return field(metadata=metadata)
    return left_out(unless, metadata)


@dataclass(frozen=True)
class SiteCourse:
    """One site in the steps before a finding; an entry is None where nothing was measured.

    Attributes:
        rms: The root mean squares.
        absmax: The largest magnitudes.
        state: Whether the values were "finite", "inf" or "nan".
        value: The values themselves, of a loss that was negative.
    """

    rms: Sequence[float | None]
    absmax: Sequence[float | None]
    state: Sequence[str | None]
    value: Sequence[float | None] = left_out(())


@dataclass(frozen=True)
class LeadUp:
    """The last recorded steps before a finding, and some sites in each of them."""

    steps: Sequence[int] = ()
    sites: Mapping[str, SiteCourse] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as it is written: without any site it is empty."""
        if not self.sites:
            return {}
        return {"steps": list(self.steps), "sites": as_json(self.sites)}


@dataclass(frozen=True)
class Places:
    """Figures of several places, with the words above them."""

    caption: str
    preferred: bool
    figures: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a finding rests on; a subclass has the fields.

    Attributes:
        kind: Which of its rule's faults a finding shows, for rules whose faults have other causes
            or other effects.
    """

    kind: str = unsaid(unless="")

    def words(self) -> Iterator[str]:
        """Yield the plain values in words, as far as they are written."""
        for each in fields(self):
            said = _said(each, getattr(self, each.name))
            if said:
                yield said

    def places(self) -> Iterator[Places]:
        """Yield the figures of several places."""
        for _, shown, figures in self._shown():
            if shown.caption:
                yield Places(shown.caption, shown.preferred, figures)

    def axis(self) -> Sequence[int]:
        """Return the steps of the curves in this evidence; empty if there are none."""
        for _, shown, steps in self._shown():
            if shown.is_axis:
                return tuple(steps)
        return ()

    def curves(self) -> dict[str, Sequence[float | None]]:
        """Return the curves in this evidence by their names."""
        return {name: values for name, shown, values in self._shown() if shown.is_curve}

    def limits(self) -> dict[str, float | None]:
        """Return the limits that the curve of a finding is compared with, by their names."""
        return {shown.limit: value for _, shown, value in self._shown() if shown.limit}

    def lead_up(self) -> LeadUp | None:
        """Return the steps before the finding; None if it does not rest on them."""
        return None

    def culprit(self) -> SourceLine | None:
        """Return the program's line that has the fault; None if it is not known."""
        return None

    def _shown(self) -> Iterator[tuple[str, Shown, Any]]:
        """Yield each field that says what the page makes of it, with its value."""
        for each in fields(self):
            shown = each.metadata.get(SHOWN)
            if shown is not None:
                yield each.name, shown, getattr(self, each.name)


def _said(each: Field[Any], value: object) -> str:
    """Return a field in words; empty if it is not written."""
    shown = each.metadata.get(SHOWN)
    name = each.name.replace("_", " ")
    if shown is None:
        shown = Shown(words=f"{name}: {{}}")
        if isinstance(value, bool):
            shown = Shown(words=f"{name}: yes", no=f"{name}: no")

    if isinstance(value, bool):
        if value:
            return shown.words
        return shown.no
    if isinstance(value, int) and shown.least is not None and value < shown.least:
        return ""
    text = in_words(value)
    if shown.is_share and isinstance(value, float):
        text = percent(value)
    if not text:
        return ""
    return shown.words.format(text)


def in_words(value: object) -> str:
    """Return a plain value as text; empty for what is not one."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return compact(value)
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or len(value) > MOST_NAMES:
        return ""
    if not all(isinstance(one, str | int | float) for one in value):
        return ""
    return ", ".join(map(in_words, value))
