"""The commands that read recordings: report, check, explain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.compare.against.departs import Departs
from kedge.rules import registry
from kedge.rules.evidence import Evidence
from kedge.rules.judgement import Judgement
from kedge.rules.rule import Finding, Rule
from kedge.store.recording import Recording

Recorded = Callable[..., Path]
FIELDS = ["code", "severity", "site", "step", "message", "evidence", "confidence", "remedy"]


WITHOUT_END = ("GRADS-SHRUNK", "TWO-OPTIMIZERS", "MOSTLY-FROZEN", "UNUSED-PARAM", "NEVER-CALLED")
"""Rules that need the end of the program."""


@dataclass(frozen=True, kw_only=True)
class It(Evidence):
    """Evidence of one figure."""

    it: object


@dataclass(frozen=True)
class Fixed(Rule):
    """A rule that always finds the same."""

    code: str
    severity: str
    evidence: object = None
    name: str = "always the same"

    def check(self, recording: Recording) -> Iterable[Finding]:
        yield Finding(
            self.code,
            self.severity,
            "log:out",
            10,
            "It is so.",
            It(it=self.evidence),
            0.5,
            "Do so.",
        )


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register two rules, one that finds an error and one that warns."""
    monkeypatch.setattr(
        registry,
        "ALL",
        (Fixed("BAD", "error", [float("nan"), (1, float("-inf"))]), Fixed("ODD", "warning")),
    )


