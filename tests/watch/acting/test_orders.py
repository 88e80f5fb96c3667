"""What can be ordered, and what is said of all else."""

from __future__ import annotations

import pytest

import kedge
from kedge.errors import ConfigError, WrongCall
from kedge.rules.rule import Finding
from kedge.watch.acting.orders import actions_for, orders_of, with_those_of_project


def test_codes_and_severities_are_keys_and_several_actions_have_an_order() -> None:
    """In any spelling; a snapshot is kept before the program ends."""
    assert orders_of({"nan-born": "snapshot, stop", "Error": ["raise"]}) == {
        "NAN-BORN": ("stop", "snapshot"),
        "error": ("raise",),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"NAN-BRON": "stop"}, "no such rule or severity; the nearest are NAN-BORN"),
        ({"info": "stop"}, "the severities are error and warning"),
        ({"NAN-BORN": "stopp"}, "no such action; the nearest are stop"),
        ({"NAN-BORN": ""}, "no such action; there are stop, raise, skip, snapshot"),
        ({"NAN-BORN": []}, "name an action: stop, raise, skip, snapshot"),
        ({"NAN-BORN": 3}, "name an action: stop, raise, skip, snapshot"),
        ({"NAN-BORN": "stop,raise"}, "stop and raise exclude each other"),
        ({"SPIKE": "skip"}, "known only after the step .* skipped for NAN-BORN; for SPIKE choose"),
        ({"error": "skip"}, "known only after the step"),
        ("NAN-BORN=stop", "give a dict"),
    ],
)
def test_what_cannot_be_ordered_is_said_at_once(given: object, said: str) -> None:
    """The message says what was asked, what there is, and the nearest."""
    with pytest.raises(WrongCall, match=said):
        kedge.watch("x.kedge", on=given)  # type: ignore[arg-type]


def finding(code: str, severity: str) -> Finding:
    """Return a finding."""
    return Finding(code=code, severity=severity, site="loss", step=0, message="It is.")  # type: ignore[arg-type]


def test_a_code_goes_before_a_severity_and_hints_are_left_alone() -> None:
    """A severity stands for findings that are at least as severe."""
    orders = orders_of({"error": "stop", "warning": "snapshot", "SPIKE": "raise"})

    assert actions_for(orders, finding("SPIKE", "warning")) == ("raise",)
    assert actions_for(orders, finding("NAN-BORN", "error")) == ("stop",)
    assert actions_for(orders, finding("NAN-BORN", "warning")) == ("snapshot",)
    assert actions_for(orders, finding("SPIKE", "info")) == ()
    only_warnings = orders_of({"warning": "stop"})
    assert actions_for(only_warnings, finding("NAN-BORN", "error")) == ("stop",)
    assert actions_for(orders_of({"error": "stop"}), finding("X", "warning")) == ()


def test_a_project_has_orders_of_its_own(tmp_path, monkeypatch) -> None:
    """Those that are given go before them; a wrong one names the file."""
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.kedge.on]\nNAN-BORN = "stop"\nSPIKE = "snapshot"\n')
    monkeypatch.chdir(tmp_path)

    assert with_those_of_project(orders_of({"SPIKE": "raise"})) == {
        "NAN-BORN": ("stop",),
        "SPIKE": ("raise",),
    }

    file.write_text('[tool.kedge.on]\nNAN-BORN = "halt"\n')
    with pytest.raises(ConfigError, match=r"pyproject.toml: on in \[tool.kedge\]: NAN-BORN=halt"):
        with_those_of_project({})
