"""`kedge.examine`: each fault is found by the trial that is made for it, and a sound model has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import WrongCall
from kedge.examination.result import NAMES, Grid, Rates

CLASSES = 3
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


class Net(nn.Module):
    """A sound classifier of rows, whose forward a test may replace."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, CLASSES)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        """Classify rows."""
        if self.own is not None:
            return self.own(self, x)
        return self.head(self.drop(self.norm(self.first(x)).relu()))


def rows(count: int = 8) -> Tensor:
    """Return rows of features."""
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


def loss(output: Tensor) -> Tensor:
    """Return the cross entropy of the output and the labels."""
    return F.cross_entropy(output, LABELS)


def examined(model: nn.Module, inputs: Any = None, **options: Any) -> Any:
    """Examine a model with the loss of this file and an optimizer of its own."""
    options.setdefault("loss", loss)
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    if inputs is None:
        inputs = rows()
    return kedge.examine(model, inputs, **options)


def verdicts(found: Any, trial: str) -> set[str]:
    """Return the verdicts of one trial."""
    return {result.verdict for result in found.of(trial)}


def said(found: Any, trial: str, verdict: str) -> str:
    """Return what a trial said with a verdict."""
    return " ".join(
        f"{each.came} {each.means}" for each in found.of(trial) if each.verdict == verdict
    )


def test_a_sound_model_has_nothing_wrong() -> None:
    """Every trial is made, and none finds anything."""
    found = examined(Net())

    assert {result.verdict for result in found.results} == {"ok"}, str(found)
    assert {result.trial for result in found.results} == {*NAMES} - {
        "positions",
        "padding",
        "functions",
    }
    assert str(found).splitlines()[-1] == "Net: nothing wrong in 13 trials"


def test_nothing_is_changed() -> None:
    """Weights, statistics, gradients, modes, the optimizer and the random state are as before."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss(model(rows())).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    numbers = torch.get_rng_state()
    model.norm.eval()

    examined(model, optimizer=optimizer)

    assert torch.equal(torch.get_rng_state(), numbers)
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, gradient)
    after = optimizer.state_dict()
    assert after["param_groups"] == before[1]["param_groups"]
    for index, state in after["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[1]["state"][index][name])


def _mixing(net: Net, x: Tensor) -> Tensor:
    hidden = net.first(x).relu()
    return net.head(hidden.t().reshape(len(x), -1))


def _softmax_over_batch(net: Net, x: Tensor) -> Tensor:
    return net.head(net.first(x).softmax(dim=0))


@pytest.mark.parametrize("forward", [_mixing, _softmax_over_batch])
def test_samples_that_mix_are_found_with_the_place(forward: Any) -> None:
    """Which dimension counts the samples is not known without a loader, so it is something to look at."""
    found = examined(Net(forward))

    told = said(found, "samples", "look")
    assert (
        "of 7 other samples changed too, first in the code that leads to the input of head" in told
    )
    (result,) = found.of("samples")
    assert result.where.startswith("tests/examination/test_examine.py:")
    assert isinstance(result.figure, Grid)
    assert result.figure.rows[0][0]


def test_statistics_of_the_batch_mix_no_samples() -> None:
    """In evaluation mode a batch norm uses its running statistics."""
    assert verdicts(examined(Net()), "samples") == {"ok"}


def test_a_model_that_ignores_its_data_is_wrong() -> None:
    """Its output is the same for any input."""
    found = examined(Net(lambda net, x: net.head(torch.ones(len(x), 16))))

    assert verdicts(found, "data-used") == {"wrong"}
    assert "does not look at its data" in said(found, "data-used", "wrong")


def test_of_an_output_of_nan_nothing_is_said_about_data() -> None:
    """It stays NaN whatever the data are, which says nothing of them."""
    found = examined(Net(lambda net, x: net.head(net.first(x)) * float("nan")))

    (result,) = found.of("data-used")
    assert (result.verdict, result.came) == ("untried", "no element of the output is finite")


def test_features_that_are_cut_off_are_named() -> None:
    """Nothing depends on them, by gradient and by change."""

    def forward(net: Net, x: Tensor) -> Tensor:
        kept = torch.cat([x[:, :2], torch.zeros(len(x), 3), x[:, 5:]], dim=1)
        return net.head(net.first(kept).relu())

    told = said(examined(Net(forward)), "data-used", "look")

    assert "nothing depends on 3 features of `x`: 2..4" in told


def test_layers_without_an_activation_between_are_named() -> None:
    """One of them, or a square, is no straight line through several."""
    layers = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, CLASSES))
    assert "in a straight line, through 2 layers" in said(examined(layers), "data-used", "look")

    for sound in (
        nn.Linear(6, CLASSES),
        Net(),
        Net(lambda net, x: net.head(net.first(x).square())),
    ):
        assert verdicts(examined(sound), "data-used") == {"ok"}


