"""What Python puts into a page: few columns that lose no spike, compact numbers, and nothing that must stay private."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.report.page.columns import form_of, packed
from kedge.report.page.document import Document, condense
from kedge.report.page.figures import figure
from kedge.report.page.redact import shareable
from kedge.report.page.render import page_of, render_page
from kedge.report.page.step_bins import MOST, Bins, Grouping
from kedge.report.shown_run import ShownRun
from kedge.rules.activations.init_scale import InitScaleEvidence
from kedge.rules.evidence import SHOWN, Evidence, axis, curve, places
from kedge.rules.gradients.grad_explode import GradExplodeEvidence
from kedge.rules.gradients.grad_vanish import GradVanishEvidence
from kedge.rules.rank_departs import FarAwayEvidence
from kedge.rules.registry import ALL, by_code, check
from kedge.rules.rule import Finding, Rule
from kedge.store.events import DumpEvent, event_from
from kedge.store.exponents import quantile
from kedge.store.recording import Recording
from tests.report.page.runs import Run
from tests.rules.goldens import FOLDER, load

NAN = float("nan")
DTYPES = {"f8": "<f8", "f4": "<f4", "b2": "<u2", "u1": "u1", "n1": "u1"}


def unpacked(text: str, form: str) -> np.ndarray[Any, Any]:
    """Read a table as the page's script does."""
    held = np.frombuffer(base64.b64decode(text), DTYPES[form])
    if form == "b2":
        return (held.astype("<u4") << 16).view("<f4").astype(float)
    return np.where(held == 255, np.nan, held / 254) if form == "u1" else held


def sheet(document: Document, name: str, site: int) -> np.ndarray[Any, Any]:
    """Read one statistic of one site."""
    entry = document.described["sheets"][name]
    width = document.described["columns"]["count"]
    table = unpacked(document.tables[name], entry["form"]).reshape(-1, width)
    return table[site if entry["rows"] is None else entry["rows"].index(site)]


def chain(steps: int, special: dict[int, float] | None = None, every: int = 1) -> Recording:
    """Make a recording of one site whose scale is 1 but in special steps."""
    special = special or {}
    rows = [
        {
            "step": step * every,
            "site": "fc:out",
            "count": 4,
            "sumsq": 4 * special.get(step, 1.0) ** 2,
        }
        | {
            "sum": special.get(step, 1.0),
            "min": -special.get(step, 1.0),
            "max": special.get(step, 1.0),
            "nonzero": 4,
        }
        for step in range(steps)
    ]
    return Recording.build(["fc:out"], rows, roots=[{"name": "Net", "parameters": 3}])


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=3000, unique=True),
    st.lists(st.integers(0, 5000), max_size=60),
)
def test_columns_are_few_and_lose_no_step(steps: list[int], wanted: list[int]) -> None:
    """Every step is in one column, in order, and there are never more columns than fit."""
    known = np.sort(np.array(steps))
    bins = Bins.of(known, wanted)

    assert len(bins) <= MOST
    assert (np.diff(bins.first) > 0).all()
    assert (bins.first[1:] > bins.last[:-1]).all()
    assert (bins.first[0], bins.last[-1]) == (known[0], known[-1])
    places = bins.column(known)
    assert ((known >= bins.first[places]) & (known <= bins.last[places])).all()


@given(
    st.integers(1, 60),
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), min_size=1, max_size=200),
    st.sampled_from(["most", "least", "last", "furthest"]),
)
def test_folding_keeps_what_it_says(most: int, values: list[float], how: str) -> None:
    """A column has the largest, the least, the last or the furthest value of its steps; NaN where there is none."""
    given_values = np.array(values)
    bins = Bins.of(np.arange(len(values)), most=most)
    folded = Grouping.of(bins, bins.steps).fold(given_values, how)

    pick: dict[str, Callable[[Any], float]] = {
        "most": max,
        "least": min,
        "last": lambda v: v[-1],
        "furthest": lambda v: max(v, key=abs),
    }
    for column, (first, last) in enumerate(zip(bins.first, bins.last, strict=True)):
        known = [value for value in values[first : last + 1] if not np.isnan(value)]
        expected = pick[how](known) if known else NAN
        assert folded[column] == pytest.approx(expected, nan_ok=True) or (
            how == "furthest" and folded[column] == -expected
        )


