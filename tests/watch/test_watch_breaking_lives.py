"""Models that come and go, are copied, compiled, hooked by others, or fail: what a long run keeps, counts and claims."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kedge.actions.measure.meter import Meter
from kedge.hooks.placing.concealed import KedgeHook
from kedge.watch.models import models as watched_models
from kedge.watch.models import optimizers
from kedge.watch.models.roots import RootModule
from kedge.watch.steps.budget import Budget, StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, descend, net, watch, watched

Paced = Callable[..., None]
LEVELS = [
    (StepKind.MEASURED,),
    (StepKind.GUARDED,),
    (StepKind.SKIPPED,),
    (StepKind.SKIPPED, StepKind.MEASURED, StepKind.GUARDED),
]
each_level = pytest.mark.parametrize("levels", LEVELS, ids=lambda levels: "-".join(level.name for level in levels))


def batch() -> Tensor:
    """Make an input."""
    return torch.randn(5, 4)


def silent(log: Memory) -> set[str]:
    """List what the ledger says never fired."""
    (ledger,) = [e for e in log.events if e["kind"] == "ledger"]
    return {entry["site"] for entry in ledger["sites"]}


def kept(watch: Watcher) -> tuple[int, ...]:
    """Count what the watch keeps by model, by parameter and by step."""
    session = watch.session
    return (len(watch.models.roots), len(session.taps), len(session.targets), len(session.fired or ()))


# -- coming and going ------------------------------------------------------------------------------


def fold() -> weakref.ref[nn.Module]:
    """Train a new model with a new optimizer for four steps."""
    model = net()
    descend(model, 4)
    return weakref.ref(model)


@pytest.mark.parametrize(("levels", "models"), [(LEVELS[0], 50), (LEVELS[1], 50), (LEVELS[3], 150)])
def test_models_that_come_and_go_leave_nothing_in_memory(
    levels: tuple[StepKind, ...], models: int, paced: Paced
) -> None:
    """Of the steps of many models, each trained for four, nothing is kept but the names of the first few."""
    paced(*levels)
    counts, sizes = [], []

    def program(watch: Watcher) -> None:
        watch.record.writer.log = Discarding()
        for number in range(models):
            gone = fold()
            assert gone() is None
            if number % (models // 5) == models // 5 - 1:
                gc.collect()
                counts.append(kept(watch))
                sizes.append(sum(issubclass(type(o), (KedgeHook, RootModule)) for o in gc.get_objects()))

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 4 * models
    assert not log.watch.failed
    assert all(now[0] == 8 for now in counts)
    assert all(b <= 32 for now in counts for b in now[1:])
    assert max(sizes) - min(sizes) < 100


def test_the_objects_of_a_long_run_do_not_grow(paced: Paced) -> None:
    """After two thousand steps of one model there are as many objects as after a thousand."""
    paced(StepKind.GUARDED, StepKind.SKIPPED, StepKind.MEASURED)
    model, sizes = net(), []

    def program(watch: Watcher) -> None:
        watch.record.writer.log = Discarding()
        descend(model, 2000, between=lambda step: sizes.append(objects()) if step in (1000, 1999) else None)

    watched(program)
    assert sizes[1] - sizes[0] < 100


class Discarding(Memory):
    """A log that keeps nothing."""

    def stats(self, step: int, columns: Any) -> None:
        pass


def objects() -> int:
    """Count all objects, without handles and weak references, which come and go with graphs."""
    gc.collect()
    return sum(type(o).__name__ not in ("RemovableHandle", "ReferenceType") for o in gc.get_objects())


def test_modules_made_anew_in_each_step_are_few_roots() -> None:
    """A program that makes a layer for every step has as many roots as are told apart, and a row in each step."""
    model = net()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(40):
            optimizer.zero_grad()
            nn.Linear(2, 1)(model(batch())).mean().backward()
            optimizer.step()

    log = watch(program, every=1)
    names = [root["name"] for root in log.roots]
    assert names == ["Sequential", *["Linear"] * 8]
    recording = log.recording()
    rows = [recording.rows(f"Linear{number}:out").step.tolist() for number in ("", *(f"_{i}" for i in range(2, 9)))]
    assert sorted(step for steps in rows for step in steps) == list(range(40))
    assert silent(log) == set()


def test_what_fired_for_one_module_is_not_called_silent_for_the_next() -> None:
    """Where modules follow each other under one name, the ledger is about all of them."""
    model = net()

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even, self.never = nn.ReLU(), nn.Tanh(), nn.Sigmoid()

        def forward(self, x: Tensor, step: int) -> Tensor:
            return self.odd(x) if step % 2 else self.even(x)

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            optimizer.zero_grad()
            Branching()(model(batch()), step).mean().backward()
            optimizer.step()

    assert silent(watch(program, every=1)) == {"Branching.never:out"}


def test_evaluating_one_model_after_the_other_goes_on_counting() -> None:
    """Without an optimizer the passes of a model that comes when another is gone are further steps."""

    def program() -> None:
        with torch.no_grad():
            for _ in range(3):
                model = net()
                for _ in range(4):
                    model(batch())
                del model

    log = watch(program, every=1)
    assert log.watch.summary.steps == 12
    recording = log.recording()
    assert recording.rows("0:out").step.tolist() == [0, 1, 2, 3]
    assert recording.rows("Sequential_2.0:out").step.tolist() == [8, 9, 10, 11]


def test_what_makes_a_parameter_is_no_root() -> None:
    """PyTorch calls a parametrization when it is registered; the model comes later, and has the plain names."""

    def program() -> None:
        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 2))
        )
        descend(model, 3)

    log = watch(program, every=1)
    assert [root["name"] for root in log.roots] == ["Sequential"]
    recording = log.recording()
    assert recording.rows("1:out").step.tolist() == [0, 1, 2]
    assert recording.rows("1.parametrizations.weight.0:out").step.tolist() == [0, 1, 2]


# -- new optimizers --------------------------------------------------------------------------------


def test_a_new_optimizer_has_its_next_step_measured_and_no_other() -> None:
    """A step in which a new optimizer steps is counted as the kind it was; the one after it is measured."""
    kinds: list[StepKind] = []

    def program() -> None:
        for _ in range(3):
            descend(net(), 4, between=lambda step: kinds.append(log.watch.budget.kind))

    log = Memory()
    watch(program, every=1000, log=log)
    measured, guarded = StepKind.MEASURED, StepKind.GUARDED
    assert kinds == [measured, measured, guarded, guarded, *[guarded, measured, guarded, guarded] * 2]
    assert log.watch.summary.levels == {"measured": 4, "guarded": 8, "skipped": 0}


def test_new_optimizers_do_not_spend_more_than_there_is() -> None:
    """Of many that step once, some are granted a measured step; the others get it where it can be paid."""
    budget = Budget(10, 0.01)
    budget.begin(0.0)
    now, measured = 0.0, 0
    for step in range(1000):
        budget.wish()
        is_measured = budget.kind is StepKind.MEASURED
        measured += is_measured
        now += 0.03 if is_measured else 0.01
        budget.run_ended(step, now, 0.02 if is_measured else 0.0)
    assert 8 < measured < 100


def test_passes_are_no_steps_where_an_optimizer_is_made_meanwhile() -> None:
    """One that the program makes after watching has begun is waited for, however many passes come before its step."""
    model = net()
    with Watcher(Meter(), Memory(), n=1) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            for _ in range(2):
                model(batch()).mean().backward()
            optimizer.step()
    assert watch.summary.steps == 3


@pytest.mark.parametrize(("batches", "searches"), [(1, 0), (2, 1)])
def test_an_optimizer_that_was_there_before_is_searched_for_only_if_it_does_not_step(
    batches: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search through all objects takes as long as hundreds of small steps; gradients that are added up need one."""
    calls: list[Any] = []
    monkeypatch.setattr(optimizers, "_is_held", lambda model: calls.append(model) or True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Watcher(Meter(), Memory(), n=1) as watch:
        for _ in range(3):
            for _ in range(batches):
                model(batch()).mean().backward()
            optimizer.step()
    assert len(calls) == searches
    assert watch.summary.steps == 3


def test_passes_are_steps_where_an_optimizer_is_another_models() -> None:
    """A model that is first called with gradients and then without has none to wait for."""
    model, other = net(), net()
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    with Watcher(Meter(), Memory(), n=1) as watch:
        model(batch()).mean().backward()
        with torch.no_grad():
            for _ in range(4):
                model(batch())
    assert optimizer.param_groups
    assert watch.summary.steps == 5


# -- copies ----------------------------------------------------------------------------------------

LOADING = """
import io, sys, pickle, torch
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "kedge", name
sys.meta_path.insert(0, Forbidden())
saved, pickled = pickle.load(sys.stdin.buffer)
for model in (torch.load(io.BytesIO(saved), weights_only=False), pickle.loads(pickled)):
    model(torch.ones(2, 4)).sum().backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
print("loaded")
"""


def test_what_is_saved_loads_where_there_is_no_kedge(paced: Paced) -> None:
    """A model that is saved or pickled in any step has nothing of Kedge in it, and a copy is not hooked."""
    paced(StepKind.GUARDED, StepKind.MEASURED, StepKind.SKIPPED)
    files: list[tuple[bytes, bytes]] = []
    model = net()

    def between(step: int) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        files.append((file.getvalue(), pickle.dumps(model)))
        twin = copy.deepcopy(model)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
        assert not any(p._backward_hooks for p in twin.parameters())

    watched(lambda watch: descend(model, 6, between=between))
    assert not any(b"kedge" in content for file in files for content in file)
    run = subprocess.run(
        [sys.executable, "-c", LOADING], input=pickle.dumps(files[1]), capture_output=True, check=False
    )
    assert run.stdout.decode().strip() == "loaded", run.stderr.decode()


# -- compiled code ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@each_level
def test_a_model_compiled_after_some_steps_is_not_compiled_again_and_again(
    levels: tuple[StepKind, ...], paced: Paced, compiled: Any
) -> None:
    """Hooks that come and go with the steps are not in the way of code that was compiled; the values stay right."""
    from torch._dynamo.utils import counters

    def run(watch: Watcher | None = None) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(2)
        torch.compiler.reset()
        model, frames = net(), []
        descend(model, 3)
        fast = compiled(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            optimizer.step()
            frames.append(counters["stats"]["unique_graphs"])
        return [p.detach().clone() for p in model.parameters()], frames

    plain, _ = run()
    paced(*levels)
    found: list[Any] = []
    log = watched(lambda watch: found.append(run(watch)))
    ((params, frames),) = found
    assert log.watch is not None
    assert not log.watch.failed
    assert frames[-1] == frames[3], "compiled again in later steps"
    assert all(torch.equal(a, b) for a, b in zip(plain, params, strict=True))
    assert log.watch.summary.steps == 15


# -- others' hooks ---------------------------------------------------------------------------------


@each_level
def test_hooks_of_the_program_stay_in_order(levels: tuple[StepKind, ...], paced: Paced) -> None:
    """What it installs and removes between steps fires as it would unwatched: in the order of installation, once a call."""

    def run(watch: Watcher | None = None) -> list[Any]:
        torch.manual_seed(0)
        model, fired, handles = net(), [], []

        def between(step: int) -> None:
            inner, weight = model[0], model[0].weight
            handles.append(inner.register_forward_hook(lambda *_: fired.append((step, "out"))))
            handles.append(inner.register_forward_pre_hook(lambda *_: fired.append((step, "in"))))
            handles.append(weight.register_hook(lambda _: fired.append((step, "grad"))))
            handles.append(inner.register_forward_hook(lambda *_: fired.append((step, "first")), prepend=True))
            if step % 3 == 2:
                for handle in handles[1::2]:
                    handle.remove()
                handles.clear()

        descend(model, 9, between=between)
        return fired

    plain = run()
    paced(*levels)
    seen: list[Any] = []
    watched(lambda watch: seen.extend(run(watch)))
    assert seen == plain


# -- many modules ----------------------------------------------------------------------------------


def test_attaching_takes_a_time_that_grows_with_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of ten times as many layers takes ten times as many attachments, looks and hooks, not more."""

    def counted(layers: int) -> int:
        calls = 0
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        log = Memory()
        log.watch = Watcher(Meter(), log, n=10, budget=0.5)
        with log.watch:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            sys.setprofile(profile)
            try:
                model(torch.randn(3, 2)).mean().backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
        return calls

    counted(10)  # what is done once
    few, many = counted(100), counted(1000)
    assert many < 13 * few


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@each_level
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


class Unreadable(dict[str, Tensor]):
    """Can be read by its maker, and by nobody else."""

    def items(self) -> Any:
        raise OSError("not now")


class Secretive(nn.Module):
    """Takes and returns what cannot be looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return Unreadable(y=self.inner(x["x"]))


@each_level
def test_a_value_that_cannot_be_looked_through_ends_no_program(
    levels: tuple[StepKind, ...], paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told once for each place, and all else is seen."""
    paced(*levels)
    model = Secretive()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            model(Unreadable(x=batch()))["y"].mean().backward()
            optimizer.step()

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 6
    assert not log.watch.failed
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[kedge] :in is not seen: it cannot be looked through: OSError: not now"
    assert len(lines) == len(set(lines)) <= 4
    assert log.recording().rows("inner:out").step.tolist()[0] == 0


def test_what_kedge_failed_with_is_there_to_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is kept with where it came from, and without what went through there."""
    monkeypatch.setattr(watched_models, "module_tree", lambda *_: 1 / 0)
    model = net()
    log = watched(lambda watch: descend(model, 4))
    assert log.watch is not None
    assert isinstance(log.watch.shield.failure, ZeroDivisionError)
    assert log.watch.shield.failure.__traceback__ is None
    assert "in watch" in log.watch.shield.failure.__notes__[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[kedge] watching failed: ZeroDivisionError: division by zero (watch/models/models.py:")
    assert line.endswith("); it stops here, and the program goes on")
