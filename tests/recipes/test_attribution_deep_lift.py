"""DeepLIFT: attributions that add up to the last digits, the same however a model is written, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kedge.errors import AttributionError
from kedge.recipes.attribution.deep_lift import deep_lift
from kedge.testing import assert_same_bits, assert_unhooked
from tests.recipes.rewritten import FORMS, images, made


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 6] to [n, 3]."""
        return self.after(self.function(self.before(x)))


class Both(nn.Module):
    """The model that the tests of captum begin with: two inputs, and a ReLU for each."""

    def __init__(self) -> None:
        super().__init__()
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Add the two."""
        return 2 * self.relu1(x1) + 2 * self.relu2(x2 - 1.5)


def whole(output: Tensor) -> Tensor:
    """Explain all of an output."""
    return output


def rise(model: nn.Module, x: Tensor, baseline: Tensor, target: int) -> Tensor:
    """Return what attributions add up to."""
    with torch.no_grad():
        return (model(x) - model(baseline.expand_as(x)))[:, target]


def test_two_inputs_share_the_rise() -> None:
    """The numbers of captum's own test."""
    x1, x2 = torch.tensor([[-10.0, 1.0, -5.0]]), torch.tensor([[3.0, 3.0, 1.0]])
    found = deep_lift(Both(), whole, wrt=[":in[x1]", ":in[x2]"])(x1, x2)

    assert found[":in[x1]"].tolist() == [[0.0, 2.0, 0.0]]
    assert found[":in[x2]"].tolist() == [[3.0, 3.0, 0.0]]


def test_the_rescale_rule_is_that_of_the_paper() -> None:
    """On one hidden layer, against the rule written with matrices."""
    model = Between(torch.relu).double()
    x, base = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = deep_lift(model, 1, baseline=base)(x)

    with torch.no_grad():
        inner, inner_base = model.before(x), model.before(base)
        slope = (inner.relu() - inner_base.relu()) / (inner - inner_base)
        expected = (slope * model.after.weight[1]) @ model.before.weight * (x - base)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "hidden in a list"])
def test_each_form_of_a_model_gives_the_same(form: str) -> None:
    """Functions, modules called several times, in place or in a checkpoint, with a residual and a pool."""
    model, x = made(form), images()
    before = x.clone()
    base = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(2))
    found = deep_lift(model, 2, baseline=base)(x)

    assert_same_bits(found, deep_lift(made("modules"), 2, baseline=base)(x))
    total = found.flatten(1).sum(1)
    torch.testing.assert_close(total, rise(model, x, base, 2), atol=1e-5, rtol=1e-5)
    assert_same_bits(x, before)
    assert_unhooked(model)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "celu": F.celu,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "elu": F.elu,
    "exp": torch.exp,
    "gelu": F.gelu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "prelu": nn.PReLU(),
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": F.silu,
    "softplus": nn.Softplus(),
    "square": torch.square,
    "tanh": torch.tanh,
    "a weight as a factor": lambda x: nn.Parameter(torch.arange(8.0, dtype=x.dtype)) * x.tanh(),
    "a reciprocal": lambda x: (x.square() + 1).reciprocal(),
    "a power": lambda x: x**3,
    "twice": lambda x: torch.tanh(x) + F.relu(x, inplace=True),
    "in place on a view": lambda x: F.relu(x.view(-1, 2, 4), inplace=True).view(-1, 8),
    "one after another": lambda x: torch.tanh(torch.relu(x) - 0.1),
    "a maximum of windows": lambda x: F.max_pool1d(torch.tanh(x)[:, None], 3, 1, 1)[:, 0],
    "the largest": lambda x: F.adaptive_max_pool2d(x.view(-1, 2, 2, 2), 1).flatten(1).repeat(1, 4),
    "windows in space": lambda x: F.max_pool3d(x.view(-1, 1, 2, 2, 2), 2, 1, 1)[:, 0, 0].flatten(1)[:, :8],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_attributions_add_up(name: str) -> None:
    """Sample by sample, to the last digits, with one baseline for each."""
    model = Between(FUNCTIONS[name]).double()
    x, base = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    found = deep_lift(model, 1, baseline=base)(x)

    torch.testing.assert_close(found.sum(1), rise(model, x, base, 1))
    alone = deep_lift(model, 1, baseline=base[2:3])(x[2:3])
    torch.testing.assert_close(found[2:3], alone)


