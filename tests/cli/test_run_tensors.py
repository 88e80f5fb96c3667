"""``kedge run`` on programs of tensors alone: what is recorded, and that the program does not notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.store.events import TensorGraphEvent, TensorNode, TensorProgramEvent
from kedge.store.recording import Recording
from tests import forked
from tests.marks import sampled

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

HEAD = """
import math, warnings
import torch
from torch.nn import functional as F
torch.manual_seed(3)

def bits(*tensors):
    print([None if t is None else t.detach().resolve_conj().numpy().tobytes().hex() for t in tensors])
"""

#: What a program does, its source after `HEAD`, and the variables that its graphs name.
PROGRAMS = {
    "leaves": (
        """
a = torch.tensor([2.0, 3.0], requires_grad=True)
b = torch.tensor([6.0, 4.0], requires_grad=True)
cost = 3 * a ** 3 - b ** 2
cost.sum().backward()
bits(a.grad, b.grad)
""",
        {"a", "b", "cost"},
    ),
    "hooks of every kind": (
        """
w = torch.randn(4, requires_grad=True)
h = w.exp()
h.retain_grad()
h.register_hook(lambda g: print("first", g.tolist()))
h.register_hook(lambda g: g.clamp(max=0.5))
h.grad_fn.register_prehook(lambda gs: (gs[0] * 2,))
h.grad_fn.register_hook(lambda into, out: print("post", len(into), len(out)))
def triple(g):
    g.mul_(3)
def more(p):
    p.grad.add_(1)
w.register_hook(triple)
w.register_post_accumulate_grad_hook(more)
h.sum().backward()
bits(w.grad, h.grad)
print(h.grad_fn.name(), len(h._backward_hooks) >= 2)
""",
        {"w", "h"},
    ),
    "double backward": (
        """
x = torch.tensor([0.3, 0.7], requires_grad=True)
y = (x ** 3).sum()
first, = torch.autograd.grad(y, x, create_graph=True)
second, = torch.autograd.grad(first.sum(), x)
y2 = x.sin().sum()
y2.backward(create_graph=True)
bits(first, second, x.grad)
x.grad = None
""",
        {"x", "y", "first", "y2"},
    ),
    "a loop by hand": (
        """
