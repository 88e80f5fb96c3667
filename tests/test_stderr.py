"""What fails in Kedge is reported once, in one wording, and does not end the program."""

from __future__ import annotations

import enum
import functools
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge.errors import RecordingError
from kedge.short_text import counted
from kedge.stderr import STATUS, Shield


@pytest.fixture
def told() -> list[str]:
    """Collect what the user is told."""
    return []


def fail(error: Exception) -> None:
    """Fail outside of Kedge."""
    raise error


def test_the_work_gets_its_arguments_and_its_result_comes_back(told: list[str]) -> None:
    """As long as nothing fails there is nothing between them."""
    shield = Shield("adding", "nothing is added", tell=told.append)

    assert shield(max, 2, 3, key=lambda number: -number) == 2
    assert (shield.failure, shield.off, told) == (None, False, [])


def test_the_first_failure_is_reported_and_nothing_more_is_run(told: list[str]) -> None:
    """The report says what has failed, with what, and what happens now; it comes once."""
    shield, calls = Shield("adding", "the program goes on without sums", tell=told.append), []

    assert shield(fail, ValueError("no numbers")) is None
    assert shield(calls.append, 1) is None

    assert told == ["adding failed: ValueError: no numbers; the program goes on without sums"]
    assert (calls, shield.off) == ([], True)
    assert isinstance(shield.failure, ValueError)


def test_it_says_where_in_kedge(told: list[str]) -> None:
    """The line is the innermost one of Kedge, not the shield's own, and not what Kedge called."""
    number: int = None  # type: ignore[assignment]

    Shield("counting", "nothing is counted", tell=told.append)(counted, number, "step")

    (message,) = told
    assert message.startswith("counting failed: TypeError: ")
    assert " (numbers.py:" in message


def test_an_error_without_a_text_is_named(told: list[str]) -> None:
    """Its type is all that there is to say."""
    Shield("adding", "it ends", tell=told.append)(fail, KeyboardError())

    assert told == ["adding failed: KeyboardError; it ends"]


class KeyboardError(Exception):
    """Has no text."""


def test_an_error_for_the_user_speaks_for_itself(told: list[str]) -> None:
    """Its text is reported alone; that of others says where to look."""
    shield = Shield("writing", "nothing is written", tell=told.append, plain=RecordingError)

    shield(fail, RecordingError("the disk is full"))

    assert told == ["writing failed: the disk is full; nothing is written"]


def test_what_fails_is_cleaned_up_before_it_is_reported(told: list[str]) -> None:
    """What a report leads to finds everything off."""
    shield = Shield(
        "adding", "it ends", tell=told.append, on_failure=lambda: told.append("cleaned up")
    )

    shield(fail, ValueError("no"))

    assert told == ["cleaned up", "adding failed: ValueError: no; it ends"]


def test_strictly_a_failure_ends_the_program(told: list[str]) -> None:
    """With the status of a program that could not be watched; it is reported all the same."""
    shield = Shield("writing", "the program goes on", tell=told.append, strict=True)

    with pytest.raises(SystemExit) as left:
        shield(fail, ValueError("no"))

    assert left.value.code == STATUS
    assert told == ["writing failed: ValueError: no; the program ends here, because of --strict"]


def test_what_ends_the_program_is_let_through(told: list[str]) -> None:
    """An interrupt is no failure of Kedge's."""
    shield = Shield("adding", "it ends", tell=told.append)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shield(interrupt)

    assert (told, shield.off) == ([], False)


def test_the_failure_is_kept_without_what_it_went_through() -> None:
    """Its traceback is there to read, and holds nothing of the program."""

    class Held: ...

    def work(held: Held) -> None:
        del held
        inner = Held()
        refs.append(weakref.ref(inner))
        raise ValueError("no")

    refs: list[weakref.ref[Held]] = []
    shield = Shield("adding", "it ends", tell=lambda text: None)
    shield(work, Held())
    gc.collect()

    assert refs[0]() is None
    assert shield.failure is not None
    assert shield.failure.__traceback__ is None
    assert "in work" in shield.failure.__notes__[0]


def test_a_process_that_was_forked_off_runs_nothing(tmp_path: Path) -> None:
    """What is written belongs to the parent."""
    shield, place = Shield("writing", "nothing is written"), tmp_path / "written"
    child = os.fork()
    if not child:
        shield(place.touch)
        os._exit(0)
    os.waitpid(child, 0)

    assert not place.exists()
    shield(place.touch)
    assert place.exists()


def test_it_reports_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """As Kedge does everywhere; a stream that is closed does not matter."""
    Shield("adding", "it ends")(fail, ValueError("no"))
    assert capsys.readouterr().err == "[kedge] adding failed: ValueError: no; it ends\n"

    with suppress(ValueError), open(os.devnull) as closed:  # noqa: PTH123
        closed.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", closed)
            Shield("adding", "it ends")(fail, ValueError("no"))


def test_what_an_error_was_raised_from_is_not_kept() -> None:
    """The frames of an error behind the error hold tensors of the program as well."""

    class Batch:
        def read(self) -> None:
            try:
                {}["missing"]
            except KeyError as error:
                raise RuntimeError("no such batch") from error

    batch = Batch()
    alive = weakref.ref(batch)
    shield = Shield("reading", "nothing is read", tell=lambda _text: None)
    shield(batch.read)
    del batch
    gc.collect()

    assert alive() is None
    assert "KeyError" in shield.failure.__notes__[0]


class TimeOut(Exception):
    """Raised by a signal handler of the program."""


class Handler:
    """A handler that is an object."""

    def __call__(self, *_: object) -> None:
        raise TimeOut

    def method(self, *_: object) -> None:
        raise TimeOut


def handler(*_: object) -> None:
    """A handler that is a function."""
    raise TimeOut


@pytest.fixture(
    params=[handler, Handler(), Handler().method, functools.partial(handler)],
    ids=["function", "object", "method", "partial"],
)
def interrupts(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Return a function during which the program's signal arrives."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield lambda *_: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_an_error_of_a_signal_handler_is_the_programs_own(
    told: list[str], interrupts: Callable[..., None]
) -> None:
    """A time-out that arrives while Kedge's code runs goes on to the program, and the work is not off."""
    shield = Shield("adding", "nothing is added", tell=told.append)

    with pytest.raises(TimeOut):
        shield(interrupts)
    assert (shield.failure, shield.off, told) == (None, False, [])


class Color(enum.Enum):
    """Looked up by a name that it does not have."""

    RED = "red"


def test_other_errors_of_the_program_are_not_taken_for_a_signal_handlers(told: list[str]) -> None:
    """Python's default handlers are members of an enum, whose lookup raises like any other."""
    shield = Shield("adding", "nothing is added", tell=told.append)

    assert shield(Color, "blue") is None
    assert isinstance(shield.failure, ValueError)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_error_of_a_signal_handler_in_an_action_keeps_its_type(
    on_error: Any, interrupts: Callable[..., None]
) -> None:
    """The program's own `except` clause expects it, and the action has not failed."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    calls = iter([interrupts, lambda value: None])
    with kedge.session(on_error=on_error) as s:
        hooked = s.hook(model, ":out", lambda value: next(calls)(value))
        with pytest.raises(TimeOut):
            model(x)
        model(x)
        assert [entry.fired for entry in hooked.ledger()] == [1]
