"""Settings of a project: found, read, and gone by in every command that judges a recording."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.errors import ConfigError, NoSuchRule
from kedge.rules.project_config import configured_rules
from kedge.rules.registry import ALL
from kedge.rules.rule import Rule

Recorded = Callable[..., Path]
CODES = [rule.code for rule in ALL]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a project with these settings, and work in a folder inside it."""

    def make(settings: str, *, name: str = "pyproject.toml") -> Path:
        (tmp_path / name).write_text(settings)
        inner = tmp_path / "runs" / "today"
        inner.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(inner)
        return tmp_path / name

    return make


def found(rules: tuple[Rule, ...]) -> list[str]:
    """Name rules."""
    return [rule.code for rule in rules]


def ratio(rules: tuple[Rule, ...]) -> float:
    """Return a threshold of GRAD-VANISH."""
    return next(rule.ratio for rule in rules if rule.code == "GRAD-VANISH")


def test_without_a_file_all_rules_apply(project: Callable[..., Path]) -> None:
    """With their default thresholds."""
    project("[project]\nname = 'x'\n")

    assert configured_rules() == ALL


def test_the_nearest_file_above_counts(project: Callable[..., Path]) -> None:
    """It is looked for from the working directory upwards, as ruff does."""
    project("[tool.kedge]\nignore = ['SPIKE']\n[tool.kedge.rules.GRAD-VANISH]\nratio = 0.5\n")

    rules = configured_rules()

    assert found(rules) == [code for code in CODES if code != "SPIKE"]
    assert ratio(rules) == 0.5


def test_a_file_without_settings_is_passed_over(project: Callable[..., Path]) -> None:
    """A package inside a project does not hide the project's settings; one with settings does."""
    outer = project("[tool.kedge]\nselect = ['SPIKE']\n")
    inner = outer.parent / "runs" / "pyproject.toml"

    inner.write_text("[tool.ruff]\n")
    assert found(configured_rules()) == ["SPIKE"]

    inner.write_text("[tool.kedge]\n")
    assert found(configured_rules()) == CODES


def test_another_folder_can_be_looked_from(project: Callable[..., Path], tmp_path: Path) -> None:
    """A program may have changed its working directory."""
    project("[tool.kedge]\nselect = ['SPIKE']\n")

    assert found(configured_rules(folder=tmp_path.parent)) == CODES


def test_another_file_can_be_named(project: Callable[..., Path], tmp_path: Path) -> None:
    """Then no other is read."""
    project("[tool.kedge]\nselect = ['SPIKE']\n")
    other = project("[tool.kedge]\nselect = ['NAN-BORN']\n", name="other.toml")

    assert found(configured_rules(config=str(other))) == ["NAN-BORN"]


@pytest.mark.parametrize(
    ("select", "ignore", "left"),
    [
        (None, None, ["SPIKE"]),
        ("NAN-BORN,underflow", None, ["NAN-BORN", "UNDERFLOW"]),
        (None, "SPIKE", []),
        ("NAN-BORN, SPIKE", "nan-born", ["SPIKE"]),
    ],
)
def test_what_is_typed_goes_before_the_file(
    project: Callable[..., Path], select: str | None, ignore: str | None, left: list[str]
) -> None:
    """A typed selection takes the place of both lists of the file; what is typed to be ignored adds to them."""
    project("[tool.kedge]\nselect = ['SPIKE', 'NAN-BORN']\nignore = ['NAN-BORN']\n")

    assert found(configured_rules(select, ignore)) == left


def test_a_typed_selection_keeps_the_thresholds(project: Callable[..., Path]) -> None:
    """They are another matter."""
    project("[tool.kedge.rules.GRAD-VANISH]\nratio = 0.5\n")

    assert ratio(configured_rules("GRAD-VANISH")) == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "[tool.kedge\n",
            "it is not TOML (Expected ']' at the end of a table declaration (at line 1, column 12))",
        ),
        ("tool.kedge = 3\n", "tool.kedge is 3; it must be a table: [tool.kedge]"),
        (
            "[tool.kedge]\nselect = ['SPIK']\n",
            "select in [tool.kedge]: there is no rule 'SPIK'; the nearest are SPIKE",
        ),
        (
            "[tool.kedge.rules.SPIKE]\nabove = '3'\n",
            "above in [tool.kedge.rules.SPIKE] is '3'; it must be a number",
        ),
    ],
)
def test_what_cannot_be_read_names_the_file(
    project: Callable[..., Path], settings: str, message: str
) -> None:
    """And the key in it."""
    path = project(settings)

    with pytest.raises(ConfigError) as caught:
        configured_rules()

    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_named_file_has_to_be_one(project: Callable[..., Path], tmp_path: Path) -> None:
    """It is an error if it is not there, or has no settings."""
    empty = project("[tool.ruff]\n")

    with pytest.raises(
        ConfigError, match=r"cannot read no\.toml: No such file or directory; name another file"
    ):
        configured_rules(config="no.toml")
    with pytest.raises(
        ConfigError, match=r"has no table \[tool\.kedge\]; add one, or name another file"
    ):
        configured_rules(config=str(empty))


def test_an_unknown_code_that_is_typed_is_another_error() -> None:
    """No file is to blame."""
    with pytest.raises(NoSuchRule, match="there is no rule 'SPIK': the nearest are SPIKE"):
        configured_rules("SPIK")


def test_check_goes_by_the_settings(
    project: Callable[..., Path], recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is ignored is not found, and does not decide the exit status."""
    run = str(recorded(broken_at=10).absolute())
    config = project("[tool.kedge]\nignore = ['NAN-BORN']\n")

    assert main(["check", run]) == 0
    told = capsys.readouterr().out
    judged, idle = map(int, re.findall(r"(\d+) (?:rules over|had nothing)", told))
    assert told.startswith("✓ no findings: ")
    assert judged + idle == len(CODES) - 1

    config.unlink()
    assert main(["check", run]) == 1


def test_a_bad_setting_ends_a_command_with_2(
    project: Callable[..., Path], recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr says what to mend."""
    run = str(recorded().absolute())
    path = project("[tool.kedge]\nselct = []\n")

    assert main(["check", run]) == 2
    assert capsys.readouterr() == (
        "",
        f"kedge: {path}: [tool.kedge] has an unknown key 'selct'; the nearest are select\n",
    )


def test_explain_shows_what_applies(
    project: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A page ends with the thresholds as they are set, also of a rule that the project leaves out."""
    project("[tool.kedge]\nselect = ['SPIKE']\n[tool.kedge.rules.GRAD-ZERO]\nsamples = 7\n")

    assert main(["explain", "grad-zero"]) == 0
    assert capsys.readouterr().out.endswith(
        "    [tool.kedge.rules.GRAD-ZERO]\n    samples = 7  # default: 20\n    few = 5\n"
    )

    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CODES) + 1  # and DEPARTS


def test_explain_prints_all_thresholds(
    project: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the form in which they are set; of one rule if it is named."""
    config = project("[tool.kedge.rules.GRAD-ZERO]\nsamples = 7\n")

    assert main(["explain", "--thresholds"]) == 0
    everything = capsys.readouterr().out
    assert [line for line in everything.splitlines() if line.startswith("[")] == [
        f"[tool.kedge.rules.{code}]" for code in CODES
    ]

    assert main(["explain", "grad-zero", "--thresholds", "--config", str(config)]) == 0
    assert (
        capsys.readouterr().out
        == "[tool.kedge.rules.GRAD-ZERO]\nsamples = 7  # default: 20\nfew = 5\n"
    )
