"""Pictures of results: attributions, features in the plane, effects by site, memory over a step."""

from __future__ import annotations

import io
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

import kedge
from kedge import figures
from kedge.errors import CannotDraw
from kedge.recipes.interventions.patching import patch


def images(axes):
    """Return what the images of some axes show."""
    return [np.asarray(image.get_array()) for image in axes.images]


def test_attributions_of_both_signs_are_white_at_zero():
    """Channels are added up, each map is relative to its own largest magnitude, and 0 is in the middle of the colours."""
    maps = torch.tensor([[[[1.0, -4.0]], [[1.0, 0.0]]]])
    figure = figures.attributions(maps, torch.rand(1, 1, 1, 2), labels=["a cat"])
    image, drawn = figure.axes[0], figure.axes[1]

    assert images(drawn)[0].tolist() == [[0.5, -1.0]]
    assert drawn.images[0].get_clim() == (-1, 1)
    assert drawn.images[0].get_cmap().name == "RdBu_r"
    assert image.get_title(loc="left") == "a cat"


def test_attributions_of_one_sign_begin_at_zero():
    """A saliency or Grad-CAM, which has no negative values, has a map of one sign, stretched over its image."""
    figure = figures.attributions({"cam": torch.rand(1, 2, 2)}, torch.rand(1, 3, 8, 8), how="over")
    grey, drawn = figure.axes[0].images

    assert grey.get_array().shape == drawn.get_array().shape == (8, 8)
    assert drawn.get_clim() == (0, 1)
    assert drawn.get_cmap().name == "viridis"
    assert drawn.get_alpha().shape == (8, 8)
    assert 0 <= drawn.get_alpha().min() <= drawn.get_alpha().max() < 1