def test_a_softmax_shares_its_result_for_each_sample_alone() -> None:
    """Multipliers of its classes have the mean zero; a batch changes nothing."""
    model = Between(torch.tanh)
    network = nn.Sequential(model, nn.Softmax(-1))
    x = torch.randn(4, 6)
    found = deep_lift(network, 1, wrt="0", baseline=0.25)(x)
    multipliers = found / (model(x) - 0.25)

    torch.testing.assert_close(multipliers.sum(1), torch.zeros(4), atol=1e-6, rtol=0)
    for i in range(4):
        alone = deep_lift(network, 1, baseline=0.25)(x[i : i + 1])
        torch.testing.assert_close(deep_lift(network, 1, baseline=0.25)(x)[i : i + 1], alone)


def test_several_targets_and_places() -> None:
    """A list of targets adds a dimension; a layer is compared with a value of its own."""
    model, x = made("F.relu"), images()
    both = deep_lift(model, [0, 3])(x)
    assert both.shape == (2, *x.shape)
    assert_same_bits(both[1], deep_lift(model, 3)(x))

    at_layer = deep_lift(model, 3, wrt="fc1", baseline=0.0)(x)
    assert at_layer.shape == (4, 16)
    best = deep_lift(model)(x)
    classes = model(x).argmax(1)
    assert_same_bits(best, deep_lift(model, classes)(x))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a mask": (lambda x: x * (x > 0), "depends on the input without a gradient"),
    "a choice": (lambda x: torch.where(x > 0, x, 0.0), "depends on the input without a gradient"),
    "a filled mask": (lambda x: x.masked_fill(x < 0, 0), "without a gradient"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "without a gradient"),
    "a product": (lambda x: x * torch.sigmoid(x), "two of its arguments"),
    "a quotient": (F.softsign, "division by a value that depends on the input"),
    "a division": (lambda x: torch.ones(8) / (x + 9), "division by a value that depends"),
    "a factor with its own gradient": (
        lambda x: x * (nn.Parameter(torch.ones(8)) * x.detach()),
        "without a gradient",
    ),
    "a norm": (lambda x: F.layer_norm(x, (8,)), "no rule for NativeLayerNorm"),
    "a maximum": (lambda x: torch.maximum(x, x * 2), "no rule for Maximum"),
    "a logarithm": (lambda x: F.log_softmax(x, 1), "no rule for LogSoftmax"),
    "rounding": (lambda x: x + x.detach().round(), "add up to"),
    "another batch": (lambda x: x[None].tanh()[0], "cannot follow an operation"),
    "mixed samples": (lambda x: (x - x.mean(0)).tanh(), "add up to"),
    "statistics": (lambda x: F.batch_norm(x, None, None, training=True), "statistics of the batch"),
    "a part in place": (lambda x: torch.cat([x[:, :4].relu_(), x[:, 4:]], 1), "has no rule|follow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused(name: str) -> None:
    """Where captum takes the plain gradient without a word."""
    function, message = REFUSED[name]
    with pytest.raises(AttributionError, match=message):
        deep_lift(Between(function), 1, baseline=0.3)(torch.randn(4, 6))


def test_a_hidden_module_is_refused() -> None:
    """Its operations belong to a module that is not hooked."""
    with pytest.raises(AttributionError, match="such as one in a plain list"):
        deep_lift(made("hidden in a list"), 1)(images())
    with pytest.raises(AttributionError, match="baseline is a number or a tensor"):
        deep_lift(made("modules"), 1, baseline="black")


class Pooling(nn.Module):
    """A network that captum can explain: each nonlinearity a module, used once, none behind another."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16, 8), act(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Map images to five scores."""
        return self.layers(x)


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
@pytest.mark.parametrize(
    "act",
    [nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus],
    ids=lambda a: a.__name__,
)
def test_captum_gives_the_same_bits(act: type[nn.Module]) -> None:
    """On a network that it supports, where it is installed."""
    captum = pytest.importorskip("captum.attr")
    model, x = Pooling(act).eval(), images()
    base = torch.randn_like(x) / 10
    theirs = captum.DeepLift(model).attribute(x.clone().requires_grad_(), baselines=base, target=2)
    assert_same_bits(deep_lift(model, 2, baseline=base)(x), theirs.detach())

    many = torch.randn(3, 3, 8, 8) / 10
    mean = torch.stack([deep_lift(model, 2, baseline=one)(x) for one in many]).mean(0)
    shap = captum.DeepLiftShap(model).attribute(
        x.clone().requires_grad_(), baselines=many, target=2
    )
    torch.testing.assert_close(mean, shap.detach())