class Masked(nn.Module):
    """A model of tokens that may look at its mask."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.head = nn.Linear(16, CLASSES)
        self.looks = looks

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Classify the mean of the tokens."""
        embedded = self.embed(tokens)
        if self.looks:
            embedded = embedded * mask[..., None]
        return self.head(embedded.mean(dim=1))


@pytest.mark.parametrize("looks", [True, False])
def test_a_mask_that_is_ignored_is_named(looks: bool) -> None:
    """The output is the same when everything is masked."""
    tokens = torch.arange(40).reshape(8, 5) % 20

    found = examined(Masked(looks=looks), {"tokens": tokens, "mask": torch.ones(8, 5)})

    assert ("when any of these is zero: mask" in said(found, "data-used", "look")) is not looks


class Language(nn.Module):
    """A model of sequences, with or without a causal mask."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 30)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of each position."""
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask))


@pytest.mark.parametrize(
    ("causal", "shifted", "verdict", "text"),
    [
        (True, True, "ok", "15 on earlier and 0 on later ones"),
        (False, True, "wrong", "can read its answer"),
        (True, False, "wrong", "only has to copy"),
    ],
)
def test_a_language_model_that_reads_its_answer_is_wrong(
    causal: bool, shifted: bool, verdict: str, text: str
) -> None:
    """That takes targets that are the next inputs, or the inputs themselves."""
    text_ids = torch.randint(0, 30, (4, 21), generator=torch.Generator().manual_seed(3))
    inputs, targets = text_ids[:, :-1], text_ids[:, int(shifted) : 20 + int(shifted)]

    found = examined(
        Language(causal=causal),
        inputs,
        loss=lambda output: F.cross_entropy(output.flatten(0, 1), targets.flatten()),
    )

    assert verdicts(found, "positions") == {verdict}
    assert text in said(found, "positions", verdict)


PADDED = torch.tensor(
    [[3, 4, 5, 6, 7, 8], [5, 7, 9, 11, 0, 0], [6, 8, 3, 0, 0, 0], [9, 4, 6, 5, 8, 0]] * 2
)
HIDDEN = PADDED == 0


class Texts(nn.Module):
    """A model of texts that are filled up with zeros, and a mask that is true there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 16, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.rows = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.way = way

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Classify texts, or their words."""
        x = self.embed(tokens)
        lengths = (~hidden).sum(dim=1)
        if self.way == "last":
            return self.head(self.rows(x)[0][:, -1])
        if self.way == "state":
            return self.head(self.rows(x)[0][torch.arange(len(x)), lengths - 1])
        if self.way == "sum":
            return self.head(x.sum(dim=1) / lengths[:, None])
        if self.way == "mean":
            return self.head(self.block(x, src_key_padding_mask=hidden).mean(dim=1))
        mask = {"masked": hidden, "reversed": ~hidden, "unmasked": None}[self.way]
        return self.head(self.block(x, src_key_padding_mask=mask))


@pytest.mark.parametrize(
    ("way", "content", "amount"),
    [
        ("masked", "ok", "ok"),
        ("state", "ok", "ok"),
        ("sum", "look", "ok"),
        ("mean", "look", "look"),
        ("last", "look", "look"),
        ("unmasked", "look", "look"),
        ("reversed", "wrong", "look"),
    ],
)
def test_what_depends_on_padding_is_told(way: str, content: str, amount: str) -> None:
    """Only a mask that hides what is real, and shows the padding, is certain to be wrong.

    A row of zeros may be added up on purpose, since it adds nothing.
    """

    def loss_of(output: Tensor) -> Tensor:
        return output.square().mean()

    found = examined(Texts(way), {"tokens": PADDED, "hidden": HIDDEN}, loss=loss_of)

    of_content, of_amount = found.of("padding")
    assert (of_content.verdict, of_amount.verdict) == (content, amount), str(found)
    assert "`hidden` says what is padding of `tokens`" in of_content.came
    assert "without 3 of 6 positions of `tokens`" in of_amount.came
    if amount == "look":
        assert "padding_idx of embed only keeps that row from being trained" in of_amount.means
    if content == "wrong":
        assert "the mask is the wrong way round" in of_content.means


