"""Compiled models: hooks that were there before stay in the graph, later ones take part by recompiling."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tqdm
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import kedge
from kedge.errors import CannotCompile, Recompiled
from tests.marks import full

# Dynamo and Inductor themselves use what PyTorch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
tqdm.tqdm.monitor_interval = 0  # Inductor's progress bars would leave a thread behind
BACKENDS = pytest.mark.parametrize("backend", ["eager", full("aot_eager"), "inductor"])


class Net(nn.Module):
    """A layer that runs twice, an activation, a child that returns a dict, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.split, self.head = (
            nn.Linear(4, 4),
            nn.ReLU(),
            Split(),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc(self.fc(x)))
        parts = self.split(h)
        return self.head(parts["a"] * 2 + parts["b"])


class Split(nn.Module):
    """Returns a dict."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x + 1, "b": x * 3}


SITES = "fc, fc:in, act, split, head, :out, fc:out.grad, act:out.grad, split:out.grad, head:out.grad, **:param.grad"
READ = [
    "fc#0",
    "fc#1",
    "fc#1:in",
    "act",
    "split:out[a]",
    "split:out[b]",
    "head",
    ":out",
    "fc#0:out.grad",
    "fc#1:out.grad",
]
READ += [
    "act:out.grad",
    "split:out.grad[a]",
    "split:out.grad[b]",
    "head:out.grad",
    "fc.weight:param.grad",
    "head.bias:param.grad",
]


def step(model: Callable[[Tensor], Tensor], params: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient of one training step."""
    params.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in params.parameters())]


def values(hook: Any) -> dict[str, Tensor]:
    """Everything that was recorded."""
    return {name: hook[name].clone() for name in READ}


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether tensors are equal up to the order of sums, which a compiler may change."""
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))


def edit(s: kedge.hooks.session.Session, model: nn.Module) -> None:
    """Edit values, inputs and gradients."""
    s.hook(model, "act", kedge.scale(2))
    s.hook(model, "split:out[b]", lambda v: v.clamp(max=0.5))
    s.hook(model, "head:in", kedge.add(1))
    s.hook(model, "act:out.grad", kedge.scale(0.5))


@pytest.mark.parametrize(
    ("backend", "late"),
    [
        pytest.param("eager", False, id="early-eager"),
        pytest.param("eager", True, id="late-eager"),
        full("aot_eager", False, id="early-aot_eager"),
        pytest.param("aot_eager", True, id="late-aot_eager"),
        full("inductor", False, id="early-inductor"),
        full("inductor", True, id="late-inductor"),
    ],
)
def test_a_compiled_model_gives_what_an_uncompiled_one_gives(
    backend: str, late: bool, compiled: Callable[..., Any]
) -> None:
    """Hooked before or after its first call, with fullgraph, every value and gradient is recorded, edits apply, removal holds."""
    model, x = Net(), torch.randn(5, 4)
    plain = step(model, model, x)
    with kedge.hook(model, SITES, kedge.record()) as h:
        step(model, model, x)
    eager = values(h)
    with kedge.session() as s:
        edit(s, model)
        edited = step(model, model, x)

    fast = compiled(model, backend=backend, fullgraph=True)
    if late:
        assert close(step(fast, model, x), plain)
        with pytest.warns(Recompiled):
            h = kedge.hook(fast, SITES, kedge.record())
    else:
        h = kedge.hook(model, SITES, kedge.record())
    with h:
        for _ in range(2):
            assert close(step(fast, model, x), plain)
        assert close(list(values(h).values()), list(eager.values()))
        assert [r.event.call for r in h.records("fc:out.grad")] in ([1, 0], [0, 1])
    before = len(h.records("act"))
    assert close(step(fast, model, x), plain)
    assert len(h.records("act")) == before
    with pytest.warns(Recompiled), kedge.session() as s:
        edit(s, fast)
        assert close(step(fast, model, x), edited)
    assert close(step(fast, model, x), plain)


def test_a_hooked_instance_does_not_borrow_the_code_of_an_unhooked_one(
    compiled: Callable[..., Any],
) -> None:
    """Of two models of one class, the second is hooked after the first was compiled: it fires, the first does not."""
    one, two, x = Net(), Net(), torch.randn(5, 4)
    fast_one, fast_two = compiled(one, backend="eager"), compiled(two, backend="eager")
    fast_one(x)
    with kedge.session() as s:
        acts = s.hook(two, "act", kedge.record(keep=None))
        fast_two(x)
        fast_one(x)
        fast_two(x)

    assert len(acts.records("act")) == 2
    assert torch.allclose(acts.records("act")[0].value, two.act(two.fc(two.fc(x))))


def test_hooks_on_one_model_leave_the_code_of_others(compiled: Callable[..., Any]) -> None:
    """A model of the same classes that is hooked again and again costs another no compilation; the hooked one fires."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    one, other, whole, x = Net(), Net(), nn.Sequential(Net(), nn.ReLU()), torch.randn(5, 4)
    fast, fast_whole = compiled(one, backend=backend), compiled(whole, backend=backend)
    fast(x), fast_whole(x)
    before = len(graphs)
    for _ in range(3):
        with kedge.hook(other, "**:out", kedge.record()):
            other(x), fast(x), fast_whole(x)
        fast(x), fast_whole(x)
    assert len(graphs) == before
    with pytest.warns(Recompiled), kedge.hook(whole[0], "act", kedge.record(keep=None)) as acts:
        fast_whole(x), fast(x)
    assert len(acts.records("act")) == 1
    fast_whole(x), fast(x)
    assert len(graphs) == before + 1


