"""How near a run's numbers came to the limits of their number format, and of the formats that could replace it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge.report.fitted_text import print_paragraph
from kedge.report.module_lines import lines, matching
from kedge.short_text import compact
from kedge.store.exponents import SMALLEST_NORMAL, below, quantile
from kedge.store.formats import FORMATS, NumberFormat
from kedge.store.recording import Recording, SiteInfo

WHAT_IF = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
KINDS = ("out", "out.grad")
#: Fewer doublings than this are few, a larger share of subnormal numbers is large: as in the rules.
FEW, MUCH = 2.0, 0.05
#: The quantile that counts as a site's small end; the smallest element would depend on the number
#: of drawn ones.
TAIL = 0.05

_LEGEND = (
    "largest: the largest magnitude of the run at a site. small: 5 % of the drawn non-zero elements are smaller. Each format "
    "has three figures: the doublings that the largest can take before it overflows, the halvings that the small one can take "
    "before it is below the smallest normal number, where precision is lost, and the share of elements below that number."
)


@dataclass(frozen=True)
class Reach:
    """The range of one site's magnitudes over the whole run.

    Attributes:
        site: The site.
        largest: Its largest finite magnitude; NaN if it was never measured in full.
        counts: The number of drawn elements by power of two, shape ``(83,)``.
    """

    site: SiteInfo
    largest: float
    counts: np.ndarray

    def headroom(self, form: NumberFormat) -> float:
        """Return the doublings that the largest magnitude can take before it overflows; negative if it would have."""
        return form.headroom(self.largest) if math.isfinite(self.largest) else math.nan

    @property
    def small(self) -> float:
        """The magnitude that 5 % of its non-zero elements are below; NaN if none were drawn."""
        return float(quantile(self.counts, TAIL))

    def depth(self, form: NumberFormat) -> float:
        """Return the halvings that the small magnitude can take before it is subnormal; negative if it is."""
        return form.depth(self.small) if math.isfinite(self.small) else math.nan

    def under(self, form: NumberFormat) -> float:
        """Return the share of the non-zero elements below the format's smallest normal number; NaN if none were drawn."""
        if not self.counts.any() or form.lowest_power < SMALLEST_NORMAL:
            return math.nan
        return float(below(self.counts, form.lowest_power))


def reaches(recording: Recording, pattern: str | None = None) -> Iterator[Reach]:
    """Yield the reach of every output and output gradient, in data-flow order.

    Args:
        recording: The recording.
        pattern: Patterns over module paths; all modules if None.

    Raises:
        NoSuchSite: No module matches the pattern.
    """
    known = lines(recording)
    paths = {line.label for line in (matching(known, pattern) if pattern is not None else known)}
    labels = {text: line.label for line in known for text in line.texts}
    for site in (s for kind in KINDS for s in recording.of_kind(kind)):
        if site.dtype in FORMATS and labels.get(site.site) in paths:
            largest = recording.rows(site).statistic("absmax")
            finite = largest[np.isfinite(largest)]
            counts = recording.exponents(site)[1].sum(axis=0)
            yield Reach(site, float(finite.max()) if len(finite) else math.nan, counts)


def render_headroom(recording: Recording, console: Console, pattern: str | None = None) -> None:
    """Print the table, with a line for each site and a column for each format."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("site", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("largest", "small"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("own", *(_short(name) for name in WHAT_IF)):
        table.add_column(
            title, justify="right"
        )  # in a narrow terminal the share goes into a line of its own
    for reach in reaches(recording, pattern):
        formats = [FORMATS[reach.site.dtype], *(FORMATS[name] for name in WHAT_IF)]
        table.add_row(
            reach.site.site,
            reach.site.dtype,
            compact(reach.largest),
            compact(reach.small),
            *_cells(reach, formats),
        )
    if not table.row_count:
        console.print("nothing was measured in full: no output or gradient of a module was watched")
        return
    console.print(table)
    console.print()
    print_paragraph(Text(_LEGEND, "dim"), console)


def _cells(reach: Reach, formats: Sequence[NumberFormat]) -> Iterator[Text]:
    for form in formats:
        left, deep, lost = reach.headroom(form), reach.depth(form), reach.under(form)
        cell = Text(_powers(left), "bold red" if left < FEW else "")
        cell.append(f" {_powers(deep)}", "yellow" if deep < 0 else "")
        cell.append(f" {_share(lost)}", "yellow" if lost > MUCH else "dim")
        yield cell


def _powers(room: float) -> str:
    return "-" if math.isnan(room) else f"{room:.1f}" if abs(room) < 10 else f"{room:.0f}"


def _share(lost: float) -> str:
    return "-" if math.isnan(lost) else "<1%" if 0 < lost < 0.005 else f"{lost:.0%}"


def _short(name: str) -> str:
    return {
        "float16": "fp16",
        "bfloat16": "bf16",
        "float8_e5m2": "fp8 e5m2",
        "float8_e4m3fn": "fp8 e4m3",
    }[name]
