"""The files for the package index and for those who cite Kedge agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePosixPath

import pytest

ADDRESS = "https://github.com/kedge/kedge"


@pytest.fixture(scope="module")
def project(root):
    """The content of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def test_one_version_stands_everywhere(root, project):
    """The version of the package is that of the citation, and has a section in the changelog."""
    version = project["project"]["version"]

    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{version}]" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_one_address_stands_everywhere(root, project):
    """Whoever moves the project finds every address by searching for one."""
    assert all(url.startswith(ADDRESS) for url in project["project"]["urls"].values())
    for name in ("CITATION.cff", "SECURITY.md", "CHANGELOG.md"):
        found = re.findall(
            r"https://github\.com/[\w-]+/[\w-]+", (root / name).read_text(encoding="utf-8")
        )
        assert set(found) == {ADDRESS}


def test_no_address_of_the_readme_is_relative_on_the_package_index(root, project):
    """A picture becomes its file and a link its page; both lead to what this repository has."""
    text = (root / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)

    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []
    assert pictures
    for picture in pictures:
        assert f"](https://raw.githubusercontent.com/kedge/kedge/main/{picture})" in text


def test_only_what_is_tested_is_classified(project, root):
    """Each version of Python has a row of test results in docs/reference/versions.md, and the oldest is required."""
    named = [
        name for name in project["project"]["classifiers"] if re.search(r"Python :: 3\.\d+$", name)
    ]

    versions = [name.rpartition(" ")[2] for name in named]
    page = (root / "docs/reference/versions.md").read_text(encoding="utf-8")
    tried = re.findall(
        r"^\| (3\.\d+)\.\d+ \|", page.partition("## Other versions of Python")[2], re.MULTILINE
    )
    assert versions == list(dict.fromkeys(tried))
    assert versions[0] == project["project"]["requires-python"].removeprefix(">=")


def test_a_release_is_started_by_hand(root):
    """No event of the repository builds or publishes anything."""
    text = (root / ".github/workflows/release.yml").read_text(encoding="utf-8")

    assert re.search(r"^on:\n  workflow_dispatch:\n(?:    .*\n)+\n", text, re.MULTILINE)
    assert "if: inputs.publish" in text


SHIPPED = ["native/statistics.ptx", "native/c/statistics.cu", "native/c/work.h", "py.typed"]


@pytest.mark.parametrize("file", SHIPPED)
def test_what_is_no_python_is_shipped(root, project, file):
    """The sdist leaves out what git ignores, and wheel and sdist what pyproject.toml excludes."""
    build = project["tool"]["scikit-build"]
    assert (root / "src" / "kedge" / file).is_file()
    lines = (root / ".gitignore").read_text(encoding="utf-8").splitlines()
    lines += [name for name in build["sdist"]["exclude"] if name != "/.*"]
    lines += [re.sub("^!?", r"\g<0>src/", name) for name in build["wheel"]["exclude"]]
    path = PurePosixPath("src/kedge", file)
    for one in (path, *path.parents[:-1]):
        matching = [line for line in lines if one.match(line.lstrip("!").strip("/") or "#")]
        assert not matching or matching[-1].startswith("!"), one
