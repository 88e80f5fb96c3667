"""README.md and docs/ are run as they stand, so that no example is wrong.

The blocks of a page are run from top to bottom in an empty folder beside a copy of ``examples/``:
Python blocks share their names, ``$ kedge ...`` and ``$ torchrun ...`` lines of console blocks are
run as commands. A comment before a block says what is special about it: ``<!-- not run: why -->``,
or ``<!-- exit 1 -->`` for what its last command ends with. Below ``<!-- output compared -->`` the
commands have to print what the block shows, except for numbers, curves and line breaks; ``...``
stands for anything. Both: ``<!-- exit 1, output compared -->``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")) if path.exists())
BLOCK = re.compile(
    r"^(?:<!--[ ]*(?P<note>[^\n]*?)[ ]*-->\n\n?)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
AHEAD = f"sklearn.datasets {forked.WATCH}"  # most pages train on digits
COMMANDS = ("$ kedge ", "$ torchrun ")
LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)(?:#(?P<heading>[^)\s]+))?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    @property
    def is_run(self):
        """Whether the block is to be run; if not, its note has to say why."""
        if not self.note.startswith("not run"):
            return True
        assert re.fullmatch(r"not run: .{8,}", self.note), (
            f"{self}: not run, but why? <!-- not run: reason -->"
        )
        return False

    @property
    def hides(self):
        """Whether the block holds what is meant to be run, but is not marked so."""
        names = "(kedge|torchrun) "
        commands = rf"^{names}" if self.language == "console" else rf"^(\$ )?{names}"
        aliases = {"py", "python3", "pycon", "sh", "shell", "shellsession"}
        return self.language in aliases or re.search(commands, self.text, re.MULTILINE)

    @property
    def commands(self):
        """The block's ``kedge`` and ``torchrun`` commands, each as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith(COMMANDS)]

    @property
    def printed(self):
        """What the block shows below each command, if that is to be compared."""
        parts = re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
        return [
            part.partition("\n")[2] if self.note.endswith("output compared") else "..."
            for part in parts
        ]

    @property
    def exit_code(self):
        """What the last command ends with."""
        said = re.fullmatch(r"exit (\d+)(?:, output compared)?", self.note)
        return int(said[1]) if said else 0


def blocks(page):
    """Read the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")),
            found["language"],
            found["text"],
            found["note"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def run_page(page, folder):
    """Run the blocks of a page in a folder, which has to be the current one."""
    names = {"__name__": "__page__"}
    for block in blocks(page):
        if not block.is_run:
            continue
        if block.language == "python":
            exec(
                compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True), names
            )
        elif block.language == "console":
            run_commands(block, folder)


def run_commands(block, folder):
    """Run the commands of a console block; all but the last have to end with 0."""
    codes = [0] * (len(block.commands) - 1) + [block.exit_code]
    for words, code, printed in zip(block.commands, codes, block.printed, strict=False):
        assert not {"|", "||", "&&", ";", ">", "<"} & set(words), f"{block}: {words} needs a shell"
        program = shutil.which(words[0], path=Path(sys.executable).parent)
        assert program, (
            f"the {words[0]} command is not installed beside this Python; `make setup` does it"
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        command = [sys.executable, program, *words[1:]]
        ended = forked.run(command, cwd=folder, env=environment, forks=True, ahead=AHEAD)
        assert ended.returncode == code, (
            f"{block}: {shlex.join(words)}\n{ended.stdout}\n{ended.stderr}"
        )
        assert not missing(printed, ended.stdout + ended.stderr), (
            f"{block}: not in the output of {shlex.join(words)}"
        )


def plain(text):
    """Return a text without what differs from run to run: numbers, curves and line breaks."""
    without_curves = re.sub(r"[▁-█✗0]*[▁-█][▁-█✗0]*", "▁", " ".join(text.split()))
    return re.sub(r"\d+(?:[.,]\d+)*(?:e-?\d+)?", "0", without_curves)


def missing(printed, output):
    """Return the pieces of a page's text that an output lacks; they have to follow each other as in the page."""
    lacking, rest = [], plain(output)
    for piece in map(plain, re.split(r"(?<!\S)\.\.\.$", printed, flags=re.MULTILINE)):
        _, found, after = rest.partition(piece) if piece else ("", "nothing", rest)
        lacking, rest = (lacking, after) if found else ([*lacking, piece], rest)
    return lacking


