"""What docs/explanation/how-it-works.md shows of the source tree is what the import contract says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
import torch

# Words that mean something else outside of Kedge, or nothing.
OWN = {
    "birth",
    "corner",
    "door",
    "gate",
    "keeper",
    "lane",
    "leaf",
    "meter",
    "mount",
    "root",
    "seat",
    "shelf",
    "station",
    "tap",
    "witness",
}


@pytest.fixture(scope="module")
def house(root):
    """The script that draws the picture and writes the import order."""
    spec = importlib.util.spec_from_file_location("house", root / "docs/pictures/house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_import_order_in_the_docs_is_that_of_the_contract(house):
    """``make generated`` writes it; by hand nobody keeps both the same."""
    assert house.PAGE.read_text(encoding="utf-8") == house.page(), "run `make generated`"
    assert house.order() in house.page()


def test_the_stays_in_the_docs_are_those_that_are_measured(house, root):
    """``make generated`` measures them, with the PyTorch of ``constraints.txt``: with another one the way through Kedge may be another."""
    if f"torch=={torch.__version__.split('+')[0]}\n" not in (root / "constraints.txt").read_text(
        encoding="utf-8"
    ):
        pytest.skip("measured with another PyTorch")
    program = "import sys, ways; sys.stdout.write(ways.filled(sys.stdin.read()))"
    text = house.PAGE.read_text(encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=house.PICTURE.parent,
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == text, "the way of a value has changed: run `make generated`"


def test_the_picture_of_the_house_is_drawn_from_the_contract(house):
    """Its rows are the lines of the contract, its texts the first sentences of what they name; ``make generated`` draws it."""
    assert house.PICTURE.read_text(encoding="utf-8") == house.picture()


def test_every_folder_of_the_source_is_in_the_picture(house, sources):
    """A folder that no line of the contract names is missing from the order and the picture alike."""
    named = {name for line in house.layers() for name in line}

    assert {source.folder for source in sources} - {""} <= named
    assert all(house.purpose(name) for name in named)


def test_a_word_of_our_own_on_a_page_is_in_the_glossary(root):
    """Whoever reads of a birth or a root finds both in docs/reference/glossary.md."""
    page = (root / "docs/reference/glossary.md").read_text(encoding="utf-8")
    glossary = set(re.findall(r"^\| \**([a-z, ]+?)\** \|", page, re.MULTILINE))
    pages = "".join(
        page.read_text(encoding="utf-8")
        for page in (root / "README.md", *root.glob("docs/**/*.md"))
    )
    text = re.sub(
        r"^```.*?^```$|`[^`\n]+`|\]\([^)]*\)|root mean square",
        "",
        pages,
        flags=re.MULTILINE | re.DOTALL,
    )
    used = {word for word in OWN if re.search(rf"\b{word}s?\b", text, re.IGNORECASE)}

    assert used <= glossary
    assert "birth" in used
