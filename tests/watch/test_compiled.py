"""Compiled models and optimizers: watched as they are uncompiled, and not compiled again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.torch_internals import dynamo
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.marks import full
from tests.watch.watched import (
    GUARDED,
    MEASURED,
    SKIPPED,
    Conv,
    Memory,
    Paced,
    at_levels,
    batch,
    descend,
    images,
    net,
    train,
    watch,
    watched,
)


class Holder(nn.Module):
    """Holds a network; Dynamo compiles no model that has no code of the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@at_levels(SKIPPED, GUARDED, MEASURED)
def test_a_model_that_is_compiled_late_is_compiled_twice_at_most(
    levels: tuple[StepKind, ...], paced: Paced, compiled: Any
) -> None:
    """Its steps count once, and it is compiled again only to get its hooks."""
    paced(*levels)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(watch: Watcher) -> None:
        model = Holder()
        descend(model, 3)
        model.compile(backend=backend, fullgraph=True)
        descend(model, 9)

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 12
    assert len(log.roots) == 1
    assert len(graphs) <= 2


def test_a_compiled_step_of_an_optimizer_is_a_step(paced: Paced, compiled: Any) -> None:
    """What is done at its end is not compiled with it."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    model = net()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = compiled(optimizer.step, backend="eager")
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).mean().backward()
            step()

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.levels == {"measured": 3, "guarded": 3, "skipped": 0}


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@at_levels()
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


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", [full("eager"), "aot_eager"])
def test_a_compiled_model_is_watched_as_it_is_uncompiled(compiled: Any, backend: str) -> None:
    """Same sites, same figures, same parameters afterwards."""

    def run(*, compiling: bool) -> tuple[Memory, Any]:
        torch.manual_seed(1)
        model = Conv()
        called = compiled(model, backend=backend) if compiling else model

        def program() -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(4):
                optimizer.zero_grad()
                called(images()).square().mean().backward()
                optimizer.step()

        return watch(program, every=3), list(model.state_dict().values())

    (eager, plain), (log, weights) = run(compiling=False), run(compiling=True)
    assert sorted(log.texts()) == sorted(eager.texts())
    assert log.steps(level=2)[-1] == 3
    assert (log.steps(level=1), log.steps(level=2)) == ([], [0, 1, 3])
    for text in (
        "conv:out",
        "act:out",
        ":out",
        "conv:out.grad",
        "fc.weight:param.grad",
        "conv.bias:update",
    ):
        ours, theirs = log.recording().rows(text), eager.recording().rows(text)
        assert ours.sumsq.tolist() == pytest.approx(theirs.sumsq.tolist(), rel=1e-4), text
    torch.testing.assert_close(weights, plain)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_what_is_compiled_is_not_surveyed(compiled: Any) -> None:
    """A survey's hooks come down after a step, and compiled code would be compiled again for that."""

    def program() -> None:
        model = nn.Sequential(Conv(), nn.Linear(3, 1))
        model[0].compile(backend="eager")
        train(model, 3)

    assert [e for e in watch(program).events if e["kind"] == "saved"] == []