def prose(page):
    """Return a page's text without its blocks and code."""
    return re.sub(r"`[^`\n]+`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def headings(page):
    """Return the names by which the headings of a page are linked to."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def dead_links(page):
    """Return the links of a page that lead to no file, or to no heading in it."""
    dead = []
    for link in LINK.finditer(prose(page)):
        target = page.parent / link["file"] if link["file"] else page
        if not target.exists() or (link["heading"] and link["heading"] not in headings(target)):
            dead.append(link[0])
    return dead


def marks(page):
    """Return the marks of a page: what a run of Kedge prints depends on time, where other tests take that time."""
    return pytest.mark.timing if "output compared -->" in page.read_text(encoding="utf-8") else ()


each_page = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page), id=page.relative_to(ROOT).as_posix()) for page in PAGES],
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a copy of ``examples/``, which is the current one."""
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each_page
def test_the_examples_of_a_page_run(page, folder):
    """Whoever types what a page shows, from top to bottom, gets what the page says."""
    run_page(page, folder)


@each_page
def test_the_links_of_a_page_lead_somewhere(page):
    """Every relative link of a page leads to a file of the repository, and to a heading in it."""
    assert dead_links(page) == []


@each_page
def test_no_example_of_a_page_hides_from_being_run(page):
    """Python stands in python blocks, commands in console blocks after a dollar, and blocks begin at the margin."""
    hidden = [str(block) for block in blocks(page) if block.is_run and block.hides]
    text = page.read_text(encoding="utf-8")

    assert hidden == []
    assert len(blocks(page)) * 2 == len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))


def write(folder, text):
    """Write a page."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_names_and_order(folder):
    """A later block goes on where an earlier one stopped."""
    page = write(
        folder, "```python\nx = [1]\n```\ntext\n```python\nx.append(2)\nassert x == [1, 2]\n```\n"
    )

    run_page(page, folder)


def test_a_wrong_block_is_reported_at_its_line(folder):
    """An error in a block points into the page."""
    page = write(folder, "# Title\n\n```python\nx = 1\nassert x == 2\n```\n")

    with pytest.raises(AssertionError) as raised:
        run_page(page, folder)

    assert (raised.traceback[-1].path, raised.traceback[-1].lineno + 1) == (page, 5)


def test_a_block_is_left_out_for_a_reason_only(folder):
    """A block that is not run says why."""
    run_page(
        write(folder, "<!-- not run: it needs a GPU -->\n```python\nraise SystemError\n```\n"),
        folder,
    )

    with pytest.raises(AssertionError, match="not run, but why"):
        run_page(write(folder, "<!-- not run -->\n```python\nraise SystemError\n```\n"), folder)


def test_a_command_must_end_as_the_page_says(folder):
    """A command that ends otherwise than the page says is an error."""
    run_page(write(folder, "<!-- exit 2 -->\n```console\n$ kedge no-such-command\n```\n"), folder)

    with pytest.raises(AssertionError, match="no-such-command"):
        run_page(write(folder, "```console\n$ kedge no-such-command\n```\n"), folder)


def test_a_printed_line_must_be_in_the_output(folder):
    """What a page shows below a command is compared where it says so; numbers, and what is left out, are not."""
    shown = "$ kedge explain SPIKE\nSPIKE ...\n\nMeaning:\n...\n    factor = 7\n...\n"
    run_page(write(folder, f"<!-- output compared -->\n```console\n{shown}```\n"), folder)
    wrong = shown.replace("Meaning", "Sense")
    run_page(write(folder, f"```console\n{wrong}```\n"), folder)

    with pytest.raises(AssertionError, match="not in the output of kedge explain SPIKE"):
        run_page(write(folder, f"<!-- output compared -->\n```console\n{wrong}```\n"), folder)


def test_pieces_of_an_output_have_an_order():
    """Numbers, curves and line breaks are not compared; words and their order are."""
    output = "step 1  loss 2.5e-3 ▁▂▅\nended\n"

    assert missing("step 7\nloss 0.1 ▅▂\n...", output) == []
    assert missing("ended\n...\nstep 1", output) == ["step 0"]


def test_a_dead_link_is_found(folder):
    """A link to a missing file or heading is found; addresses elsewhere and code are left alone."""
    page = write(
        folder,
        "# One word\n[a](#one-word) [b](#two) [c](no.md) [d](page.md#one-word) [e](https://x.y) `[f](g)`\n",
    )

    assert dead_links(page) == ["](#two)", "](no.md)"]
