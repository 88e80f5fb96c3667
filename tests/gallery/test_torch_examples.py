"""Hook examples of PyTorch's documentation and tutorials, and of common idioms, beside the same with Kedge.

Each pair is two functions of one case, re-stated briefly, that return equal numbers. Their lines
are counted here, for the table in docs/how-to/from-torch-hooks.md.
"""

from __future__ import annotations

import inspect
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

import kedge

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/from-torch-hooks.md"
TABLE = "<!-- counted by tests/gallery/test_torch_examples.py -->\n\n"


class Convs(nn.Module):
    """The network of the nn package tutorial, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool1, self.conv2 = nn.Conv2d(1, 3, 5), nn.MaxPool2d(2), nn.Conv2d(3, 4, 5)
        self.pool2, self.fc1, self.fc2 = nn.MaxPool2d(2), nn.Linear(64, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.conv1(x)))
        x = self.pool2(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Case(NamedTuple):
    """What both functions of a pair are given: a model with an input and a target, and an empty folder."""

    model: Any
    x: Tensor
    target: Tensor
    folder: Path

    def loss(self) -> Tensor:
        """Call the model, and return its loss."""
        return F.cross_entropy(self.model(self.x), self.target)


def convs(folder: Path) -> Case:
    """Make a case of images."""
    return Case(
        Convs(), torch.randn(2, 1, 28, 28, requires_grad=True), torch.tensor([3, 7]), folder
    )


def layers(folder: Path) -> Case:
    """Make a case of a deep network of linear layers and sigmoids."""
    parts = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.Sigmoid())]
    return Case(
        nn.Sequential(*parts, nn.Linear(6, 4)),
        torch.randn(8, 6, requires_grad=True),
        torch.arange(8) % 4,
        folder,
    )


def linear(folder: Path) -> Case:
    """Make a case of one linear layer."""
    return Case(
        nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]), folder
    )


def _norms_torch(case: Case) -> list[Any]:
    seen = []

    def print_norm(module, inputs, output):
        seen.append((type(module).__name__, inputs[0].size(), output.size(), output.norm()))

    handle = case.model.conv2.register_forward_hook(print_norm)
    case.model(case.x)
    handle.remove()
    return seen


def _norms_kedge(case: Case) -> list[Any]:
    seen = []

    def print_norm(value, event):
        seen.append((type(event.module).__name__, event.args[0].size(), value.size(), value.norm()))

    with kedge.hook(case.model, "conv2", print_norm):
        case.model(case.x)
    return seen


def _gradient_norms_torch(case: Case) -> list[Any]:
    seen = []

    def print_gradient_norm(module, grad_input, grad_output):
        seen.extend([grad_output[0].norm(), grad_input[0].norm()])

    handle = case.model.conv2.register_full_backward_hook(print_gradient_norm)
    case.loss().backward()
    handle.remove()
    return seen


def _gradient_norms_kedge(case: Case) -> list[Any]:
    seen = []
    with kedge.hook(
        case.model, "conv2:out.grad, conv2:in.share", lambda grad: seen.append(grad.norm())
    ):
        case.loss().backward()
    return seen


def _forward_edits_torch(case: Case) -> Any:
    def add_one(module, inputs):
        return inputs[0] + 1

    def add_input(module, inputs, output):
        return output + inputs[0]

    before = case.model.register_forward_pre_hook(add_one)
    behind = case.model.register_forward_hook(add_input)
    out = case.model(case.x)
    before.remove()
    behind.remove()
    return out


def _forward_edits_kedge(case: Case) -> Any:
    with kedge.session() as s:
        s.hook(case.model, ":in", kedge.add(1))
        s.hook(case.model, ":out", lambda value, event: value + event.args[0])
        return case.model(case.x)


def _backward_edit_torch(case: Case) -> Any:
    def always_42(module, grad_inputs, grad_outputs):
        return [torch.ones_like(grad) * 42 for grad in grad_inputs]

    handle = case.model.register_full_backward_hook(always_42)
    case.model(case.x).sum().backward()
    handle.remove()
    return case.x.grad


def _backward_edit_kedge(case: Case) -> Any:
    with kedge.hook(case.model, ":in.share", kedge.replace(42.0)):
        case.model(case.x).sum().backward()
    return case.x.grad


def _gradient_flow_torch(case: Case) -> Any:
    grads, handles = [], []

    def hook_backward(name):
        def hook(grad):
            grads.append((name, grad))

        return hook

    def hook_forward(name):
        def hook(module, args, output):
            output.register_hook(hook_backward(name))

        return hook

    for name, layer in case.model.named_modules():
        if not any(layer.children()):
            handles.append(layer.register_forward_hook(hook_forward(name)))
    case.loss().backward()
    for handle in handles:
        handle.remove()
    return {name: grad.abs().mean() for name, grad in grads}


def _gradient_flow_kedge(case: Case) -> Any:
    with kedge.hook(case.model, "*:out.grad", kedge.record()) as grads:
        case.loss().backward()
    return {name: grads[f"{name}:out.grad"].abs().mean() for name, _ in case.model.named_children()}


def _disk_torch(case: Case) -> Any:
    class SelfDeletingFile:
        def __init__(self):
            self.name = case.folder / str(uuid.uuid4())

        def __del__(self):
            self.name.unlink()

    def pack(tensor):
        if tensor.numel() < 40:
            return tensor
        file = SelfDeletingFile()
        torch.save(tensor, file.name)
        return file

    def unpack(packed):
        return packed if isinstance(packed, Tensor) else torch.load(packed.name, weights_only=False)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = case.loss()
    loss.backward()
    return [p.grad for p in case.model.parameters()]


def _disk_kedge(case: Case) -> Any:
    with kedge.offload(case.model, to=kedge.Disk(case.folder)):
        loss = case.loss()
    loss.backward()
    return [p.grad for p in case.model.parameters()]


def _packed_torch(case: Case) -> Any:
    class Packed(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
                return self.module(*args, **kwargs)

    case.model[2] = Packed(case.model[2])
    case.loss().backward()
    case.model[2] = case.model[2].module
    return [p.grad for p in case.model.parameters()]


def _packed_kedge(case: Case) -> Any:
    with kedge.hook(case.model, "2:saved", kedge.packed(lambda t: t.half(), lambda t: t.float())):
        case.loss().backward()
    return [p.grad for p in case.model.parameters()]


def _order_torch(case: Case) -> Any:
    seen = []
    out = case.model(case.x)
    handles = [
        out.register_hook(lambda grad: grad * 2),
        out.grad_fn.register_prehook(lambda grads: seen.append(grads[0])),
        out.register_hook(lambda grad: seen.append(grad)),
    ]
    out.retain_grad()
    out.sum().backward()
    for handle in handles:
        handle.remove()
    return [*seen, out.grad, case.x.grad]


def _order_kedge(case: Case) -> Any:
    with kedge.session() as s:
        out = case.model(case.x)
        seen = s.hook({"out": out}, kedge.scale(2), kedge.record())
        node = s.hook(out.grad_fn, ":pre", kedge.record(keep=None))
        out.sum().backward()
    name = out.grad_fn.name()
    return [seen["out"], node[f"{name}:pre[0]"], seen["out"], case.x.grad]


def _step_in_backward_torch(case: Case) -> Any:
    optimizers = {p: torch.optim.Adam([p]) for p in case.model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in case.model.parameters()]
    case.loss().backward()
    for handle in handles:
        handle.remove()
    return [p.detach().clone() for p in case.model.parameters()]


def _step_in_backward_kedge(case: Case) -> Any:
    optimizers = {name: torch.optim.Adam([p]) for name, p in case.model.named_parameters()}

    def step(grad, event):
        optimizers[event.site.path].step()
        optimizers[event.site.path].zero_grad()

    with kedge.hook(case.model, "**:param.acc", step):
        case.loss().backward()
    return [p.detach().clone() for p in case.model.parameters()]


def _activations_torch(case: Case) -> Any:
    activations = {}

    def keep(name):
        def hook(module, args, output):
            activations[name] = output.detach().clone()

        return hook

    handles = [
        case.model.get_submodule(name).register_forward_hook(keep(name))
        for name in ("pool1", "fc1")
    ]
    case.model(case.x)
    for handle in handles:
        handle.remove()
    return activations


def _activations_kedge(case: Case) -> Any:
    with kedge.hook(case.model, "pool1, fc1", kedge.record()) as activations:
        case.model(case.x)
    return {name: activations[name] for name in ("pool1", "fc1")}


def _cam_torch(case: Case) -> Any:
    kept = {}

    def keep(module, args, output):
        kept["value"] = output.detach()
        output.register_hook(lambda grad: kept.update(grad=grad))

    handle = case.model.conv2.register_forward_hook(keep)
    case.model(case.x)[0, 3].backward()
    handle.remove()
    weights = kept["grad"].mean((2, 3), keepdim=True)
    return F.relu((weights * kept["value"]).sum(1))


def _cam_kedge(case: Case) -> Any:
    with kedge.hook(case.model, "conv2, conv2:out.grad", kedge.record()) as kept:
        case.model(case.x)[0, 3].backward()
    weights = kept["conv2:out.grad"].mean((2, 3), keepdim=True)
    return F.relu((weights * kept["conv2:out"]).sum(1))


def _shapes_torch(case: Case) -> Any:
    shapes, names = {}, {module: name for name, module in case.model.named_modules()}

    def note(module, args, output):
        if isinstance(module, nn.Conv2d):
            shapes[names[module]] = tuple(output.shape)

    handle = modules.register_module_forward_hook(note)
    case.model(case.x)
    handle.remove()
    return shapes


def _shapes_kedge(case: Case) -> Any:
    shapes = {}

    def note(value, event):
        shapes[event.site.path.removeprefix("Convs.")] = tuple(value.shape)

    with kedge.hook(kedge.everywhere, "**{Conv2d}", note):
        case.model(case.x)
    return shapes


def _first_nan_torch(case: Case) -> Any:
    def check(name):
        def hook(module, args, output):
            if not torch.isfinite(output).all():
                raise RuntimeError(name)

        return hook

    handles = [m.register_forward_hook(check(name)) for name, m in case.model.named_modules()]
    try:
        case.model(case.x / 0)
    except RuntimeError as error:
        return str(error)
    finally:
        for handle in handles:
            handle.remove()


def _first_nan_kedge(case: Case) -> Any:
    try:
        with kedge.hook(case.model, "**", kedge.error_if(kedge.nonfinite)):
            case.model(case.x / 0)
    except kedge.errors.ConditionMet as error:
        return str(error).partition(":out")[0].rpartition(" ")[2]


def _several_gradients_torch(case: Case) -> Any:
    found = []
    weights = list(case.model.parameters())
    handle = torch.autograd.graph.register_multi_grad_hook(weights, found.extend)
    case.loss().backward()
    handle.remove()
    return found


def _several_gradients_kedge(case: Case) -> Any:
    weights = dict(case.model.named_parameters())
    with kedge.hook(weights, kedge.record()) as found:
        case.loss().backward()
    return [found[name] for name in weights]


_NN = "https://docs.pytorch.org/tutorials/beginner/former_torchies/nnft_tutorial.html"
_MODULES = "https://docs.pytorch.org/docs/stable/notes/modules.html#module-hooks"
_FLOW = "https://docs.pytorch.org/tutorials/intermediate/visualizing_gradients_tutorial.html"
_SAVED = (
    "https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html"
)
_ORDER = "https://docs.pytorch.org/docs/stable/notes/autograd.html#backward-hooks-execution"
_STEP = "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"
_MULTI = "https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.register_multi_grad_hook"


class Example(NamedTuple):
    """One pair.

    Attributes:
        what: What it does.
        source: The address of the original; empty for a common idiom.
        make: Makes the case.
        torch: The example with PyTorch's hooks.
        kedge: The same with Kedge.
    """

    what: str
    source: str
    make: Callable[[Path], Case]
    torch: Callable[[Case], Any]
    kedge: Callable[[Case], Any]


EXAMPLES = [
    Example("sizes and norm of a layer's input and output", _NN, convs, _norms_torch, _norms_kedge),
    Example(
        "norms of a layer's gradients", _NN, convs, _gradient_norms_torch, _gradient_norms_kedge
    ),
    Example(
        "edit the input and the output",
        _MODULES,
        linear,
        _forward_edits_torch,
        _forward_edits_kedge,
    ),
    Example(
        "replace the gradient of the input",
        _MODULES,
        linear,
        _backward_edit_torch,
        _backward_edit_kedge,
    ),
    Example(
        "mean gradient of every layer's output",
        _FLOW,
        layers,
        _gradient_flow_torch,
        _gradient_flow_kedge,
    ),
    Example("saved tensors to the disk", _SAVED, layers, _disk_torch, _disk_kedge),
    Example("saved tensors of one layer packed", _SAVED, layers, _packed_torch, _packed_kedge),
    Example(
        "a tensor's hooks, its node's, and `retain_grad`",
        _ORDER,
        linear,
        _order_torch,
        _order_kedge,
    ),
    Example(
        "the optimizer steps inside the backward",
        _STEP,
        layers,
        _step_in_backward_torch,
        _step_in_backward_kedge,
    ),
    Example(
        "several gradients together",
        _MULTI,
        layers,
        _several_gradients_torch,
        _several_gradients_kedge,
    ),
    Example("activations of two layers by name", "", convs, _activations_torch, _activations_kedge),
    Example("Grad-CAM", "", convs, _cam_torch, _cam_kedge),
    Example(
        "output shapes of all convolutions, by a global hook",
        "",
        convs,
        _shapes_torch,
        _shapes_kedge,
    ),
    Example("the first layer with a NaN", "", layers, _first_nan_torch, _first_nan_kedge),
]


def lines_of(function: Callable[..., Any]) -> int:
    """Count the lines of a function's body that hold code."""
    body = textwrap.dedent(inspect.getsource(function)).splitlines()[1:]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in body)