class Graphs:
    """A backend that keeps the graphs it was given, and counts their calls."""

    def __init__(self) -> None:
        self.tapped: list[bool] = []
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.tapped.append(any("kedge" in str(node.target) for node in graph.graph.nodes))

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def paying(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Pretend that compiling a second variant took so many seconds."""
    monkeypatch.setattr(dynamo, "compile_seconds", lambda: seconds * dynamo.has_compiled())


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_compiled_code_has_two_variants_and_the_kind_of_step_chooses(
    in_place: bool, paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 steps compile twice: with the hooks, then without; every measured step has every site."""
    paced(*MEASURED, *SKIPPED, *SKIPPED, *GUARDED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()

    def program(watch: Watcher) -> None:
        model = Holder()
        fast = model if in_place else compiled(model, backend=graphs, fullgraph=True)
        if in_place:
            model.compile(backend=graphs, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(50):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            optimizer.step()

    log = watched(program)
    assert [e for e in log.events if e["kind"] == "compiled"] == [{"kind": "compiled", "step": 0}]
    assert graphs.tapped == [True, False]
    assert graphs.calls == 50
    measured = [0, *range(1, 50, 4)]
    assert log.steps(level=2) == measured
    assert log.recording().rows("net.1:out").step.tolist() == measured
    assert log.recording().rows("net.1:out.grad").step.tolist() == measured


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    "why",
    [
        "too dear",
        "error_on_recompile",
        "enable_compiler_collectives",
        "fail_on_recompile_limit_hit",
    ],
)
def test_hooks_stay_in_code_that_is_not_to_be_compiled_twice(
    why: str, paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because compiling would exceed the budget, or because the program's settings forbid it."""
    from torch._dynamo import config

    paced(*MEASURED, *SKIPPED, *GUARDED)
    paying(monkeypatch, 60.0 if why == "too dear" else 0.0)
    settings = {} if why == "too dear" else {why: True}
    graphs = Graphs()

    def program(watch: Watcher) -> None:
        model = Holder()
        fast = compiled(model, backend=graphs)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            optimizer.step()

    with config.patch(settings):
        log = watched(program)
    assert graphs.tapped == [True]
    assert graphs.calls == 12
    assert log.watch is not None
    assert not log.watch.failed


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("own", ["of the call", "of Dynamo"])
def test_hooks_stay_where_the_program_has_set_its_own_limit_meanwhile(
    own: str, paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no room for a second variant, so that compiling one would end the program, or leave it uncompiled."""
    from torch._dynamo import config

    paced(*SKIPPED, *MEASURED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()

    def program(watch: Watcher) -> None:
        model = net()
        fast = compiled(
            model,
            backend=graphs,
            fullgraph=True,
            **({"recompile_limit": 1} if own == "of the call" else {}),
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            if own == "of Dynamo":
                config.recompile_limit = 1
            optimizer.step()

    with config.patch(recompile_limit=config.recompile_limit):
        log = watched(program)
    assert graphs.tapped == [True]
    assert graphs.calls == 6
    assert log.watch is not None
    assert not log.watch.failed


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_the_hooks_of_a_root_come_back_in_their_order(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo checks that, too: another order would be a third variant, for which nothing had paid."""
    paced(*SKIPPED, *MEASURED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()

    def program(watch: Watcher) -> None:
        model = net()
        fast = compiled(model, backend=graphs)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(8):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            optimizer.step()

    watched(program)
    assert graphs.tapped == [True, False]
    assert graphs.calls == 8


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_two_variants_of_everything_stay_below_the_limit_of_dynamo(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with as many variants as Dynamo allows never runs uncompiled, and finds its settings as they were."""
    from torch._dynamo import config

    paced(*MEASURED, *GUARDED)
    paying(monkeypatch, 0.0)
    graphs, calls = Graphs(), 0

    def program(watch: Watcher) -> None:
        nonlocal calls
        model = Holder()
        fast = compiled(model, backend=graphs, dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(16):
            optimizer.zero_grad()
            fast(torch.randn(4 + step // 2 % 3, 4)).square().mean().backward()
            optimizer.step()
            calls += 1

    with config.patch(recompile_limit=3):
        watched(program)
        assert config.recompile_limit == 3
    assert sorted(graphs.tapped) == [False] * 3 + [True] * 3
    assert graphs.calls == calls
    assert config.skip_nnmodule_hook_guards is True


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_watching_changes_no_bit_of_a_compiled_training(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever variant runs a step."""
    paced(*MEASURED, *SKIPPED, *GUARDED)
    paying(monkeypatch, 0.0)

    def run(watch: Watcher | None = None) -> list[Tensor]:
        torch.manual_seed(2)
        torch.compiler.reset()
        model = Holder()
        fast = compiled(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(9):
            optimizer.zero_grad()
            fast(batch()).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain, found = run(), []
    watched(lambda watch: found.append(run(watch)))
    assert all(map(torch.equal, plain, found[0]))


REFUSING = ("fail_on_recompile", "eager_on_recompile")


def refusing(
    stance: str,
    at: int,
    graphs: Graphs,
    compiled: Any,
    *,
    in_place: bool = False,
    each: bool = False,
) -> Any:
    """Return a program of 12 steps that sets a stance, from one step on, between the step's end and the next forward.

    Args:
        stance: The stance.
        at: The step.
        graphs: The backend.
        compiled: Compiles.
        in_place: Whether the model is compiled in place.
        each: Whether the stance is set around each forward alone.
    """

    def program(watch: Watcher | None = None) -> None:
        model = Holder()
        fast = model if in_place else compiled(model, backend=graphs, fullgraph=True)
        if in_place:
            model.compile(backend=graphs, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(12):
            optimizer.zero_grad()
            with torch.compiler.set_stance(stance if step >= at else "default"):
                loss = fast(batch()).square().mean()
                if not each:
                    loss.backward()
                    optimizer.step()
            if each:
                loss.backward()
                optimizer.step()

    return program


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
@pytest.mark.parametrize(
    "each", [full(False, id="to the end"), pytest.param(True, id="each forward")]
)
@pytest.mark.parametrize("stance", REFUSING)
def test_hooks_return_to_code_where_a_stance_allows_no_other(
    stance: str,
    each: bool,
    in_place: bool,
    paced: Paced,
    compiled: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """They are out, for code that is still to be compiled: no call fails or runs uncompiled, and one line says so."""
    paced(*SKIPPED, *SKIPPED, *SKIPPED, *MEASURED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()
    log = watched(refusing(stance, 1, graphs, compiled, in_place=in_place, each=each))
    assert graphs.tapped == [True]
    assert graphs.calls == 12
    assert log.steps(level=2) == [0, 4, 8]
    assert log.recording().rows("net.1:out").step.tolist() == [0, 4, 8]
    assert log.watch is not None
    assert not log.watch.failed
    assert (
        capsys.readouterr().err.count(
            f'torch.compiler.set_stance("{stance}") allows no more compiling'
        )
        == 1
    )


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_code_in_both_variants_is_used_under_every_stance(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A stance that is set when both exist changes nothing, and nothing is said."""
    paced(*MEASURED, *SKIPPED, *SKIPPED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()
    log = watched(refusing("fail_on_recompile", 4, graphs, compiled))
    assert graphs.tapped == [True, False]
    assert graphs.calls == 12
    assert log.recording().rows("net.1:out").step.tolist() == log.steps(level=2) == [0, 1, 4, 7, 10]
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_an_error_of_a_stance_is_raised_only_where_it_would_be_without_kedge(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A shape that has code with the hooks alone runs uncompiled once, then with them; a new shape fails as ever."""
    paced(*SKIPPED)
    paying(monkeypatch, 0.0)
    graphs, calls = Graphs(), []

    def program(watch: Watcher) -> None:
        model = Holder()
        fast = compiled(model, backend=graphs, dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            optimizer.zero_grad()
            with torch.compiler.set_stance("fail_on_recompile" if step > 2 else "default"):
                fast(batch()).square().mean().backward()
                if step in (0, 3, 4, 5):
                    fast(torch.randn(9, 4)).square().mean().backward()
                    calls.append(graphs.calls)
                if step == 5:
                    with pytest.raises(RuntimeError, match="Detected recompile.*fail_on_recompile"):
                        fast(torch.randn(10, 4))
            optimizer.step()

    log = watched(program)
    assert sorted(graphs.tapped) == [False, True, True]
    assert calls == [2, 5, 7, 9]
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == 6
    assert "no code of the model without" in capsys.readouterr().err
    assert torch._dynamo.eval_frame._callback_from_stance.__module__ == "torch._dynamo.eval_frame"


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_code_without_hooks_runs_on_where_a_stance_allows_no_other(
    paced: Paced, compiled: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A model that was compiled in steps without hooks is not measured as long as the stance is set."""
    paced(*SKIPPED, *SKIPPED, *SKIPPED, *SKIPPED, *SKIPPED, *MEASURED)
    paying(monkeypatch, 0.0)
    graphs = Graphs()

    def program(watch: Watcher) -> None:
        model = Holder()
        descend(model, 2)
        fast = compiled(model, backend=graphs, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(18):
            optimizer.zero_grad()
            with torch.compiler.set_stance(
                "fail_on_recompile" if step in range(2, 12) else "default"
            ):
                fast(batch()).square().mean().backward()
            optimizer.step()

    log = watched(program)
    assert graphs.tapped == [False, True]
    assert graphs.calls == 18
    assert log.watch is not None
    assert not log.watch.failed
    assert "is not measured" in capsys.readouterr().err
    assert log.recording().rows("net.1:out").step.tolist()[-1] == 18


def test_a_compiled_model_whose_calls_are_not_seen_is_found_by_its_parameters(
    compiled: Any,
) -> None:
    """The search for the holder of an optimizer's parameters finds the compiled model; its sites are those inside it."""

    def program() -> None:
        model = compiled(net(), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
            (batch() @ weight.T + bias).square().mean().backward()
            optimizer.step()

    log = watch(program, every=1)
    assert not log.watch.failed
    assert len(log.recording().rows("0.weight:update").step) > 0
