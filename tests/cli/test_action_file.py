"""``action.yml``: its steps as a runner carries them out, and the workflows of the docs that use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "ci.md"
EXPRESSION = re.compile(r"\$\{\{ *(.*?) *\}\}")

TRAINING = """
    import sys
    import torch
    from torch import nn

    if sys.argv[1:] != ["--name", "a b"]:
        sys.exit(f"other arguments came: {sys.argv[1:]}")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(8):
        x = torch.randn(32, 4)
        loss = (net(x if not BROKEN or step < 5 else x.sqrt()) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def action() -> dict[str, Any]:
    """Read the action."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return found


def step(name: str) -> dict[str, Any]:
    """Return a step by its name."""
    found: dict[str, Any] = next(
        one for one in action()["runs"]["steps"] if one.get("name") == name
    )
    return found


def carried_out(
    name: str, folder: Path, env: Mapping[str, str] | None = None, **inputs: str
) -> Any:
    """Do a step as a runner does: expressions are replaced in the environment, and the text is run as a file."""
    known = {f"inputs.{key}": one.get("default", "") for key, one in action()["inputs"].items()}
    known |= {f"inputs.{key.replace('_', '-')}": value for key, value in inputs.items()}
    known |= {"github.action_path": str(ROOT)}
    found = step(name)
    assert found["shell"] == "python"
    given = {
        key: EXPRESSION.sub(lambda one: known[one[1]], value) for key, value in found["env"].items()
    }
    file = folder / "step.py"
    file.write_text(found["run"], encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env={
            **os.environ,
            "CI": "true",
            "GITHUB_WORKSPACE": str(folder),
            "OMP_NUM_THREADS": "1",
            **given,
            **(env or {}),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_no_input_becomes_code() -> None:
    """Expressions stand in conditions, environments and the inputs of other actions, and never in what is run."""
    inputs, used = action()["inputs"], set()
    for one in action()["runs"]["steps"]:
        assert "${{" not in one.get("run", "")
        assert one.get("shell", "python") == "python"
        used |= set(re.findall(r"inputs\.([\w-]+)", str(one)))

    assert used == set(inputs)
    assert all(
        one["description"] and ("default" in one) != ("required" in one) for one in inputs.values()
    )


def test_what_is_installed_is_split_into_words(tmp_path: Path) -> None:
    """Kedge as it stands beside the action, and what was asked for; signs of a shell mean nothing."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("import sys; print(sys.argv[1:])")

    done = carried_out(
        "install",
        tmp_path,
        {"PYTHONPATH": str(tmp_path)},
        install="torch 'a b' $(id); x>=1\n-r requirements.txt",
    )

    assert (
        done.stdout
        == f"{['install', str(ROOT), 'torch', 'a b', '$(id);', 'x>=1', '-r', 'requirements.txt']}\n"
    )


@pytest.mark.parametrize("broken", [False, True], ids=["healthy", "broken"])
def test_a_broken_training_fails_with_annotations(*, broken: bool, tmp_path: Path) -> None:
    """The training runs with its arguments; a finding is an annotation at its line, and an error fails the step."""
    (tmp_path / "train.py").write_text(f"BROKEN = {broken}\n{dedent(TRAINING)}", encoding="utf-8")

    ran = carried_out(
        "kedge run",
        tmp_path,
        program="train.py --name 'a b'",
        run_options="--budget none --every 1",
    )
    checked = carried_out("kedge check", tmp_path, check_options="--ignore INPUT-SCALE")

    assert (ran.returncode, "other arguments" in ran.stderr) == (0, False), ran.stderr
    assert checked.returncode == broken, checked.stdout
    assert ("::error file=train.py,line=" in checked.stdout) == broken
    if broken:
        assert carried_out("kedge check", tmp_path, fail_on="never").returncode == 0
        assert carried_out("kedge check", tmp_path, fail_on="nothing").returncode == 2


def test_a_failed_training_is_checked_too() -> None:
    """The last step waits for nothing but the installation."""
    condition = step("kedge check")["if"]

    assert condition == "${{ !cancelled() && steps.install.outcome == 'success' }}"
    assert step("install")["id"] == "install"


def workflows() -> list[str]:
    """Return the workflows of the page."""
    return re.findall(
        r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_workflow_of_the_docs_has_ten_lines() -> None:
    """It is YAML, names inputs that the action has, and the version of this Kedge."""
    [text] = [text for text in workflows() if "uses: kedge/" in text and "on:" in text]
    last = yaml.safe_load(text)["jobs"]["train"]["steps"][-1]
    version = re.search(
        r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )

    assert len(text.splitlines()) == 10
    assert version is not None
    assert last["uses"] == f"kedge/kedge@v{version[1]}"
    assert set(last["with"]) <= set(action()["inputs"])
    assert {name for name, one in action()["inputs"].items() if one.get("required")} <= set(
        last["with"]
    )


def test_the_docs_list_every_input() -> None:
    """With its default."""
    rows = dict(
        re.findall(r"^\| `([\w-]+)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )

    assert {name: cell.strip("`") for name, cell in rows.items()} == {
        name: "required" if one.get("required") else one["default"] or "-"
        for name, one in action()["inputs"].items()
    }
