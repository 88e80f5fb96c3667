"""What a user does by mistake, and what data do at their worst: each has a right value, or an error that says what to do."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kedge
from kedge import figures
from kedge.errors import AttributionError, CannotDraw, InterventionError, NothingCut, ReducerError, TableError
from kedge.features.reduce import Covariance, Mean, Quantiles, frechet_distance
from kedge.features.tables import feature_table
from kedge.figures.graph import graph
from kedge.recipes import (
    Steering,
    ablate,
    contrast,
    deconvnet,
    gradient,
    guided_backprop,
    means,
    patch,
    resample,
    saliency,
    smoothgrad,
)
from kedge.testing import assert_same_bits, assert_unhooked
from tests.recipes.rewritten import DeconvolutionByHand, GuidedByHand, Rectified, by_hand, images, made, plainly

FLOORS = {
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clip(0)": lambda x: x.clip(0),
    "clamp_min(0)": lambda x: x.clamp_min(0),
    "clamp(0, 6)": lambda x: x.clamp(0, 6),
    "clamp_": lambda x: (x * 1).clamp_(min=0),
    "threshold": lambda x: F.threshold(x, 0, 0),
}


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
@pytest.mark.parametrize(("recipe", "paper"), [(guided_backprop, GuidedByHand), (deconvnet, DeconvolutionByHand)])
def test_a_relu_by_another_name_is_cut_beside_others(recipe, paper, floor) -> None:
    """What is nothing below 0 is a ReLU, whether it is written as one or as a clamp."""
    torch.manual_seed(3)
    model = Rectified(nn.ReLU(), floor, F.relu).eval()

    assert_same_bits(recipe(model, 2)(images()), plainly(by_hand(paper), images(), 2))


def test_clamps_from_elsewhere_are_not_cut() -> None:
    """A clamp that begins at another number, or has an upper end only, lets the gradient by."""
    torch.manual_seed(3)
    plain = Rectified(nn.ReLU(), lambda x: x.clamp(min=-1).clamp(max=2), F.relu).eval()
    hooked = images().requires_grad_()
    with kedge.hook(plain, "**/relu:out.grad", kedge.clamp(min=0)):
        plain(hooked)[:, 2].sum().backward()

    assert_same_bits(guided_backprop(plain, 2)(images()), hooked.grad)


class Partly(nn.Module):
    """Works on a part of a tensor in place, between ReLUs."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        x = x.relu() - 1
        self.change(x[:, :2])
        return x.flatten(1)


def test_a_clamp_on_a_part_of_a_tensor_is_an_error_only_where_it_may_be_a_relu() -> None:
    """Autograd does not tell from where it clamps there; if nothing negative is left, it may be from 0."""
    with pytest.raises(NothingCut, match="cannot cut at /clamp_"):
        guided_backprop(Partly(lambda x: x.clamp_(min=0)), 2)(images())
    for change in (lambda x: x.clamp_(max=0.5), nn.Hardtanh(inplace=True)):
        assert guided_backprop(Partly(change), 2)(images()).shape == images().shape


def test_smoothgrad_keeps_the_digits_of_half_precision() -> None:
    """The mean of many copies is summed up in float32, so it is no further off than one gradient is."""
    model = nn.Linear(4, 3)
    many = smoothgrad(gradient(model.bfloat16(), 1), samples=999)(torch.ones(2, 4).bfloat16())

    assert_same_bits(many, model.weight[1].detach().expand(2, 4).contiguous())


def test_a_function_of_the_output_is_asked_about_each_copy() -> None:
    """How many copies go through the model at once makes no difference to a target that picks samples by their place."""
    model, x = made("modules"), images()
    one_by_one, together = (
        smoothgrad(saliency(model, lambda out: out[[0, 1, 2, 3], [4, 3, 2, 1]]), samples=5, at_once=k)(x)
        for k in (1, 3)
    )

    torch.testing.assert_close(together, one_by_one)


