"""Values from inside a model: `extract`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kedge.errors import ExtractError
from kedge.features.capture import Transform, Wanted
from kedge.features.collect import Collected
from kedge.features.forward import FeatureForward
from kedge.torch_internals.module_tables import is_replica

if TYPE_CHECKING:
    from kedge.features.dataset import FeatureSet


class Features(nn.Module):
    """A model that returns the values at some of its sites instead of its output, as a dict by name.

    It has the call interface of the model and contains it, so ``.to``, ``.train``, parameters, copies and pickles work as
    for any module. Between calls the model has no Kedge hooks.
    """

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        super().__init__()
        self.model, self.wanted = model, wanted
        self._work: FeatureForward | None = FeatureForward(model, wanted)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the model and return the values by name.

        Raises:
            NotRecorded: If a site has no value; the message says why.
            Overwritten: If the forward changes a value in place that earlier forwards left unchanged.
        """
        __tracebackhide__ = True
        return self.work.run(self.model, args, kwargs)

    @contextmanager
    def collect(self) -> Iterator[Mapping[str, list[Any]]]:
        """Context that captures the values of every forward pass of the model, such as those of ``model.generate``.

        Every pass runs to its end, in the grad mode of the block.

        Returns:
            A mapping from name to a list with one value per pass; it grows with each pass.
        """
        collected = Collected(self.wanted, self.work.why)
        with self.work.collecting(collected):
            yield collected

    def dataset(self, loader: Any, out: str | os.PathLike[str], **options: Any) -> FeatureSet:
        """Write the features of a whole data set to a folder, or continue an earlier run of the same extraction.

        Args:
            loader: A `torch.utils.data.DataLoader`, or any iterable of batches.
            out: The folder.
            options: The attributes of `kedge.features.dataset.Options`.

        Returns:
            The features in the folder at the end; errors as in `kedge.features.dataset.extract_dataset`.
        """
        engine: Any = import_module("kedge.features.dataset")  # half of the import time of kedge.features
        written: FeatureSet = engine.extract_dataset(self, loader, out, engine.Options(**options))
        return written

    def held(self) -> AbstractContextManager[None]:
        """Return a context that keeps the hooks on the model between calls; use it only for calls of these features."""
        return self.work.held()

    @property
    def work(self) -> FeatureForward:
        """The object that captures the values; a copy of these features creates its own."""
        if self._work is None or not (self._work.root is self.model or is_replica(self)):
            self._work = FeatureForward(self.model, self.wanted)
        return self._work

    @property
    def names(self) -> tuple[str, ...]:
        """The selectors under their new names; a selector for several values has several names in the result."""
        return tuple(self.wanted.rename.get(text, text) for text in self.wanted.texts)

    def extra_repr(self) -> str:
        """Return the names, separated by commas."""
        return ", ".join(self.names)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the capture, which belongs to this very model."""
        return self.__dict__ | {"_work": None}


def extract(
    model: nn.Module,
    sites: str | Iterable[str] | Mapping[str, Transform | None],
    *,
    rename: Mapping[str, str] | None = None,
    early_stop: bool = True,
    no_grad: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Features:
    """Return a model that returns the values at some of this model's sites.

    Args:
        model: The model; it remains unchanged, and between calls it has no Kedge hooks.
        sites: Selectors, or a dict from each selector to a transform of its values; None for no transform.
        rename: New names, by selector or by the name of a value.
        early_stop: Whether to end a forward once all values are captured, as learned from the first of its kind.
        no_grad: Whether to run without grad; False keeps each value's graph.
        device: The device on which to keep values; None for their own.
        dtype: The dtype in which to keep floating-point and complex values; None for their own.

    Returns:
        A module with the call interface of the model that returns a dict. A selector for one value is that value's
        name; several values of one selector are named by their sites: ``"encoder#1"``, ``"lstm:out[0]"``.

    Raises:
        NoSiteMatched: If a selector matches nothing.
        NoSuchKind: If a selector matches a kind of value that does not arise in a forward.
        ExtractError: If the names are impossible or not unique, no selector is given, or the model is compiled and
            `no_grad` is False.
    """
    given = {sites: None} if isinstance(sites, str) else sites if isinstance(sites, Mapping) else list(sites)
    texts = tuple(str(text) for text in given)
    if not texts:
        raise ExtractError('no site given; extract(model, ["layer4"]) takes at least one selector')
    transforms = tuple(given.values()) if isinstance(given, Mapping) else (None,) * len(texts)
    place = None if device is None else torch.device(device)
    return Features(model, Wanted(texts, transforms, dict(rename or {}), early_stop, no_grad, place, dtype))
