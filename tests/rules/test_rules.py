"""What holds for every rule, and for the functions that run and explain them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pytest

from kedge.errors import KedgeError, NoSuchRule, WrongCall
from kedge.rules.nonfinite.nan_born import NanBorn
from kedge.rules.registry import ALL, check, explain
from kedge.rules.rule import SEVERITIES, Finding, Rule
from kedge.store.recording import Recording
from tests.rules import page
from tests.rules.goldens import FOLDER, findings, load, makers, write
from tests.rules.scenes import NAN, all_of, chain

SECTIONS = ("Meaning:", "Formula:", "Window:", "Thresholds:", "Evidence:", "Remedy:", "Cannot see:")

HEALTHY = (
    "give the rest of the recording the figures of a healthy run: weights by "
    "`Course.weight(path, steady(0.1, 1e-3, 1e-4))`, modules by `Scene.module(path)`"
)

each_rule = pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.code)


@dataclasses.dataclass(frozen=True)
class Says(Rule):
    """A rule that gives the findings it was made of."""

    given: tuple[Finding, ...]

    code = "SAYS"
    name = "says what it is told"
    severity = "error"

    def check(self, recording):
        """Return the given findings."""
        return self.given


def test_codes_are_unique_and_written_alike():
    """A code is typed by hand, and names one rule."""
    codes = [rule.code for rule in ALL]

    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[A-Z]+(-[A-Z]+){0,2}", code) for code in codes)


def test_a_rule_of_ones_own_has_a_page_too():
    """A report on its findings shows the page of the rule, as of any other."""
    page = explain("says", [Says(())])

    assert page.startswith("SAYS (error): says what it is told")
    assert inspect.getdoc(Says) in page


@each_rule
def test_a_rule_is_a_value(rule):
    """It is frozen, compares by its thresholds, and its class makes it without arguments."""
    assert dataclasses.is_dataclass(rule)
    assert type(rule).__dataclass_params__.frozen
    assert type(rule)() == rule


@each_rule
def test_a_rule_has_a_page(rule):
    """Its docstring has all sections, in order, each with text."""
    page = inspect.getdoc(type(rule)).splitlines()

    assert page[0].endswith(".")
    assert [line for line in page if line in SECTIONS] == list(SECTIONS)
    for section in SECTIONS:
        assert page[page.index(section) + 1].startswith("    ")


@each_rule
def test_every_threshold_is_on_the_page_with_its_value(rule):
    """Who wants to know why a rule fired finds the number and where it comes from."""
    page = " ".join(inspect.getdoc(type(rule)).split())
    written = {
        field.name: f"{field.name} ({_number(field.default)})" for field in dataclasses.fields(rule)
    }

    assert {name for name, text in written.items() if text not in page} == set()


@each_rule
def test_names_and_severities_are_fit_to_print(rule):
    """A name completes a line, a severity is one of three."""
    assert rule.severity in SEVERITIES
    assert rule.name
    assert not rule.name.endswith(".")


def test_every_rule_has_a_golden_pair():
    """And no pair is left over from a rule that is gone."""
    codes = {rule.code for rule in ALL}

    assert codes == set(makers()), "mark what makes the pair of a rule in its test: @golden(code)"
    assert codes == {path.name for path in FOLDER.iterdir()}, "run `make generated`"


@pytest.mark.parametrize("name", ["fires", "clean"])
@each_rule
def test_golden_findings_are_what_they_were(rule, name):
    """What all rules together find in a recording does not change unnoticed."""
    recording, expected = load(FOLDER / rule.code / f"{name}.json")

    assert findings(recording) == expected


@each_rule
def test_a_rule_fires_on_its_own_recording_and_no_other_does(rule):
    """The recordings are made so that each shows one thing."""
    recording, _ = load(FOLDER / rule.code / "fires.json")

    assert {finding.code for finding in check(recording)} == {rule.code}, HEALTHY


@each_rule
def test_clean_recordings_are_clean_for_all_rules(rule):
    """A false alarm is a defect."""
    recording, _ = load(FOLDER / rule.code / "clean.json")

    assert check(recording) == (), HEALTHY


@each_rule
def test_golden_recordings_are_written_by_their_makers(rule, tmp_path):
    """No golden file was changed by hand: ``python -m tests.rules.goldens`` makes the same."""
    write(tmp_path, {rule.code: makers()[rule.code]})

    for name in ("fires.json", "clean.json"):
        golden = FOLDER / rule.code / name
        assert golden.exists(), f"{rule.code} has no {name}: run `make generated`"
        assert (tmp_path / rule.code / name).read_text() == golden.read_text(), (
            "run `make generated`"
        )


@each_rule
def test_findings_say_what_they_rest_on(rule):
    """Code, site and step, a sentence, evidence that JSON can hold, and what to do."""
    recording, _ = load(FOLDER / rule.code / "fires.json")

    for finding in rule.check(recording):
        assert finding.code == rule.code
        assert SEVERITIES.index(finding.severity) >= SEVERITIES.index(rule.severity)
        assert finding.message.endswith(".")
        assert finding.site in finding.message or finding.site.rpartition(":")[0] in finding.message
        evidence = finding.entry()["evidence"]
        assert evidence
        assert 0 < finding.confidence <= 1
        assert finding.remedy.endswith(".")
        json.dumps(evidence, allow_nan=False)


@each_rule
def test_nothing_is_found_in_nothing(rule):
    """An empty recording, as a run leaves that ends before its first step, is no reason to complain."""
    assert list(rule.check(Recording.build())) == []
    assert list(rule.check(Recording.build(["fc:out", "fc:out.grad"]))) == []


@each_rule
def test_one_healthy_step_is_enough_to_read(rule):
    """A run that is watched for one step is judged without an error and without a finding."""
    scene = chain(loss=True)
    scene.step(0)

    assert list(rule.check(scene.recording())) == []


def _light(
    step: int, sites: list[dict[str, object]], bad: dict[str, float] | None = None
) -> list[dict[str, object]]:
    """Return the rows of a step in between: norms of outputs and of all gradients, and the loss."""
    kept = [site["site"] for site in sites if str(site["site"]).endswith((":out", ":grad.norm"))]
    squares = {text: (bad or {}).get(text, 0.5 + 0.1 * (step % 3)) for text in kept}
    rows = [
        {"step": step, "site": text, "count": 4, "sumsq": value, "level": 1}
        for text, value in squares.items()
    ]
    return [
        row | ({"count": 1, "sum": 0.5 - step / 1000} if row["site"] == "Loss:out" else {})
        for row in rows
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_light_steps_raise_no_false_alarm(broken):
    """What is written between the measured steps, and of the sixteen before a birth, is no finding of its own."""
    scene = chain(loss=True)
    scene.site(":grad.norm", shape=[32])
    for step in range(0, 400, 10):
        scene.step(step)
    scene.rows = [
        row | {"sumsq": 1e-7} if row["site"].endswith(":update") else row for row in scene.rows
    ]
    for step in range(384, 400) if broken else []:
        scene.rows += _light(
            step, [site for site in scene.sites if site["site"] not in (":grad.norm", "Loss:out")]
        )
    for step in (step for step in range(400) if step % 10):
        scene.rows += _light(
            step, [site for site in scene.sites if site["site"] in (":grad.norm", "Loss:out")]
        )
    if broken:
        scene.rows += _light(
            400, scene.sites, all_of(["log:out", "head:out", ":out", "Loss:out", ":grad.norm"], NAN)
        )

    assert {finding.code for finding in check(scene.recording())} == (
        {"NAN-BORN"} if broken else set()
    )


def test_errors_come_first_then_earlier_steps():
    """What is read first is what matters most."""
    made = [Finding("X", severity, "a:out", step, "m.") for severity, step in (
        ("info", 0), ("error", 9), ("warning", 1), ("error", 3))]  # fmt: skip

    found = check(Recording.build(), [Says(tuple(made))])

    assert [(finding.severity, finding.step) for finding in found] == [
        ("error", 3),
        ("error", 9),
        ("warning", 1),
        ("info", 0),
    ]


def test_a_choice_of_rules_can_be_run():
    """Only those that are given, with their own thresholds."""
    scene = chain()
    scene.step(0, all_of(["log:out", "head:in", "head:out", ":out"], NAN))

    assert [finding.code for finding in check(scene.recording())] == ["NAN-BORN"]
    assert check(scene.recording(), [rule for rule in ALL if rule.code != "NAN-BORN"]) == ()


@each_rule
def test_a_page_can_be_asked_for_by_code(rule):
    """In any case; it begins with code, severity and name."""
    page = explain(rule.code.lower())

    assert page.startswith(f"{rule.code} ({rule.severity}): {rule.name}\n\n")
    assert "Thresholds:" in page


@pytest.mark.parametrize("given", [NanBorn, object()], ids=["a class", "an object"])
def test_what_is_no_rule_is_refused_with_what_to_do(given):
    """A class instead of an instance, or an object with the same methods."""
    recording = Recording.build([], [])

    with pytest.raises(WrongCall, match="make its class a subclass of kedge.rules.Rule"):
        check(recording, [given])


def test_an_unknown_code_names_the_nearest():
    """A slip of the finger is answered with what was meant."""
    with pytest.raises(NoSuchRule) as caught:
        explain("GRAD-VANISHED")

    assert isinstance(caught.value, KedgeError)
    assert str(caught.value).startswith(
        "there is no rule 'GRAD-VANISHED': the nearest are GRAD-VANISH"
    )


def test_a_code_like_no_other_lists_all():
    """Where nothing is near, all codes are named."""
    with pytest.raises(
        NoSuchRule,
        match="'7': the rules are NAN-BORN, NOT-OPTIMIZED, NO-EFFECT, GRADS-KEPT, GRADS-SHRUNK, NEVER",
    ):
        explain("7")


def test_the_pages_of_rules_are_up_to_date():
    """They are made of the docstrings; to write them: ``python -m tests.rules.goldens``."""
    made = page.pages()

    assert {path: path.read_text() for path in made} == made, "run `make generated`"
    assert {*page.FOLDER.iterdir()} == {*made} - {page.INDEX}, "run `make generated`"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.code)
def test_a_rule_has_its_page_and_its_line_in_the_index(rule):
    """The line says what the rule says and what it cannot see; the page has the whole docstring."""
    line = next(
        line for line in page.INDEX.read_text().splitlines() if line.startswith(f"| [{rule.code}](")
    )
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    text = (page.INDEX.parent / cells[0].partition("(")[2].rstrip(")")).read_text()

    assert cells[1:3] == [rule.severity, rule.name]
    assert len(cells[3]) > 20
    assert text.startswith(f"# {rule.code}\n")
    assert "## Cannot see\n" in text
    assert "## Remedy\n" in text
    words = re.findall(r"\w+", type(rule).__doc__)
    assert {*words} <= {*re.findall(r"\w+", text)}


def test_the_index_of_rules_is_short():
    """What stands in a rule's page does not stand there, too."""
    assert len(page.INDEX.read_text()) < 20_000


def _number(value: float) -> str:
    """Write a threshold as the pages do."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.0e}".replace("e-0", "e-") if value < 1e-2 or value == 1e-2 else f"{value:g}"