def test_questions_that_are_none_are_refused() -> None:
    """A text as a class and an empty list of sites are errors that say what to give."""
    with pytest.raises(AttributionError, match="a class is a number"):
        saliency(made("modules"), "3")(images())
    with pytest.raises(AttributionError, match="names no site"):
        saliency(made("modules"), 3, wrt=[])


def linear() -> tuple[nn.Module, torch.Tensor]:
    """Make a small model of tokens, and some."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Identity()), torch.randn(3, 5, 4)


@pytest.mark.parametrize(
    ("dim", "positions"), [(-1, 2), (-2, [0, -1]), (-3, slice(1, None)), (1, slice(None, None, -2))]
)
def test_dimensions_and_slices_are_counted_from_either_end(dim, positions) -> None:
    """A negative dimension, and a slice that goes backwards, mean what they mean in numpy."""
    model, x = linear()
    expected = model(x).detach().clone()
    expected.movedim(dim, 0)[
        list(range(expected.shape[dim]))[positions] if isinstance(positions, slice) else positions
    ] = 0
    with ablate(model, "0", positions=positions, dim=dim):
        assert torch.equal(model(x), expected)


def test_positions_may_be_an_array_and_no_yes_or_no() -> None:
    """Indices and masks of numpy are taken; one truth value is a mistake."""
    model, x = linear()
    with ablate(model, "0", positions=np.array([1, 3])):
        some = model(x)
    with ablate(model, "0", positions=np.arange(5) % 2 == 1):
        assert torch.equal(model(x), some)
    with pytest.raises(InterventionError, match="indices, a slice or a mask"), ablate(model, "0", positions=True):
        model(x)


def test_patches_along_a_dimension_counted_from_the_end() -> None:
    """``along=-2`` is the same table as ``along=1``; a dimension with nothing in it is an error."""
    model, x = linear()
    first, last = (patch(model, x[:1], x[1:2], "0", torch.Tensor.sum, along=dim) for dim in (1, -2))

    assert torch.equal(first.effects, last.effects)
    with pytest.raises(InterventionError, match="nothing in it"):
        patch(model, x[:0], x[:0], "0", torch.Tensor.sum, along=0)


@pytest.mark.parametrize("number", [None, [1.0], 1j])
def test_a_metric_that_gives_no_number_is_an_error_that_says_so(number) -> None:
    """It names what the metric gave, and the hooks are gone."""
    model, x = linear()
    with pytest.raises(InterventionError, match="must return one real number"):
        patch(model, x[:1], x[1:2], "0", lambda out: number)
    assert_unhooked(model)


def test_an_action_that_returns_nothing_has_not_ablated() -> None:
    """That is an error instead of the model as it was; an action may take the event; what is no action is refused."""
    model, x = linear()
    with pytest.raises(InterventionError, match="nothing was ablated"), ablate(model, "0", lambda value: None):
        model(x)
    with ablate(model, "0", lambda value, event: value * 0):
        assert not model(x).any()
    with pytest.raises(InterventionError, match="give a number"):
        ablate(model, "0", kedge.record())


def test_a_number_that_the_value_cannot_hold_is_an_error() -> None:
    """Half a word would be word 0."""
    model = nn.Embedding(5, 2)
    with pytest.raises(InterventionError, match="0.5 cannot stand in int64"), ablate(model, ":in", 0.5):
        model(torch.tensor([[1, 2]]))


def test_batches_that_are_one_tensor_are_refused() -> None:
    """A tensor in the place of a list of batches would be taken row by row, and averaged over its features."""
    model, x = linear()
    with pytest.raises(InterventionError, match=r"give a list of batches, such as \[inputs\]"):
        means(model, "0", x)
    with pytest.raises(InterventionError, match="give a list of batches"):
        contrast(model, "0", x[:1], [x[1:]])


def test_means_over_no_dimension_are_sums_over_none() -> None:
    """Each element has its own mean; values of one dimension have no sample axis to average with ``over=None``."""
    model, x = linear()
    found = means(model, "0", [x, x + 1], over=())

    torch.testing.assert_close(found["0"].float(), (model(x) + model(x + 1)).detach() / 2)
    assert means(model, "0", [x[0, 0]], over=None)["0"].shape == (6,)
    assert means(model, "0", [x], over=(0, -3))["0"].shape == (1, 5, 6)


def test_resampling_draws_anew_in_each_block() -> None:
    """One action in several blocks, each of one forward, does not take from the same samples every time."""
    model, x, other = nn.Identity(), torch.arange(9.0)[:, None], resample(0)

    def once():
        with ablate(model, ":out", other):
            return model(x)

    assert not torch.equal(once(), once())


def test_a_length_that_is_nothing_is_kept() -> None:
    """Steering with `keep_norm` makes no NaN where value or sum is zero; a direction is floating-point."""
    assert not Steering(torch.zeros(4), keep_norm=True)(torch.zeros(2, 4)).any()
    assert not Steering(-torch.ones(4), keep_norm=True)(torch.ones(2, 4)).any()
    with pytest.raises(InterventionError, match="floating-point tensor"):
        Steering(torch.ones(4, dtype=torch.long), norm=2.0)


def test_numbers_beyond_float32_are_no_infinities() -> None:
    """Quantiles refuse what they cannot count; an infinity that is given is one."""
    with pytest.raises(ReducerError, match="scale the values"):
        Quantiles([0.5]).update(torch.tensor([1e300], dtype=torch.float64))
    quantiles = Quantiles([0.5])
    quantiles.update(torch.tensor([[math.inf, 1.0, 3e38]], dtype=torch.float64))
    assert quantiles.result()["max"] == math.inf


def test_reducers_are_told_from_arrays_and_results() -> None:
    """An array in the place of a tensor, and a reducer in that of its result, are errors that say what to give."""
    with pytest.raises(ReducerError, match="given a ndarray"):
        Mean().update(np.ones((2, 3)))
    with pytest.raises(ReducerError, match=r"a\.result\(\)"):
        frechet_distance(Covariance(), Covariance())


def test_a_site_that_not_every_sample_has_makes_no_table() -> None:
    """The error tells how many rows each site has."""
    given = [torch.ones(2, 3), torch.zeros(2, 3)]

    def features(x):
        return {"a": x} | ({"b": x} if x.any() else {})

    with pytest.raises(TableError, match="'a' 4, 'b' 2"):
        feature_table(features, given)


def drawn(figure) -> bytes:
    """Write a figure."""
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    return written.getvalue()


@pytest.mark.parametrize("how", ["beside", "over"])
def test_attributions_of_one_figure_have_one_scale_that_belongs_to_all(how) -> None:
    """Where one map has both signs, 0 is white in every map, and the bar of colours is theirs."""
    maps = {"signed": torch.tensor([[[1.0, -4.0]]]), "cam": torch.tensor([[[0.0, 2.0]]])}
    figure = figures.attributions(maps, torch.rand(1, 1, 1, 2), how=how)
    last = [axes.images[-1] for axes in figure.axes if axes.images][-2:]

    assert [image.get_clim() for image in last] == [(-1, 1)] * 2
    assert [image.get_cmap().name for image in last] == ["RdBu_r"] * 2
    bars = [axes for axes in figure.axes if axes.get_ylabel()]
    assert [bar.get_ylim() for bar in bars] == [(-1, 1)]


def test_what_is_not_finite_is_no_colour() -> None:
    """NaN in maps and images is grey, as 0 is white, and leaves the range to the others."""
    maps, pixels = torch.tensor([[[math.nan, -4.0, 2.0]]]), torch.tensor([[[[math.nan, 1.0, 3.0]]]])
    figure = figures.attributions(maps, pixels)
    image, found = (np.ma.filled(axes.images[0].get_array().astype(float), np.nan)[0] for axes in figure.axes[:2])

    np.testing.assert_array_equal(image, [np.nan, 0, 1])
    np.testing.assert_array_equal(found, [np.nan, -1, 0.5])
    assert figure.axes[1].get_facecolor()[:3] != (1, 1, 1)
    assert drawn(figures.attributions(maps, pixels, how="over"))


WILD = "a$x^$ _{"
WILDLY = {
    "attributions": lambda: figures.attributions(
        {WILD: torch.rand(1, 2, 2)}, torch.rand(1, 3, 2, 2), labels=[WILD], title=WILD
    ),
    "feature_maps": lambda: figures.feature_maps(torch.rand(1, 2, 3, 3), title=WILD),
    "bands": lambda: figures.distributions({WILD: torch.rand(9)}, title=WILD, units=(WILD, WILD)),
    "ridges": lambda: figures.distributions({WILD: torch.rand(9)}, kind="ridges"),
    "scatter": lambda: figures.scatter(torch.rand(2, 3), [0, 1], names=[WILD, WILD], title=WILD),
    "effects": lambda: figures.effects(torch.rand(1, 1), [WILD], [WILD], unit=WILD, title=WILD),
}


@pytest.mark.parametrize("draw", WILDLY.values(), ids=WILDLY)
def test_names_with_dollars_are_no_formulas(draw) -> None:
    """Names and titles are drawn as they are, whatever they hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn(draw())


