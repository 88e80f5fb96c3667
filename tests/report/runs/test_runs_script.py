"""The scripts of the page of several runs: modules as they stand, and one script when they are put together."""

from __future__ import annotations

import re

import pytest

from kedge.report.page.render import asset
from kedge.report.runs.page import FRAME, OWN, SCRIPTS, STYLE
from tests.report.page.test_script import EXPORTS, IMPORTS, NAMES

PACKAGE = "kedge.report.runs"
TEXTS = {name: asset(name) for name in SCRIPTS} | {name: asset(name, PACKAGE) for name in OWN}


@pytest.mark.parametrize("name", OWN)
def test_a_script_imports_what_is_there(name: str) -> None:
    """It imports from scripts before it, what they export, and uses all of it."""
    body = IMPORTS.sub("", TEXTS[name])
    before = [*TEXTS][: [*TEXTS].index(name)]
    assert len(re.findall(r"^import ", TEXTS[name], re.MULTILINE)) == len(
        IMPORTS.findall(TEXTS[name])
    )
    for wanted, other in IMPORTS.findall(TEXTS[name]):
        assert other in before
        for word in map(str.strip, wanted.split(",")):
            assert word in EXPORTS.findall(TEXTS[other])
            assert re.search(rf"\b{word}\b", body), f"{name} imports {word} and does not use it"


def test_names_are_defined_once_and_exported_for_somebody() -> None:
    """Put together, the scripts share one scope; every own export is imported by another."""
    names = [name for text in TEXTS.values() for name in NAMES.findall(text)]
    assert sorted(names) == sorted(set(names))
    imported = {
        word.strip()
        for text in TEXTS.values()
        for wanted, _ in IMPORTS.findall(text)
        for word in wanted.split(",")
    }
    assert {name for own in OWN for name in EXPORTS.findall(TEXTS[own])} <= imported


def test_no_text_becomes_markup() -> None:
    """Names from a recording enter the page as text, and nothing ends the element that holds a script or a style."""
    for text in (*(TEXTS[name] for name in OWN), asset(STYLE, PACKAGE)):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|</(script|style)|<!--",
            text,
        )
    assert "{{script}}" in asset(FRAME, PACKAGE)