def test_tokens_are_not_changed_where_nothing_tells_what_is_padding() -> None:
    """Since the model may know padding by its number alone."""

    class Own(Texts):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            """Find the padding."""
            return super().forward(tokens, tokens == 0)

    found = examined(Own("masked"), PADDED, loss=lambda output: output.square().mean())

    (of_amount,) = found.of("padding")
    assert of_amount.verdict == "ok"


def test_features_that_end_in_zeros_are_padded() -> None:
    """And a model that takes the state after them is told."""
    x = torch.randn(8, 6, 16).masked_fill(HIDDEN[..., None], 0)
    rows_of = nn.GRU(16, 16, batch_first=True)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = rows_of

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            """Return the state after the last position, whether it is real or not."""
            return self.rows(x)[0][:, -1] * lengths[:, None]

    lengths = (~HIDDEN).sum(dim=1)
    found = examined(Rows(), (x, lengths), loss=lambda output: output.square().mean())

    of_content, of_amount = found.of("padding")
    assert (of_content.verdict, of_amount.verdict) == ("look", "look")
    assert "`lengths` says what is padding of `x`" in of_content.came


@pytest.mark.parametrize("ignored", [0, -100])
def test_targets_that_are_padding_and_count_are_named(ignored: int) -> None:
    """Unless the loss ignores them."""
    model = Language(causal=True)

    found = examined(
        model,
        PADDED[:, :-1],
        loss=lambda output: F.cross_entropy(
            output.flatten(0, 1), PADDED[:, 1:].flatten(), ignore_index=ignored
        ),
    )

    told = said(found, "padding", "look")
    assert ("ignore_index=0" in told) is (ignored != 0)
    if ignored:
        assert "30.0 % of the targets are 0, with which `tokens` is filled up" in told


def test_numbers_of_one_length_are_not_padded() -> None:
    """A number that ends every row, such as an end of text, is none."""
    ended = PADDED.clone()
    ended[:, -1] = 1
    ended[ended == 0] = 2

    found = examined(Language(causal=True), ended, loss=lambda output: output.square().mean())

    assert found.of("padding") == ()


def test_an_encoder_may_see_later_positions() -> None:
    """Its targets are not its inputs."""
    inputs = torch.randint(0, 30, (4, 20), generator=torch.Generator().manual_seed(3))
    targets = torch.randint(0, 30, (4, 20), generator=torch.Generator().manual_seed(4))

    found = examined(
        Language(causal=False),
        inputs,
        loss=lambda output: F.cross_entropy(output.flatten(0, 1), targets.flatten()),
    )

    assert verdicts(found, "positions") == {"ok"}


def test_a_graph_that_is_cut_is_found_with_the_module_before_it() -> None:
    """The module is called, and what it returns is taken out of the graph."""
    found = examined(Net(lambda net, x: net.head(net.first(x).detach().relu())))

    told = said(found, "parameters", "wrong")
    assert "first.weight, first.bias; the graph ends behind first" in told
    assert "norm.weight, norm.bias" in said(found, "parameters", "look")


