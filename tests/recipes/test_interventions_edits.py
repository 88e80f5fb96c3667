"""Ablation and steering: small actions with a handle that leaves nothing behind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import AttributionError, InterventionError, InTrainingMode
from kedge.recipes.attribution.attribution import saliency
from kedge.recipes.interventions.ablation import Ablation, ablate, means, resample
from kedge.recipes.interventions.steering import Steering, contrast, steer
from kedge.testing import assert_hooks_restored, assert_same_bits, assert_unhooked


def model() -> nn.Sequential:
    """A small net over the last dimension."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def tokens(n: int = 5, length: int = 6) -> Tensor:
    """Make a batch of sequences."""
    return torch.randn(n, length, 3, generator=torch.Generator().manual_seed(n + length))


def test_a_part_is_replaced_by_nothing_until_the_block_ends() -> None:
    """Zeros, another number, a tensor or an action in its place; afterwards the model is what it was."""
    net, x = model(), tokens()
    plain, opposite, row = net(x), net[2](-net[:2](x)), torch.arange(4.0)
    with assert_hooks_restored(net):
        with ablate(net, "1"):
            assert_same_bits(net(x), net[2](torch.zeros(5, 6, 4)))
        with ablate(net, "1", 2):
            assert_same_bits(net(x), net[2](torch.full((5, 6, 4), 2.0)))
        with ablate(net, "1", row):
            assert_same_bits(net(x), net[2](row.expand(5, 6, 4).clone()))
        with ablate(net, "1", torch.neg):
            assert_same_bits(net(x), opposite)
        handle = ablate(net, "1", kedge.zero())
        net(x)
        handle.remove()
        assert_same_bits(net(x), plain)


@pytest.mark.parametrize(
    ("positions", "changed"),
    [
        (-1, [5]),
        ([0, 2], [0, 2]),
        (slice(1, 3), [1, 2]),
        (torch.tensor([True, False, False, False, False, True]), [0, 5]),
        (range(2), [0, 1]),
        (torch.tensor([1, -1]), [1, 5]),
        ([False, True, False, False, False, True], [1, 5]),
        ([], []),
        (np.array([1, 3]), [1, 3]),
        (np.arange(6) % 2 == 1, [1, 3, 5]),
    ],
)
def test_only_the_positions_that_are_named_change(positions, changed) -> None:
    """Indices from either end, several, a slice or a mask, of numpy too; all others keep their bits."""
    net, x = model(), tokens()
    plain = net[:2](x)
    expected = plain.clone()
    expected[:, changed] = 0
    with ablate(net, "1", positions=positions), kedge.hook(net, "2:in", kedge.record()) as seen:
        net(x)
    assert_same_bits(seen["2:in"], expected)

    direction = torch.tensor([1.0, 0, 0, 2])
    with (
        steer(net, "1", direction, positions=positions),
        kedge.hook(net, "2:in", kedge.record()) as seen,
    ):
        net(x)
    expected = plain.clone()
    expected[:, changed] += direction
    assert_same_bits(seen["2:in"], expected)


def test_positions_may_differ_by_sample_or_lie_in_another_dimension() -> None:
    """A mask of samples and tokens; channels of the last dimension."""
    net, x = model(), tokens()
    chosen = torch.rand(5, 6) > 0.5
    with ablate(net, "1", positions=chosen), kedge.hook(net, "2:in", kedge.record()) as seen:
        net(x)
    assert_same_bits(seen["2:in"], net[:2](x).masked_fill(chosen[..., None], 0))

    with ablate(net, "1", positions=[3], dim=2), kedge.hook(net, "2:in", kedge.record()) as seen:
        net(x)
    assert_same_bits(seen["2:in"], torch.cat([net[:2](x)[..., :3], torch.zeros(5, 6, 1)], -1))


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (6, "at 1:out.*position"),
        ([0, -7], "at 1:out.*position"),
        (0.5, "at 1:out.*position"),
        (torch.ones(4, dtype=torch.bool), "at 1:out.*position"),
        (True, "indices, a slice or a mask"),
    ],
)
def test_positions_that_are_not_there_are_an_error(positions, said) -> None:
    """Nothing is wrapped or left out: the message names the site, and how many positions there are."""
    net = model()
    with pytest.raises(InterventionError, match=said), ablate(net, "1", positions=positions):
        net(tokens())
    assert_unhooked(net)


