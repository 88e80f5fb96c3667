"""Rules as a project wants them: a mapping in, rules out, and errors that name file and key."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from kedge.errors import ConfigError, KedgeError
from kedge.rules.registry import ALL, explain
from kedge.rules.settings import chosen, codes, configured, thresholds, toml
from tests.rules import page


@dataclass(frozen=True)
class Plain:
    """A rule with a threshold of each type."""

    ratio: float = 1e-3
    samples: int = 20
    code: ClassVar[str] = "PLAIN"
    name: ClassVar[str] = "plain"
    severity: ClassVar[str] = "error"


@dataclass(frozen=True)
class Other(Plain):
    """Another one."""

    code: ClassVar[str] = "OTHER-ONE"


RULES = (Plain(), Other())


def test_without_settings_the_rules_are_as_they_were():
    """An empty table changes nothing."""
    assert configured(ALL, {}, "pyproject.toml") == ALL
    assert codes(ALL, {}, "select", "pyproject.toml") is None


def test_thresholds_can_be_set():
    """Those of the rule that is named, and no others; its code in any case."""
    table = {"rules": {"PLAIN": {"ratio": 1e-4}, "other-one": {"samples": 5}}}

    assert configured(RULES, table, "f") == (Plain(ratio=1e-4), Other(samples=5))


def test_a_whole_number_will_do_for_any_number():
    """In TOML 1 and 1.0 are not the same; for a threshold they are."""
    (rule, _) = configured(RULES, {"rules": {"PLAIN": {"ratio": 1}}}, "f")

    assert thresholds(rule) == {"ratio": 1.0, "samples": 20}
    assert isinstance(rule.ratio, float)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"selct": []}, "f: [tool.kedge] has an unknown key 'selct'; the nearest are select"),
        (
            {"x": 1},
            "f: [tool.kedge] has an unknown key 'x'; the known ones are select, ignore, rules, on",
        ),
        ({"rules": 3}, "f: [tool.kedge.rules] is 3; it must be a table"),
        ({"rules": {"PLAIN": 3}}, "f: [tool.kedge.rules.PLAIN] is 3; it must be a table"),
        (
            {"rules": {"PLAIM": {}}},
            "f: [tool.kedge.rules.PLAIM]: there is no rule 'PLAIM'; the nearest are PLAIN",
        ),
        (
            {"rules": {"PLAIN": {"ratoi": 1}}},
            "f: [tool.kedge.rules.PLAIN] has an unknown key 'ratoi'; the nearest are ratio",
        ),
        (
            {"rules": {"PLAIN": {"code": "X"}}},
            "f: [tool.kedge.rules.PLAIN] has an unknown key 'code'; the known ones are ratio, samples",
        ),
        (
            {"rules": {"PLAIN": {"ratio": "small"}}},
            "f: ratio in [tool.kedge.rules.PLAIN] is 'small'; it must be a number, such as 0.001",
        ),
        (
            {"rules": {"PLAIN": {"samples": 2.5}}},
            "f: samples in [tool.kedge.rules.PLAIN] is 2.5; it must be a whole number, such as 20",
        ),
        (
            {"rules": {"PLAIN": {"samples": True}}},
            "f: samples in [tool.kedge.rules.PLAIN] is True; it must be a whole number, such as 20",
        ),
        (
            {"rules": {"PLAIN": {"ratio": float("nan")}}},
            "f: ratio in [tool.kedge.rules.PLAIN] is nan; it must be a number, such as 0.001",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error(table, message):
    """It names the file and the key, what was found, and what would do."""
    with pytest.raises(ConfigError) as caught:
        configured(RULES, table, "f")

    assert str(caught.value) == message
    assert isinstance(caught.value, KedgeError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "PLAIN",
            "f: select in [tool.kedge] is 'PLAIN'; write a list of codes: select = [\"PLAIN\"]",
        ),
        ([1], 'f: select in [tool.kedge] is [1]; write a list of codes: select = ["PLAIN"]'),
        (
            ["OTHER"],
            "f: select in [tool.kedge]: there is no rule 'OTHER'; the nearest are OTHER-ONE",
        ),
    ],
)
def test_a_list_of_codes_is_a_list_of_codes(value, message):
    """Of rules that there are."""
    with pytest.raises(ConfigError) as caught:
        codes(RULES, {"select": value}, "select", "f")

    assert str(caught.value) == message


def test_codes_are_read_in_any_case():
    """As on the command line."""
    assert codes(RULES, {"ignore": ["plain", "OTHER-ONE"]}, "ignore", "f") == ["PLAIN", "OTHER-ONE"]


@pytest.mark.parametrize(
    ("select", "ignore", "left"),
    [
        (None, [], ["PLAIN", "OTHER-ONE"]),
        (["PLAIN"], [], ["PLAIN"]),
        (None, ["PLAIN"], ["OTHER-ONE"]),
        (["OTHER-ONE", "PLAIN"], ["OTHER-ONE"], ["PLAIN"]),
        ([], [], []),
    ],
)
def test_rules_can_be_chosen(select, ignore, left):
    """In their own order; what is ignored goes, whether it is selected or not."""
    assert [rule.code for rule in chosen(RULES, select, ignore)] == left


def test_what_is_printed_can_be_read_back():
    """All thresholds as TOML give the same rules again."""
    table = tomllib.loads(toml(ALL, ALL))["tool"]["kedge"]

    assert configured(ALL, table, "f") == ALL
    assert "default" not in toml(ALL, ALL)


def test_what_was_changed_names_its_default():
    """So that one sees at a glance what a project changed."""
    assert toml([Plain(samples=5)], RULES) == (
        "[tool.kedge.rules.PLAIN]\nratio = 0.001\nsamples = 5  # default: 20\n"
    )


def test_every_threshold_can_be_set():
    """Each is a number, so that a file can hold it."""
    for rule in ALL:
        assert thresholds(rule)
        assert all(type(value) in {int, float} for value in thresholds(rule).values())


def test_a_page_shows_the_thresholds_that_apply():
    """With the defaults of those that were changed."""
    vanish = next(rule for rule in ALL if rule.code == "GRAD-VANISH")

    page = explain("grad-vanish", [replace(vanish, ratio=0.5)])

    assert (
        "    [tool.kedge.rules.GRAD-VANISH]\n    ratio = 0.5  # default: 0.001\n    still = 1e-06\n"
        in page
    )


def test_all_thresholds_stand_in_one_place():
    """At the end of the page of rules."""
    assert page.pages()[page.FOLDER / "thresholds.md"].endswith(f"```toml\n{toml(ALL, ALL)}```\n")
