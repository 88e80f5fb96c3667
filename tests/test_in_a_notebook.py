"""In IPython and notebooks: an error of Kedge shows the user's own lines, and results show what `print` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge import recipes
from kedge.errors import _own_lines
from kedge.notebook import LINES

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")

COLOURS = re.compile(r"\x1b\[[\d;]*m")
BEFORE = """
import torch, kedge
from torch import nn
from kedge import recipes
model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
def broken(value):
    return value.no_such_method()
def study():
    with kedge.hook(model, "1", broken):
        return model(x)
"""


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    """IPython, without a history on the disk."""
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    running = interactiveshell.InteractiveShell.instance(config=config)
    running.run_cell(BEFORE)
    yield running
    interactiveshell.InteractiveShell.clear_instance()


def _shown(shell: Any, cell: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert not shell.run_cell(cell).success
    told = capsys.readouterr()
    return COLOURS.sub("", told.out + told.err)


@pytest.mark.parametrize(
    ("cell", "lines", "last"),
    [
        (
            "kedge.hook(model, 'nope', kedge.record())",
            ["kedge.hook(model, 'nope', kedge.record())"],
            "NoSiteMatched: ",
        ),
        (
            "kedge.saved(model, x)",
            ["kedge.saved(model, x)"],
            "WrongCall: saved(the module Sequential, a Tensor)",
        ),
        (
            "recipes.saliency(model, 9)(x)",
            ["recipes.saliency(model, 9)(x)"],
            "AttributionError: target 9",
        ),
        (
            "study()",
            ["return value.no_such_method()", "study()", "return model(x)"],
            "ActionError: broken at 1:out",
        ),
    ],
    ids=["selector", "call", "recipe", "action"],
)
def test_an_error_shows_the_users_own_lines(
    cell: str, lines: list[str], last: str, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of Kedge's or PyTorch's, which the message makes superfluous; also of the error that was the cause."""
    text = _shown(shell, cell, capsys)

    assert re.findall(r"^-+> +\d+ +(.*)$", text, re.MULTILINE) == lines
    assert text.splitlines()[-1].startswith(last)
    assert "site-packages" not in text
    assert "src/kedge" not in text


def test_a_verbose_traceback_is_whole(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``%xmode Verbose`` shows every line, for a report of a fault in Kedge; the error itself keeps its traceback."""
    shell.run_line_magic("xmode", "Verbose")
    try:
        text = _shown(shell, "kedge.hook(model, 'nope', kedge.record())", capsys)
    finally:
        shell.run_line_magic("xmode", "Context")
    assert "attach.py" in text

    error, depth = shell.run_cell("study()").error_in_exec, 0
    frames = error.__traceback__
    while frames is not None:
        depth, frames = depth + 1, frames.tb_next
    assert depth > 6
    assert error.__cause__.__traceback__.tb_frame.f_globals["__name__"].startswith("kedge.")


def test_a_traceback_without_own_lines_is_whole() -> None:
    """An error that came from Kedge alone, as on a thread, is not shown without any line."""
    try:
        kedge.select("")
    except kedge.errors.SelectorError as error:
        inside = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert _own_lines(inside) is inside
    assert _own_lines(None) is None


def test_results_are_shown_as_they_print(shell: Any) -> None:
    """Where a value is displayed without `print`, in IPython and in Python; a long one has its first lines."""
    names = shell.user_ns
    model, x = names["model"], names["x"]
    with kedge.session() as s:
        s.hook(model, "1", kedge.measure())
        model(x)
    with kedge.offload(model) as account:
        model(x).sum().backward()
    results = [
        kedge.sites(model),
        kedge.select("1").on(model),
        kedge.audit(model),
        kedge.audit(x),
        kedge.operations(model, x),
        kedge.operations(lambda: x + 1),
        kedge.saved(model)(x),
        s.ledger(),
        s.timeline(),
        account,
        recipes.patch(model, x, x + 1, "1", torch.sum),
        kedge.watch().findings(),
    ]
    plain = shell.display_formatter.formatters["text/plain"]
    for result in results:
        assert plain(result) == repr(result) == str(result)

    deep = kedge.sites(nn.Sequential(*(nn.Linear(n + 1, n + 2) for n in range(40))))
    lines = repr(deep).splitlines()
    assert lines[:LINES] == str(deep).splitlines()[:LINES]
    assert lines[LINES:] == [
        f"... and {len(str(deep).splitlines()) - LINES} more lines; print() shows all"
    ]


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda model: kedge.session(), "<kedge.session: 0 actions at 0 sites>"),
        (lambda model: kedge.watch("run.kedge"), "<kedge.watch into run.kedge: not begun>"),
        (lambda model: kedge.at(0, 10), "at(0, 10)"),
        (
            lambda model: recipes.saliency(model, target=3),
            "<attribution of Sequential, target=3, with respect to ':in': call it like the model>",
        ),
        (
            lambda model: recipes.smoothgrad(recipes.saliency(model), samples=5),
            "<smoothgrad of 5 samples, attribution of Sequential, target=None, with respect to ':in': call it like the model>",
        ),
    ],
    ids=["session", "watch", "at", "attribution", "smoothgrad"],
)
def test_what_is_no_table_says_what_it_is(made: Any, shown: str, shell: Any) -> None:
    """In one line, with what to do next."""
    assert repr(made(shell.user_ns["model"])) == shown


@pytest.mark.parametrize("name", ["sites", "offload", "watch"])
def test_a_function_that_is_a_package_has_the_functions_help(name: str, shell: Any) -> None:
    """``kedge.watch?`` shows its arguments and text, and it is displayed as a function."""
    found = getattr(kedge, name)
    __import__(f"kedge.{name}")
    package = getattr(kedge, name)
    info = shell.object_inspect(f"kedge.{name}")

    assert info["docstring"] == inspect.getdoc(package)
    assert "Args:" in package.__doc__
    assert "*args" not in info["definition"]
    assert repr(package).startswith(f"<kedge.{name}: a function and a package, ")
    assert found is package or callable(found)
