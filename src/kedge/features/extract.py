"""Values out of the middle of a model: `extract`."""

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
    """A model that returns what flows at some of its sites instead of its output, as a dict by name.

    It is called like the model and holds it, so that ``.to``, ``.train``, parameters, copies and pickles work as
    for any module. Between calls the model is bare: nothing of Kedge's is on it.
    """

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        super().__init__()
        self.model, self.wanted = model, wanted
        self._work: FeatureForward | None = FeatureForward(model, wanted)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the model and return the values by name.

        Raises:
            NotRecorded: If there is no value at one of the sites; the message says why.
            Overwritten: If the forward has changed a value in place that none before it did.
        """
        __tracebackhide__ = True
        return self.work.run(self.model, args, kwargs)

    @contextmanager
    def collect(self) -> Iterator[Mapping[str, list[Any]]]:
        """Take the values of every forward pass of the model in the block, such as those of ``model.generate``.

        Every pass runs to its end, in the grad mode of the block.

        Returns:
            A mapping from name to a list with one value a pass; it grows as they come.
        """
        collected = Collected(self.wanted, self.work.why)
        with self.work.collecting(collected):
            yield collected

    def dataset(self, loader: Any, out: str | os.PathLike[str], **options: Any) -> FeatureSet:
        """Write the features of a whole data set into a folder, going on where an earlier run stopped.

        Args:
            loader: A `torch.utils.data.DataLoader`, or any iterable of batches.
            out: The folder.
            options: See `kedge.features.dataset.Options`.

        Returns:
            What the folder holds then; errors as `kedge.features.dataset.extract_dataset` has them.
        """
        engine: Any = import_module("kedge.features.dataset")  # half of the time that importing all this takes
        written: FeatureSet = engine.extract_dataset(self, loader, out, engine.Options(**options))
        return written

    def held(self) -> AbstractContextManager[None]:
        """Leave the hooks on the model between calls in a block that calls nothing but these features."""
        return self.work.held()

    @property
    def work(self) -> FeatureForward:
        """What takes the values; a copy of these features makes its own."""
        if self._work is None or not (self._work.root is self.model or is_replica(self)):
            self._work = FeatureForward(self.model, self.wanted)
        return self._work

    @property
    def names(self) -> tuple[str, ...]:
        """The selectors under their new names; one that stands for several values has more names in the result."""
        return tuple(self.wanted.rename.get(text, text) for text in self.wanted.texts)

    def extra_repr(self) -> str:
        """The names."""
        return ", ".join(self.names)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very model."""
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
    """Make of a model one that returns what flows at some of its sites.

    Args:
        model: The model; it is not changed, and between calls nothing is on it.
        sites: Selectors, or a dict from a selector to what its values go through before they are kept; None for nothing.
        rename: New names, by selector or by the name of a value.
        early_stop: End a forward once all is there, as learned from the first of its kind.
        no_grad: Run without grad; False keeps each value's graph.
        device: Where to keep the values; None for where they are.
        dtype: As what to keep floating-point values; None for what they are.

    Returns:
        A module that is called like the model and returns a dict. A selector that stands for one value is its
        name; of several, each goes by its site: ``"encoder#1"``, ``"lstm:out[0]"``.

    Raises:
        NoSiteMatched: If a selector stands for nothing.
        NoSuchKind: If it stands for something that a forward does not have.
        ExtractError: If names cannot come out as asked.
    """
    given = {sites: None} if isinstance(sites, str) else sites if isinstance(sites, Mapping) else list(sites)
    texts = tuple(str(text) for text in given)
    if not texts:
        raise ExtractError('no site was asked for; extract(model, ["layer4"]) takes at least one selector')
    transforms = tuple(given.values()) if isinstance(given, Mapping) else (None,) * len(texts)
    place = None if device is None else torch.device(device)
    return Features(model, Wanted(texts, transforms, dict(rename or {}), early_stop, no_grad, place, dtype))
