"""How programs end: by themselves, by an error, by an interrupt or by a fork of theirs; nothing of Kedge's is left."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest

from kedge.store.recording import Recording
from kedge.testing import assert_hooks_restored
from kedge.watch.step import StepKind
from tests.watch.watched import Conv, Paced, at_levels, batch, descend, net, train, watch, watched


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@at_levels()
def test_a_program_that_is_interrupted_in_a_forward_leaves_no_hook(
    levels: tuple[StepKind, ...], error: type[BaseException], paced: Paced, tables: Any
) -> None:
    """What ends the program gets through, and all hooks come down."""
    paced(*levels)
    model = net()
    model[1].register_forward_hook(lambda *_: stop())
    left = [5]

    def stop() -> None:
        left[0] -= 1
        if not left[0]:
            raise error

    before = tables(model)
    with pytest.raises(error):
        watched(lambda watch: descend(model, 9))
    assert tables(model) == before
    model(batch())


def test_nothing_stays_on_a_model_or_in_pytorch() -> None:
    """At the end the hook tables are what they were, also when the program ended with an exception."""

    def fails() -> None:
        train(model, 2)
        raise KeyError("the program's own")

    model = Conv()
    with assert_hooks_restored(model):
        watch(lambda: train(model, 2))
        with pytest.raises(KeyError, match="the program's own"):
            watch(fails)


def ended(tmp_path, source):
    """Run a program in a process of its own, whose end is what is tested; returns it, and what its recording says of its end."""
    head = "import os, torch, kedge\nfrom torch import nn\nmodel = nn.Linear(2, 2)\n"
    (tmp_path / "train.py").write_text(head + dedent(source))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    return done, Recording.open(tmp_path / "run.kedge").end


UNENDED = 'kedge.watch("run.kedge").begin()\nmodel(torch.ones(2))\n'


@pytest.mark.parametrize(
    ("rest", "code", "error"),
    [("", 0, None), ('raise SystemError("bad")\n', 1, "SystemError: bad")],
    ids=["by-itself", "by-an-error"],
)
def test_a_watch_that_is_not_ended_ends_with_the_program(rest, code, error, tmp_path):
    """As if there had been a block: its recording has an end and an error, and its user the last words."""
    done, end = ended(tmp_path, UNENDED + rest)

    assert done.returncode == code
    assert (end.exit, end.error) == (code, error)
    assert done.stderr.endswith("see more with: kedge report run.kedge\n")


def test_a_forked_child_leaves_the_recording_to_its_parent(tmp_path):
    """What the child calls is not recorded, and its end is not the run's."""
    done, end = ended(
        tmp_path,
        """
        with kedge.watch("run.kedge") as run:
            model(torch.ones(2))
            child = os.fork()
            if child == 0:
                model(torch.ones(2))
                run.end()
                os._exit(0)
            os.waitpid(child, 0)
            model(torch.ones(2))
            model(torch.ones(2))
        """,
    )

    assert (done.returncode, end.steps) == (0, 3), done.stderr
    assert done.stderr.count("see more with") == 1
