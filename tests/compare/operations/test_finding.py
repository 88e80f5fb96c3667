"""One thing is changed in a forward or a loss: it is the operation that is named, with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kedge.compare.comparison import Parting
from kedge.compare.operations.finding import OperationFinding, finding_of
from kedge.compare.operations.seen import SeenOperation
from kedge.repro.step.operations_seen import OperationsSeen

Code = Callable[[Tensor], Any]


class Net(nn.Module):
    """Two layers with code between them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self.first(x)))


@contextmanager
def seeing(net: nn.Module) -> Iterator[list[SeenOperation]]:
    """See the operations of a block; the list is filled at its end."""
    failures: list[str] = []
    operations = OperationsSeen(failures.append)
    names = {id(module): name for name, module in net.named_modules()}
    found: list[SeenOperation] = []
    operations.begin()
    try:
        yield found
    finally:
        operations.end()
    found += operations.seen(lambda module: names.get(id(module), ""))
    assert not failures


def step_of(code: Code, loss: Code, given: Code) -> list[SeenOperation]:
    """Run one step of a net, and see it."""
    torch.manual_seed(0)
    net = Net(code)
    x = torch.randn(8, 8)
    with seeing(net) as found:
        loss(net(given(x))).backward()
    return found


def same(x: Tensor) -> Tensor:
    """Change nothing."""
    return x


def mean(x: Tensor) -> Tensor:
    """Return a loss."""
    return x.mean()


def difference(
    a: Code = same,
    b: Code = same,
    *,
    kind: str = "in",
    path: str = "last",
    losses: tuple[Code, Code] = (mean, mean),
    given: tuple[Code, Code] = (same, same),
) -> OperationFinding:
    """Compare one step of two nets, which first differ at a site."""
    site = SimpleNamespace(path=path)
    text = f"{path}:{kind}"
    parting = SimpleNamespace(same=SimpleNamespace(kind=kind, a=site, b=site, text=text))
    steps = [step_of(*parts) for parts in zip((a, b), losses, given, strict=True)]
    return finding_of(cast("Parting", parting), *steps)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        pytest.param(
            lambda h: F.gelu(h),
            lambda h: F.gelu(h, approximate="tanh"),
            "gelu at {here} gets other arguments: approximate is not given in A, 'tanh' in B",
            id="gelu",
        ),
        pytest.param(
            lambda h: F.dropout(h, 0.1),
            lambda h: F.dropout(h, 0.2),
            "dropout at {here} gets other arguments: p is 0.1 in A, 0.2 in B",
            id="dropout",
        ),
        pytest.param(
            lambda h: F.layer_norm(h, (8,)),
            lambda h: F.layer_norm(h, (8,), eps=1e-3),
            "layer_norm at {here} gets other arguments: eps is 1e-05 in A, 0.001 in B",
            id="eps",
        ),
        pytest.param(
            lambda h: (h @ h.T * 0.25).softmax(-1) @ h,
            lambda h: (h @ h.T).softmax(-1) @ h,
            "only A computes mul at {here}",
            id="scale forgotten",
        ),
        pytest.param(
            lambda h: h.view(8, 2, 4).flatten(1),
            lambda h: h.view(8, 2, 4).transpose(1, 2).reshape(8, 8),
            "only B computes transpose at {here}",
            id="transposed",
        ),
        pytest.param(
            lambda h: torch.tanh(h),
            lambda h: torch.sigmoid(h),
            "A computes tanh at {here} where B computes sigmoid at {here}",
            id="another function",
        ),
        pytest.param(
            lambda h: F.softmax(h, dim=-1),
            lambda h: F.softmax(h, dim=0),
            "softmax at {here} gets other arguments: dim is -1 in A, 0 in B",
            id="dim",
        ),
        pytest.param(
            lambda h: h.masked_fill(torch.ones(8, 8).triu(1).bool(), 0.0),
            lambda h: h.masked_fill(torch.ones(8, 8).triu(2).bool(), 0.0),
            "triu at {here} gets other arguments: argument 1 is 1 in A, 2 in B",
            id="mask",
        ),
        pytest.param(
            lambda h: F.scaled_dot_product_attention(h, h, h, torch.ones(8, 8).tril().bool()),
            lambda h: F.scaled_dot_product_attention(h, h, h, torch.ones(8, 8).tril()),
            "only A computes bool at {here}",
            id="dtype of a mask",
        ),
    ],
)
def test_the_operation_between_two_modules(a: Code, b: Code, said: str) -> None:
    """Its name, its line, and the arguments that differ."""
    found = difference(a, b)

    shown = found.headline
    for each in (*found.a, *found.b):
        shown = shown.replace(f"at {each.place}", "at {here}")
    assert found.how == "operation"
    assert shown == said
    lines = {each.line for each in (*found.a, *found.b)}
    assert lines <= {code.__code__.co_firstlineno for code in (a, b)}