def table() -> str:
    """Return the table of the page."""
    rows = ["| example | with PyTorch's hooks | with Kedge |", "|---|---|---|"]
    for example in EXAMPLES:
        name = f"[{example.what}]({example.source})" if example.source else example.what
        rows.append(f"| {name} | {lines_of(example.torch)} lines | {lines_of(example.kedge)} |")
    counts = [
        sum(lines_of(each) for each in side)
        for side in zip(*(e[3:] for e in EXAMPLES), strict=True)
    ]
    return "\n".join([*rows, f"| all | {counts[0]} lines | {counts[1]} |", ""])


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, tensors to the last bit."""
    if isinstance(ours, dict):
        return set(ours) == set(theirs) and all(_same(ours[name], theirs[name]) for name in ours)
    if type(ours) in (list, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize(
    "example",
    EXAMPLES,
    ids=lambda example: example.kedge.__name__.strip("_").removesuffix("_kedge"),
)
def test_an_example_of_pytorch_gives_the_same_numbers(
    example: Example, tmp_path: Path, tables: Callable[..., Any]
) -> None:
    """With Kedge as with PyTorch's own hooks, to the last bit; and no hook stays behind, however it was written."""
    found = []
    for run in (example.torch, example.kedge):
        torch.manual_seed(0)
        case = example.make(tmp_path)
        before = tables(case.model)
        found.append(run(case))
        assert tables(case.model) == before
    assert _same(*found)


def test_the_lines_on_the_page_are_counted() -> None:
    """The table of the page is the one that these functions make."""
    text = PAGE.read_text(encoding="utf-8")

    assert text.partition(TABLE)[2].partition("\n\n")[0] + "\n" == table()


def test_kedge_needs_no_more_lines_than_pytorch() -> None:
    """In any of the examples, and about half as many in all."""
    assert [e.what for e in EXAMPLES if lines_of(e.kedge) > lines_of(e.torch)] == []
    assert (
        2 * sum(lines_of(e.kedge) for e in EXAMPLES)
        <= sum(lines_of(e.torch) for e in EXAMPLES) + 10
    )