data = torch.randn(32, 3)
target = data @ torch.tensor([1.0, -2.0, 0.5])
weight = torch.zeros(3, requires_grad=True)
for _ in range(15):
    loss = ((data @ weight - target) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None
bits(weight, loss)
""",
        {"data", "target", "weight", "loss"},
    ),
    "layers in a list": (
        """
layers = [
    (torch.randn(1, 8, requires_grad=True), torch.zeros(8, requires_grad=True)),
    (torch.randn(8, 1, requires_grad=True), torch.zeros(1, requires_grad=True)),
]
x = torch.linspace(-1, 1, 20).unsqueeze(1)
def model(v):
    (w1, b1), (w2, b2) = layers
    return torch.tanh(v @ w1 + b1) @ w2 + b2
for _ in range(3):
    loss = F.mse_loss(model(x), x.sin())
    loss.backward()
    for pair in layers:
        for p in pair:
            p.data -= 0.05 * p.grad
            p.grad.zero_()
bits(loss, *layers[0])
""",
        {"x", "loss", "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"},
    ),
    "an optimizer": (
        """
w = torch.randn(3, requires_grad=True)
optimizer = torch.optim.Adam([w], lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    loss = (w - 1).square().sum()
    loss.backward()
    optimizer.step()
bits(w)
""",
        {"w", "loss"},
    ),
    "a function of its own": (
        """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 2 * x * grad
x = torch.tensor([1.5, -0.5], requires_grad=True)
squared = Square.apply(x)
squared.sum().backward()
bits(x.grad)
""",
        {"x", "squared"},
    ),
    "its own pair of hooks on saved tensors": (
        """
def pack(t):
    print("pack", tuple(t.shape))
    return t.clone()
def unpack(t):
    print("unpack", tuple(t.shape))
    return t
x = torch.randn(3, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
    y = x.exp() * x.cos()
y.sum().backward()
bits(x.grad)
""",
        {"x", "y"},
    ),
    "in place": (
        """
x = torch.ones(2, 3, requires_grad=True)
y = x * 1.5
y.mul_(3)
y[0, 0] = 7.0
y.sum().backward()
e = torch.ones(2, requires_grad=True)
changed = e.exp()
kept = changed * 1
changed.add_(1)
try:
    changed.sum().backward()
except RuntimeError as error:
    print(str(error)[:70])
bits(x.grad, e.grad)
""",
        {"x", "y", "e", "changed"},
    ),
    "checkpoints": (
        """
from torch.utils.checkpoint import checkpoint
x = torch.full((2, 2), 0.4, requires_grad=True)
w = torch.eye(2, requires_grad=True)
def block(v, m):
    return torch.tanh(v @ m)
y = checkpoint(block, x, w, use_reentrant=False)
z = checkpoint(block, y, w, use_reentrant=True)
z.sum().backward()
bits(x.grad, w.grad)
""",
        {"x", "w", "z"},
    ),
    "a gradient to begin with": (
        """
x = torch.arange(3.0, requires_grad=True)
y = x ** 2
try:
    y.backward()
except RuntimeError as error:
    print(error)
y.backward(torch.tensor([1.0, 0.1, 0.01]))
torch.autograd.backward([x.sum(), x.prod()])
bits(x.grad)
""",
        {"x", "y"},
    ),
    "jacobians and transforms": (
        """
def f(v):
    return torch.stack([v[0] ** 2 + v[1], v[1].sin()])
x = torch.tensor([1.0, 2.0])
bits(torch.autograd.functional.jacobian(f, x), torch.func.jacrev(f)(x))
bits(torch.func.vmap(lambda v: v * 2)(x), torch.func.grad(lambda v: f(v).sum())(x))
x.requires_grad_()
f(x).sum().backward()
bits(x.grad)
""",
        {"x"},
    ),
    "a retained graph": (
        """
x = torch.tensor(1.3, requires_grad=True)
y = x.exp().sqrt()
y.backward(retain_graph=True)
y.backward()
try:
    y.backward()
except RuntimeError as error:
    print(str(error)[:60])
bits(x.grad)
""",
        {"x", "y"},
    ),
    "complex numbers": (
        """
z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
power = (z * z.conj()).real.sum()
power.backward()
bits(z.grad)
""",
        {"z", "power"},
    ),
    "containers and objects": (
        """
params = {"w": torch.ones(2, requires_grad=True), "b": torch.zeros((), requires_grad=True)}
class Holder:
    def __init__(self):
        self.scale = torch.tensor(3.0, requires_grad=True)
holder = Holder()
out = ((params["w"] + params["b"]) * holder.scale).sum()
out.backward()
bits(params["w"].grad, params["b"].grad, holder.scale.grad)
""",
        {"params.w", "params.b", "scale", "out"},
    ),
    "functions": (
        """
def forward(w, data):
    hidden = torch.sigmoid(w * data)
    hidden.register_hook(lambda g: print("hidden", g.tolist()))
    return hidden.sum()
def main():
    weight = torch.tensor([0.1, 0.2], requires_grad=True)
    value = forward(weight, torch.tensor([1.0, 2.0]))
    value.backward()
    bits(weight.grad)
main()
""",
        {"weight", "value"},
    ),
    "warnings": (
        """
x = torch.ones(2, requires_grad=True)
h = x * 2
print(h.grad)
F.mse_loss(torch.ones(3, 1), torch.ones(3))
F.softmax(torch.ones(2, 2))
torch.ones(2, 3, 4).T
h.sum().backward()
""",
        {"x", "h"},
    ),
    "a hook that raises": (
        """
x = torch.ones(2, requires_grad=True)
y = x * 2
def bad(g):
    raise ValueError("no")
y.register_hook(lambda g: g * 2)
y.register_hook(bad)
y.register_hook(lambda g: None)
try:
    y.sum().backward()
except ValueError as error:
    print(error)
(x * 3).sum().backward()
bits(x.grad)
""",
        {"x", "y"},
    ),
    "an error in the middle": (
        """
w = torch.ones(3, requires_grad=True)
(w * 2).sum().backward()
bits(w.grad)
torch.ones(2, 3) @ torch.ones(2, 3)
""",
        {"w"},
    ),
    "a NaN": (
        """
x = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
y = torch.sqrt(x)
total = y.sum()
total.backward()
bits(x.grad)
""",
        {"x", "y", "total"},
    ),
    "compiled code": (
        """
w = torch.ones(2, requires_grad=True)
compiled = torch.compile(lambda a: (a * 2).sin().sum(), backend="aot_eager", fullgraph=True)
value = compiled(w)
value.backward()
bits(w.grad)
""",
        {"w", "value"},
    ),
    "a view of what changes afterwards": (
        """
x = torch.ones(3, requires_grad=True)
base = x * 2
view = base.view(3)
base.mul_(2)
view.sum().backward()
bits(x.grad)
""",
        {"x", "base", "view"},
    ),
    "gradients that nobody else holds": (
        """
import weakref
places = []
x = torch.ones(3, requires_grad=True)
x.register_hook(lambda g: places.append(g.data_ptr()))
(x * torch.ones(3) * 2).sum().backward()
print(places[0] == x.grad.data_ptr())
gradients = []
y = torch.ones(3, requires_grad=True)
h = y * 2
h.register_hook(lambda g: gradients.append(weakref.ref(g)))
y.register_hook(lambda g: print(gradients[0]()))
h.sum().backward()
""",
        {"x", "y", "h"},
    ),
    "types of few bits": (
        """
x = torch.linspace(-2, 2, 9, requires_grad=True)
small = x.to(torch.float8_e4m3fn)
other = x.detach().to(torch.float8_e5m2).to(torch.float32)
(x * other).sum().backward()
bits(x.grad)
""",
        {"x", "other"},
    ),
    "fake tensors among others": (
        """
from torch._subclasses.fake_tensor import FakeTensorMode
x = torch.ones(2, requires_grad=True)
with FakeTensorMode(allow_non_fake_inputs=True):
    print(x * torch.ones(2))
(x * 2).sum().backward()
bits(x.grad)
""",
        {"x"},
    ),
    "a class of tensors with operations of its own": (
        """
class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        new = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        new.inner = inner
        return new
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        print(func)
        args = [each.inner if isinstance(each, Wrapped) else each for each in args]
        return Wrapped(func(*args, **(kwargs or {})))
class Told(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        print(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})
w = Wrapped(torch.ones(3)).requires_grad_()
(w * 3).sum().backward()
print(type(w.grad), w.grad.inner)
told = torch.ones(3).as_subclass(Told).requires_grad_()
doubled = told * 2
doubled.register_hook(lambda g: print(type(g)))
doubled.sum().backward()
masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
print(masked * 2)
""",
        {"w"},
    ),
    "modes, traces and forks": (
        """
import os
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
class Names(TorchDispatchMode):
    seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Names.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
w = torch.tensor([1.0, 2.0], requires_grad=True)
print(make_fx(lambda a: a.sin() + 1)(torch.ones(2)).code)
with Names():
    product = w * 3
    product.sum().backward()
print(Names.seen)
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x) * 1.5
    return x.sum()
for _ in range(3):
    scripted(w).backward()
if os.fork() == 0:
    (w * 2).sum()
    print(torch._C._len_torch_dispatch_stack(), flush=True)
    os._exit(0)
os.wait()
bits(w.grad, torch.func.hessian(lambda v: (v ** 3).sum())(w.detach()))
""",
        {"w", "product"},
    ),
    "no backward": (
        """
a = torch.randn(4, 4)
b = a @ a.T + torch.eye(4)
c = torch.linalg.cholesky(b)
bits(c)
""",
        {"a", "b", "c"},
    ),
}


@pytest.fixture
def recorded(kedge: Kedge, script: Script, tmp_path: Path) -> Callable[..., Recording]:
    """Run a program with and without ``kedge run``, compare the two, and return the recording."""

    def run(source: str, *options: str) -> Recording:
        name = script(HEAD + source)
        plain = forked.run([sys.executable, name], cwd=tmp_path, forks=True)
        done = kedge("run", *options, "-o", "it.kedge", name)
        lines = done.stderr.splitlines(keepends=True)
        own = "".join(line for line in lines if not line.startswith("[kedge]"))

        assert (done.stdout, own, done.returncode) == (
            plain.stdout,
            plain.stderr,
            plain.returncode,
        )
        assert "failed" not in done.stderr
        return Recording.open(tmp_path / "it.kedge")

    return run


ALWAYS_RUN = (
    "hooks of every kind",
    "double backward",
    "an optimizer",
    "in place",
    "compiled code",
    "a class of tensors with operations of its own",
    "modes, traces and forks",
    "no backward",
)


@pytest.mark.parametrize("what", sampled(PROGRAMS, ALWAYS_RUN))
def test_a_program_of_tensors_is_recorded_and_does_not_notice(recorded, what):
    """Output, errors and gradients are the same bit for bit, and the graphs have the variables' names."""
    source, names = PROGRAMS[what]
    recording = recorded(source, "--saved")
    graphs = list(recording.of(TensorGraphEvent))
    nodes = [node for graph in graphs for node in graph.nodes]

    assert names <= {node.variable for node in nodes}
    for graph in graphs:
        for place, node in enumerate(graph.nodes):
            assert all(taken < place for taken in node.takes)
        assert all(hook.owner != "kedge" for hook in graph.hooks)


def by_name(graph: TensorGraphEvent) -> dict[str, TensorNode]:
    """Return the named tensors of a graph."""
    return {node.variable: node for node in graph.nodes if node.variable}


def text(value) -> str | None:
    """Return a value's numbers."""
    return None if value is None else value.text


def test_values_gradients_and_what_is_saved(recorded):
    """Each tensor has its value, its gradient, its line, and what its operation keeps."""
    (graph,) = recorded(
        "w = torch.tensor([1.0, 2.0], requires_grad=True)\n"
        "x = torch.tensor([3.0, 4.0])\n"
        "h = w * x\n"
        "loss = h.sum()\n"
        "loss.backward()\n",
        "--saved",
    ).of(TensorGraphEvent)
    named = by_name(graph)

    assert {name: text(node.value) for name, node in named.items()} == {
        "w": "[1, 2]",
        "x": "[3, 4]",
        "h": "[3, 8]",
        "loss": "11",
    }
    assert {name: text(node.gradient) for name, node in named.items()} == {
        "w": "[3, 4]",
        "x": None,
        "h": "[1, 1]",
        "loss": "1",
    }
    assert text(named["w"].kept) == "[3, 4]"
    assert [(one.name, one.shape, one.bytes) for one in named["h"].saved] == [("other", (2,), 8)]
    assert named["h"].source is not None
    assert named["h"].source.text == "h = w * x"
    assert [graph.nodes[place].variable for place in graph.roots] == ["loss"]


def test_passes_that_are_alike_are_one_graph(recorded):
    """A loop has one graph, with the first and last values, and a loss of each further pass."""
    recording = recorded(PROGRAMS["a loop by hand"][0])
    (graph,) = recording.of(TensorGraphEvent)
    (program,) = recording.of(TensorProgramEvent)
    loss = by_name(graph)["loss"]

    assert (graph.passes, program.passes, program.until) == (15, 15, "end")
    assert loss.value is not None
    assert loss.last is not None
    assert float(loss.value.text) > float(loss.last.text)
    assert len(recording.steps) == 14


def test_hooks_have_what_they_did(recorded):
    """Each hook of the program has its place in the order, what it was given, and what it returned."""
    (graph,) = recorded(PROGRAMS["hooks of every kind"][0]).of(TensorGraphEvent)
    called = [hook for hook in graph.hooks if hook.times]
    called.sort(key=lambda hook: hook.firings[0].order)

    assert [(graph.nodes[hook.node].variable, hook.kind) for hook in called] == [
        ("h", "tensor"),
        ("h", "tensor"),
        ("h", "node-pre"),
        ("h", "node-post"),
        ("w", "tensor"),
        ("w", "post-accumulate"),
    ]
    assert [hook.firings[0].did for hook in called] == [
        "nothing",
        "returned",
        "returned",
        "nothing",
        "changed",
        "changed",
    ]
    assert [hook.kind for hook in graph.hooks if not hook.times] == ["retain-grad"]
    clamped, doubled = called[1].firings[0], called[2].firings[0]
    assert text(clamped.given) == "[1, 1, 1, 1]"
    assert text(clamped.result) == text(doubled.given) == "[0.5, 0.5, 0.5, 0.5]"
    assert text(doubled.result) == "[1, 1, 1, 1]"


def test_a_hook_that_raises_is_named(recorded):
    """The hook in which a pass ended has raised, and those behind it were not called."""
    first, _ = recorded(PROGRAMS["a hook that raises"][0]).of(TensorGraphEvent)

    assert (first.passes, first.failed) == (1, 1)
    assert [(hook.name, [each.did for each in hook.firings]) for hook in first.hooks] == [
        ("lambda", ["returned"]),
        ("bad", ["raised"]),
        ("lambda", []),
    ]


def test_a_removed_hook_is_said_to_be(recorded):
    """A hook that the program removes has its calls until then."""
    recording = recorded(
        "w = torch.ones(2, requires_grad=True)\n"
        "handle = w.register_hook(lambda g: g * 2)\n"
        "for i in range(4):\n"
        "    (w * 2).sum().backward()\n"
        "    if i == 1:\n"
        "        handle.remove()\n"
        "bits(w.grad)\n"
    )
    (graph,) = recording.of(TensorGraphEvent)
    (hook,) = graph.hooks

    assert (hook.times, hook.removed, graph.passes) == (2, True, 4)


def test_the_first_value_that_is_not_finite_is_named(kedge, script):
    """The last lines of the run say where a NaN was born."""
    done = kedge("run", script(HEAD + PROGRAMS["a NaN"][0]))

    (said,) = [line for line in done.stderr.splitlines() if "not finite" in line]
    assert said.startswith("[kedge] not finite: y, sqrt at train.py:")


@pytest.mark.parametrize(
    "source",
    [
        "f = torch.jit.trace(lambda a: (a * 2).sum(), (torch.ones(2),))\nprint(f(torch.ones(2)))\n",
        "with torch.profiler.profile() as p:\n"
        "    torch.ones(2).sum()\n"
        "print(sorted((each.key, each.count) for each in p.key_averages()))\n",
        "a, b = torch.ones(2), torch.zeros(3)\ntorch.utils.swap_tensors(a, b)\nbits(a, b)\n",
    ],
)
def test_programs_that_modes_would_change_are_left_alone(kedge, script, tmp_path, source):
    """A program with traces, a profiler or swapped tensors prints what it prints without Kedge, and is told for which line."""
    name = script(HEAD + source)
    plain = forked.run([sys.executable, name], cwd=tmp_path, forks=True)
    done = kedge("run", "-o", "it.kedge", name, fresh=True)

    assert (done.stdout, done.returncode) == (plain.stdout, 0)
    assert "do not work under a mode, and it has one at train.py:" in done.stderr
    assert not (tmp_path / "it.kedge").exists()


@pytest.mark.parametrize("seen", ["", "import sys; sys.setprofile(lambda *_: None)\n"])
def test_a_long_program_is_left_alone(recorded, seen):
    """After some thousand operations the mode is off, under a profiler of Python's once that is, and the losses are recorded all the same."""
    recording = recorded(
        f"{seen}w = torch.tensor(5.0, requires_grad=True)\n"
        "for _ in range(1500):\n"
        "    loss = (w - 1) ** 2\n"
        "    loss.backward()\n"
        "    with torch.no_grad():\n"
        "        w -= 0.01 * w.grad\n"
        "        w.grad = None\n"
        "import sys; sys.setprofile(None)\n"
        "bits(w)\n"
        "print(torch._C._len_torch_dispatch_stack())\n"
    )
    (program,) = recording.of(TensorProgramEvent)

    assert program.until == "limit"
    assert program.passes < 1500
    assert recording.end is not None
    assert recording.end.steps == 1499


def test_a_module_ends_it_and_keeps_its_names(recorded):
    """When a module is called the mode is off, and the model has the names that it has without it."""
    recording = recorded(
        "w = torch.ones(2, requires_grad=True)\n"
        "for _ in range(3):\n"
        "    (w * 2).sum().backward()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(3, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "print(torch._C._len_torch_dispatch_stack())\n"
        "bits(*model.parameters())\n"
    )
    (program,) = recording.of(TensorProgramEvent)
    paths = {site.site for site in recording.sites}

    assert (program.until, program.passes) == ("module", 3)
    assert {":out", "weight:param.grad"} <= paths


FIRST_CALLS = {
    "a compiled function": """
@torch.compile(backend=lambda graph, _: graph)
def call(a):
    return a.sin().sum()
call(x)
""",
    "an operation of a class of tensors": """
class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        layer(torch.ones(2))
        return torch.ones(2)
Wrapped(torch.ones(2)) * 2
""",
    "a mode": """
from torch.utils._python_dispatch import TorchDispatchMode
class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        layer(torch.ones(2))
        return func(*args, **(kwargs or {}))
with Calls():
    torch.ones(2) * 2
""",
    "a hook in backward": """
def hook(grad):
    with torch.no_grad():
        layer(grad)
product = x * 2
product.register_hook(hook)
product.sum().backward()
""",
}


def test_a_graph_that_is_too_large_is_told(kedge, script):
    """Nothing is said to be no operation, and the report has what was seen."""
    name = script(
        HEAD + "x = torch.ones(1, requires_grad=True)\n"
        "y = x\n"
        "for _ in range(400):\n"
        "    y = y * 1.001\n"
        "y.backward()\n"
    )
    done = kedge("run", "-o", "it.kedge", name)
    report = kedge("report", "it.kedge")
    told = "401 operations, 1 backward pass; 1 pass not recorded, as too large or too different"

    assert told in done.stderr
    assert told in " ".join(report.stdout.split())


def test_operators_that_change_their_arguments_count_their_versions(kedge, script):
    """A program that registers one is left alone, and is told so."""
    name = script(
        HEAD + "@torch.library.custom_op('own::more', mutates_args={'x'})\n"
        "def more(x: torch.Tensor) -> None:\n"
        "    x.add_(1)\n"
        "x = torch.ones(2)\n"
        "more(x)\n"
        "print(x._version)\n"
    )
    done = kedge("run", name)
    assert done.stdout == "2\n"
    assert "train.py:9: @torch.library.custom_op('own::more', mutates_args={'x'})" in done.stderr


@pytest.mark.parametrize("where", FIRST_CALLS)
def test_the_first_module_is_called_where_pytorch_puts_its_keys_back(recorded, where):
    """No mode is missed by PyTorch afterwards, and none is left when a module is called by the program itself."""
    recorded(
        "x = torch.ones(2, requires_grad=True)\n"
        "layer = torch.nn.Linear(2, 2)\n"
        f"{FIRST_CALLS[where]}"
        "x = x * 2\n"
        "x.sum().backward()\n"
        "layer(torch.ones(2)).sum().backward()\n"
        "key = torch._C.DispatchKey.Python\n"
        "print(torch._C._len_torch_dispatch_stack())\n"
        "print(torch._C._dispatch_tls_is_dispatch_key_included(key))\n"
        "bits(layer.weight.grad)\n"
    )


def test_the_report_lists_what_the_page_of_the_docs_shows(kedge, script):
    """The report of the program in docs/how-to/tensors.md is the one there."""
    page = (Path(__file__).parents[2] / "docs/how-to/tensors.md").read_text(encoding="utf-8")
    source = page.partition("```python\n")[2].partition("```")[0]
    shown = page.partition("```text\n")[2].partition("```")[0]
    kedge("run", "-o", "it.kedge", script(source, "listing.py"))
    done = kedge("report", "it.kedge", env={**os.environ, "COLUMNS": "140"})

    assert shown.strip() in "\n".join(line.rstrip() for line in done.stdout.splitlines())
