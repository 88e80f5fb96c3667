"""How near a run's numbers came to the limits of number formats.

These are the format they had, and those that could replace it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

#: The formats that could replace a site's own, with their titles.
WHAT_IF = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e5m2": "fp8 e5m2",
    "float8_e4m3fn": "fp8 e4m3",
}
KINDS = ("out", "out.grad")
#: Fewer doublings than this are few, as in the rules.
FEW = 2.0
#: A larger share of subnormal numbers than this is large, as in the rules.
MUCH = 0.05
#: The quantile that counts as a site's small end; the smallest element would depend on the number
#: of drawn ones.
TAIL = 0.05

_LEGEND = (
    "largest: the largest magnitude of the run at a site. "
    "small: 5 % of the drawn non-zero elements are smaller. "
    "Each format has three figures: the doublings that the largest can take before it "
    "overflows, the halvings that the small one can take before it is below the smallest "
    "normal number, where precision is lost, and the share of elements below that number."
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
        """Return the doublings that the largest magnitude can take before it overflows.

        They are negative if it would have overflowed.
        """
        if not math.isfinite(self.largest):
            return math.nan
        return form.headroom(self.largest)

    @property
    def small(self) -> float:
        """The magnitude that 5 % of its non-zero elements are below; NaN if none were drawn."""
        return float(quantile(self.counts, TAIL))

    def depth(self, form: NumberFormat) -> float:
        """Return the halvings that the small magnitude can take before it is subnormal.

        They are negative if it is.
        """
        if not math.isfinite(self.small):
            return math.nan
        return form.depth(self.small)

    def under(self, form: NumberFormat) -> float:
        """Return the share of the non-zero elements below the smallest normal number of a format.

        It is NaN if none were drawn.
        """
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
    chosen = lines(recording)
    if pattern is not None:
        chosen = matching(chosen, pattern)
    texts = set[str]().union(*(line.texts for line in chosen))

    for kind in KINDS:
        for site in recording.of_kind(kind):
            if site.dtype not in FORMATS or site.site not in texts:
                continue
            magnitudes = recording.rows(site).statistic("absmax")
            finite = magnitudes[np.isfinite(magnitudes)]
            largest = float(finite.max()) if len(finite) else math.nan
            counts = recording.exponents(site)[1].sum(axis=0)
            yield Reach(site, largest, counts)


def render_headroom(
    recording: Recording,
    console: Console,
    pattern: str | None = None,
) -> None:
    """Print the table, with a line for each site and a column for each format."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("site", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("largest", "small"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("own", *WHAT_IF.values()):
        # In a narrow terminal the share goes into a line of its own.
        table.add_column(title, justify="right")

    for reach in reaches(recording, pattern):
        site = reach.site
        cells = [_cell(reach, FORMATS[name]) for name in (site.dtype, *WHAT_IF)]
        table.add_row(
            site.site,
            site.dtype,
            compact(reach.largest),
            compact(reach.small),
            *cells,
        )
    if not table.row_count:
        console.print("nothing was measured in full: no output or gradient of a module was watched")
        return
    console.print(table)
    console.print()
    print_paragraph(Text(_LEGEND, "dim"), console)


def _cell(reach: Reach, form: NumberFormat) -> Text:
    left = reach.headroom(form)
    cell = Text(_powers(left))
    if left < FEW:
        cell.stylize("bold red")
    deep = reach.depth(form)
    cell.append(f" {_powers(deep)}", "yellow" if deep < 0 else "")
    lost = reach.under(form)
    cell.append(f" {_share(lost)}", "yellow" if lost > MUCH else "dim")
    return cell


def _powers(room: float) -> str:
    if math.isnan(room):
        return "-"
    if abs(room) < 10:
        return f"{room:.1f}"
    return f"{room:.0f}"


def _share(lost: float) -> str:
    if math.isnan(lost):
        return "-"
    if 0 < lost < 0.005:
        return "<1%"
    return f"{lost:.0%}"