def test_a_spike_and_a_nan_of_one_step_survive() -> None:
    """Of ten thousand steps the one with a spike and the one with a NaN are still seen."""
    recording = chain(10_000, {1234: 1e6, 7777: NAN})
    document = condense(ShownRun(recording, [], ()))

    assert document.described["columns"] == {
        "count": MOST,
        "single": False,
        "steps": 10_000,
        "end": None,
    }
    scale, least = sheet(document, "rms", 0), sheet(document, "rms.least", 0)
    assert scale.max() == pytest.approx(1e6)
    assert (scale > 2).sum() == 1
    assert least.max() == 1
    assert (sheet(document, "state", 0) == 2).sum() == 1


def test_steps_around_a_finding_stay_apart() -> None:
    """Where a finding is, each step has a column of its own, with its own value."""
    recording = chain(10_000, {5003: 7.0})
    found = Finding("X", "error", "fc:out", 5003, "It is so.")
    document = condense(ShownRun(recording, [found], ()))
    first, last = (unpacked(document.tables[name], "f8") for name in ("first", "last"))

    near = (first >= 4998) & (first <= 5008)
    assert first[near].tolist() == list(range(4998, 5009))
    assert (first[near] == last[near]).all()
    assert sheet(document, "rms", 0)[near].tolist() == [1, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1]


def test_a_finding_of_a_step_without_rows_has_a_column_of_its_own() -> None:
    """What was seen in a step that no row tells of stands between its neighbours, where nothing has a value."""
    found = Finding("X", "error", "fc:out", 13, "It is so.")
    document = condense(ShownRun(chain(4, every=10), [found], ()))

    assert unpacked(document.tables["first"], "f8").tolist() == [0, 10, 13, 20, 30]
    assert sheet(document, "rms", 0) == pytest.approx([1, 1, NAN, 1, 1], nan_ok=True)
    assert sheet(document, "state", 0).tolist() == [1, 1, 0, 1, 1]
    assert document.described["columns"]["steps"] == 4


def test_few_steps_are_shown_as_they_were() -> None:
    """Up to the width of the page each step is a column, and its figures are those of the recording."""
    recording = chain(MOST, {3: 0.125})
    document = condense(ShownRun(recording, [], ()))

    assert document.described["columns"]["single"]
    assert "rms.least" not in document.described["sheets"]
    assert (
        sheet(document, "rms", 0).tolist()
        == recording.series("fc:out", "rms").astype("f4").tolist()
    )


def test_light_steps_share_the_column_before_them() -> None:
    """Steps off schedule that tell of one site do not tear holes into the rows of all others."""
    rows = [
        {"step": step, "site": site, "count": 4, "sumsq": 4.0, "sum": 1.0}
        for step in (0, 10, 20)
        for site in "ab"
    ]
    rows += [
        {"step": step, "site": "a", "count": 4, "sumsq": 16.0, "level": 1} for step in (14, 15, 16)
    ]
    document = condense(
        ShownRun(
            Recording.build(["a:out", "b:out"], [r | {"site": f"{r['site']}:out"} for r in rows]),
            [],
            (),
        )
    )

    assert unpacked(document.tables["first"], "f8").tolist() == [0, 10, 20]
    assert sheet(document, "rms", 0).tolist() == [1, 2, 1]
    assert sheet(document, "rms", 1).tolist() == [1, 1, 1]


def test_light_steps_alone_have_columns() -> None:
    """Where no step was measured in full, each light one is a column."""
    rows = [
        {"step": step, "site": "a:out", "count": 4, "sumsq": 4.0, "level": 1} for step in range(5)
    ]
    document = condense(ShownRun(Recording.build(["a:out"], rows), [], ()))

    assert unpacked(document.tables["first"], "f8").tolist() == [0, 1, 2, 3, 4]


