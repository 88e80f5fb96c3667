"""The page in a browser: it opens from disk, and what is clicked and typed does what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kedge.rules.evidence import Evidence
from kedge.rules.gradients.grad_vanish import GradVanishEvidence
from kedge.rules.rule import Finding
from kedge.store.events import EndEvent
from kedge.store.recording import Recording
from kedge.watch.steps.budget import ALLOWANCE
from tests.report.page.runs import Run

pytestmark = pytest.mark.timing

NAN = float("nan")
TIMES = "\N{MULTIPLICATION SIGN}"
TO = "\N{EN DASH}"


@dataclass(frozen=True, kw_only=True)
class Evil(Evidence):
    """Evidence with names of a program that means harm."""

    near: Mapping[str, Mapping[str, float]]
    other: str


@pytest.fixture
def shown(broken: Recording, saved: Callable[..., str], tab: Any) -> Any:
    """The page of that run, open in a tab."""
    return tab.open(saved(broken))


def cell(page: Any, row: int, column: int) -> dict[str, float]:
    """Return the place of a cell of the heat-map in its canvas."""
    held = page.eval_on_selector("#cells", "canvas => ({...canvas.dataset})")
    wide = float(held["plot"]) / int(held["columns"])
    return {
        "x": float(held["left"]) + (column + 0.5) * wide,
        "y": float(held["top"]) + (row + 0.5) * float(held["row"]),
    }


def colour_at(page: Any, place: dict[str, float]) -> list[int]:
    """Read a pixel of the heat-map."""
    return page.eval_on_selector(
        "#cells",
        "(canvas, at) => [...canvas.getContext('2d').getImageData(at.x * devicePixelRatio, at.y * devicePixelRatio, 1, 1).data]",
        place,
    )


def test_the_page_opens_from_disk_and_asks_nobody(shown: Any, tab: Any) -> None:
    """The page opens from file:// without an error and without a request but for itself."""
    assert shown.title() == "net.kedge · Kedge"
    assert [url for url in tab.requests if not url.startswith("data:")] == [shown.url]


def test_findings_come_first_with_evidence_remedy_and_source(shown: Any) -> None:
    """First stands what is wrong: where, since when, what to do, the line of source, and a figure."""
    sections = shown.eval_on_selector_all("main > section", "all => all.map(one => one.id)")
    finding = shown.locator(".finding").first

    assert sections == ["findings", "run", "curves", "heat", "depth", "saved", "modules"]
    assert "NAN-BORN" in finding.inner_text()
    assert "relu1:out" in finding.inner_text()
    assert "step 6" in finding.inner_text()
    assert "→" in finding.inner_text()
    assert "net.py:12" in finding.inner_text()
    assert "x = self.block(x) # <b>" in " ".join(finding.inner_text().split())
    assert "confidence" in finding.inner_text()
    assert finding.locator("canvas").count() == 1

    finding.locator("summary").click()
    assert "Meaning:" in finding.locator("pre").inner_text()
    assert not shown.locator("#panel").is_visible()


