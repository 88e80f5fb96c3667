"""The live screen, driven by keys and clicks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kedge.errors import NotARecording
from kedge.report.live.app import LiveApp
from kedge.report.live.board import Board
from kedge.report.live.reading import RunState
from tests.report.live.followed import PATHS

pytestmark = pytest.mark.timing

Drive = Callable[["Screen"], Awaitable[None]]


class Screen:
    """The screen under test."""

    def __init__(self, app: LiveApp, pilot: Pilot) -> None:
        self.app, self.pilot = app, pilot

    @property
    def board(self) -> Board:
        """The table."""
        return self.app.query_one(Board)

    @property
    def shown(self) -> list[str]:
        """The labels in the table, from top to bottom."""
        return [line.label for line in self.board.modules.shown]

    def text(self, name: str) -> str:
        """Return what stands in a part of the screen."""
        return str(self.app.query_one(name).render())

    def drawn(self) -> str:
        """Return what the table draws."""
        return "\n".join(
            self.board.render_line(y).text.rstrip() for y in range(self.board.size.height)
        )

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds."""
        for _ in range(500):
            if holds():
                await self.pilot.pause()
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"in vain: {self.text('#head')}\n{self.drawn()}")

    async def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        await self.pilot.press(*keys)
        await self.pilot.pause()


def drive(path: Path, steps: Drive, size: tuple[int, int] = (120, 40)) -> LiveApp:
    """Open the screen and do something with it."""
    app = LiveApp(path)

    async def opened() -> None:
        async with app.run_test(size=size) as pilot:
            await steps(Screen(app, pilot))

    asyncio.run(opened())
    return app


def test_it_opens_waits_and_follows_to_the_end(run) -> None:
    """Before the run a line says that Kedge waits for it; then modules and figures appear, and finally its end."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: "waiting for the run to begin" in screen.text("#head"))
        run.begin()
        run.go_on()
        await screen.until(lambda: screen.shown == list(PATHS))
        assert screen.app.reader.state is RunState.RUNNING
        assert "step 0, 1 measured" in screen.text("#head")
        assert screen.text("#found") == "no findings so far"
        run.go_on(4)
        await screen.until(lambda: "step 40, 5 measured" in screen.text("#head"))
        assert "blocks.1.attn" in screen.drawn()
        assert "32.0" in screen.drawn()
        run.end()
        await screen.until(lambda: "ended" in screen.text("#head"))
        assert screen.text("#found") == "no findings"

    drive(run.path, steps)


def test_findings_appear_with_their_module_marked(run) -> None:
    """What the rules find stands above the table, and the module's line has the mark of its severity."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: "NAN-BORN" in screen.text("#found"))
        assert "1 error" in screen.text("#found")
        line = next(line for line in screen.drawn().splitlines() if "blocks.0.mlp" in line)
        assert line.startswith("✗")

    run.begin()
    run.go_on(3)
    run.go_on(1, broken="blocks.0.mlp")
    drive(run.path, steps)


@pytest.fixture
def ended(run):
    """A run that has ended."""
    run.begin()
    run.go_on(3)
    run.end()
    return run.path


def test_the_table_is_sorted_by_each_column_and_turned_round(ended: Path) -> None:
    """The key s goes through the columns, r turns the order round, and after the last the data's order is back."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        order = {}
        for _ in range(7):
            await screen.press("s")
            order[screen.board.modules.sorted_by] = screen.shown
        falling = [
            "blocks.1.attn",
            "head",
            "blocks.0.attn",
            "blocks.1.mlp",
            "blocks.0.mlp",
            "embed",
        ]
        assert order["module"] == sorted(PATHS)
        assert order["out"] == order["grad"] == falling
        assert order[None] == list(PATHS)
        await screen.press("s", "s", "s", "r")
        assert (screen.board.modules.sorted_by, screen.shown) == ("out", falling[::-1])
        assert "out▲" in screen.drawn()

    drive(ended, steps)


def test_a_click_on_a_title_sorts_and_a_click_on_a_line_chooses(ended: Path) -> None:
    """The mouse does what the keys do."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        place = screen.drawn().splitlines()[0].index("out")
        await screen.pilot.click(Board, offset=(place, 0))
        assert screen.shown[0] == "blocks.1.attn"
        await screen.pilot.click(Board, offset=(place, 0))
        assert screen.shown[0] == "embed"
        await screen.pilot.click(Board, offset=(4, 3))
        assert screen.board.modules.chosen == screen.shown[2]

    drive(ended, steps)