def test_quantiles_of_a_column_are_those_of_all_its_steps() -> None:
    """Histograms of steps that share a column are added, not their quantiles."""
    counts = np.zeros((1200, 83), dtype=int)
    counts[np.arange(1200), 40 + np.arange(1200) % 7] = 9
    rows = [
        {"step": s, "site": "a:out", "count": 9, "sumsq": 1.0, "exponents": counts[s]}
        for s in range(1200)
    ]
    document = condense(ShownRun(Recording.build(["a:out"], rows), [], ()))
    first, last = (unpacked(document.tables[name], "f8").astype(int) for name in ("first", "last"))

    expected = [
        float(quantile(counts[a : b + 1].sum(axis=0), 0.95))
        for a, b in zip(first, last, strict=True)
    ]
    assert sheet(document, "q95", 0) == pytest.approx(expected)


@given(
    st.lists(
        st.floats(-1e37, 1e37).filter(lambda x: x == 0 or abs(x) > 1e-37), min_size=1, max_size=50
    )
)
def test_two_bytes_keep_two_digits(values: list[float]) -> None:
    """The form of two bytes is off by at most 0.4 %, and keeps NaN, infinity and the sign."""
    told = np.array([*values, NAN, np.inf, -np.inf, 0.0])
    read = unpacked(packed(told, "b2"), "b2")

    assert read[:-4] == pytest.approx(told[:-4], rel=2**-8)
    assert np.isnan(read[-4])
    assert read[-3:].tolist() == [np.inf, -np.inf, 0.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_share_is_only_0_or_1_if_it_is(shares: list[float]) -> None:
    """The form of one byte is off by at most 0.4 percentage points, and says all or nothing only of all or nothing."""
    told = np.array(shares)
    read = unpacked(packed(told, "u1"), "u1")

    assert np.abs(read - told).max() <= 1 / 254
    assert ((read == 0) == (told == 0)).all()
    assert ((read == 1) == (told == 1)).all()


@pytest.mark.parametrize(
    ("value", "form"), [(1e300, "f8"), (1e-300, "f8"), (3.0, "f4"), (NAN, "f4"), (0.0, "f4")]
)
def test_numbers_that_a_narrow_form_cannot_hold_get_a_wide_one(value: float, form: str) -> None:
    """A float64 beyond float32 is neither infinity nor zero on the page."""
    assert form_of(np.array([value]), share=False, brief=False) == form


def test_a_recording_of_many_numbers_takes_the_brief_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a number of cells on, a page takes half the bytes for each, and a share a single one."""
    monkeypatch.setattr("kedge.report.page.sheets.MANY", 100)
    document = condense(ShownRun(chain(50), [], ()))

    assert {name: entry["form"] for name, entry in document.described["sheets"].items()} == {
        "rms": "b2",
        "mean": "b2",
        "std": "b2",
        "min": "b2",
        "max": "b2",
        "zero": "u1",
        "nonfinite": "b2",
        "state": "n1",
    }


@pytest.fixture
def recording(run: Callable[..., Run], tmp_path: Path) -> Recording:
    """A whole run, with a NaN in its fifth step."""
    made = run()
    for step in range(8):
        made.step(step, {"relu1:out": NAN, "loss:out": NAN} if step >= 4 else None)
    made.end(error="FileNotFoundError: /home/ada/secret/data.pt", exit=1)
    return Recording.open(tmp_path / "net.kedge")


def test_without_source_no_file_and_no_line_of_the_program_is_shown(recording: Recording) -> None:
    """``--no-source`` leaves out source lines, file names, the command's arguments and what an error says of files."""
    pages = {}
    for spare in (False, True):
        shown = shareable(recording, source=not spare)
        pages[spare] = render_page(ShownRun(shown, check(shown), ()))

    for word in ("secret", "self.block", "/home", "/usr/lib", '"function":"forward"', "--lr"):
        assert (word in pages[False], word in pages[True]) == (True, False)
    assert "train.py" in pages[True]
    assert "FileNotFoundError" in pages[True]


def test_without_source_no_event_has_a_line_of_the_program() -> None:
    """Wherever a line stands in an event, it is left out; the rest of the event stays."""
    line = {"file": "secret.py", "line": 9, "function": "fit", "text": "x.softmax(1)"}
    events = [
        {
            "kind": "dropouts",
            "step": 0,
            "site": "loss",
            "dropouts": [{"kept": 0.1, "source": line}],
        },
        {"kind": "modes", "step": 0, "root": 0, "training": False, "eval_calls": [line]},
        {
            "kind": "loss-lines",
            "step": 1,
            "site": "loss",
            "operations": [{"node": "SoftmaxBackward0", "shape": [8, 3], "source": line}],
        },
    ]
    shown = shareable(Recording.build(events=events), source=False)

    assert "secret.py" in str(Recording.build(events=events).events)
    assert "secret.py" not in str(shown.events)
    assert [event.kind for event in shown.events] == ["dropouts", "modes", "loss-lines"]
    assert shown.events[2].entry()["operations"] == [{"node": "SoftmaxBackward0", "shape": [8, 3]}]


def test_without_source_an_operation_keeps_its_name_alone(recording: Recording) -> None:
    """The line of an operation that was named by running a kept call again is source as well."""
    made = {
        "site": "relu1/log:out",
        "name": "log",
        "value": "nan",
        "file": "secret.py",
        "line": 3,
        "text": "x.log()",
    }
    kept = DumpEvent(step=4, site="relu1:out", folder="dump-4")
    again = event_from(
        {"kind": "operation", "folder": "dump-4", "operations": [{**made, "function": "f"}]}
    )
    shown = shareable(replace(recording, events=(*recording.events, kept, again)), source=False)
    page = render_page(ShownRun(shown, check(shown), ()))

    assert "relu1/log:out" in page
    assert "secret.py" not in page
    assert "x.log()" not in page


def test_without_source_possible_operations_keep_their_names_alone() -> None:
    """The lines of operations that may have made a value, and of one that makes the loss later, are source as well."""
    among = [{"operation": "log", "node": "LogBackward0", "file": "secret.py", "line": 3}]
    source = {"file": "secret.py", "line": 9, "function": "fit", "text": "loss.backward()"}
    recording = Recording.build(
        events=[
            {"kind": "producer", "step": 4, "operation": "log", "among": among, "of": 1},
            {"kind": "loss-operation", "step": 4, "loss": "loss", "source": source},
        ]
    )
    producer, changed = shareable(recording, source=False).events

    assert producer.entry()["among"] == [
        {"operation": "log", "node": "LogBackward0", "file": None, "line": None}
    ]
    assert changed.entry()["source"] is None


def test_a_page_tells_the_recordings_name_and_not_its_place(recording: Recording) -> None:
    """Where the recording lies is nobody's business."""
    events = (
        *recording.events,
        DumpEvent(step=4, site="relu1:out", folder="dump-4"),
    )
    shown = shareable(replace(recording, events=events))
    page = render_page(ShownRun(shown, check(shown), ()))

    assert "net.kedge/dump-4/replay.py" in page
    assert str(recording.path.parent) not in page
    assert "4711" not in page  # the process


def test_a_page_names_no_address_but_that_of_its_library(recording: Recording) -> None:
    """There is nothing in the page that a browser would load; the name of SVG is an address that nobody asks."""
    page = render_page(ShownRun(recording, check(recording), ()))

    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) == {
        "https://github.com/leeoniya/uPlot",
        "http://www.w3.org/2000/svg",
    }
    assert re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=(\S+)", page) == ['"data:,">']
    assert "default-src &#x27;none&#x27;" in page
    assert "Permission is hereby granted" in page


