"""Pictures of values: feature maps, distributions by depth, and what all pictures have in common."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from io import BytesIO

import matplotlib as mpl
import pytest
import torch
from torch import nn

import kedge
from kedge import figures
from kedge.errors import CannotDraw
from tests import forked

EVERY = {
    "feature_maps": lambda: figures.feature_maps(torch.randn(2, 5, 4, 4)),
    "distributions": lambda: figures.distributions(
        {"a": torch.randn(9), "b": torch.zeros(3)}, {"a": torch.randn(9)}
    ),
    "ridges": lambda: figures.distributions(
        {"a": torch.randn(9), "b": torch.zeros(3)}, kind="ridges"
    ),
    "attributions": lambda: figures.attributions(torch.randn(2, 1, 4, 4), torch.rand(2, 1, 4, 4)),
    "over": lambda: figures.attributions(
        {"a": torch.rand(2, 2, 2)}, torch.rand(2, 3, 8, 8), how="over"
    ),
    "scatter": lambda: figures.scatter(torch.randn(20, 3), torch.arange(20) % 4),
    "effects": lambda: figures.effects(torch.randn(3, 2), ["a", "b", "c"], ["x", "y"]),
    "memory": lambda: figures.memory(
        kedge.saved(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backward=True)(torch.ones(2, 4))
    ),
}
every = pytest.mark.parametrize("name", EVERY)


def words(figure):
    """Return all that is written in a figure."""
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


def images(figure):
    """Return what the images of a figure show."""
    return [axes.images[0] for axes in figure.axes if axes.images]


@every
def test_a_picture_belongs_to_nobody(name):
    """No setting of matplotlib is changed, pyplot neither knows the figure nor is loaded for it, and no memory is kept."""
    before = dict(mpl.rcParams)
    figure = EVERY[name]()
    picture = BytesIO()
    figure.savefig(picture, format="png")
    pyplot = sys.modules.get("matplotlib.pyplot")

    assert dict(mpl.rcParams) == before
    assert pyplot is None or pyplot.get_fignums() == []
    assert picture.getvalue().startswith(b"\x89PNG")


@every
def test_a_notebook_shows_a_picture(name):
    """A figure shows itself in a notebook, as wide as the text beside it."""
    figure = EVERY[name]()

    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.get_size_inches()[0] <= 7.2


@every
def test_what_is_written_can_be_read(name):
    """No word of a picture is smaller than eight points, and none lies outside of it."""
    figure = EVERY[name]()
    figure.draw_without_rendering()
    found = [t for t in figure.findobj(mpl.text.Text) if t.get_text() and t.get_visible()]
    renderer = figure._get_renderer()
    page = figure.bbox.padded(2)
    drawn = [t for t in found if not isinstance(t.axes, mpl.axes.Axes) or t.axes.get_visible()]
    ticks = [
        label
        for axes in figure.axes
        for label in (*axes.get_xticklabels(minor=True), *axes.get_yticklabels(minor=True))
    ]
    outside = [
        t.get_text()
        for t in drawn
        if t not in ticks
        and not _is_tick(figure, t)
        and not page.contains(*t.get_window_extent(renderer).get_points()[0])
    ]

    assert min(t.get_fontsize() for t in found) >= 7
    assert outside == []


def _is_tick(figure, text):
    """Return the visible labels of ticks; matplotlib keeps some beyond the ends of an axis."""
    return any(text in (*axes.get_xticklabels(), *axes.get_yticklabels()) for axes in figure.axes)


def test_without_a_display_and_without_pyplot():
    """Pictures are drawn where there is no screen, and pyplot is never loaded."""
    code = (
        "import sys, torch\nfrom kedge import figures\n"
        "figures.scatter(torch.randn(9, 3))._repr_png_()\nassert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    forked.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_missing_matplotlib_is_named():
    """Without matplotlib the error is one of Kedge's, and names the extra that brings it."""
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nfrom kedge.errors import MissingExtra\n"
        "try:\n    from kedge.figures import scatter\nexcept MissingExtra as error:\n    print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert ended.stdout.strip() == (
        "kedge.figures needs the package matplotlib, which is not installed: pip install 'kedge[plot]'"
    )


def test_figures_die_with_those_who_hold_them():
    """A figure that is let go of is gone: nothing keeps a list of them."""
    import weakref

    figure = EVERY["scatter"]()
    ref = weakref.ref(figure)
    del figure
    gc.collect()

    assert ref() is None