def test_a_loss_that_is_a_function() -> None:
    """What the backward pass begins at leads back to the loss."""
    y = torch.arange(8)
    losses = (
        lambda out: F.cross_entropy(out, y),
        lambda out: F.cross_entropy(out, y, label_smoothing=0.1),
    )
    found = difference(kind="loss", path="loss", losses=losses)

    assert found.arguments[0].name == "label_smoothing"
    assert found.a[0].text.endswith("F.cross_entropy(out, y),")


def test_the_same_line_with_another_argument() -> None:
    """What computes the argument is to be compared, not the line."""
    rates = iter([0.1, 0.2])
    code = lambda h: F.dropout(h, next(rates))
    found = difference(code, code)

    assert found.how == "argument"
    assert "its line is the same in both: compare what computes the argument" in found.evidence


def test_data_from_elsewhere_accuses_no_operation() -> None:
    """What no operation made came from outside."""
    torch.manual_seed(5)
    ready = [torch.randn(8, 8), torch.randn(8, 8)]
    found = difference(kind="in", path="", given=(lambda _: ready[0] + 0, lambda _: ready[1] + 0))

    assert found.how == "outside"
    assert found.headline == "none: what differs in :in was made by no operation"


def test_a_draw_more_before_a_dropout() -> None:
    """The dropout is not accused: the generator has moved on before it."""

    def drawing(h: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(h, 0.5)

    found = difference(lambda h: F.dropout(h, 0.5), drawing)

    assert found.how == "random"
    assert "one run draws more, or seeds again" in found.evidence
    assert f"rand at {found.b[0].file}:{drawing.__code__.co_firstlineno + 1} in B" in found.evidence


def test_a_metric_beside_it_is_not_accused() -> None:
    """An operation that differs, but does not lead to the value, is not named."""

    def with_metric(h: Tensor) -> Tensor:
        h.std(0)
        return F.gelu(h)

    found = difference(with_metric, lambda h: F.relu(h))

    assert (found.a[0].name, found.b[0].name) == ("gelu", "relu")


def test_another_of_the_values_is_passed_on() -> None:
    """Both runs have both values, and the next layer gets the other one."""

    def one(h: Tensor) -> Tensor:
        tanh, sine = h.tanh(), h.sin()
        return tanh if sine.requires_grad else sine

    def other(h: Tensor) -> Tensor:
        tanh, sine = h.tanh(), h.sin()
        return sine if tanh.requires_grad else tanh

    found = difference(one, other)

    assert found.how == "value"
    assert "is given other values: the result of tanh at" in found.headline
    assert "in A and the result of sin at" in found.headline


def test_an_operation_in_place_is_the_same() -> None:
    """Equal bits: nothing differs, neither by value nor in the graph."""
    found = difference(
        lambda h: F.relu(h), lambda h: h.relu_(), kind="param.grad", path="first.weight"
    )

    assert found.how == "backward"


@pytest.mark.parametrize("cut", [Tensor.detach, torch.no_grad()(Tensor.tanh)])
def test_equal_values_and_another_path_of_the_gradients(cut: Code) -> None:
    """Where a value leaves the autograd graph, its operation is named, and that it is inferred."""
    code = same if cut is Tensor.detach else torch.tanh
    found = difference(code, cut, kind="param.grad", path="first.weight")

    assert found.how == "graph"
    assert "AddmmBackward0 in A" in found.headline or "TanhBackward0 in A" in found.headline
    assert found.headline.endswith("no gradient in B")
    assert "inferred" in found.evidence


def test_a_module_that_was_not_called_is_not_seen() -> None:
    """Nothing is said of what was not seen."""
    assert difference(path="other").how == "not-seen"


def test_large_tensors_are_read_again_after_a_change() -> None:
    """The digest of a large tensor that is changed in place is another one."""
    big = torch.zeros(600, 600)

    def changed(h: Tensor) -> Tensor:
        big.add_(1)
        return h + big.mean()

    net = Net(changed)
    with seeing(net) as found:
        net(torch.randn(8, 8))
    digests = [each.outputs[0].digest for each in found if each.name == "add_"]
    assert digests[0] != next(each.inputs[0].digest for each in found if each.name == "add_")
