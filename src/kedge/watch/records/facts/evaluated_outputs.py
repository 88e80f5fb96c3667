"""The outputs of a model in evaluation mode, and the running statistics with which they were computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from kedge.sites.site import Site
from kedge.store.events import EvaluatedOutputsEvent, OutputSize
from kedge.torch_internals.hook_tables import before_forward
from kedge.torch_internals.module_tables import modules_in
from kedge.watch.models.roots import RootModule
from kedge.watch.records.samples import can_sample, sample, tensors_in

_BEFORE = 2
"""Most outputs that are taken before the model is trained."""
_MOST = 20
"""Most outputs that are taken."""
_LATER = 20
"""The first step from which on more are taken of a model that is not trained, each after twice as many steps."""
_NAMED = 50
"""Most names in a note."""
_SPECTRAL = frozenset({"SpectralNorm", "_SpectralNorm"})
"""The classes of PyTorch's two spectral norms, a hook and a parametrization."""


class EvaluatedOutputs:
    """Takes the size of one output in some evaluations of one root.

    On a device it stays there until the end of the run, since reading it would wait.
    """

    def __init__(self, root: RootModule) -> None:
        self._root = root
        self._sizes: list[tuple[int, str, Tensor | float]] = []
        self._estimates: tuple[str, ...] | None = None
        self._initial: dict[str, Tensor | bool] = {}
        self._last = 0

    def wants(self, step: int) -> bool:
        """Whether the output of another evaluation is to be taken."""
        if len(self._sizes) >= _MOST:
            return False
        if self._root.optimizers or len(self._sizes) < _BEFORE:
            return True
        return step >= max(2 * self._last, _LATER)

    def take(self, module: nn.Module, output: Any, step: int) -> None:
        """Take the size of an output: of its first tensor of floating-point numbers."""
        if self._estimates is None:
            paths = (self._root.label(path) for path in _estimating(module))
            self._estimates = tuple(paths)[:_NAMED]
        self._initial = {}
        for path, norm in modules_in(module).items():
            initial = _has_initial_statistics(norm)
            if initial is not None:
                self._initial[self._root.label(path)] = initial
        self._last = step
        for leaf, value in tensors_in(output):
            if value.is_floating_point() and can_sample(value):
                site = str(Site(self._root.label(""), "out", leaf or None))
                rms = sample(value).float().square().mean().sqrt()
                self._sizes.append((step, site, rms.item() if rms.is_cpu else rms))
                return

    def notes(self) -> list[EvaluatedOutputsEvent]:
        """Return the note at the end of the run, if there were evaluations."""
        sizes = []
        for step, site, rms in self._sizes:
            number = float(rms)
            if math.isfinite(number):
                sizes.append(OutputSize(step=step, site=site, rms=number))
        if not sizes:
            return []
        initial = [path for path, is_initial in self._initial.items() if is_initial]
        note = EvaluatedOutputsEvent(
            step=sizes[0].step,
            root=self._root.index,
            sizes=tuple(sizes),
            estimates=self._estimates or (),
            initial=tuple(initial)[:_NAMED],
        )
        return [note]


def _estimating(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that estimate in training what they compute with in evaluation."""
    for path, module in modules_in(model).items():
        norms = {type(each).__name__ for each in (module, *before_forward(module).values())}
        if getattr(module, "running_var", None) is not None or norms & _SPECTRAL:
            yield path


def _has_initial_statistics(module: nn.Module) -> Tensor | bool | None:
    """Return whether running statistics are a mean of 0 and a variance of 1; None for a module without any.

    One training step of one batch changes both. On a device the answer stays there.
    """
    mean = getattr(module, "running_mean", None)
    var = getattr(module, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return None
    if not can_sample(mean) or not can_sample(var):
        return None
    initial = (mean == 0).all() & (var == 1).all()
    if initial.is_cpu:
        return bool(initial)
    return initial