def test_an_optimizer_of_a_replaced_head_is_wrong() -> None:
    """It holds the old head, and not the new one."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = nn.Linear(16, CLASSES)

    found = examined(model, optimizer=optimizer)

    told = said(found, "optimizer", "wrong")
    assert "2 parameters that the loss depends on are in no optimizer: head" in told
    assert "2 tensors that no model has any more" in told


def test_layers_in_a_list_are_wrong() -> None:
    """`model.parameters()` does not have them."""
    hidden = [nn.Linear(6, 16)]

    found = examined(Net(lambda net, x: net.head(hidden[0](x).relu())))

    assert "plain list or dict" in said(found, "optimizer", "wrong")


def test_a_frozen_layer_that_keeps_statistics_is_named() -> None:
    """Its weights are frozen, and its mean and variance follow each batch."""
    model = Net()
    model.norm.requires_grad_(requires_grad=False)

    told = said(examined(model), "parameters", "look")

    assert "1 frozen layer updates running statistics: norm" in told


class WrongBackward(torch.autograd.Function):
    """A square whose backward forgets the 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return half of the gradient."""
        (x,) = ctx.saved_tensors
        return grad * x


class RightBackward(WrongBackward):
    """A square."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient."""
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Rounding(torch.autograd.Function):
    """A quantizer with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round."""
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass the gradient on."""
        return grad


@pytest.mark.parametrize(
    ("function", "verdict"),
    [(WrongBackward, "wrong"), (RightBackward, "ok"), (Rounding, "look")],
)
def test_a_backward_is_compared_with_finite_differences(function: Any, verdict: str) -> None:
    """A quantizer's gradient is meant not to agree."""
    found = examined(Net(lambda net, x: net.head(function.apply(net.first(x)))))

    assert verdicts(found, "functions") == {verdict}
    assert function.apply(torch.ones(1)) == 1


def test_a_start_that_is_sure_of_wrong_answers_is_named() -> None:
    """The last layer's weights are too large."""
    model = Net()
    with torch.no_grad():
        model.head.weight *= 100

    assert "sure of wrong answers" in said(examined(model), "loss-at-start", "look")


def test_a_reversed_sign_is_wrong() -> None:
    """The loss is minus the cross entropy."""
    found = examined(Net(), loss=lambda output: -loss(output))

    assert "which is minus nll_loss" in said(found, "loss-at-start", "wrong")


def test_a_model_that_is_to_forget_is_no_reversed_sign() -> None:
    """It knows the answers already, as no fresh one does."""
    model = Net(lambda net, x: net.head(net.first(x).relu()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(rows())).backward()
        optimizer.step()

    found = examined(model, loss=lambda output: -loss(output))

    assert verdicts(found, "loss-at-start") == {"look"}
    assert "may be meant to forget" in said(found, "loss-at-start", "look")


def test_a_softmax_before_cross_entropy_is_wrong() -> None:
    """The loss has one itself."""
    found = examined(Net(lambda net, x: net.head(net.first(x).relu()).softmax(dim=-1)))

    assert "softmax made the logits" in said(found, "logits", "wrong")


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (lambda logits: F.nll_loss(logits, LABELS), "wrong"),
        (lambda logits: F.nll_loss(logits.softmax(dim=-1), LABELS), "wrong"),
        (lambda logits: F.nll_loss(logits.log_softmax(dim=-1), LABELS), "ok"),
        (lambda logits: F.nll_loss(logits.log_softmax(dim=0), LABELS), "wrong"),
        (lambda logits: F.nll_loss(logits.bfloat16().log_softmax(dim=-1), LABELS), "ok"),
        (lambda logits: F.nll_loss(logits.bfloat16().log_softmax(dim=0), LABELS), "wrong"),
        (lambda logits: F.nll_loss((logits * float("nan")).log_softmax(dim=-1), LABELS), "ok"),
        (lambda logits: F.cross_entropy(logits.relu(), LABELS), "wrong"),
        (lambda logits: F.cross_entropy(logits[:, None].flatten(1), LABELS), "ok"),
        (lambda logits: F.binary_cross_entropy(logits.sigmoid(), torch.ones(8, 3)), None),
    ],
)
def test_a_loss_is_given_what_it_takes(end: Any, verdict: str | None) -> None:
    """Logits, or logarithms of probabilities; through views."""
    found = verdicts(examined(Net(), loss=end), "logits")

    assert found == ({verdict} if verdict else set())


SHARES = F.one_hot(LABELS, CLASSES).float()