def test_the_filter_is_in_the_site_language_and_is_taken_back(ended: Path) -> None:
    """It leaves the modules that it selects; one that selects nothing says so and leaves all; Escape brings all back."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        await screen.press("slash", *"attn")
        assert screen.shown == ["blocks.0.attn", "blocks.1.attn"]
        await screen.press("enter", "down")
        assert screen.board.modules.chosen == "blocks.1.attn"
        await screen.press("slash", *["backspace"] * 4, *"*.0.*")
        assert screen.shown == ["blocks.0.attn", "blocks.0.mlp"]
        await screen.press(*".zzz")
        assert screen.shown == list(PATHS)
        assert '"*.0.*.zzz" selects nothing' in screen.text("#problem")
        await screen.press("{")
        assert "cannot read the selector" in screen.text("#problem")
        await screen.press("escape")
        assert not screen.app.query_one("#problem").display
        assert screen.shown == list(PATHS)
        assert screen.board.has_focus

    drive(ended, steps)


def test_a_chosen_module_is_shown_in_detail(ended: Path) -> None:
    """Enter opens the curve and the figures of the chosen module; n and m go through its sites and statistics."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        await screen.press("down", "enter")
        assert "blocks.0.attn" in screen.text("#drawn")
        assert "net.py:7  x = self.blocks.0.attn(x)" in screen.text("#drawn")
        assert "absmax 8.00" in screen.text("#drawn")
        assert "step 0" in screen.text("#drawn")
        await screen.press("n")
        assert "absmax 0.0800" in screen.text("#drawn")
        before = screen.text("#drawn")
        await screen.press("m")
        assert screen.text("#drawn") != before
        await screen.press("down")
        assert "blocks.0.mlp" in screen.text("#drawn")
        await screen.press("escape")
        assert not screen.app.query_one("#detail").has_class("open")

    drive(ended, steps)


def test_the_detail_tells_what_was_found_and_what_to_do(run) -> None:
    """The findings of the chosen module stand below its curve in full, with their remedy."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: "NAN-BORN" in screen.text("#found"))
        await screen.press("enter")
        assert "✗ NAN-BORN" in screen.text("#drawn")
        assert "→" in screen.text("#drawn")
        assert "nan" in screen.text("#drawn")

    run.begin()
    run.go_on(3)
    run.go_on(1, broken="embed")
    drive(run.path, steps)


def test_the_chosen_module_stays_chosen_while_the_run_goes_on(run) -> None:
    """New steps neither move the choice nor the order."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        await screen.press("s", "s", "s", "down", "down")
        chosen, shown = screen.board.modules.chosen, screen.shown
        run.go_on(3)
        await screen.until(lambda: "step 50" in screen.text("#head"))
        assert (screen.board.modules.chosen, screen.shown) == (chosen, shown)

    run.begin()
    run.go_on(3)
    drive(run.path, steps)


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 50)])
def test_every_line_fits_the_terminal(ended: Path, size: tuple[int, int]) -> None:
    """In any terminal the chosen line is in sight, and no line is wider than the screen."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        await screen.press("end", "enter")
        await screen.pilot.pause()
        assert all(len(line) <= size[0] - 1 for line in screen.drawn().splitlines())
        assert screen.drawn().splitlines()[0].endswith("✗")
        assert "head" in screen.drawn()

    drive(ended, steps, size)


def test_it_quits_with_q(ended: Path) -> None:
    """The key q ends it, without an error."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        await screen.press("q")

    assert drive(ended, steps).return_value is None


def test_a_recording_that_is_spoilt_ends_it_with_the_error(run) -> None:
    """What makes it impossible to follow is handed to the command, which says it."""

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.shown)
        with (run.path / "events.jsonl").open("a") as file:
            file.write("{\n")
        await screen.until(lambda: screen.app.return_value is not None)

    run.begin()
    run.go_on()
    ended = drive(run.path, steps).return_value
    assert isinstance(ended, NotARecording)
    assert "line 1 is not JSON" in str(ended)


def command(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``kedge`` in a process of its own, after some code."""
    code = f"import sys\n{before}\nfrom kedge.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )


def test_without_textual_it_says_what_to_install(ended: Path) -> None:
    """Where the extra is not installed the message names it."""
    done = command("live", str(ended), before='sys.modules["textual"] = None')

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "kedge: kedge live needs the package textual, which is not installed: pip install 'kedge[live]'\n"
    )


def test_without_a_terminal_it_points_at_the_report(ended: Path) -> None:
    """Where nothing can be drawn, the other command is named."""
    done = command("live", str(ended))

    assert done.returncode == 2
    assert "its output is not one; kedge report prints a recording as text" in done.stderr


def test_nothing_but_this_command_loads_textual() -> None:
    """The program that is watched, and all other commands, never have textual in their process."""
    code = (
        "import sys, kedge, kedge.cli.main, kedge.cli.run, kedge.report.terminal, kedge.store.follow, kedge.rules.registry\n"
        "kedge.cli.main.build_parser()\nprint(*(name in sys.modules for name in ('textual', 'duckdb', 'pyarrow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False False False\n"