def test_means_over_a_reference_are_those_of_all_values_at_once() -> None:
    """Batch by batch in float64: by site and call, over samples, or over samples and positions of any number."""
    net, batches = model(), [tokens(5), tokens(3), tokens(1)]
    net.append(net[1])
    every = torch.cat([net[:2](x) for x in batches]).double()
    found = means(net, "1, 2", batches)
    torch.testing.assert_close(found["1#0"], every.mean(0, keepdim=True), rtol=1e-12, atol=0)
    assert found["1#0"].dtype == torch.float64
    with pytest.raises(InterventionError, match='"1" matches 2 means; there are 1#0:out, 1#1:out'):
        found["1"]
    assert found["2"].shape == (1, 6, 2)

    x = tokens(4)
    expected = net[1](net[2](found["1#0"].float().repeat(4, 1, 1)))
    with ablate(net, "1#0", found):
        assert_same_bits(net(x), expected)
    with (
        pytest.raises(InterventionError, match="does not broadcast.*over="),
        ablate(net, "1#0", found),
    ):
        net(tokens(2, 9))

    ragged = [tokens(2, 6), tokens(3, 9)]
    pooled = torch.cat([net[:1](x).flatten(0, 1) for x in ragged]).double()
    for over in ((0, 1), None):
        everywhere = means(net, "0", ragged, over=over)
        torch.testing.assert_close(
            everywhere["0"], pooled.mean(0).reshape(1, 1, 4), rtol=1e-12, atol=0
        )
    with pytest.raises(
        InterventionError, match=r"shape \[1, 6, 4\], then of \[1, 9, 4\].*over=\(0, 1\)"
    ):
        means(net, "0", ragged)
    assert_unhooked(net)