def test_a_page_without_data_is_small() -> None:
    """Scripts, styles and the library take less than 300 kB."""
    assert len(render_page(ShownRun(Recording.build(), [], ()))) < 300_000


def test_the_same_recording_gives_the_same_page(recording: Recording) -> None:
    """A page has no time of its making and no chance in it."""
    assert render_page(ShownRun(recording, check(recording), ())) == render_page(
        ShownRun(Recording.open(recording.path), check(recording), ())
    )


@given(st.text(max_size=60))
def test_no_text_ends_the_element_that_holds_it(text: str) -> None:
    """Whatever a module is called, the page's data are read as they were."""
    page = page_of(
        Document(json.loads(json.dumps({"run": {"name": text}, "x": [text, {text: 1}]})), {})
    )
    held = re.search(
        r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL
    )

    assert held
    assert "<" not in held[1]
    assert json.loads(held[1])["x"] == [text, {text: 1}]


@dataclass(frozen=True, kw_only=True)
class Odd(Evidence):
    """Evidence of numbers that JSON lacks."""

    a: float = float("inf")
    b: tuple[float, ...] = (NAN,)
    c: float = float(np.float32(2))
    d: Mapping[str, None] = field(default_factory=lambda: {"e": None})


@dataclass(frozen=True, kw_only=True)
class Norms(Evidence):
    """Evidence with a curve of its own."""

    steps: Sequence[int] = axis("steps {}")
    norm: Sequence[float | None] = curve()