@pytest.mark.parametrize(
    ("end", "verdict", "text"),
    [
        (lambda out: F.mse_loss(out.sigmoid(), 16 * SHARES), "wrong", "33.3 % of the targets"),
        (lambda out: F.mse_loss(out.tanh(), 1.01 * SHARES), None, ""),
        (lambda out: F.mse_loss(out.relu(), SHARES), None, ""),
        (lambda out: F.mse_loss(out.relu(), -SHARES), "wrong", "relu returns numbers from 0 to"),
        (lambda out: F.mse_loss(out, 16 * SHARES), None, ""),
        (lambda out: F.cross_entropy(out, SHARES), None, ""),
        (lambda out: F.cross_entropy(out, 0.9 * SHARES + 0.1 / 3), None, ""),
        (lambda out: F.cross_entropy(out, 1 - SHARES), "look", "they add up to 2.00..2.00"),
        (lambda out: F.kl_div(out.log_softmax(-1), SHARES, reduction="batchmean"), None, ""),
        (
            lambda out: F.kl_div(out.softmax(-1), SHARES, reduction="batchmean"),
            "wrong",
            "was given probabilities",
        ),
    ],
)
def test_a_loss_of_numbers_or_probabilities_is_given_what_it_takes(
    end: Any, verdict: str | None, text: str
) -> None:
    """Targets within reach of the last operation, probabilities that add up to one, logarithms."""
    found = examined(Net(), loss=end)

    worst = {"wrong", "look"} & verdicts(found, "logits")
    assert worst == ({verdict} if verdict else set())
    if verdict:
        assert text in said(found, "logits", verdict)


def test_a_softmax_of_one_value_is_wrong() -> None:
    """The loss is zero whatever the model says."""
    model = nn.Sequential(nn.Linear(6, 1))
    targets = torch.zeros(8, dtype=torch.long)

    for asked in (targets, torch.ones(8, 1)):
        found = examined(model, loss=lambda output, asked=asked: F.cross_entropy(output, asked))
        assert "a softmax over one value" in said(found, "loss-at-start", "wrong")


def test_layers_that_can_do_nothing_in_training_are_named() -> None:
    """A dropout of everything, and a batch norm of one sample."""
    model = Net(lambda net, x: net.head(net.drop(net.first(x))))
    model.drop.p = 1.0
    assert "everything is dropped in drop" in said(examined(model), "modes", "wrong")

    convolutions = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
    )
    found = examined(
        convolutions, torch.randn(1, 1, 4, 4), loss=lambda out: F.cross_entropy(out, LABELS[:1])
    )
    assert "1 batch norm normalized by a batch of one sample: 1" in said(found, "modes", "look")
    assert not said(examined(Net()), "modes", "look")


def test_targets_that_are_not_scaled_are_named() -> None:
    """Beside predictions near zero."""
    targets = 150 + 70 * torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(6))

    found = examined(Net(), loss=lambda output: F.mse_loss(output, targets))

    assert "Bring targets and predictions to one scale" in said(found, "loss-at-start", "look")


