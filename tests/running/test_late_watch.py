"""A watch that begins at any moment of a training, and ends at any."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time

import pytest
import torch
from torch import nn

from kedge.rules.judgement import judge
from kedge.rules.registry import ALL, check
from kedge.running import late_watch
from kedge.running.entry import CannotEnter, LentModules
from kedge.running.late_watch import LateWatch
from kedge.store.recording import Recording
from tests.running.training import Training, digest_of


class Command:
    """The command's end of a late watch in this process."""

    def __init__(self, place):
        self.end, inside = socket.socketpair()
        order = {"recording": str(place), "force": False, "sites": "**", "every": 1, "budget": None}
        self.watch = LateWatch(inside, order, LentModules([], []))
        self.place = place

    def begin(self):
        """Begin, as in the main thread between two instructions."""
        self.watch.begin()

    def events(self):
        """Return the names of all events until the watch has closed the connection, without the first."""
        self.end.settimeout(30)
        text = b"".join(iter(lambda: self.end.recv(1 << 16), b""))
        self.end.close()
        return [json.loads(line)["event"] for line in text.splitlines()][1:]

    def leave(self, meanwhile=lambda: None):
        """End the watch as the command does, while the program goes on; returns the events."""
        self.end.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 30
        while late_watch._active and time.monotonic() < until:
            meanwhile()
        return self.events()


@pytest.fixture
def command(tmp_path):
    """A command that records."""
    made = Command(tmp_path / "a.kedge")
    yield made
    if late_watch._active:
        made.leave()
    for thread in threading.enumerate():
        if thread.name == "kedge attach":  # it has closed the connection, and is about to end
            thread.join(30)


def test_a_watch_in_the_midst_of_a_training_changes_no_bit(command, tables):
    """Begun and ended between other steps, it records and leaves nothing."""
    training = Training()
    before = tables(training.model)
    for _ in range(5):
        training.step()
    command.begin()
    for _ in range(20):
        training.step()
    events = command.leave(training.step)

    assert events == ["began", "summary", "over"]
    assert tables(training.model) == before
    assert training.digest.hexdigest() == digest_of(training.steps)
    assert len(Recording.open(command.place).steps) >= 19


def test_a_program_with_more_than_a_thousand_open_files_is_watched(tmp_path):
    """The number of the connection is larger than `select` can wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"a process may have {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        command = Command(tmp_path / "a.kedge")
        training = Training()
        command.begin()
        time.sleep(0.5)
        for _ in range(3):
            training.step()
        assert command.leave(training.step) == ["began", "summary", "over"]
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_watch_that_comes_inside_a_forward_begins_with_the_next_one(command):
    """A model that is half way through would be seen as several small ones."""
    training = Training()
    hook = training.model[1].register_forward_hook(
        lambda *_: None if late_watch._active else command.begin()
    )
    for _ in range(4):
        training.step()
    hook.remove()
    command.leave(training.step)

    recording = Recording.open(command.place)
    assert [root.name for root in recording.roots] == ["Sequential"]
    assert training.digest.hexdigest() == digest_of(training.steps)


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_watch_may_come_and_go_inside_a_backward_pass_or_an_optimizers_step(command, where):
    """It waits for the next forward, and meanwhile no table of hooks that PyTorch goes through is changed."""
    training, calls = Training(), []

    def meanwhile(*_):
        calls.append(None)
        if len(calls) == 3:
            command.begin()
        if len(calls) == 9:
            command.end.shutdown(socket.SHUT_WR)
            time.sleep(0.5)

    weight = training.model[0].weight
    hook = (
        weight.register_post_accumulate_grad_hook(meanwhile)
        if where == "backward"
        else training.optimizer.register_step_post_hook(meanwhile)
    )
    while len(calls) < 10 or late_watch._active:
        training.step()
    hook.remove()

    assert command.events() == ["began", "summary", "over"]
    assert training.digest.hexdigest() == digest_of(training.steps)


def test_a_command_that_leaves_before_a_forward_leaves_no_hook(command):
    """The watch ends without a recording, though the program calls no module any more."""
    command.begin()

    assert command.leave(lambda: time.sleep(0.01)) == ["over"]
    assert not command.place.exists()


def test_a_watch_that_begins_between_micro_batches_finds_nothing_wrong(command):
    """Gradients that were there before are the program's way of adding them up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def micro_batch(number):
        inputs = torch.randn(64, 6)
        nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(2):
        micro_batch(number)
    command.begin()
    for number in range(2, 200):
        micro_batch(number)
    command.leave()

    assert check(Recording.open(command.place)) == ()


def test_rules_about_the_beginning_do_not_judge_a_late_recording(command):
    """A loss that is flat may have fallen before; the judgement says which rules that concerns."""
    training = Training()
    command.begin()
    for _ in range(120):
        training.step()
    command.leave(training.step)

    judgement = judge(Recording.open(command.place))
    early = {rule.code for rule in ALL if rule.of_the_beginning}
    assert {lack.code for lack in judgement.unjudged} >= early
    assert {finding.code for finding in judgement.findings} & early == set()


def test_a_second_watch_of_the_process_is_refused(command, tmp_path):
    """The one that is there stays as it is."""
    command.begin()
    second = Command(tmp_path / "b.kedge")

    with pytest.raises(CannotEnter, match="end that one first"):
        second.begin()
    second.watch._control.close()
    second.end.close()


def test_a_forked_child_is_not_watched(command):
    """The hook that waits for a call is the parent's, and so is the connection."""
    training = Training()
    command.begin()
    child = os.fork()
    if child == 0:
        try:
            training.step()
        finally:
            os._exit(
                int(
                    late_watch._active[0]._watch is not None
                    or command.watch._control.fileno() != -1
                )
            )

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.step()
    assert command.leave(training.step) == ["began", "summary", "over"]


def test_what_kedge_says_goes_to_the_command_alone(command, capfd):
    """Nothing is printed by the training."""
    training = Training()
    command.begin()
    training.step()
    command.watch._watch.shield.lose("a step", ValueError("made up"))
    events = command.leave(training.step)

    assert "says" in events
    assert capfd.readouterr() == ("", "")
    assert sys.meta_path[-1] is not command.watch._lent