@dataclass(frozen=True, kw_only=True)
class Shares(Evidence):
    """Evidence about several places, beside the curve of the site."""

    shares: Mapping[str, float | None] = places("share at each site")


@dataclass(frozen=True, kw_only=True)
class Profile(Evidence):
    """Evidence about several places, before the curve of the site."""

    profile: Mapping[str, float | None] = places("value of each layer", preferred=True)


@dataclass(frozen=True)
class Drawing(Rule):
    """A rule that says which curves show its findings."""

    statistic: str = ""
    beside: tuple[str, ...] = ()

    code = "X"
    name = "what a test draws"
    severity = "error"

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Return nothing: the test has the findings."""
        return ()

    def drawn(self, recording: Recording, finding: Finding) -> Sequence[str]:
        """Return the site, and those beside it."""
        return [finding.site, *self.beside]


def test_a_number_that_json_lacks_is_text_in_the_evidence() -> None:
    """Infinity and NaN in evidence do not make the page's data unreadable."""
    finding = Finding("X", "error", "fc:out", 2, "So.", Odd())
    told = condense(ShownRun(chain(5), [finding], ())).described["findings"][0]

    assert told["evidence"] == {"a": "inf", "b": ["nan"], "c": 2.0, "d": {"e": None}}
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("evidence", "rule", "drawn"),
    [
        (Evidence(), Drawing(), ("series", ["rms of fc:out"])),
        (Evidence(), None, ("series", ["rms of fc:out"])),
        (Evidence(), Drawing(statistic="zero"), ("series", ["zero of fc:out"])),
        (Evidence(), Drawing(statistic="saturated"), ("series", ["rms of fc:out"])),
        (Norms(steps=range(20), norm=[1.0] * 20), Drawing(), ("series", ["norm"])),
        (
            Shares(shares={"a": 1.0, "b": 2.0, "c": None}),
            Drawing(),
            ("series", ["rms of fc:out"]),
        ),
        (Evidence(), Drawing(statistic="max"), ("series", ["max of fc:out"])),
        (Evidence(), Drawing(beside=("b:out",)), ("series", ["rms of fc:out", "rms of b:out"])),
        (
            Norms(steps=[1, 2, 3], norm=[1.0, 2.0, None]),
            Drawing(),
            ("series", ["rms of fc:out"]),
        ),
        (
            Profile(profile={"a": 1.0, "b": 2.0, "c": None}),
            Drawing(),
            ("profile", ["a", "b", "c"]),
        ),
    ],
)
def test_a_finding_is_drawn_with_what_it_rests_on(
    evidence: Evidence, rule: Rule | None, drawn: tuple[str, list[str]]
) -> None:
    """The figure is the series or the profile in the evidence, or the site's own series around the step."""
    rows = [
        {"step": s, "site": site, "count": 4, "sumsq": 4.0, "max": 3.0, "nonzero": 2}
        for s in range(9)
        for site in ("fc:out", "b:out")
    ]
    recording = Recording.build(["fc:out", "b:out"], rows)
    finding = Finding("X", "error", "fc:out", 4, "So.", evidence)
    made = figure(recording, finding, rule)

    assert made is not None
    labels = (
        made["labels"] if made["form"] == "profile" else [one["label"] for one in made["series"]]
    )
    assert (made["form"], labels) == drawn


