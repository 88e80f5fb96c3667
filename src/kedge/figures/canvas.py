"""The parts that all pictures share: the figure, text sizes, and colours."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from kedge.errors import CannotDraw, required

with required("matplotlib", "plot", "kedge.figures needs"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What other files take from here, and is matplotlib's.
__all__ = ["Axes"]

WIDTH = 7.2
"""Inches; at 110 dots per inch as wide as a page of text."""
TEXT = 9
TITLE = 10
TWO_SIGNS = "RdBu_r"
"""The colour map for both signs, with white for 0; it is for all kinds of colour vision."""
ONE_SIGN = "viridis"
"""The colour map for one sign; it is for all kinds of colour vision."""
CLASSES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#882255",
    "#5b5b5b",
    "#332288",
    "#999933",
)
"""Colours of classes, after Okabe and Ito and after Tol; see also `MARKERS`."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
"""One more than there are colours, so that no two of 110 classes share both."""
ACCENT = "#0072b2"
QUIET = "#57606a"
NOTHING = "#d0d7de"
"""The background of images, visible at non-finite values; not a colour of the maps."""


class Drawing(Figure):
    """A figure independent of pyplot, which would keep it alive."""

    def __init__(self, height: float, width: float = WIDTH) -> None:
        super().__init__(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def dress(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Set the title and labels of axes, and remove the frame on the right and above."""
    axes.set_title(plain(title), fontsize=TITLE, loc="left")
    axes.set_xlabel(plain(x), fontsize=TEXT)
    axes.set_ylabel(plain(y), fontsize=TEXT)
    axes.tick_params(labelsize=TEXT - 1, color=QUIET)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)


def plain(text: object) -> str:
    """Return a text escaped so that matplotlib shows it unchanged, without formulas between dollar signs."""
    return str(text).replace("$", r"\$")


def bare(axes: Axes, title: str = "") -> None:
    """Remove ticks and frame from the axes of an image; NaN and other values without a colour are grey."""
    axes.set_facecolor(NOTHING)
    axes.set_title(plain(title), fontsize=TEXT - 1, loc="left", pad=3)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def colours(figure: Figure, image: Any, beside: Any, label: str) -> None:
    """Draw the scale of an image's colours beside axes."""
    bar = figure.colorbar(image, ax=beside, shrink=0.8, pad=0.02)
    bar.set_label(plain(label), fontsize=TEXT)
    bar.ax.tick_params(labelsize=TEXT - 1)
    bar.outline.set_visible(False)


def host(value: Any) -> Tensor:
    """Return a value as a dense tensor on the CPU: float64 stays, all else becomes float32."""
    if hasattr(value, "keys"):
        names = [f'["{name}"]' for name in value][:3]
        raise CannotDraw(
            "a figure takes one tensor here, not a mapping: "
            f"give one of its values, such as {', '.join(names)}"
        )
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise CannotDraw(
            "a figure takes a tensor, or a value that converts to one, "
            f"not a {type(value).__name__}: {error}"
        ) from error
    if tensor.is_nested or tensor.is_complex():
        what = "nested" if tensor.is_nested else "complex"
        raise CannotDraw(
            f"a figure takes a dense tensor of real numbers, and this one is {what}; "
            "give a part of it, or .abs()"
        )

    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.to(device="cpu", dtype=dtype)


def shown(tensor: Tensor) -> Any:
    """Return a tensor as an array for matplotlib."""
    return tensor.numpy()
