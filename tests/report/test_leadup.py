"""The steps before a birth, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.report.findings import lead_up
from kedge.rules.evidence import Evidence, LeadUp, SiteCourse


@dataclass(frozen=True, kw_only=True)
class Before(Evidence):
    """Evidence of the steps before a finding."""

    before: LeadUp | None

    def lead_up(self) -> LeadUp | None:
        """Return them."""
        return self.before


def before(steps: Sequence[int], sites: dict[str, SiteCourse]) -> Before:
    """Return evidence of some steps."""
    return Before(before=LeadUp(steps, sites))


def course(*rms: float | None, last: str = "finite") -> SiteCourse:
    """The course of a site that was finite until the last step."""
    states = [None if value is None else "finite" for value in rms[:-1]] + [last]
    return SiteCourse(rms=rms, absmax=rms, state=states)


def test_each_site_has_a_line_and_the_first_to_fail_comes_last():
    """What went in is drawn above what came out, each with its first and last size."""
    sites = {"log:out": course(1.0, 10.0, None, last="inf"), "log:in": course(1.0, 0.01, 1e-4)}

    lines = [str(line) for line in lead_up(before([3, 4, 5], sites))]

    assert lines == [
        "rms in steps 3 to 5",
        "  log:in   █▅▁  1.00 → 1.0e-4",
        "  log:out  ▁█✗  1.00 → 10.0 → inf",
    ]


def test_steps_that_were_not_measured_are_gaps():
    """A site that is only measured in full steps has nothing in the others."""
    lines = [str(line) for line in lead_up(before([3, 4, 5], {"x:out": course(1.0, None, 1.0)}))]

    assert lines[1] == "  x:out  ▄ ▄  1.00 → 1.00"


def test_nothing_is_drawn_of_one_step_or_without_figures():
    """A birth in the first step has no steps before it, and other findings no such evidence."""
    one = before([0], {"x:out": course(1.0)})
    none = before([0, 1], {"x:out": course(None, None, last="nan")})
    without = (Evidence(), Before(before=None), Before(before=LeadUp()))

    assert [lead_up(evidence) for evidence in (one, none, *without)] == [[]] * 5


def test_long_names_are_cut_in_their_middle():
    """Paths of one model begin alike."""
    name = "encoder.layers.11.attention.self.query.projection:out"

    (_, line) = lead_up(before([0, 1], {name: course(1.0, 1.0)}))

    assert str(line) == "  enc…11…self.query.projection:out  ▄▄  1.00 → 1.00"


def test_the_blocks_of_a_negative_loss_rise_where_it_rises():
    """Its size would fall there; values below zero are drawn as they are."""
    signed = SiteCourse(
        rms=(0.5, 2.0, 1.0), absmax=(0.5, 2.0, 1.0), state=("finite",) * 3, value=(0.5, -2.0, -1.0)
    )

    lines = [str(line) for line in lead_up(before([3, 4, 5], {"loss": signed}))]

    assert lines[1] == "  loss (value)  █▁▄  0.500 → -1.00"
