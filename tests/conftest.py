"""What holds in every test: nothing is downloaded, one thread computes, and nothing of ours stays behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # its pool of workers would outlive the test
os.environ.setdefault(
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0"
)  # to precompile them takes as long as all that the tests compile with them

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch as dispatch

from kedge.torch_internals import dynamo
from tests.accelerator import plugin as accelerator
from tests.hook_tables import hook_tables

torch.set_num_threads(1)

if find_spec("hypothesis") is not None:  # the tests of private corners do without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "busy machine", suppress_health_check=[HealthCheck.too_slow], deadline=None
    )
    settings.load_profile("busy machine")

TABLES = {
    name: table
    for owner in (modules, optimizers)
    for name, table in vars(owner).items()
    if name.startswith("_global_") and isinstance(table, dict)
}

TRIED_AGAIN: set[str] = set()
TQDM = "tqdm_monitor"  # one thread that tqdm starts when it is first used, and keeps


FEW_FILES = 50


def open_files() -> int:
    """Return how many files are open in this process, where the system tells."""
    place = Path("/proc/self/fd")
    if not place.is_dir():
        return 0
    return len(list(place.iterdir()))


def installed() -> dict[str, Any]:
    """Return what is installed in PyTorch for all models alike."""
    found: dict[str, Any] = {name: list(table.values()) for name, table in TABLES.items() if table}
    found |= {
        "torch function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": len(dispatch._get_current_dispatch_mode_stack()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "gradients are on": torch.is_grad_enabled(),
    }
    return found


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Begin with the same seed; fail if a global hook, a mode, a saved-tensor hook or a thread stays behind."""
    if dynamo.has_compiled():  # by a test before this one, whichever that was
        torch.compiler.reset()
    torch.manual_seed(0)
    before, threads, depth = installed(), {*threading.enumerate()}, sys.getrecursionlimit()
    files = open_files()
    yield
    assert open_files() < files + FEW_FILES, (
        "with a thousand open files, `select` fails in later tests"
    )
    sys.setrecursionlimit(depth)  # which Inductor raises

    assert installed() == before
    ours = (
        t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)
    )  # autograd's has run a hook
    left = [t for t in ours if t not in threads and t.name != TQDM]
    for thread in left:
        thread.join(5)  # rich tells its own to end, and does not wait for it
    assert [thread for thread in left if thread.is_alive()] == []


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_searched() -> Iterator[None]:
    """Freeze what the tests of a file have imported and left: Kedge's searches of all objects would go through it in each later test."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def tables() -> Callable[..., dict[str, Any]]:
    """The function that lists what is hooked on models and tensors."""
    return hook_tables


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """`torch.compile`, with nothing compiled before the test or after it."""
    torch.compiler.reset()
    yield torch.compile
    torch.compiler.reset()


def pytest_configure(config: pytest.Config) -> None:
    """Use the fixture `sim` in every test."""
    config.pluginmanager.register(accelerator.Plugin(), "simulated accelerator")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that wait for processes and threads: begun last, they would leave cores without work."""
    waiting = {item.path for item in items if item.get_closest_marker("timing")}
    items.sort(key=lambda item: item.path not in waiting)


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run no step again in a copy of the process, as on a device: what the rows and the graph show is all."""
    # By name it is not found before the package is imported: until then `kedge.watch` is the function.
    from kedge.watch.records import steps_again

    monkeypatch.setattr(steps_again, "can_run_again", lambda *_: False)


def pytest_collection_finish() -> None:
    """Freeze what was imported: otherwise each garbage collection takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreeze at the end of the process: extension modules then name what is not freed."""
    gc.unfreeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count in a worker of xdist what is left out, which it does not tell by itself."""
    told = getattr(items[0].config, "workeroutput", None) if items else None
    if told is not None:
        told["deselected"] = told.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Try a test once more whose process has ended, such as one that hung (``faulthandler_timeout``); the closing line counts it."""
    if crashitem not in TRIED_AGAIN:
        TRIED_AGAIN.add(crashitem)
        report.outcome = "rerun"  # type: ignore[assignment]  # as xdist's documentation has it
        sched.mark_test_pending(crashitem)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Report in the closing line how many tests were left out; every worker of xdist leaves out the same ones."""
    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    reporter.stats["deselected"] = [SimpleNamespace()] * getattr(node, "workeroutput", {}).get(
        "deselected", 0
    )