def test_a_birth_is_drawn_with_the_sites_next_to_it() -> None:
    """They hold the values that were still finite."""
    recording, _ = load(FOLDER / "NAN-BORN" / "fires.json")
    (finding,) = check(recording)
    made = figure(recording, finding, by_code()["NAN-BORN"])

    assert made is not None
    assert [one["label"] for one in made["series"]] == ["rms of log:out", "rms of log:in"]


PLACES = {"a": 1.0, "b": 2.0, "c": 4.0}


@pytest.mark.parametrize(
    ("evidence", "caption"),
    [
        (
            InitScaleEvidence(doublings=1.0, factor=1.0, rank_correlation=1.0, profile=PLACES),
            "root mean square of each layer's output",
        ),
        (
            GradVanishEvidence(
                ratio_of_output_gradients=None,
                shallow_update_ratio=None,
                deep_update_ratio=None,
                profile=PLACES,
                ratio=None,
                samples=1,
            ),
            "gradient of each weight relative to its size",
        ),
        (Profile(profile=PLACES), "value of each layer"),
        (
            FarAwayEvidence(rank=1, times=2.0, rms=PLACES, steps=5),
            "root mean square on each rank",
        ),
    ],
)
def test_a_figure_of_several_places_says_what_it_shows(evidence: Evidence, caption: str) -> None:
    """Its caption is in words of the reader, and not the name in the evidence."""
    finding = Finding("X", "error", "fc:out", 4, "So.", evidence)
    described = condense(ShownRun(Recording.build(["fc:out"]), [finding], ())).described

    assert described["findings"][0]["figure"]["name"] == caption


@pytest.mark.parametrize(
    ("evidence", "labels"),
    [
        (Norms(steps=[1, 2, 3], norm=[1.0, 2.0, None]), ["norm"]),
        (Shares(shares={"a": 1.0, "b": 2.0, "c": None}), ["a", "b", "c"]),
    ],
)
def test_a_finding_at_no_site_is_drawn_with_its_evidence(
    evidence: Evidence, labels: list[str]
) -> None:
    """Where the site itself was not recorded, what the evidence holds is drawn."""
    figure = condense(
        ShownRun(chain(5), [Finding("X", "error", "gone:out", 4, "So.", evidence)], ())
    ).described["findings"][0]["figure"]

    assert (figure.get("labels") or [one["label"] for one in figure["series"]]) == labels


def test_a_finding_about_the_gradients_is_drawn_with_their_norm() -> None:
    """GRAD-EXPLODE names a parameter, and is about the norm of all."""
    rows = [{"step": s, "site": ":grad.norm", "count": 100, "sumsq": 9.0} for s in range(4)]
    rows += [{"step": s, "site": "w:param.grad", "count": 4, "sumsq": 4.0} for s in range(4)]
    evidence = GradExplodeEvidence(
        norm=3.0,
        bar=2.0,
        largest=3.0,
        samples_before=2,
        update_ratio=None,
        ends_badly=False,
        shares={},
    )
    found = Finding("GRAD-EXPLODE", "error", "w:param.grad", 2, "So.", evidence)
    figure = condense(
        ShownRun(Recording.build([":grad.norm", "w:param.grad"], rows), [found], ())
    ).described["findings"][0]["figure"]

    assert [one["values"] for one in figure["series"]] == [[3.0] * 4]
    assert figure["bars"] == [{"name": "limit", "value": 2.0}]


