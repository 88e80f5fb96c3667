"""``kedge check --format github``: findings as annotations, and the workflow of the docs that uses it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.cli.github import annotation
from kedge.cli.main import main
from kedge.rules.rule import Finding
from kedge.store.recording import Recording

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ci.md"


def recording(file: Path) -> Recording:
    """Make a recording of a module that is called in a file, and of its weight."""
    source = {"file": str(file), "line": 12, "function": "forward", "text": "x = self.fc(x)"}
    entries = [
        {"site": "fc:out", "owner": "fc", "source": source},
        {"site": "fc.weight:param.grad", "owner": "fc"},
        {"site": ":grad.norm"},
    ]
    return Recording.build(entries)


@pytest.mark.parametrize(
    ("severity", "site", "start"),
    [
        ("error", "fc:out", "::error file=src/net.py,line=12,title=BAD::"),
        ("warning", "fc.weight:param.grad", "::warning file=src/net.py,line=12,title=BAD::"),
        ("info", ":grad.norm", "::notice title=BAD::"),
        ("info", "gone:out", "::notice title=BAD::"),
    ],
)
def test_a_finding_stands_at_the_line_of_its_module(
    tmp_path: Path, severity: str, site: str, start: str
) -> None:
    """A parameter is at the line that calls its module; what has no line is an annotation of the job."""
    finding = Finding("BAD", severity, site, 3, "It is so.", remedy="Do so.")

    assert (
        annotation(recording(tmp_path / "src" / "net.py"), finding, str(tmp_path))
        == f"{start}It is so. Do so."
    )


def test_a_file_outside_of_the_repository_is_not_named(tmp_path: Path) -> None:
    """GitHub would find no such file."""
    finding = Finding("BAD", "error", "fc:out", 3, "It is so.")

    assert (
        annotation(recording(tmp_path / "net.py"), finding, str(tmp_path / "here"))
        == "::error title=BAD::It is so."
    )


def test_what_has_a_meaning_in_the_line_is_escaped(tmp_path: Path) -> None:
    """Ends of lines and percent signs in the message; colons and commas also in the name of the file."""
    finding = Finding("BAD", "error", "fc:out", 3, "50%\r\nof a:b, c")

    assert annotation(recording(tmp_path / "a,b:c.py"), finding, str(tmp_path)) == (
        "::error file=a%2Cb%3Ac.py,line=12,title=BAD::50%25%0D%0Aof a:b, c"
    )


def test_check_prints_annotations_and_the_verdict(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line a finding, then the verdict; the exit status is as without."""
    assert main(["check", str(recorded(broken_at=10)), "--format", "github"]) == 1

    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("::error title=NAN-BORN::log:out ")
    assert last.startswith("1 error: ")


def test_json_is_a_format(
    recorded: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json`` is short for it."""
    name = str(recorded())
    main(["check", name, "--json"])
    short = capsys.readouterr().out
    main(["check", name, "--format", "json"])

    assert capsys.readouterr().out == short


def test_the_workflow_of_the_docs_is_one() -> None:
    """It is YAML with a job of steps, and has ten lines."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    texts = re.findall(
        r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    [text] = [text for text in texts if "kedge check" in text]
    workflow = yaml.safe_load(text)
    steps = workflow["jobs"]["train"]["steps"]

    assert len(text.splitlines()) == 10
    assert [step["run"] for step in steps if step.get("run", "").startswith("kedge")] == [
        "kedge run -o smoke.kedge --budget none train.py --steps 100",
        "kedge check smoke.kedge --format github",
    ]
