"""The page of DEPARTS: it has the sections of a rule's page, and the margins that apply."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from kedge.cli.main import main
from kedge.compare.against import departures, layers, optimizers, parameters, passes, ranges
from kedge.compare.against.departs import Departs, page
from kedge.compare.against.run_pair import LEAST_STEPS
from kedge.errors import NoSuchRule
from kedge.rules import explain
from tests.rules.test_rules import SECTIONS

WORDS = " ".join((inspect.getdoc(Departs) or "").split())


def test_the_page_has_the_sections_of_a_rules_page():
    """A finding of either kind is looked up in the same way."""
    lines = page().splitlines()

    assert lines[0] == "DEPARTS (error): what held in a good run does not hold here"
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)


@pytest.mark.parametrize("scale", [ranges.INPUTS, *ranges.SCALES], ids=lambda scale: scale.kind)
def test_the_margin_of_every_size_is_on_the_page(scale):
    """As it is at first, and later where it is asked later."""
    later = "" if scale.later is None else f" and {scale.later}"
    between = ", relative to the weights," if scale.kind == "updates" else ""

    assert f"{scale.kind}{between} {scale.at_first}{later}" in WORDS


@pytest.mark.parametrize(
    "said",
    [
        f"Values below {ranges.LEAST:g} count as zero",
        f"The beginning is {ranges.BEGINNING} measured steps",
        f"falling from {ranges.FALLS} powers of ten on",
        f"has to fall by {ranges.FELL} of what",
        f"a factor of {optimizers.OTHER_RATE}",
        f"stays for {optimizers.OTHER_PACE} times fewer steps",
        f"changes in {parameters.MOVES} of the measured steps",
        f"stopped after {parameters.STOPPED} measured steps",
        f"if {passes.USUAL} of the steps have it",
        f"if it does in {layers.EACH}",
        f"Fewer than {LEAST_STEPS} measured steps",
        f"if {departures.LEAST_ALIKE} of the smaller model's modules",
    ],
)
def test_every_threshold_is_on_the_page(said):
    """Who wants to know why something departs finds the number."""
    assert said in WORDS


def test_every_kind_of_departure_is_on_the_page():
    """Each is a word in brackets."""
    modules = (layers, optimizers, parameters, passes, ranges, departures.ranks)
    source = "".join(inspect.getsource(module) for module in modules)
    kinds = {*re.findall(r'kind="(\w+)"', source), *(scale.kind for scale in ranges.SCALES)}
    known = {
        word for words in re.findall(r"\(([\w, ]+)\)", WORDS) for word in re.split(", ", words)
    }

    assert kinds <= known


def test_the_page_is_printed(capsys):
    """As that of a rule, in any case of letters, and as JSON."""
    assert main(["explain", "departs"]) == 0
    printed = capsys.readouterr().out
    assert main(["explain", "DEPARTS", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)

    assert printed == page() == entry["page"]
    assert (entry["code"], entry["severity"], entry["thresholds"]) == ("DEPARTS", "error", {})


def test_it_is_no_rule():
    """So it cannot be chosen among the rules."""
    with pytest.raises(NoSuchRule, match="there is no rule 'DEPARTS'"):
        explain("DEPARTS")
    assert main(["check", "--select", "DEPARTS", "any"]) == 2


def test_a_code_near_it_is_named(capsys):
    """Whoever mistypes it."""
    assert main(["explain", "DEPART"]) == 2

    assert "the nearest are DEPARTS" in capsys.readouterr().err