def test_steps_that_are_rounded_away_are_named() -> None:
    """Weights of 16 bits have too few digits for small steps."""
    model = nn.Linear(6, CLASSES).bfloat16()

    for rate, is_named in ((1e-6, True), (0.3, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        found = examined(model, rows().bfloat16(), optimizer=optimizer)
        told = said(found, "one-batch", "look")
        assert ("did not change in the first step" in told) is is_named, told


def test_dropout_that_stays_on_is_found() -> None:
    """The output differs in `eval()`, and the place is named."""
    found = examined(Net(lambda net, x: net.head(F.dropout(net.first(x), 0.5))))

    told = said(found, "repeated", "look")
    assert (
        "the outputs differ, first in the code that leads to the input of head, after first" in told
    )


def test_a_model_that_is_trained_in_eval_is_named() -> None:
    """No layer drops, and no statistics follow."""
    assert "model.train() is missing" in said(examined(Net().eval()), "modes", "look")


def test_a_batch_that_is_not_scaled_or_finite_is_named() -> None:
    """Inputs beyond the usual, NaN, and targets that are all the same."""
    assert "standard deviation" in said(examined(Net(), rows() * 1e3), "batch", "look")
    broken = rows()
    broken[2, 3] = torch.nan
    assert "1 element of 48 that are not finite" in said(examined(Net(), broken), "batch", "wrong")
    same = torch.zeros(8, dtype=torch.long)
    found = examined(Net(), loss=lambda output: F.cross_entropy(output, same))
    assert "all 8 targets are 0" in said(found, "batch", "look")


def _table(count: int = 32) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(2))


def _examined_table(table: Tensor) -> Any:
    targets = torch.arange(len(table)) % CLASSES
    return examined(Net(), table, loss=lambda output: F.cross_entropy(output, targets))


def test_features_that_are_the_same_in_all_samples_are_named() -> None:
    """A zero as well, unless zeros are usual in the table."""
    table = _table()
    table[:, 1], table[:, 2], table[:, 5] = 0.0, 0.0, 3.0
    told = said(_examined_table(table), "batch", "look")
    assert "3 features of `x` are the same in all 32 samples: 1..2, 5, which hold 0, 3.00" in told

    table = _table().relu()
    table[:, 1] = 0.0
    assert verdicts(_examined_table(table), "batch") == {"ok"}
    assert verdicts(_examined_table(_table()), "batch") == {"ok"}


@pytest.mark.parametrize(("factor", "size"), [(4000.0, "3"), (1e-5, "7")])
def test_a_feature_of_another_scale_is_named(factor: float, size: str) -> None:
    """Also where the mean over all features is as usual."""
    table = _table()
    table[:, 4] *= factor

    told = said(_examined_table(table), "batch", "look")

    assert "1 feature of `x` of another scale than the others" in told
    assert f": 4, of {size}" in told  # times the usual magnitude of that column


def test_predictions_paired_with_all_targets_are_wrong() -> None:
    """A column beside a row is spread over a square."""
    targets = torch.randn(8, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    found = examined(model, loss=lambda output: (output - targets).square().mean())

    assert "(8, 8)" in said(found, "batch", "wrong")


@pytest.mark.parametrize(
    ("rate", "verdict", "text"),
    [
        (0.1, "ok", "at the rate 0.100"),
        (1e-5, "look", "it is too small"),
        (1e-8, "look", "it is too small"),
        (1e4, "look", "the rate is too large"),
        (0.0, "look", "The rate is zero"),
    ],
)
def test_one_batch_is_learned_or_not(rate: float, verdict: str, text: str) -> None:
    """The rate is judged beside a hundredth to a hundred times of it."""
    model = Net()

    found = examined(model, optimizer=torch.optim.SGD(model.parameters(), lr=rate))

    assert verdicts(found, "one-batch") == {verdict}
    (result,) = found.of("one-batch")
    assert text.lower() in f"{result.came} {result.means}".lower()
    assert isinstance(result.figure, Rates)
    assert {0.01, 0.1, 1.0, 10.0, 100.0} <= {*result.figure.curves}


def test_what_a_step_keeps_is_counted_and_the_largest_batch_inferred() -> None:
    """Each linear layer keeps its input: 8 rows of 1000 numbers of four bytes; the loss keeps more."""
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(3)])
    inputs = torch.randn(8, 1000)

    found = examined(model, inputs, loss=lambda output: output.square().mean())

    kept, plans, limit = found.of("memory")
    assert kept.numbers == {"bytes": 3 * 8 * 4000, "bytes_outside": 8 * 4000}
    assert "96 kB for 8 samples, most in 0 32 kB" in kept.came
    assert kept.where == ""
    assert plans.numbers["bytes_moved"] == 96_000  # each is below what is worth moving
    numbers = limit.numbers
    assert numbers["bytes_per_sample"] == 16_000
    left = numbers["bytes_free"] - 3 * 4_000_000
    assert numbers["first_too_large"] == left // 16_000 + 1
    assert "would not fit, and hold most in 0" in limit.came


def test_the_blocks_whose_recomputation_leaves_least_are_named() -> None:
    """With a selector that kedge.offload takes, and what it keeps."""
    block = [nn.Linear(200, 4000), nn.ReLU(), nn.Linear(4000, 200)]
    model = nn.Sequential(
        nn.Sequential(*[nn.Sequential(*copy.deepcopy(block)) for _ in range(3)]), nn.Linear(200, 3)
    )
    inputs = torch.randn(8, 200)

    _, plans, _ = examined(model, inputs).of("memory")

    assert 'with recompute="0.*"' in plans.came
    with kedge.offload(model, recompute="0.*") as account:
        model(inputs)
    assert account.step.resident <= plans.numbers["bytes_recomputed"]
    assert plans.numbers["bytes_of_largest_block"] == 8 * 4000 * 4


