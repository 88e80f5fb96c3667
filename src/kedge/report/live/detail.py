"""One module in detail: a statistic of one of its sites, its newest figures, and its findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from kedge.report.findings import MARKS, STYLES
from kedge.report.live.plot import plot
from kedge.report.module_lines import ModuleLine
from kedge.report.sparkline import BAD
from kedge.rules.rule import Finding
from kedge.short_text import compact, counted
from kedge.store.recording import STATISTICS, Recording, SiteInfo
from kedge.store.rows import Floats

HEIGHT = 8
FIGURES_WIDTH = 34
SCALE_WIDTH = 8
#: The most steps of which a curve is drawn.
MOST_STEPS = 50_000
#: The statistics with curves, in the order in which keys go through them.
COURSES = (
    "rms",
    "mean",
    "std",
    "absmax",
    "zero",
    "q05",
    "q50",
    "q95",
    "saturated",
    "nonfinite",
    "nan",
    "inf",
)


#: The statistics that are shown only where an element is not finite.
OF_BROKEN = {"nan", "inf"}
#: The statistics that a non-finite element makes non-finite.
SPOILT = {"mean", "rms", "std", "absmax", "min", "max"}


def sites_of(line: ModuleLine) -> list[SiteInfo]:
    """Return the sites of a line, its output first."""
    own = [line.sites[kind] for kind in ("out", "out.grad") if kind in line.sites]
    return [*own, *(site for sites in line.parameters.values() for site in sites)]


def courses_of(recording: Recording, site: SiteInfo) -> list[str]:
    """Return the statistics that were measured at a site."""
    broken = (recording.series(site, "nonfinite") > 0).any()
    asked = [name for name in COURSES if broken or name not in OF_BROKEN]
    measured = [name for name in asked if np.isfinite(recording.series(site, name)).any()]
    return measured or list(COURSES[:1])


def detail(
    line: ModuleLine, chosen: tuple[int, int], findings: Sequence[Finding], width: int
) -> Text:
    """Return a module in detail.

    Args:
        line: The line of the table.
        chosen: The numbers of the site and of the statistic; both wrap around.
        findings: The findings; those of other modules are left out.
        width: The width of the text.
    """
    sites = sites_of(line)
    site = sites[chosen[0] % len(sites)]
    names = courses_of(line.recording, site)
    name = names[chosen[1] % len(names)]
    curve = _curve(line.recording, site, name, width - FIGURES_WIDTH)
    figures = _figures(line.recording, site)
    lines = [_title(line, site), *_choices(sites, site, names, name)]
    lines += _beside(curve, figures, width)
    for finding in findings:
        if finding.site in line.texts:
            mark = (f"{MARKS[finding.severity]} {finding.code}  ", STYLES[finding.severity])
            lines.append(Text.assemble(mark, finding.message))
            if finding.remedy:
                lines.append(Text(f"  → {finding.remedy}", "italic"))
    return Text("\n").join(lines)


def _title(line: ModuleLine, site: SiteInfo) -> Text:
    parts = [part for part in (line.type, line.shape, site.dtype) if part]
    if line.size:
        parts.append(counted(line.size, "parameter"))
    title = Text.assemble((line.label, "bold"), "  ", (" · ".join(parts), "dim"))
    called = site.source
    if called is not None:
        title.append(f"  {called.file}:{called.line}  ", "dim")
        title.append(called.text or "", "italic")
    return title


def _choices(
    sites: Sequence[SiteInfo], site: SiteInfo, names: Sequence[str], name: str
) -> Iterator[Text]:
    """Yield a line of all sites and one of all statistics, with the shown ones marked."""
    labels = [other.site.removeprefix(other.owner).lstrip(".:") for other in sites]
    yield _choice(labels, sites.index(site))
    yield _choice(names, names.index(name))


def _choice(labels: Sequence[str], chosen: int) -> Text:
    text = Text()
    for place, label in enumerate(labels):
        text.append(f" {label} ", "reverse" if place == chosen else "dim")
    return text


def _curve(recording: Recording, site: SiteInfo, name: str, width: int) -> list[Text]:
    """Return the curve of a statistic, with its scale on the left and the steps below."""
    wide = max(width - SCALE_WIDTH - 3, 8)
    drawn = plot(_to_scale(recording, site, name), wide, HEIGHT)
    if drawn is None:
        said = Text(f"no finite value of {name} is recorded", "dim")
        return [said, *[Text("")] * HEIGHT]

    scale = {0: compact(drawn.high), HEIGHT - 1: compact(drawn.low)}
    if drawn.logarithmic:
        scale[HEIGHT // 2] = "(log)"
    rows = []
    for i, row in enumerate(drawn.rows):
        label = f"{scale.get(i, ''):>{SCALE_WIDTH}} "
        rows.append(Text.assemble((label, "dim"), (row, "cyan")))

    first = str(recording.steps[0])
    last = str(recording.steps[-1])
    room = max(wide - len(first), len(last) + 1)
    axis = f"{'step':>{SCALE_WIDTH}} {first}{last:>{room}}"
    return [*rows, Text(axis, "dim")]


def _to_scale(recording: Recording, site: SiteInfo, name: str) -> Floats:
    """Return a statistic at evenly spaced steps; between two sampled ones it is that of the first."""
    values = recording.series(site, name)
    steps = recording.steps
    if not len(steps):
        return values
    many = min(int(steps[-1] - steps[0]) + 1, MOST_STEPS)
    even = np.linspace(steps[0], steps[-1], many)
    return np.asarray(values[np.searchsorted(steps, even, side="right") - 1])


def _figures(recording: Recording, site: SiteInfo) -> list[Text]:
    """Return every statistic of the newest step in which the site was measured, two in a line."""
    seen = np.flatnonzero(~np.isnan(recording.series(site, "count")))
    if not len(seen):
        return [Text("no measured step is recorded", "dim")]
    newest = int(seen[-1])
    broken = recording.series(site, "nonfinite")[newest] > 0
    cells = []
    for name in STATISTICS:
        if name in OF_BROKEN and not broken:
            continue
        value = float(recording.series(site, name)[newest])
        if np.isfinite(value):
            style = ""
        elif broken and name in SPOILT:
            style = BAD
        else:  # it was not measured
            continue
        cells.append(Text.assemble((f"{name:>9} ", "dim"), (f"{compact(value):<7}", style)))
    rows = [Text("").join(cells[i : i + 2]) for i in range(0, len(cells), 2)]
    return [Text(f"{'at step':>9} {recording.steps[newest]}", "dim"), *rows]


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield two blocks side by side; without room for both, the first alone."""
    room = width - FIGURES_WIDTH
    for i, text in enumerate(left):
        line = text.copy()
        if i < len(right) and room >= FIGURES_WIDTH:
            line.truncate(room)
            line.pad_right(room - line.cell_len)
            line.append_text(right[i])
        yield line