def test_classes_whose_names_begin_with_an_underscore_are_in_the_legend() -> None:
    """Each class has its line there, though matplotlib leaves out what begins so."""
    legend = figures.scatter(torch.rand(4, 3), [0, 1, 0, 1], names=["_background", "cat"]).axes[0].get_legend()

    assert [text.get_text().strip("\u200b") for text in legend.get_texts()] == ["_background", "cat"]


def test_two_hundred_classes_and_sites_have_place() -> None:
    """As many as can be read are named, and it is said that there are more; one site alone has bands to be seen."""
    scatter = figures.scatter(torch.rand(400, 3), torch.arange(400) % 200)
    sites = figures.distributions({f"layer{i}": torch.rand(9) for i in range(200)})
    assert drawn(scatter)
    assert drawn(sites)
    legend = scatter.axes[0].get_legend()

    assert (len(legend.get_texts()), legend.get_title().get_text()) == (44, "the first 44 of 200 classes")
    names = [tick.get_text() for tick in sites.axes[1].get_xticklabels()]
    assert names[:2] == ["layer0", "layer4"]
    assert (len(names), sites.axes[1].get_xlabel()) == (50, "one site in 4 is named")
    alone = figures.distributions({"a": torch.rand(9)}).axes[0].collections[0].get_paths()[0].get_extents()
    assert alone.width > 0