def test_learning_means_leaves_the_model_as_it_was() -> None:
    """No gradient is kept, and what training mode would gather is given back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    before, rng = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    with pytest.warns(
        InTrainingMode, match=r"BatchNorm1d 1, Dropout 2.* Call model\.eval\(\) first"
    ):
        found = means(net, "2", [torch.randn(8, 3, generator=torch.Generator().manual_seed(1))])

    assert not found["2"].requires_grad
    assert_same_bits(dict(net.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), rng)
    with pytest.raises(InterventionError, match="no floating-point value was seen"):
        means(net.eval(), "2", [])


def test_resampling_gives_each_sample_the_value_of_another() -> None:
    """No sample keeps its own, none is used twice, all sites take from the same, and every forward draws anew."""
    net, x = model(), tokens(7)
    plain = {name: net[: int(name) + 1](x) for name in "01"}
    before, orders = torch.get_rng_state(), []
    action = resample(seed=3)
    with kedge.session() as s:
        s.hook(net, "0", Ablation(action))
        mixed = s.hook(net, "0, 1", kedge.record())
        for _ in range(4):
            net(x)
            order = [int((plain["0"] == row).flatten(1).all(1).nonzero()) for row in mixed["0"]]
            assert sorted(order) == list(range(7))
            assert all(i != j for i, j in enumerate(order))
            assert_same_bits(mixed["1"], plain["1"][order])
            orders.append(tuple(order))
    assert len(set(orders)) > 1
    assert torch.equal(torch.get_rng_state(), before)

    with ablate(net, "0, 1", resample(seed=3)), kedge.hook(net, "0, 1", kedge.record()) as both:
        net(x)
    assert_same_bits(both["1"], plain["1"][list(orders[0])][list(orders[0])])

    with pytest.raises(InterventionError, match="here is one"), ablate(net, "0", resample()):
        net(tokens(1))


def test_edits_are_made_again_in_a_recompute() -> None:
    """In a checkpoint the gradient is that of the edited forward: resampling draws for a forward once."""
    net, x = model(), tokens()
    for edit in (resample(seed=1), means(net, "0", [x])):
        grads = []
        for run in (lambda: net(x), lambda: checkpoint(net, x, use_reentrant=False)):
            net.zero_grad()
            with ablate(
                net, "0", copy.deepcopy(edit), positions=[0, 1]
            ):  # each draws from the beginning
                run().square().sum().backward()
            grads.append({n: p.grad.clone() for n, p in net.named_parameters()})
        assert_same_bits(*grads)


def test_steering_adds_a_direction() -> None:
    """With a strength, brought to a length first, or with each position brought back to its own length."""
    net, x, direction = model(), tokens(), torch.tensor([3.0, 0, 4, 0])
    plain = net[:2](x)
    with steer(net, "1", direction, 0.5), kedge.hook(net, "2:in", kedge.record()) as seen:
        net(x)
    assert_same_bits(seen["2:in"], plain + 0.5 * direction)
    with steer(net, "1", direction, 2, norm=1.0), kedge.hook(net, "2:in", kedge.record()) as seen:
        net(x)
    torch.testing.assert_close(seen["2:in"], plain + direction * 0.4)

    with (
        kedge.hook(net, "1", Steering(direction, keep_norm=True)),
        kedge.hook(net, "2:in", kedge.record()) as seen,
    ):
        net(x)
    turned = seen["2:in"]
    torch.testing.assert_close(turned.norm(dim=-1), plain.norm(dim=-1))
    assert (turned @ direction > plain @ direction).all()
    assert_same_bits(net[2](plain), net(x))

    with (
        pytest.raises(InterventionError, match=r"float32\[3\] cannot be added.*\[5, 6, 4\]"),
        steer(net, "1", torch.ones(3)),
    ):
        net(x)
    with pytest.raises(InterventionError, match="length 0.0 cannot be scaled"):
        steer(net, "1", torch.zeros(4), norm=1.0)
    assert_unhooked(net)


def test_a_contrast_leads_from_one_set_to_the_other() -> None:
    """It is the difference of the means over samples and positions, and steering along it moves towards the first set."""
    net, a, b = model(), tokens(4) + 2, tokens(6, 9) - 2
    direction = contrast(net, "0", [a, a], [b])
    expected = net[0](a).double().mean((0, 1)) - net[0](b).double().mean((0, 1))
    torch.testing.assert_close(direction, expected, rtol=1e-12, atol=1e-12)
    with steer(net, "0", direction), kedge.hook(net, "1:in", kedge.record()) as seen:
        net(b)
    torch.testing.assert_close(seen["1:in"].double().mean((0, 1)), net[0](a).double().mean((0, 1)))
    with pytest.raises(InterventionError, match="matches 2 values; name one of 0#0:out, 1#0:out"):
        contrast(net, "[01]", [a], [b])


@pytest.mark.filterwarnings("ignore::kedge.errors.Recompiled")
def test_compiled_models_are_changed_alike(compiled) -> None:
    """Ablation and steering become part of the graph, or run beside it, with the bits of the eager model's."""
    net, x = model(), tokens()
    reference = means(net, "1", [x])
    edits = {
        "zeros": lambda m: ablate(m, "1", positions=[1, -1]),
        "means": lambda m: ablate(m, "1", reference),
        "others": lambda m: ablate(m, "1", resample(3)),
        "steered": lambda m: steer(m, "1", torch.ones(4), 2.0, positions=slice(2, None)),
    }
    for edit in edits.values():
        with edit(net):
            expected = net(x)
        fast = compiled(net, backend="aot_eager")
        with edit(fast):
            found = fast(x)
        assert_same_bits(found, expected)
        assert_same_bits(fast(x), net(x))


