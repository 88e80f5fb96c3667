"""Tests with the fixture `sim` run each in a process of its own, in which the simulated device is the accelerator.

To load the device changes a process for good, and other tests run in the same one. So the tests'
process is forked as soon as it has collected, before any test has run in it; the fork loads the
device, without using it, and waits. For each such test it forks once more: there the test runs, and
what pytest would say of it is sent back. A test that crashes has failed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from typing import Any, BinaryIO

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

from tests.accelerator import build

FIXTURE = "sim"
TIMEOUT = 300


class Server:
    """The fork that has loaded the device, and has each test run in a fork of itself."""

    def __init__(self, session: pytest.Session) -> None:
        asked, asking = os.pipe()
        answered, answering = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks in a process with threads: xdist's, which do no harm
            self.process = os.fork()
        if self.process == 0:
            os.close(asking)
            os.close(answered)
            try:
                serve(session, os.fdopen(asked, "rb"), os.fdopen(answering, "wb"))
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answering)
        self.asking, self.answered = os.fdopen(asking, "wb"), os.fdopen(answered, "rb")

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Run a test, and return what is to be said of its parts."""
        self.asking.write(item.nodeid.encode() + b"\n")
        self.asking.flush()
        answer = json.loads(self.answered.readline())
        return [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            for data in answer
        ]

    def end(self) -> None:
        """End the fork."""
        self.asking.close()
        self.answered.close()
        os.waitpid(self.process, 0)


def serve(session: pytest.Session, asked: BinaryIO, answering: BinaryIO) -> None:
    """Run each test that is asked for in a fork, and answer with its reports."""
    import torch
    import torch._dynamo

    from tests.accelerator import sim

    items = {item.nodeid: item for item in session.items}
    sim.load()
    gc.collect()
    gc.freeze()  # or each test would look through what was loaded, and copy the memory in which it is
    for line in asked:
        item = items[line.decode().rstrip("\n")]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            signal.alarm(TIMEOUT)
            torch.set_num_threads(
                torch.get_num_threads()
            )  # mends PyTorch's pool: autograd's threads, two at once, would race
            with catch_warnings_for_item(
                config=item.config, ihook=item.ihook, when="runtest", item=item
            ):
                reports = runtestprotocol(item, log=False)
            data = [
                item.config.hook.pytest_report_to_serializable(config=item.config, report=r)
                for r in reports
            ]
            with os.fdopen(write, "w") as pipe:
                json.dump(data, pipe)
            sim._C.shut_down()
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        answering.write(
            (text or json.dumps([crash(item, os.waitstatus_to_exitcode(status))])).encode() + b"\n"
        )
        answering.flush()


def crash(item: pytest.Item, status: int) -> dict[str, Any]:
    """Describe the end of a test that has not told its own."""
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    text = f"the test's process ended by {how}" + (
        " (the host has read memory of the device?)" * (status == -signal.SIGSEGV)
    )
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
    return item.config.hook.pytest_report_to_serializable(config=item.config, report=report)


class Plugin:
    """The hooks, and the fixture."""

    server: Server | None = None

    @pytest.fixture
    def sim(self) -> Any:
        """Return the module of the simulated device, which is the accelerator of this test's process."""
        from tests.accelerator import sim

        return sim

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Fork before the first test runs: a process in which autograd has run threads cannot be forked to any use."""
        needed = any(FIXTURE in getattr(item, "fixturenames", ()) for item in session.items)
        if needed and not session.config.option.collectonly and build.compiler():
            self.server = Server(session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test with the fixture in a fork, and leave what the test before it shared with it, but not with the next one."""
        if FIXTURE not in getattr(item, "fixturenames", ()):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self.server is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler, or no headers of Python"))
            runtestprotocol(item, nextitem=nextitem)
        else:
            for report in self.server.reports(item):
                item.ihook.pytest_runtest_logreport(report=report)
            item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        """End the fork."""
        if self.server is not None:
            self.server.end()
            self.server = None
