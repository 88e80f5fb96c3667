"""Grad-CAM: the parts of an image where a layer's channels support a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from kedge.calls.arguments import called_as, described
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import Session
from kedge.recipes.attribution.attribution import INPUT, Attribution, Method
from kedge.recipes.attribution.scores import Targets
from kedge.sites import leaves

Size: TypeAlias = Literal["input"] | Sequence[int] | None
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Tokens:
    """The layout of a transformer's tokens over the image, for `grad_cam`.

    It turns values [samples, tokens, width] into [samples, width, rows, columns].

    Attributes:
        grid: The number of rows and of columns of patches.
        skip: The number of tokens before the patches, such as 1 for a class token.
    """

    grid: tuple[int, ...]
    skip: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.grid, Sequence) and all(isinstance(each, int) for each in self.grid):
            return
        raise AttributionError(
            f"Tokens(grid={described(self.grid)}): "
            "grid is the numbers of rows and columns of patches, as in "
            "Tokens(grid=(14, 14), skip=1)"
        )

    def __call__(self, value: Tensor) -> Tensor:
        """Return tokens in the layout of the image."""
        count = prod(self.grid)
        if value.dim() != 3 or value.shape[1] != self.skip + count:
            raise AttributionError(
                f"{self} stands for {self.skip} + {count} tokens, "
                f"but the site gave {leaves.describe(value)}: "
                "it needs [samples, tokens, width], "
                "with a token for each patch after those to skip"
            )
        patches = value[:, self.skip :].transpose(1, 2)
        return patches.reshape(*patches.shape[:2], *self.grid)


class _GradCam(Method):
    noisy = INPUT

    def __init__(
        self,
        site: str,
        layout: Callable[[Tensor], Tensor] | None,
        size: Size,
        *,
        positive: bool,
    ) -> None:
        self.site = site
        self.layout = layout
        self.size = size
        self.positive = positive
        self.images: dict[str, tuple[int, ...]] = {}

    def begin(self, s: Session, model: nn.Module) -> None:
        """Hook the input for its size."""
        if self.size == "input":
            s.hook(model, INPUT, self._measure)

    def _measure(self, value: Tensor, event: Event) -> None:
        if value.is_floating_point() and value.dim() > 2:
            self.images[str(event.site)] = tuple(value.shape[2:])

    def read(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of the channels, weighted by their mean gradients.

        If that is chosen, only its positive part.
        """
        if self.layout is not None:
            value = self.layout(value)
            gradient = self.layout(gradient)
        of_images = any(len(size) > 1 for size in self.images.values())
        if value.dim() < 3 or (self.layout is None and value.dim() == 3 and of_images):
            raise AttributionError(
                "Grad-CAM needs [samples, channels, rows, columns], "
                f'but "{self.site}" gave {leaves.describe(value)}; '
                "for tokens [samples, tokens, width] give their layout, "
                "such as layout=Tokens(grid=(14, 14), skip=1)"
            )

        weights = gradient.mean(tuple(range(2, gradient.dim())), keepdim=True)
        cam = (weights * value).sum(1, keepdim=True)
        if self.positive:
            cam = cam.relu()
        return self._resized(cam).squeeze(1)

    def _resized(self, cam: Tensor) -> Tensor:
        size = self._wanted() if self.size == "input" else self.size
        if size is None:
            return cam
        mode = _MODES.get(cam.dim() - 2)
        if mode is None or len(size) != cam.dim() - 2:
            raise AttributionError(
                f"a map {list(cam.shape[2:])} cannot be resized to {list(size)}; "
                "size=None leaves it as it is"
            )
        return functional.interpolate(cam, tuple(size), mode=mode, align_corners=False)

    def _wanted(self) -> tuple[int, ...]:
        sizes = set(self.images.values())
        if len(sizes) == 1:
            return next(iter(sizes))
        found = [f"{name} {list(size)}" for name, size in self.images.items()]
        raise AttributionError(
            "the size of the map is unknown (images in the input: "
            f"{', '.join(found) or 'none'}); "
            "give it, such as size=(224, 224), "
            "or size=None to leave the map as it is at the site"
        )


@called_as('recipes.grad_cam(model, "layer4", target=3)(images)')
def grad_cam(
    model: nn.Module,
    site: str,
    target: Targets = None,
    *,
    layout: Callable[[Tensor], Tensor] | None = None,
    size: Size = "input",
    positive: bool = True,
) -> Attribution:
    """Explain a score by Grad-CAM: a map of where the channels of a layer raise it.

    The map is the sum of the channels at the site, each weighted by the mean of its gradient over
    the image; only the positive part is kept (Selvaraju et al., "Grad-CAM: visual explanations from
    deep networks via gradient-based localization", 2017).

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        site: A selector of one value [samples, channels, rows, columns], such as ``"layer4"``.
        target: The class to explain, one class for each sample, a function of the output, or a list
            of these; None for the class with the highest score of each sample. See `Attribution`.
        layout: A function from values of another form to this one: `Tokens` for [samples, tokens,
            width], or a function such as ``lambda value: value.movedim(-1, 1)`` for channels in the
            last dimension.
        size: The size of the map in pixels: "input" for that of the image, (rows, columns), or None
            for that of the site.
        positive: Whether to keep only what raises the score; False keeps what lowers it too, as
            negative values.

    Returns:
        The attribution. Call it like the model; it returns [samples, rows, columns].

    Examples:
        >>> recipes.grad_cam(model, "relu", target=2)(images).shape
        torch.Size([8, 8, 8])
    """
    if not (layout is None or callable(layout)):
        raise AttributionError(
            f"layout={described(layout)}: give a function of the value, "
            "such as Tokens(grid=(14, 14), skip=1)"
        )
    if not (size is None or isinstance(size, Sequence)):
        raise AttributionError(
            f"size={described(size)}: give (rows, columns), such as size=(224, 224), "
            '"input" or None'
        )
    method = partial(_GradCam, site, layout, size, positive=positive)
    return Attribution(model, method, target, site)