@pytest.mark.parametrize(("samples", "width"), [(60, 5), (8, 30)])
def test_principal_components_are_those_of_a_reference(samples, width):
    """Projections and shares of variance are scikit-learn's, up to the sign, which is the same in every run."""
    torch.manual_seed(0)
    features = torch.randn(samples, width) * torch.arange(1, width + 1)
    points, share = figures.principal(features)
    reference = PCA(2, svd_solver="full").fit(features.double().numpy())

    np.testing.assert_allclose(share, reference.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(
        points.abs(), np.abs(reference.transform(features.double().numpy())), rtol=1e-7, atol=1e-9
    )
    assert torch.equal(figures.principal(features)[0], points)
    torch.testing.assert_close(figures.principal(features.flip(0))[0].flip(0), points)


def test_features_that_do_not_vary_are_drawn():
    """Samples that are all alike, or of one number each, make a picture and no error."""
    same, share = figures.principal(torch.ones(3, 4))
    line, _ = figures.principal(torch.arange(3.0)[:, None])

    assert same.abs().max() == share.sum() == 0
    assert line[:, 1].abs().max() == 0
    figures.scatter(torch.ones(3, 4))._repr_png_()


def test_classes_differ_in_colour_and_in_mark():
    """Of a hundred classes no two look alike, and the legend names each."""
    figure = figures.scatter(torch.randn(200, 3), torch.arange(200) % 100, names=["zero", "one"])
    (axes,) = figure.axes
    looks = {
        (tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in axes.collections
    }
    legend = [text.get_text() for text in axes.get_legend().get_texts()]

    assert len(looks) == 100
    assert legend[:3] == ["zero", "one", "2"]
    assert axes.get_xlabel().startswith("principal component 1 (")
    assert axes.get_xlabel().endswith("% of variance)")


def test_effects_are_drawn_about_no_effect():
    """Where effects have both signs, what is no effect is white; what is missing is grey; each number stands in its cell."""
    figure = figures.effects(
        torch.tensor([[1.0, -2.0], [float("nan"), 0.0]]), ["a", "b"], ["x", "y"], unit="logits"
    )
    axes, bar = figure.axes
    written = [text.get_text() for text in axes.texts]

    assert axes.images[0].get_clim() == (-2, 2)
    assert written == ["1.00", "-2.00", "nan", "0.00"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert bar.get_ylabel() == "logits"


def test_what_patching_gives_is_drawn():
    """The table of activation patching is drawn with its own sites."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    found = patch(model, torch.ones(1, 2), -torch.ones(1, 2), "0, 1", lambda out: out.sum().item())
    axes = figures.effects(found).axes[0]

    assert [label.get_text() for label in axes.get_yticklabels()] == ["0:out", "1:out"]
    np.testing.assert_allclose(images(axes)[0][:, 0], found.effects)


def test_memory_is_that_of_the_account():
    """The curve has the bytes of the account's course, its peak, and the modules that hold it."""
    account = kedge.saved(
        nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Sigmoid()), backward=True
    )(torch.ones(200, 300))
    over, who = figures.memory(account).axes
    (line,) = [line for line in over.lines if line.get_drawstyle() == "steps-post"]

    assert line.get_ydata().max() * 1e3 == pytest.approx(account.timeline.peak)
    assert over.get_ylabel() == "held for backward, kB"
    assert [label.get_text() for label in who.get_yticklabels()] == [
        path for path, _ in account.timeline.holders
    ]
    assert any(text.get_text().startswith("peak ") for text in over.texts)
    assert isinstance(over, mpl.axes.Axes)


def test_alike_blocks_share_a_bar_of_memory():
    """Ten bars of ten alike blocks would hide what holds the rest: in a deep model each part of the blocks is one bar."""
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(24)]
    account = kedge.saved(nn.Sequential(*blocks), backward=True)(
        torch.ones(4, 8, requires_grad=True)
    )
    _, who = figures.memory(account).axes

    shown = {
        label.get_text(): round(bar.get_width() * 1e3)
        for label, bar in zip(who.get_yticklabels(), who.patches, strict=True)
    }
    assert any(name.endswith("-23.1") for name in shown), shown
    assert sum(shown.values()) == pytest.approx(account.timeline.peak, rel=0.01)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.attributions(torch.ones(3, 4, 4), torch.ones(2, 1, 4, 4)), "for 2 images"),
        (
            lambda: figures.attributions(torch.ones(1, 4, 4), torch.ones(1, 2, 4, 4)),
            "of 1 or 3 channels",
        ),
        (
            lambda: figures.attributions({}, torch.rand(1, 3, 2, 2), how="over"),
            "needs at least one map",
        ),
        (
            lambda: figures.attributions(
                torch.rand(1, 2, 2), torch.rand(1, 3, 2, 2), how="beneath"
            ),
            "got how='beneath'",
        ),
        (lambda: figures.scatter(torch.ones(1, 3)), "at least 2 samples"),
        (
            lambda: figures.scatter(torch.rand(2, 3), ["cat", "dog"]),
            "a whole number for each sample as labels",
        ),
        (
            lambda: figures.scatter(torch.tensor([[1.0], [float("nan")]])),
            "and 1 samples hold a NaN or an infinity; the first is 1",
        ),
        (lambda: figures.scatter(torch.randn(4, 3), torch.ones(3)), "as labels of 4 samples"),
        (lambda: figures.effects(torch.ones(3), ["a"]), "with 1 rows' and 0 columns' names"),
        (lambda: figures.memory(kedge.saved(nn.Identity())(torch.ones(2))), "that holds nothing"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, said):
    """What makes no picture, or is a word that a picture does not know, is refused, and the message says what was given."""
    with pytest.raises(CannotDraw, match=said):
        draw()


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
    image, found = (
        np.ma.filled(axes.images[0].get_array().astype(float), np.nan)[0]
        for axes in figure.axes[:2]
    )

    np.testing.assert_array_equal(image, [np.nan, 0, 1])
    np.testing.assert_array_equal(found, [np.nan, -1, 0.5])
    assert figure.axes[1].get_facecolor()[:3] != (1, 1, 1)
    assert drawn(figures.attributions(maps, pixels, how="over"))


def test_classes_whose_names_begin_with_an_underscore_are_in_the_legend() -> None:
    """Each class has its line there, though matplotlib leaves out what begins so."""
    legend = (
        figures.scatter(torch.rand(4, 3), [0, 1, 0, 1], names=["_background", "cat"])
        .axes[0]
        .get_legend()
    )

    assert [text.get_text().strip("\u200b") for text in legend.get_texts()] == [
        "_background",
        "cat",
    ]


def test_two_hundred_classes_and_sites_have_place() -> None:
    """As many as can be read are named, and it is said that there are more; one site alone has bands to be seen."""
    scatter = figures.scatter(torch.rand(400, 3), torch.arange(400) % 200)
    sites = figures.distributions({f"layer{i}": torch.rand(9) for i in range(200)})
    assert drawn(scatter)
    assert drawn(sites)
    legend = scatter.axes[0].get_legend()

    assert (len(legend.get_texts()), legend.get_title().get_text()) == (
        44,
        "the first 44 of 200 classes",
    )
    names = [tick.get_text() for tick in sites.axes[1].get_xticklabels()]
    assert names[:2] == ["layer0", "layer4"]
    assert (len(names), sites.axes[1].get_xlabel()) == (50, "one site in 4 is named")
    alone = (
        figures.distributions({"a": torch.rand(9)})
        .axes[0]
        .collections[0]
        .get_paths()[0]
        .get_extents()
    )
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