def test_a_page_begins_with_the_verdict(
    broken: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """The number of findings stands above all, and a run that ended with errors has no tick."""
    page = tab.open(saved(broken))
    assert page.locator("#verdict").inner_text().split("\n")[1:] == ["1 error"]
    assert page.locator("#verdict").get_attribute("class") == "error"
    assert page.locator("main").inner_text().split()[1:3] == ["1", "error"]
    assert page.locator("#status .pill").inner_text() == "ended"
    assert "✓" not in page.locator("header.bar").inner_text()


@pytest.mark.parametrize(
    ("severities", "numbers"),
    [
        (
            ("error", "warning", "warning", "info"),
            {"1 error": "1", "2 warnings": "2", "1 info": "1"},
        ),
        (("info",), {"1 info": "1"}),
    ],
)
def test_a_narrow_page_keeps_the_numbers_of_findings(
    severities: tuple[str, ...],
    numbers: dict[str, str],
    broken: Recording,
    saved: Callable[..., str],
    tab: Any,
) -> None:
    """All of them are in the bar, and in view, however long the state of the run is."""
    tab.page.set_viewport_size({"width": 390, "height": 800})
    running = replace(broken, events=tuple(e for e in broken.events if not isinstance(e, EndEvent)))
    found = [Finding("ODD", severity, "relu1:out", 1, "It is odd.") for severity in severities]
    for recording in (broken, running):
        page = tab.open(saved(recording, found))
        shown = page.locator("#status .tally")
        for title, number in numbers.items():
            tally = page.locator(f"#status .tally[title='{title}']")
            assert tally.is_visible()
            assert number in tally.inner_text()
            box = tally.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= page.locator("#filter").bounding_box()["x"]
        assert shown.count() == len(numbers)


def test_a_narrow_page_keeps_the_scales_of_modules(
    broken: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """The figures of a module stand in a second line, each with its title."""
    tab.page.set_viewport_size({"width": 390, "height": 800})
    page = tab.open(saved(broken))
    row = page.locator(".tree .row", has=page.locator("[data-path='conv1']"))
    name = row.locator(".name").bounding_box()
    for title in ("rms", "gradient"):
        figure = row.locator(f"[data-title='{title}']")
        assert figure.is_visible()
        assert figure.inner_text()
        assert figure.bounding_box()["y"] > name["y"]
        before = figure.evaluate("one => getComputedStyle(one, '::before').content")
        assert title in before
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_steps_that_were_not_measured_are_a_gap(saved: Callable[..., str], tab: Any) -> None:
    """The map has colours where a step was measured, and none between there and the next one, or the end."""
    rows = [
        {"site": "a:out", "step": step, "count": 4, "sumsq": 4.0 * (1 + step)}
        for step in (0, 1, 2, 40, 50)
    ]
    end = {"kind": "end", "exit": 0, "steps": 100}
    page = tab.open(saved(Recording.build(["a:out"], rows, events=[end]), []))
    held = page.eval_on_selector("#cells", "canvas => ({...canvas.dataset})")
    left, plot, top = (float(held[name]) for name in ("left", "plot", "top"))

    def at(share: float) -> dict[str, float]:
        return {"x": left + share * plot, "y": top + float(held["row"]) / 2}

    panel = [255, 255, 255, 255]
    blank = page.evaluate("getComputedStyle(document.querySelector('#heat')).backgroundColor")
    assert blank == "rgb(255, 255, 255)"
    for share, measured in (
        (0.003, True),
        (0.2, False),
        (0.405, True),
        (0.45, False),
        (0.9, False),
    ):
        colour = colour_at(page, at(share))
        assert (colour not in (panel, [0, 0, 0, 0])) is measured, share
    page.locator("#cells").hover(position=at(0.2))
    assert f"then steps 3{TO}39 not measured" in page.locator(".tip").inner_text()
    page.locator("#cells").hover(position=at(0.9))
    assert f"then steps 51{TO}99 not measured" in page.locator(".tip").inner_text()
    assert "not measured" in page.locator("#heat .legend").inner_text()


def test_the_groups_of_an_optimizer_share_a_chart(saved: Callable[..., str], tab: Any) -> None:
    """A curve for each group, by its name."""
    rows = [{"site": ":out", "step": step, "count": 4, "sumsq": 4.0} for step in range(5)]
    events = [
        {"kind": "learning-rates", "step": 0, "rates": [0.1, 0.2], "names": ["body", "head"]},
        {"kind": "learning-rates", "step": 3, "rates": [0.01, 0.02], "names": ["body", "head"]},
        {"kind": "learning-rates", "step": 0, "optimizer": 1, "rates": [0.3]},
    ]
    page = tab.open(saved(Recording.build([":out"], rows, events=events), []))
    figures = page.locator("#curves-body figure")

    assert figures.locator("figcaption").all_inner_texts() == [
        "learning rate optimizer 0",
        "learning rate optimizer 1",
    ]
    assert figures.first.locator("canvas").count() == 1
    for part, told in (
        (".u-label", ["step", "body", "head"]),
        (".u-value", ["4", "0.0100", "0.0200"]),
    ):
        assert figures.first.locator(part).all_inner_texts() == told


def test_a_figure_over_the_depth_has_its_words_above_and_not_in_its_legend(
    broken: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """The caption says what the values are.

    In the legend, these words are cut off where the page is narrow.
    """
    profile = {"relu1": 1.0, "relu2": 2.0, "relu3": 4.0}
    evidence = GradVanishEvidence(
        ratio_of_output_gradients=None,
        shallow_update_ratio=None,
        deep_update_ratio=None,
        profile=profile,
        ratio=None,
        samples=1,
    )
    finding = Finding("GRAD-VANISH", "warning", "relu1:out", 1, "It fades.", evidence)

    figure = tab.open(saved(broken, findings=[finding])).locator(".finding").first

    assert (
        "gradient of each weight relative to its size, from relu1 to relu3" in figure.inner_text()
    )
    assert figure.locator(".u-label").all_inner_texts() == ["at", "value"]


def test_a_click_on_a_cell_opens_its_site(shown: Any) -> None:
    """Whoever clicks a cell sees the series, the neighbours and the figures of that site."""
    shown.locator("#cells").click(position=cell(shown, 2, 3))

    panel = shown.locator("#panel")
    assert panel.locator("h2").inner_text() == "fc.a:out"
    assert {"scale", "quantiles of |x|, of the drawn elements", "shares"} <= set(
        panel.locator("figcaption").all_inner_texts()
    )
    assert panel.locator("figure canvas").count() == 4
    assert "relu1:out" in panel.locator(".flow").first.inner_text()
    assert "not finite in 3 of 9 columns, first at step 6" in panel.inner_text()

    shown.locator("#panel-after").click()
    assert panel.locator("h2").inner_text() == "fc.b:out"
    shown.locator(".flow button", has_text="fc.a:out").first.click()
    assert panel.locator("h2").inner_text() == "fc.a:out"


def test_a_band_between_quantiles_has_the_colour_of_bands(shown: Any) -> None:
    """It is light enough to see the lines in it, in both themes: never an opaque area."""
    shown.locator("#cells").click(position=cell(shown, 2, 3))
    figure = shown.locator("#panel figure", has_text="quantiles of |x|")
    opaque, tinted = figure.locator("canvas").evaluate(
        """canvas => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const alphas = Array.from({ length: data.length / 4 }, (_, at) => data[4 * at + 3]);
          return [alphas.filter((alpha) => alpha > 200).length, alphas.filter((alpha) => alpha > 0 && alpha < 128).length]
            .map((count) => count / alphas.length);
        }"""
    )
    assert tinted > 0.02
    assert opaque < 0.1


def test_a_pointer_reads_the_numbers_of_a_cell(shown: Any, broken: Recording) -> None:
    """The word at the pointer has the site, the step, and the value that was recorded."""
    shown.locator("#cells").hover(position=cell(shown, 1, 4))

    value = broken.series("relu1:out", "rms")[4]
    assert (
        f"relu1:out\nstep 4 · Linear · 8{TIMES}8\nrms {value:.2f}"
        in shown.locator(".tip").inner_text()
    )

    shown.locator("#cells").hover(position=cell(shown, 1, 7))
    assert "5 not finite" in shown.locator(".tip").inner_text()


def test_the_colours_of_the_heat_map_are_those_of_the_values(shown: Any) -> None:
    """A larger value is a lighter colour, and one that is not finite is of the colour that says so."""
    small, large = (colour_at(shown, place) for place in (cell(shown, 0, 0), cell(shown, 3, 0)))
    middle = cell(shown, 1, 7)
    bad = colour_at(shown, {"x": middle["x"] + 12, "y": middle["y"]})

    assert sum(large[:3]) > sum(small[:3])
    assert bad == [209, 36, 47, 255]


def test_another_statistic_is_drawn(shown: Any) -> None:
    """The heat-map offers what was recorded, and draws what is chosen."""
    offered = shown.locator("#quantity option").all_inner_texts()
    assert {
        "rms of outputs",
        "rms of output gradients",
        "largest |x| of outputs",
        "update ratio of parameters",
    } <= set(offered)

    shown.select_option("#quantity", label="update ratio of parameters")
    shown.locator("#cells").hover(position=cell(shown, 0, 0))
    assert "conv1.weight:update" in shown.locator(".tip").inner_text()
    assert "update ratio 1.2e-3" in shown.locator(".tip").inner_text()

    shown.select_option("#quantity", label="rms of outputs")
    shown.locator("#relative").check()
    assert TIMES in shown.locator("#heat .legend").inner_text()


@pytest.mark.parametrize(
    ("typed", "rows"),
    [("fc.*", 2), ("conv1, fc.b", 2), ("*", 3), ("?onv1", 1), ("relu", 1), ("nothing*", 0)],
)
def test_sites_are_filtered(shown: Any, typed: str, rows: int) -> None:
    """The filter takes the patterns of ``kedge report --sites``; a word that is no path stands for what holds it."""
    shown.keyboard.press("/")
    shown.keyboard.type(typed)
    shown.wait_for_function(
        "rows => document.querySelector('#cells').dataset.rows === String(rows)", arg=rows
    )
    leaves = shown.locator(".tree .leaf").count()
    assert shown.locator("#heat .empty").is_visible() == (rows == 0)

    shown.keyboard.press("Escape")
    shown.wait_for_function("() => document.querySelector('#cells').dataset.rows === '5'")
    assert shown.input_value("#filter") == ""
    assert leaves == rows


def test_the_theme_follows_the_system_and_can_be_switched(
    browser: Any, broken: Recording, saved: Callable[..., str]
) -> None:
    """The page begins with the system's theme; the switch and the key t change it, and it stays so."""
    context = browser.new_context(color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    page.goto(saved(broken))
    theme, ground = (
        "document.documentElement.dataset.theme",
        "getComputedStyle(document.body).backgroundColor",
    )
    assert (page.evaluate(theme), page.evaluate(ground)) == ("dark", "rgb(17, 20, 24)")

    page.locator("#theme").click()
    assert (page.evaluate(theme), page.evaluate(ground)) == ("light", "rgb(246, 247, 249)")

    page.reload()
    assert page.evaluate(theme) == "light"
    page.keyboard.press("t")
    assert page.evaluate(theme) == "dark"
    context.close()


def test_the_keyboard_is_enough(shown: Any) -> None:
    """Findings, heat-map, sites, help and the way back: each has its key."""
    shown.keyboard.press("j")
    assert shown.locator(".finding.focus").count() == 1
    shown.keyboard.press("Enter")
    assert shown.locator("#panel-site").inner_text() == "relu1:out"
    shown.keyboard.press("n")
    assert shown.locator("#panel-site").inner_text() == "fc.a:out"
    shown.keyboard.press("p")
    shown.keyboard.press("p")
    assert shown.locator("#panel-site").inner_text() == "conv1:out"
    shown.keyboard.press("Escape")
    assert shown.locator("#panel").is_hidden()

    shown.keyboard.press("h")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "End"):
        shown.keyboard.press(key)
    assert "fc.a:out\nstep 8" in shown.locator(".tip").inner_text()
    shown.keyboard.press("Enter")
    assert shown.locator("#panel-site").inner_text() == "fc.a:out"

    shown.keyboard.press("?")
    assert shown.locator("#help").is_visible()
    shown.keyboard.press("Escape")
    assert shown.locator("#help").is_hidden()
    assert shown.locator("#panel").is_visible()


def test_the_address_leads_back_to_a_site(shown: Any, tab: Any) -> None:
    """A copied address opens the same site."""
    shown.locator("#cells").click(position=cell(shown, 2, 3))
    address = shown.url
    shown.goto("about:blank")

    assert tab.open(address).locator("#panel-site").inner_text() == "fc.a:out"


def test_the_tree_has_shapes_parameters_and_saved_bytes(shown: Any) -> None:
    """Each module stands in the tree with its class, its output, its parameters and what autograd saved in it."""
    rows = {
        row.split("\n")[0]: row.split("\n")[1:]
        for row in shown.locator(".tree .row").all_inner_texts()
    }

    assert rows["(Net)"][-2:] == ["288", "10 kB"]
    assert rows["fc"][-2:] == ["144", "7 kB"]
    assert rows["conv1"] == ["Linear", f"8{TIMES}8", "72", "1.57", "1.5e-3", "1 kB"]

    shown.locator(".tree .head", has_text="fc").first.locator(".name .indent").dispatch_event(
        "click"
    )
    assert shown.locator("[data-path='fc.a']").is_hidden()
    shown.keyboard.press("t")
    assert shown.locator("[data-path='fc.a']").is_hidden()


def test_the_depth_picture_says_what_fits_a_format(shown: Any) -> None:
    """At the newest step that is finite, the table tells how far the sites are from each format's ends."""
    assert shown.locator("#depth output").inner_text() == "step 5"
    rows = {
        row.split("\t")[0]: row for row in shown.locator(".headroom tbody tr").all_inner_texts()
    }
    assert list(rows) == ["fp16", "bf16", "fp8 e4m3", "fp8 e5m2", "fp32"]
    assert "✓ fits" in rows["fp16"]

    shown.locator("#depth-step").evaluate(
        "slider => { slider.value = 7; slider.dispatchEvent(new Event('input')) }"
    )
    assert shown.locator("#depth output").inner_text() == "step 7"
    shown.select_option("#depth-format", "bfloat16")
    assert "far away: largest bf16" in shown.locator("#depth .toolbar").inner_text()


def test_the_head_tells_what_ran_and_what_it_cost(shown: Any) -> None:
    """Command, versions, device, steps, what the watching took and its budget stand at the top."""
    text = shown.locator("main").inner_text().replace("\n", " ")

    for words in (
        "/home/ada/secret/train.py --lr 1",
        "Net, 288 parameters",
        "9, 9 measured",
        "5.0 % of the time",
        f"budget 3.0 %, or {ALLOWANCE:g} s if that is more",
    ):
        assert words in text
    for words in (
        "torch 2.13.0",
        "Python 3.11.7",
        "Kedge 0.1.0",
        "device cpu",
        "2026-11-21 07:00 UTC",
        "10 kB in step 0",
    ):
        assert words in text


def test_loss_and_gradient_norm_are_drawn(shown: Any) -> None:
    """A module that gives a single number is the loss; its curve and that of the gradients' norm are there."""
    assert shown.locator("#curves figcaption").all_inner_texts() == [
        "loss CrossEntropyLoss (loss:out)",
        "gradient norm all gradients of Net",
    ]
    assert shown.locator("#curves canvas").count() == 2


def test_hostile_names_stay_names(
    run: Callable[..., Run], tmp_path: Any, saved: Callable[..., str], tab: Any
) -> None:
    """Markup in names, classes, messages, commands and source lines is text, and nothing of it runs."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    made = run(evil, "a&b;\"'", types=(evil, "<b>"), command=[evil], device="<i>", torch="-->")
    for step in range(3):
        made.step(step)
    made.end(exit=1, error=f"Error: {evil}")
    recording = Recording.open(tmp_path / "net.kedge")
    evidence = Evil(near={evil: {evil: 1.0}}, other=evil)
    finding = Finding(evil, "error", f"{evil}:out", 1, evil, evidence, 0.5, evil)

    page = tab.open(saved(recording, findings=[finding]))
    page.keyboard.press("j")
    page.keyboard.press("Enter")

    assert page.locator("#panel-site").inner_text() == f"{evil}:out"
    assert evil in page.locator(".finding").inner_text()
    assert page.locator("img, main b b, main script").count() == 0
    page.locator("#cells").hover(position=cell(page, 0, 0))
    assert evil in page.locator(".tip").inner_text()