def test_a_batch_whose_bytes_are_on_no_line_is_not_inferred() -> None:
    """Such as that of a model that compares each sample with each."""

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.head(hidden + (hidden @ hidden.t()).tanh().mean())

    found = examined(Net(forward))

    assert "are on no line" in said(found, "memory", "untried")


def test_a_step_is_timed_in_its_parts() -> None:
    """The whole is no less than each; an optimizer that computes the loss itself is not timed."""
    (result,) = examined(Net()).of("time")

    numbers = result.numbers
    assert {*numbers} == {"step", "forward", "backward", "optimizer", "samples_per_second"}
    assert 0 < numbers["forward"] < numbers["step"]
    assert result.came.startswith(f"{1000 * numbers['step']:.3g}"[:3])

    model = Net()
    found = examined(model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert "computes the loss itself" in said(found, "time", "untried")


def test_without_a_loss_the_rest_is_tried() -> None:
    """What needs a loss or an optimizer is said to be untried."""
    model = Net()
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1)):
        found = kedge.examine(model, rows(), optimizer=optimizer)

        assert verdicts(found, "samples") == {"ok"}
        assert verdicts(found, "parameters") == {"untried"}
        assert verdicts(found, "optimizer") == {"untried"}
        assert found.verdict == "ok"


def test_a_model_that_raises_costs_its_trials_alone() -> None:
    """Trials whose inputs it does not take are untried, with the error."""

    def forward(net: Net, x: Tensor) -> Tensor:
        if not net.training:
            message = "not in eval"
            raise RuntimeError(message)
        return net.head(net.first(x).relu())

    found = examined(Net(forward))

    assert verdicts(found, "samples") == {"untried"}
    assert "RuntimeError: not in eval" in said(found, "samples", "untried")
    assert verdicts(found, "one-batch") == {"ok"}


def test_trials_can_be_left_out() -> None:
    """By name; an unknown name is refused with those that there are."""
    found = examined(Net(), skip=("precision", "one-batch"))

    assert not found.of("precision")
    assert not found.of("one-batch")
    with pytest.raises(WrongCall, match="the trials are loss-at-start, "):
        examined(Net(), skip=("speed",))


def test_what_is_no_model_or_no_loss_is_refused() -> None:
    """With what was found instead."""
    with pytest.raises(WrongCall, match="takes a torch.nn.Module"):
        kedge.examine(rows(), rows())  # type: ignore[arg-type]
    with pytest.raises(WrongCall, match="loss is a function"):
        kedge.examine(Net(), rows(), loss=rows())  # type: ignore[arg-type]
    with pytest.raises(WrongCall, match="a tensor of one real number"):
        kedge.examine(Net(), rows(), loss=lambda output: output)
    with pytest.raises(WrongCall, match="or a list of them"):
        kedge.examine(Net(), rows(), optimizer="adam")  # type: ignore[arg-type]


class HalfOfASquare(WrongBackward):
    """Another name for a square whose backward forgets the 2."""


def test_a_wrong_backward_is_told_where_half_of_the_slopes_are_zero() -> None:
    """As behind a ReLU: where both the slope and the gradient are zero, they agree."""
    found = examined(Net(lambda net, x: net.head(HalfOfASquare.apply(net.first(x).relu()))))

    assert verdicts(found, "functions") == {"wrong"}


def test_a_module_that_was_frozen_by_an_attribute_is_wrong() -> None:
    """PyTorch does not read it."""
    model = Net()
    model.first.requires_grad = False  # type: ignore[assignment]
    assert "was set on the module first" in said(examined(model), "parameters", "wrong")

    model = Net()
    model.first.requires_grad_(requires_grad=False)
    assert not said(examined(model), "parameters", "wrong")


class Reversing(WrongBackward):
    """The identity, whose gradient is reversed, as against a domain's adversary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Reverse the gradient."""
        return -0.5 * grad


