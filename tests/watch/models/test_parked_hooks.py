"""What programs do to hooks and to copies of a model while the hooks of measured steps are taken out and put back."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Paced, at_levels, descend, net, watch, watched


def trained(model: nn.Module, meanwhile: Callable[[int], None], steps: int = 20) -> Any:
    """Train for some steps, of which one in four is measured, with something done before each; returns the log."""

    def program() -> None:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if not nn.parameter.is_lazy(p)], 0.01
        )
        for step in range(steps):
            meanwhile(step)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return watch(program, every=4)


def layers() -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("at", [1, 5, 8])
def test_hooks_that_the_program_clears_come_back_with_the_next_measured_step(at: int) -> None:
    """Whether they were up or out when it did."""
    model = layers()

    def clear(step: int) -> None:
        for module in model.modules() if step == at else ():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()

    log = trained(model, clear)
    missing = {4 * -(-at // 4)} if at % 4 == 0 else set()
    assert set(log.recording().rows("0:out").step.tolist()) >= set(range(0, 20, 4)) - missing
    assert not any(
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )


def test_hooks_of_the_program_stay_in_their_tables_while_others_come_back() -> None:
    """Another thread may be calling the module: at no moment is one of them in no table."""
    model, gaps = layers(), []

    class Watching(type(model[0]._forward_hooks)):
        """A table that notes when a hook of the program's is taken out."""

        def pop(self, key: int, *default: Any) -> Any:
            gaps.extend([key] if key in own else [])
            return super().pop(key, *default)

        def __delitem__(self, key: int) -> None:
            gaps.extend([key] if key in own else [])
            super().__delitem__(key)

    model[0]._forward_hooks = Watching()
    own: list[int] = []
    calls: list[int] = []

    def add(step: int) -> None:
        if step == 2:
            own.extend(
                model[0].register_forward_hook(lambda *_, i=i: calls.append(i)).id for i in range(3)
            )

    log = trained(model, add)
    assert set(log.recording().rows("0:out").step.tolist()) >= set(range(0, 20, 4))
    assert gaps == []
    assert calls == [0, 1, 2] * 18


def test_a_lazy_part_that_is_never_called_ends_nothing() -> None:
    """It has no shape to the end, whoever holds it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 2), nn.LazyLinear(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    log = trained(Net(), lambda step: None)
    assert not log.watch.failed
    assert log.recording().steps.tolist()[:2] == [0, 1] or len(log.recording().steps) >= 5


def test_a_hook_that_the_program_sets_on_a_parameter_hides_nothing(paced: Paced) -> None:
    """The gradient goes on being measured, and the program's own hook stays when the watch has ended."""
    paced(StepKind.SKIPPED, StepKind.MEASURED)
    model, seen = net(), []

    def between(step: int) -> None:
        if step == 3:
            model[0].weight.register_hook(lambda grad: seen.append(step))

    recording = watched(lambda watch: descend(model, 8, between=between)).recording()
    assert recording.rows("0.weight:param.grad").step.tolist() == [0, 2, 4, 6]
    assert len(seen) == 5
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == [1, 0, 0, 0]


def test_the_watch_hooks_no_gradient_on_its_way(paced: Paced) -> None:
    """Autograd reads tables of hooks without a lock: parameters have none that could change under another thread's backward."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    model = net()
    there: list[bool] = []

    def between(step: int) -> None:
        there.extend(p._backward_hooks is not None for p in model.parameters())

    watched(lambda watch: descend(model, 5, between=between))
    assert not any(there)


@at_levels()
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
            handles.append(
                inner.register_forward_hook(lambda *_: fired.append((step, "first")), prepend=True)
            )
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
        [sys.executable, "-c", LOADING],
        input=pickle.dumps(files[1]),
        capture_output=True,
        check=False,
    )
    assert run.stdout.decode().strip() == "loaded", run.stderr.decode()