def test_the_strongest_channels_come_first():
    """Channels are drawn by their mean magnitude in the sample that was asked for, the largest first."""
    values = torch.zeros(2, 4, 3, 3)
    values[1] = torch.tensor([1.0, 4.0, 0.0, 3.0]).view(4, 1, 1)
    figure = figures.feature_maps(values, sample=1, most=3)
    titles = [
        axes.get_title(loc="left")
        for axes in figure.axes
        if axes.images and axes.get_title(loc="left")
    ]

    assert titles == ["1", "3", "0"]
    assert any("3 of 4 channels, strongest first" in said for said in words(figure))
    assert [float(image.get_array().max()) for image in images(figure)[:3]] == [4, 3, 1]


def test_ranges_of_colour_are_shared_or_said():
    """A shared range is one for all; own ranges are said above each map; both signs have white at 0."""
    values = (
        torch.tensor([[1.0, 2.0], [8.0, 4.0]])
        .view(2, 2, 1, 1)
        .transpose(0, 1)[:, 0]
        .reshape(1, 2, 1, 1)
    )
    shared, own = (figures.feature_maps(values, scale=scale) for scale in ("shared", "own"))
    signed = figures.feature_maps(torch.tensor([-1.0, 3.0]).view(2, 1, 1))

    assert {image.get_clim() for image in images(shared)[:2]} == {(0, 2)}
    assert [image.get_clim() for image in images(own)[:2]] == [(0, 2), (0, 1)]
    assert any("to 2" in word for word in words(own))
    assert {image.get_clim() for image in images(signed)[:2]} == {(-3, 3)}


def test_bands_are_quantiles_of_magnitudes():
    """The middle line is the median of the magnitudes that are not zero; zeros and NaN are shown apart."""
    values = {"a": torch.tensor([0.0, 0.0, -1.0, 2.0, 3.0]), "b": torch.tensor([float("nan"), 5.0])}
    figure = figures.distributions(values)
    bands, zeros = figure.axes
    (median,) = [line for line in bands.lines if line.get_label() == "median"]

    assert median.get_ydata().tolist() == [2, 5]
    assert [bar.get_height() for bar in zeros.patches] == pytest.approx([40, 0])
    assert bands.get_yscale() == "log"
    assert "has NaN or Inf" in words(figure)
    assert [label.get_text() for label in zeros.get_xticklabels()] == ["a", "b"]


def test_sites_stand_in_the_order_they_came():
    """Ridges stand one below the other in the order of the data, whatever their names."""
    figure = figures.distributions(
        {"z": torch.randn(99), "a": torch.randn(99)}, kind="ridges", units=("V", "dV")
    )
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]

    assert labels == ["a", "z"]  # from the bottom
    assert figure.axes[0].get_xlabel() == "|V|, not zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_numbers_of_every_kind_are_drawn(dtype):
    """Values of any real type, on any device, with a graph or sparse, are drawn as they are."""
    values = torch.tensor([[0, 1], [2, 3]]).to(dtype)

    assert float(images(figures.feature_maps(values[None]))[0].get_array().max()) == values.max()
    figures.distributions({"a": values, "sparse": values.to_sparse()})._repr_png_()
    figures.distributions(
        {"a": torch.full((3,), float("nan")), "graph": torch.ones(2, requires_grad=True)}
    )._repr_png_()


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.feature_maps(torch.ones(3, 4)), r"got float32\[3, 4\]"),
        (lambda: figures.feature_maps(torch.ones(1, 2, 3, 3), sample=4), "sample=4"),
        (lambda: figures.feature_maps("relu1"), "not a str"),
        (
            lambda: figures.feature_maps({"relu1": torch.ones(1, 2, 3, 3)}),
            r'one of its values, such as \["relu1"\]',
        ),
        (
            lambda: figures.feature_maps(torch.ones(1, 2, 3, 3, dtype=torch.complex64)),
            "this one is complex",
        ),
        (lambda: figures.feature_maps(torch.rand(1, 2, 3, 3), most=0), "most must be at least 1"),
        (
            lambda: figures.feature_maps(torch.rand(1, 2, 3, 3), order="size"),
            'order=\'size\'.*order "strength" or "index"',
        ),
        (lambda: figures.distributions({}), "got no site"),
        (lambda: figures.distributions(torch.ones(3)), "it takes tensors by site"),
        (
            lambda: figures.distributions({"a": torch.ones(3)}, kind="violins"),
            '\'violins\': use "bands" or "ridges"',
        ),
        (lambda: figures.distributions({"a": torch.ones(0)}), 'got no elements for "a"'),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, said):
    """What makes no picture, or is a word that a picture does not know, is refused, and the message says what was given."""
    with pytest.raises(CannotDraw, match=said):
        draw()


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
        assert draw()._repr_png_()