class DynamicRounding(WrongBackward):
    """A quantizer whose scale depends on all elements, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round to 127 steps."""
        scale = x.abs().max() / 127
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass the gradient on."""
        return grad


@pytest.mark.parametrize("function", [Reversing, DynamicRounding])
def test_a_gradient_that_is_meant_to_differ_is_not_called_wrong(function: Any) -> None:
    """One that is reversed, and one that passes a step."""
    found = examined(Net(lambda net, x: net.head(function.apply(net.first(x)))))

    assert verdicts(found, "functions") == {"look"}


def test_a_last_layer_of_zeros_is_no_fault() -> None:
    """Its output is the same for any input, as long as it is zero."""
    model = Net()
    nn.init.zeros_(model.head.weight)

    told = said(examined(model), "data-used", "look")

    assert "As long as these weights are zero, it has to: head.weight" in told


def test_large_constants_hide_no_dependence() -> None:
    """Such as the -1e9 of a mask in the logits, or a large bias."""

    def forward(net: Net, x: Tensor) -> Tensor:
        logits = net.head(net.first(x).relu())
        return logits.masked_fill(torch.tensor([False, False, True]), -1e9)

    targets = torch.tensor([0, 1] * 4)
    found = examined(Net(forward), loss=lambda output: F.cross_entropy(output, targets))

    assert verdicts(found, "data-used") == {"ok"}
    assert verdicts(found, "samples") == {"ok"}


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_model_that_counts_its_calls_is_not_accused(is_attribute: bool) -> None:
    """A counter in an attribute is put back; with one elsewhere the output differs from run to run."""
    calls: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        if is_attribute:
            net.calls = getattr(net, "calls", 0) + 1
            return net.head(net.first(x).relu()) * int(net.calls)
        calls.append(x)
        return net.head(net.first(x)) * (1 + len(calls))

    model = Net(forward)
    found = examined(model)

    verdict = "ok" if is_attribute else "untried"
    assert verdicts(found, "samples") == {verdict}
    assert verdicts(found, "data-used") == {verdict}
    assert "wrong" not in {result.verdict for result in found.results}
    assert not hasattr(model, "calls")


class Merging(nn.Module):
    """Merges a factor into its weight in evaluation, and freezes its first layer with each mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, CLASSES)
        self.more = nn.Parameter(torch.ones(CLASSES, 16))
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        """Set the mode, freeze and merge."""
        super().train(mode)
        self.first.requires_grad_(False)
        if not mode and not self.is_merged:
            self.second.weight.data += self.more.data
        self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Classify rows."""
        hidden = self.first(x).relu()
        if self.is_merged:
            return self.second(hidden)
        return self.second(hidden) + hidden @ self.more.T


def test_a_train_of_the_models_own_leaves_no_trace() -> None:
    """What it does to parameters as a trial calls `eval()` is undone, so all of them are trained still."""
    model = Merging()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    found = examined(model)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.requires_grad for param in model.parameters())
    assert "it depends on all 5 parameters" in said(found, "parameters", "ok")


def test_a_cache_of_a_model_is_as_before() -> None:
    """A list, a tensor that is written to, and one that is replaced."""

    def forward(net: Net, x: Tensor) -> Tensor:
        net.seen.append(x)
        net.sums += x.sum(0)
        net.last = x.detach()
        return net.head(net.first(x).relu())

    model = Net(forward)
    model.seen, model.sums, model.last = [], torch.zeros(6), None

    examined(model)

    assert (model.seen, model.last) == ([], None)
    assert torch.equal(model.sums, torch.zeros(6))


def test_masks_of_infinities_are_no_bad_data() -> None:
    """A causal mask is handed over as the tutorials do."""
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    model = Net()
    model.own = lambda net, x: net.head(net.first(x))

    found = examined(_WithMask(model), (rows(), mask))

    assert verdicts(found, "batch") == {"ok"}


class _WithMask(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mix samples as the mask lets them."""
        return self.inner(mask.softmax(dim=-1) @ x)


def test_tensors_beside_the_model_are_put_back() -> None:
    """The optimizer trains a temperature as well, whose value and gradient stay."""
    model, temperature = Net(), nn.Parameter(torch.ones(()))
    temperature.grad = torch.full((), 0.25)
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    examined(model, optimizer=optimizer, loss=lambda output: loss(output / temperature))

    assert (temperature.item(), temperature.grad.item()) == (1.0, 0.25)


def test_a_warm_up_from_zero_is_no_fault() -> None:
    """The rate is that of the schedule."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)

    found = examined(model, optimizer=optimizer)

    assert "at the rate 0.100" in said(found, "one-batch", "ok")
    assert optimizer.param_groups[0]["lr"] == 0