def test_a_clean_run_checks_with_0(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing found: exit status 0, and the line that says so."""
    assert main(["check", str(recorded())]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("✓ no findings: 5 rules over 3 measured steps; ")
    idle = len(registry.ALL) - 5
    assert f"{idle} had nothing to judge: nothing was trained (" in told.out
    assert told.err == ""


def test_an_error_checks_with_1(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that makes a NaN is found in a recording on disk, with exit status 1."""
    assert main(["check", str(recorded(broken_at=10))]) == 1

    out = capsys.readouterr().out.splitlines()
    assert out[0] == "✗ error   NAN-BORN  log:out, step 10"
    assert out[-1].startswith("1 error: 5 rules over 3 measured steps; ")


@pytest.mark.parametrize(
    ("severity", "failing"),
    [("error", ["error", "warning", "info"]), ("warning", ["warning", "info"]), ("info", ["info"])],
)
def test_the_severity_that_fails_can_be_set(
    severity: str, failing: list[str], recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding counts if it is as bad as the word after ``--fail-on``, or worse; never means that none does."""
    found = Judgement(
        (Finding("BAD", severity, "log:out", 3, "It is so."),), (), rules=1, measured=3
    )
    monkeypatch.setattr("kedge.rules.judgement.judge", lambda *_: found)
    run = str(recorded())

    words = ("error", "warning", "info", "never")
    assert [word for word in words if main(["check", run, "--fail-on", word]) == 1] == failing
    assert main(["check", run]) == (severity == "error")


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("options", "status", "codes"),
    [
        ([], 1, ["BAD", "ODD"]),
        (["--select", "odd"], 0, ["ODD"]),
        (["--ignore", "BAD"], 0, ["ODD"]),
        (["--select", "BAD, ODD", "--ignore", "odd"], 1, ["BAD"]),
        (["--select", ""], 0, []),
    ],
)
def test_rules_can_be_chosen(
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    codes: list[str],
) -> None:
    """Only the rules that are left decide what is printed and the exit status."""
    assert main(["check", str(recorded()), "--json", *options]) == status
    assert [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]] == codes


@pytest.mark.usefixtures("rules")
def test_json_is_strict_and_complete(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each finding has all its fields, and numbers that JSON lacks are strings."""
    folder = str(recorded())
    main(["check", folder, "--json", "--select", "BAD"])

    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    assert printed == {
        "recording": folder,
        "findings": [
            {
                "code": "BAD",
                "severity": "error",
                "site": "log:out",
                "step": 10,
                "message": "It is so.",
                "evidence": {"it": ["nan", [1, "-inf"]]},
                "confidence": 0.5,
                "remedy": "Do so.",
            }
        ],
        "unjudged": [],
        "command": None,
        "unseen": [],
    }
    assert list(printed["findings"][0]) == FIELDS


def test_what_could_not_be_judged_is_a_field_and_strict_exits_with_3(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a killed run some rules lack the end; an error still exits with 1."""
    folder = str(recorded(events=()))

    assert main(["check", folder]) == 0
    assert capsys.readouterr().out == (
        "no findings; 5 rules could not judge: GRADS-SHRUNK (no end of the program), TWO-OPTIMIZERS (no end of the program), MOSTLY-FROZEN (no end of the program), UNUSED-PARAM (no end of the program), NEVER-CALLED (no end of the program)\n"
    )
    assert main(["check", folder, "--strict"]) == 3
    capsys.readouterr()
    assert main(["check", folder, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    lack = {"lacks": "end of the program", "have": 0, "need": 1}
    assert printed["unjudged"] == [{"code": code, **lack} for code in WITHOUT_END]
    assert printed["command"] is None
    assert main(["check", folder, "--strict", "--ignore", ",".join(WITHOUT_END)]) == 0


def test_the_command_is_in_the_json(
    tmp_path: Path, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, as it is to be typed; a rule that lacks more than the run has is not helped by it."""
    config = tmp_path / "pyproject.toml"
    folder, options = (
        str(recorded()),
        ["--json", "--select", "NEAR-OVERFLOW", "--config", str(config)],
    )

    for need, command in ((30, "kedge run --budget none --every 1 train.py --lr 1"), (31, None)):
        config.write_text(f"[tool.kedge.rules.NEAR-OVERFLOW]\nmin_samples = {need}\n")
        assert main(["check", folder, *options]) == 0
        assert json.loads(capsys.readouterr().out)["command"] == command


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_code_is_refused(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """A code that no rule has is an error, not an empty choice."""
    assert main(["check", str(recorded()), option, "NAN-BURN"]) == 2
    assert (
        capsys.readouterr().err
        == "kedge: there is no rule 'NAN-BURN': the nearest are NAN-BORN, NO-LEARNING, RANK-DEPARTS\n"
    )


@pytest.mark.parametrize("command", ["report", "check"])
def test_what_is_no_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A path without a recording is named, with exit status 2 and nothing on stdout."""
    place = tmp_path / "nothing.kedge"

    assert main([command, str(place)]) == 2
    assert capsys.readouterr() == (
        "",
        f"kedge: {place} is not a recording: there is no such folder; kedge run writes one and prints its name\n",
    )


def test_the_report_is_drawn(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    """``kedge report`` draws head, findings and table of a recording on disk."""
    assert main(["report", str(recorded(broken_at=20))]) == 0

    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["train.py --lr 1", "1 error"]
    begin = out.index("cpu · torch 2.13.0+cpu · Python 3.11.7 · started 2026-11-21 07:00 UTC")
    assert out[begin + 1 : begin + 4] == [
        "Net: 12 parameters · 3 sites",
        "30 steps, 3 measured · 2 s, 5.0 % of it for watching",
        "",
    ]
    assert "  module         type shape     out trend zero     ✗" in out
    assert "✗ log            Log  2x5       nan ▄▄✗     0%     1" in out


def test_a_glob_that_matches_nothing_is_refused(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--sites`` names what is near."""
    assert main(["report", str(recorded()), "--sites", "lag"]) == 2
    assert capsys.readouterr() == (
        "",
        'kedge: "lag" selects nothing in this recording; the nearest are "log"\n',
    )


def test_explain_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """``kedge explain CODE`` prints the rule's page, whatever the case of the code."""
    assert main(["explain", "nan-born"]) == 0
    assert capsys.readouterr().out == registry.explain("NAN-BORN")


def test_explain_lists_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """``kedge explain`` lists every rule once, with severity and name, and then DEPARTS."""
    assert main(["explain"]) == 0

    lines = capsys.readouterr().out.splitlines()
    listed = (*registry.ALL, Departs)
    assert [line.split()[:2] for line in lines] == [[each.code, each.severity] for each in listed]
    assert all(line.endswith(each.name) for line, each in zip(lines, listed, strict=True))


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A code that no rule has names the nearest."""
    assert main(["explain", "SPIKES"]) == 2
    assert (
        capsys.readouterr().err
        == "kedge: there is no rule 'SPIKES': the nearest are SPIKE, BATCH-SIZES, WORKERS-ALIKE\n"
    )