def test_attributions_see_what_is_put_in_place() -> None:
    """Around an attribution an intervention holds: an ablated layer passes no gradient on."""
    net, x = model(), tokens()[:, 0]
    assert saliency(net, 1)(x).abs().max() > 0
    with ablate(net, "1", positions=[0, 1, 2]):
        part = saliency(net, 1)(x)
    with ablate(net, "1"), pytest.raises(AttributionError, match="has no gradient|does not depend"):
        saliency(net, 1)(x)
    expected = (
        (net[2].weight[1, 3] * (1 - net[:2](x)[:, 3:] ** 2) * net[0].weight[3]).abs().detach()
    )
    torch.testing.assert_close(part, expected)


@pytest.mark.parametrize(
    ("dim", "positions"), [(-1, 2), (-2, [0, -1]), (-3, slice(1, None)), (1, slice(None, None, -2))]
)
def test_dimensions_and_slices_are_counted_from_either_end(dim, positions) -> None:
    """A negative dimension, and a slice that goes backwards, mean what they mean in numpy."""
    net, x = model(), tokens()
    expected = net[0](x).detach().clone()
    expected.movedim(dim, 0)[
        list(range(expected.shape[dim]))[positions] if isinstance(positions, slice) else positions
    ] = 0
    with (
        ablate(net, "0", positions=positions, dim=dim),
        kedge.hook(net, "1:in", kedge.record()) as seen,
    ):
        net(x)
    assert_same_bits(seen["1:in"], expected)


def test_means_over_no_dimension_are_sums_over_none() -> None:
    """Each element has its own mean; values of one dimension have no sample axis to average with ``over=None``."""
    net, x = model(), tokens()
    found = means(net, "0", [x, x + 1], over=())

    torch.testing.assert_close(found["0"].float(), (net[0](x) + net[0](x + 1)).detach() / 2)
    assert means(net, "0", [x[0, 0]], over=None)["0"].shape == (4,)
    assert means(net, "0", [x], over=(0, -3))["0"].shape == (1, 6, 4)


def test_resampling_draws_anew_in_each_block() -> None:
    """One action in several blocks, each of one forward, does not take from the same samples every time."""
    net, x, other = nn.Identity(), torch.arange(9.0)[:, None], resample(0)

    def once():
        with ablate(net, ":out", other):
            return net(x)

    assert not torch.equal(once(), once())


def ablated(net: nn.Module, x: Tensor, *args: object) -> Tensor:
    """Call a model within an ablation."""
    with ablate(net, *args):
        return net(x)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda net, x: ablated(net, x, "0", lambda value: None), "nothing was ablated"),
        (lambda net, x: ablate(net, "0", kedge.record()), "give a number"),
        (
            lambda net, x: ablated(nn.Embedding(5, 2), torch.tensor([[1, 2]]), ":in", 0.5),
            "0.5 cannot fill int64",
        ),
        (lambda net, x: means(net, "0", x), r"give a list of batches, such as \[inputs\]"),
        (lambda net, x: contrast(net, "0", x[:1], [x[1:]]), "give a list of batches"),
        (
            lambda net, x: Steering(torch.ones(4, dtype=torch.long), norm=2.0),
            "floating-point tensor",
        ),
    ],
    ids=[
        "action-returns-nothing",
        "no-action",
        "number-of-another-type",
        "batch",
        "set",
        "direction",
    ],
)
def test_what_has_no_meaning_is_an_error_that_says_what_to_give(ask, said) -> None:
    """Nothing is left as it was in silence, rounded (half a word would be word 0) or averaged over what is no sample."""
    net = model()
    with pytest.raises(InterventionError, match=said):
        ask(net, tokens())
    assert_unhooked(net)


def test_an_action_may_take_the_event() -> None:
    """With the value and the event, as an action of a hook has them."""
    assert not ablated(model(), tokens(), "2", lambda value, event: value * 0).any()


def test_a_length_that_is_nothing_is_kept() -> None:
    """Steering with `keep_norm` makes no NaN where value or sum is zero."""
    assert not Steering(torch.zeros(4), keep_norm=True)(torch.zeros(2, 4)).any()
    assert not Steering(-torch.ones(4), keep_norm=True)(torch.ones(2, 4)).any()