def test_new_shapes_and_grad_modes_are_seen_too(compiled: Callable[..., Any]) -> None:
    """A late hook fires for every shape and grad mode, those that were compiled already and new ones."""
    model = Net()
    fast = compiled(model, backend="eager")
    fast(torch.randn(5, 4))
    with torch.no_grad():
        fast(torch.randn(5, 4))
    with pytest.warns(Recompiled), kedge.hook(fast, "act", kedge.record(keep=None)) as h:
        for rows in (5, 3, 7, 5):
            fast(torch.randn(rows, 4))
            with torch.no_grad():
                fast(torch.randn(rows, 4))

    assert [len(r.value) for r in h.records("act")] == [5, 5, 3, 3, 7, 7, 5, 5]


def test_the_counts_of_compiled_events_are_those_of_uncompiled_ones(
    compiled: Callable[..., Any],
) -> None:
    """Pass, call, step, micro-batch and backward are counted inside compiled code as outside."""
    found = []
    for compile_ in (lambda m: m, lambda m: compiled(m, backend="aot_eager")):
        model = Net()
        fast = compile_(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with kedge.hook(model, "fc, fc:out.grad", kedge.record(keep=None)) as h:
            for _ in range(3):
                step(fast, model, torch.randn(5, 4))
                optimizer.step()
        events = [r.event for kind in ("fc", "fc:out.grad") for r in h.records(kind)]
        found.append(
            [(str(e.site), e.pass_, e.call, e.step, e.micro_batch, e.backward) for e in events]
        )

    assert found[1] == found[0]


def test_a_schedule_holds_in_compiled_code(compiled: Callable[..., Any]) -> None:
    """Scheduled observers and edits act in their steps alone, also where the graph was compiled in another step."""
    found = []
    for compile_ in (lambda m: m, lambda m: compiled(m, backend="eager")):
        torch.manual_seed(1)
        model, x = Net(), torch.randn(5, 4)
        fast = compile_(model)
        with kedge.session() as s:
            h = s.hook(
                model, "act, act:out.grad", kedge.record(keep=None), when=kedge.every(2, after=1)
            )
            s.hook(model, "head", kedge.scale(0), when=kedge.at(2))
            outs = []
            for _ in range(4):
                outs.append(fast(x))
                outs[-1].sum().backward()
        found.append(([r.event.step for k in ("act", "act:out.grad") for r in h.records(k)], outs))

    (eager_steps, eager), (steps, outs) = found
    assert eager_steps == [1, 3, 1, 3]
    assert steps == eager_steps
    assert close(outs, eager)


def test_one_removed_hook_of_a_compiled_model_is_gone(compiled: Callable[..., Any]) -> None:
    """A hook that is removed within the session no longer edits, and the others go on."""
    model, x = Net(), torch.randn(5, 4)
    fast, plain = compiled(model, backend="eager"), model(x)
    with kedge.session() as s:
        gone = s.hook(model, "head", kedge.zero())
        h = s.hook(model, "act", kedge.record(keep=None))
        assert fast(x).count_nonzero() == 0
        gone.remove()
        assert torch.allclose(fast(x), plain)

    assert len(h.records("act")) == 2


def test_a_hook_that_comes_to_a_hooked_compiled_module_takes_part(
    compiled: Callable[..., Any],
) -> None:
    """A second action at a module that is hooked and compiled already acts from the next call on."""
    model, x = Net(), torch.randn(5, 4)
    fast = compiled(model, backend="eager")
    with kedge.session() as s:
        h = s.hook(model, "head", kedge.record())
        fast(x)
        s.hook(model, "head", kedge.zero())
        assert fast(x).count_nonzero() == 0

    assert h["head"].count_nonzero() > 0


def test_actions_of_compiled_code_run_in_their_order(compiled: Callable[..., Any]) -> None:
    """Each action sees what the one before it left, in forward and in backward."""
    model, x = nn.Sequential(nn.Identity()), torch.ones(2, requires_grad=True)
    fast = compiled(model, backend="eager")
    with kedge.session() as s:
        first = s.hook(model, "0, 0:out.grad", kedge.record())
        s.hook(model, "0, 0:out.grad", kedge.scale(3))
        second = s.hook(model, "0, 0:out.grad", kedge.record())
        s.hook(model, "0, 0:out.grad", kedge.add(1))
        third = s.hook(model, "0, 0:out.grad", kedge.record())
        fast(x).sum().backward()

    for name in ("0", "0:out.grad"):
        assert [h[name][0].item() for h in (first, second, third)] == [1.0, 3.0, 4.0]
    assert torch.equal(x.grad, torch.full((2,), 12.0))


@pytest.mark.parametrize(
    ("backend", "action"),
    [
        full("aot_eager", kedge.record),
        ("aot_eager", kedge.measure),
        full("inductor", kedge.measure),  # half a minute of a C++ compiler
    ],
)
def test_observing_a_compiled_model_changes_no_bit(
    backend: str, action: Callable[[], Any], compiled: Callable[..., Any]
) -> None:
    """Output and gradients of a compiled step are the same with observers of every output and gradient in the graph."""
    model, x = Net(), torch.randn(5, 4)
    fast = compiled(model, backend=backend)
    bare = step(fast, model, x)
    with pytest.warns(Recompiled), kedge.hook(model, "**, **:in, **:out.grad", action()):
        observed = step(fast, model, x)

    assert all(map(torch.equal, bare, observed))


def test_hooks_break_no_graph(compiled: Callable[..., Any]) -> None:
    """A model with one break of its own has one with hooks, too."""

    class Breaks(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.fc(x))
            torch._dynamo.graph_break()
            return self.head(h)

    model, x = Breaks(), torch.randn(5, 4)
    bare = torch._dynamo.explain(model)(x)
    torch.compiler.reset()
    with kedge.hook(model, ":out, fc, act, head, fc:out.grad", kedge.measure()) as stats:
        hooked = torch._dynamo.explain(model)(x)
        compiled(model, backend="aot_eager")(x).sum().backward()

    assert hooked.graph_break_count == bare.graph_break_count == 1
    assert stats["fc"].count == 20


def test_a_checkpointed_compiled_model_records_each_value_once(
    compiled: Callable[..., Any],
) -> None:
    """Checkpointing inside a compiled model: one event a forward, and the gradient of each."""

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    model, x = Wraps(), torch.randn(5, 4)
    plain = step(model, model, x)
    with kedge.hook(model, "block.1, block.1:out.grad", kedge.record(keep=None)) as h:
        fast = compiled(model, backend="aot_eager")
        assert close(step(fast, model, x), plain)

    assert [(r.event.call, r.event.recompute) for r in h.records("block.1")] == [(0, False)]
    assert len(h.records("block.1:out.grad")) == 1


@pytest.mark.parametrize(
    ("selector", "action", "text"),
    [
        (
            "act:in.share",
            lambda v: None,
            '"act:in.share" cannot be followed inside compiled code; run the model uncompiled',
        ),
        (
            "act:in.grad",
            lambda v: None,
            '"act:in.grad" cannot be followed inside compiled code; hook the ":out.grad" it comes from',
        ),
        (
            "act",
            lambda v, event: v * 2,
            "takes (value, event), but compiled code has one graph for all passes",
        ),
        ("fc#1", kedge.scale(2), "edits one call, but compiled code has one graph for all passes"),
        ("fc#1:out.grad", kedge.scale(2), "edits one call, but compiled code has one graph"),
    ],
)
def test_what_compiled_code_cannot_do_is_said(
    selector: str, action: Any, text: str, compiled: Callable[..., Any]
) -> None:
    """Sites and actions that have no way into a graph are an error that says what to do instead."""
    model = Net()
    fast = compiled(model, backend="eager", fullgraph=True)
    with kedge.session() as s:
        hook = s.hook(model, selector, action)
        with pytest.raises(
            (CannotCompile, Unsupported), match=re.escape(text)
        ):  # Dynamo wraps what is raised while it reads
            fast(torch.randn(5, 4, requires_grad=True))
        hook.remove()


@pytest.mark.parametrize(
    "selector", ["act:in.share", "act:in.grad", "act:out", "act:out.grad", "fc#1", "fc#0:out.grad"]
)
def test_without_fullgraph_the_same_works_or_is_an_error(
    selector: str, compiled: Callable[..., Any]
) -> None:
    """Where Dynamo may break the graph, an action that takes the event acts as in an uncompiled model, or says that it cannot."""
    model, x = Net(), torch.randn(5, 4)
    double = lambda v, event: v * 2
    with kedge.hook(model, selector, double):
        edited = step(model, model, x)
    with kedge.session() as s:
        hook = s.hook(model, selector, double)
        try:
            assert close(step(compiled(model, backend="eager"), model, x), edited)
        except CannotCompile:
            hook.remove()


def test_a_late_hook_says_that_code_was_thrown_away(compiled: Callable[..., Any]) -> None:
    """Compiling again costs time, so it is said, once a session and with the way to avoid it."""
    model, x = Net(), torch.randn(5, 4)
    fast = compiled(model, backend="eager")
    fast(x)
    with pytest.warns(Recompiled) as caught, kedge.session() as s:
        s.hook(fast, "act", kedge.zero())
        s.hook(fast, "act", kedge.zero())
        fast(x)

    assert [str(w.message) for w in caught] == [
        "hooks were attached after torch.compile had compiled code, which does not check for new hooks: the code of "
        "this model compiles again, with the hooks, at its next call. Hook first to compile once"
    ]
    assert caught[0].filename == __file__


def test_a_compiled_model_can_be_copied_while_hooked(compiled: Callable[..., Any]) -> None:
    """A copy of a hooked model compiles without the hooks."""
    model, x, seen = Net(), torch.randn(5, 4), []
    with kedge.hook(model, "act", lambda v: seen.append(1)):
        twin = copy.deepcopy(model)
        out = compiled(twin, backend="eager", fullgraph=True)(x)
        assert seen == []
        assert torch.allclose(model(x), out)


@BACKENDS
def test_parameters_are_seen_in_compiled_code(backend: str, compiled: Callable[..., Any]) -> None:
    """`:param` fires at each call with the value of then, a parameter of several modules where the first is called."""
    model, x = Net(), torch.randn(5, 4)
    model.head = nn.Linear(4, 4)
    model.head.weight = model.fc.weight
    fast = compiled(model, backend=backend, fullgraph=True)
    with kedge.session() as s:
        h = s.hook(model, "**:param", kedge.record(keep=None))
        for _ in range(2):
            fast(x)
            with torch.no_grad():
                model.fc.weight += 1

    assert [r.event.pass_ for r in h.records("head.bias:param")] == [0, 1]
    assert [(r.event.pass_, r.event.call) for r in h.records("fc.weight:param")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for record, added in zip(h.records("fc.weight:param"), (2, 2, 1, 1), strict=True):
        assert torch.allclose(record.value, model.fc.weight - added, atol=1e-6)