def test_numbers_of_every_size_are_drawn() -> None:
    """Variances that overflow, magnitudes beyond float32, and effects of 1e-30 keep their values."""
    points = torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(figures.principal(points * 1e200)[1], figures.principal(points)[1])
    assert figures.principal(torch.ones(4, 2))[1].tolist() == [0, 0]
    axes = figures.distributions({"a": torch.full((9,), 1e-200, dtype=torch.float64)}).axes[0]
    assert axes.lines[0].get_ydata() == [1e-200]
    texts = [text.get_text() for text in figures.effects([1e-30, 2e-30], ["a", "b"]).axes[0].texts]
    assert texts == ["1.00e-30", "2.00e-30"]


def test_a_drawing_of_nothing_is_refused() -> None:
    """A graph is drawn with one box at least."""
    found = graph(lambda: nn.Linear(2, 1)(torch.ones(1, 2)))
    with pytest.raises(CannotDraw, match="at least one box"):
        found.dot(most=0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.attributions({}, torch.rand(1, 3, 2, 2), how="over"),
        lambda: figures.attributions(torch.rand(1, 2, 2), torch.rand(1, 3, 2, 2), how="beneath"),
        lambda: figures.feature_maps(torch.rand(1, 2, 3, 3), most=0),
        lambda: figures.feature_maps(torch.rand(1, 2, 3, 3), order="size"),
        lambda: figures.distributions({"a": torch.ones(3)}, kind="violins"),
        lambda: figures.distributions(torch.ones(3)),
        lambda: figures.scatter(torch.rand(2, 3), ["cat", "dog"]),
    ],
)
def test_what_is_asked_by_a_wrong_word_is_refused(draw) -> None:
    """A word that a picture does not know is an error, and not another picture."""
    with pytest.raises(CannotDraw):
        draw()
