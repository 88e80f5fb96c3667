"""A path that a page or a comment of a task names is one of the repository."""

from __future__ import annotations

import re

import pytest

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
FROM_ROOT = re.compile(rf"(?<![\w./<-])(?:{'|'.join(FOLDERS)})/[\w./*-]+")
# In a span of code, a file or folder may be named from any folder on: `rules/registry.py`,
# `hooks/gates/`.
FROM_ANYWHERE = re.compile(r"`((?:[a-z_]+/)+(?:\w+\.(?:py|c|h))?)`")


@pytest.fixture(scope="module")
def files(root):
    """All files of the repository's folders, as text."""
    found = (
        path
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if "__pycache__" not in path.parts
    )
    return {path.relative_to(root).as_posix() + ("/" if path.is_dir() else "") for path in found}


@pytest.fixture(scope="module")
def pages(root):
    """Every page, by its name."""
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/**/*.md")]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_every_path_on_a_page_exists(root, pages):
    """Whoever follows ``tests/rules/goldens.py`` finds it; a moved file does not stay on a page under its old name."""
    named = {
        (page, path.rstrip(".")) for page, text in pages.items() for path in FROM_ROOT.findall(text)
    }

    assert [
        (page, path) for page, path in sorted(named) if not any(root.glob(path.rstrip("/")))
    ] == []
    assert len(named) > 50


def test_every_file_that_a_page_names_without_its_folder_exists(pages, files):
    """A page may leave out the folders that its reader knows: there is a file or folder whose path ends so."""
    named = {(page, path) for page, text in pages.items() for path in FROM_ANYWHERE.findall(text)}
    missing = [
        (page, path)
        for page, path in sorted(named)
        if not any(f"/{file}".endswith(f"/{path}") for file in files)
    ]

    assert missing == []
    assert len(named) > 20