def test_an_update_is_drawn_relative_to_its_parameter() -> None:
    """The figure of a finding about updates is the ratio, in the steps that have both."""
    rows = [{"step": s, "site": "fc.weight:param", "count": 4, "sumsq": 400.0} for s in range(9)]
    rows += [
        {"step": s, "site": "fc.weight:update", "count": 4, "sumsq": 4.0} for s in range(0, 9, 2)
    ]
    recording = Recording.build(["fc.weight:param", "fc.weight:update"], rows)
    drawn = condense(
        ShownRun(recording, [Finding("X", "error", "fc.weight:update", 4, "So.")], ())
    ).described["findings"][0]["figure"]

    assert drawn["series"][0]["steps"] == [0, 2, 4, 6, 8]
    assert drawn["series"][0]["values"] == [0.1] * 5


def test_a_gradient_seen_after_clipping_is_not_compared() -> None:
    """In light steps a parameter's gradient is another quantity: of it only what is not finite is shown."""
    rows = [{"step": 0, "site": "w:param.grad", "count": 4, "sumsq": 4.0, "sum": 1.0}]
    rows += [{"step": 1, "site": "w:param.grad", "count": 4, "sumsq": 1e6, "level": 1}]
    rows += [
        {"step": 2, "site": "w:param.grad", "count": 4, "sumsq": NAN, "nonfinite": 2, "level": 1}
    ]
    document = condense(ShownRun(Recording.build(["w:param.grad"], rows), [], ()))

    assert sheet(document, "rms", 0).tolist() == [1.0]
    assert sheet(document, "state", 0).tolist() == [2]
    assert sheet(document, "nonfinite", 0).tolist() == [2]


def test_a_light_step_gives_the_size_of_a_loss() -> None:
    """Between measured steps only a loss's size may be known; that is its value unless it was ever negative."""
    for first, expected in ((2.0, [2.0, 3.0]), (-2.0, [-2.0, NAN])):
        rows = [{"step": 0, "site": ":out", "count": 1, "sum": first, "sumsq": 4.0}]
        rows += [{"step": 1, "site": ":out", "count": 1, "sumsq": 9.0, "level": 1}]
        document = condense(
            ShownRun(Recording.build([":out"], rows, roots=[{"name": "Net"}]), [], ())
        )
        curve = document.described["curves"][0]

        assert (curve["kind"], curve["broken"]) == ("loss", [])
        assert unpacked(curve["last"]["data"], "f4").tolist() == pytest.approx(
            expected, nan_ok=True
        )


def test_a_page_says_which_rules_could_not_judge() -> None:
    """With what each lacked, and the command; of rules that were not run nothing is said."""
    recording = replace(
        chain(5), manifest={"script": "t.py", "command": ["t.py"], "every": 10, "budget": None}
    )
    rules = [rule for rule in ALL if rule.code in ("NEVER-CALLED", "NEAR-OVERFLOW")]

    described = condense(ShownRun(replace(recording, events=()), [], rules)).described

    assert described["unjudged"] == [{"code": "NEVER-CALLED", "said": "no end of the program"}]
    assert described["advice"] == []
    assert condense(ShownRun(recording, [], ())).described["unjudged"] == []


def test_a_page_to_share_has_no_line_of_the_producer() -> None:
    """Where sources are left out, the operation is named without its file and text."""
    event = {
        "kind": "producer",
        "step": 3,
        "operation": "log",
        "file": "secret.py",
        "line": 7,
        "text": "secret()",
    }
    recording = replace(chain(5), events=(event_from(event),))

    told = [finding.message for finding in check(shareable(recording, source=False))]

    assert any("log made it" in message for message in told)
    assert not any("secret" in message for message in told)


@pytest.mark.parametrize(
    "golden", sorted(FOLDER.glob("*/fires.json")), ids=lambda file: file.parent.name
)
def test_the_evidence_of_every_rule_has_words(golden: Path) -> None:
    """No name of one of its fields stands on the page."""
    recording, _ = load(golden)
    rule = by_code()[golden.parent.name]

    for finding in rule.check(recording):
        bare = [each.name for each in fields(finding.evidence) if SHOWN not in each.metadata]
        assert bare == []
