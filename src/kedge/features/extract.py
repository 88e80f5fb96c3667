"""Values from inside a model: `extract`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import nn

from kedge.calls.arguments import called_as, described, not_a_model, noted_arguments
from kedge.calls.not_a_block import NotABlock
from kedge.errors import ExtractError, KedgeError, NoSiteMatched, WrongCall
from kedge.features.capture import Transform, Wanted
from kedge.features.forward import Collected, FeatureForward
from kedge.sites.nearest import is_type_of_modules, not_a_selector
from kedge.sites.select import Selector, selects
from kedge.torch_internals.module_tables import is_replica, modules_in

if TYPE_CHECKING:
    from kedge.features.dataset import FeatureSet

Wishes: TypeAlias = str | Selector | Iterable[str | Selector] | Mapping[str, str | Transform | None]
"""Selectors; as a dict each with the name of its value, or a transform of its values."""


class Features(NotABlock, nn.Module):
    """A model that returns a dict of intermediate values instead of its output; the result of `kedge.extract`.

    It is called like the model and contains it, so ``.to``, ``.train``, parameters, copies and
    pickles work as for any module. Between calls the model has no Kedge hooks.
    """

    _instead = (
        'call it: values = kedge.extract(model, ["layer4"])(images). For a block of calls, use '
        'with kedge.hook(model, "layer4", kedge.record()) as acts: model(images)'
    )

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        super().__init__()
        self.model, self.wanted = model, wanted
        self._work: FeatureForward | None = FeatureForward(model, wanted)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the model and return the values by name.

        Raises:
            NotRecorded: If a site has no value; the message says why.
            Overwritten: If the forward changes a value in place that earlier forwards left
                unchanged.
        """
        __tracebackhide__ = True
        with noted_arguments(self.model, args, kwargs):
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
            The features in the folder at the end; errors as in
            `kedge.features.dataset.extract_dataset`.
        """
        # Half of the import time of kedge.features.
        engine: Any = import_module("kedge.features.dataset")
        settings = engine.Options(**options)
        written: FeatureSet = engine.extract_dataset(self, loader, out, settings)
        return written

    def held(self) -> AbstractContextManager[None]:
        """Return a context that keeps the hooks on the model between calls; use it only for calls of these features."""
        return self.work.held()

    @property
    def work(self) -> FeatureForward:
        """The object that captures the values; a copy of these features creates its own."""
        work = self._work
        if work is None or not (work.root is self.model or is_replica(self)):
            work = self._work = FeatureForward(self.model, self.wanted)
        return work

    @property
    def names(self) -> tuple[str, ...]:
        """The selectors under their new names; a selector for several values has several names in the result."""
        rename = self.wanted.rename
        return tuple(rename.get(text, text) for text in self.wanted.texts)

    def extra_repr(self) -> str:
        """Return the names, separated by commas."""
        return ", ".join(self.names)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the capture, which belongs to this very model."""
        return self.__dict__ | {"_work": None}


class ExtractOptions(TypedDict, total=False):
    """The options of `extract`; see there."""

    rename: Mapping[str, str] | None
    early_stop: bool
    no_grad: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class ExtractSignature(Protocol):
    """``extract(model, sites)``, where the keyword of `sites` may also be torchvision's ``return_nodes``."""

    @overload
    def __call__(
        self, model: nn.Module, sites: Wishes, **options: Unpack[ExtractOptions]
    ) -> Features: ...

    @overload
    def __call__(
        self, model: nn.Module, *, return_nodes: Wishes, **options: Unpack[ExtractOptions]
    ) -> Features: ...


def _also_return_nodes(function: Callable[..., Features]) -> ExtractSignature:
    """Return the function with torchvision's keyword ``return_nodes`` as another name of `sites`."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Features:
        if "return_nodes" in kwargs:
            if len(args) > 1 or "sites" in kwargs:
                raise WrongCall(
                    "extract() got sites twice: return_nodes is another name of sites, "
                    "so give one of them"
                )
            kwargs["sites"] = kwargs.pop("return_nodes")
        return function(*args, **kwargs)

    return renamed


@_also_return_nodes
@called_as('kedge.extract(model, ["layer4"])(images)')
def extract(
    model: nn.Module,
    sites: Wishes,
    *,
    rename: Mapping[str, str] | None = None,
    early_stop: bool = True,
    no_grad: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Features:
    """Wrap a model into one that returns a dict of intermediate values.

    Args:
        model: The model. It is not changed, and has no Kedge hooks between calls.
        sites: The selectors of the values: one, a list, or a dict. In a dict, each selector has the
            name of its value, or a function that transforms it, or None for neither. The argument
            may also be called ``return_nodes``, as in torchvision's ``create_feature_extractor``.
        rename: New names, by selector or by the name of a value.
        early_stop: Whether to stop a forward once all values are computed, as learned from the
            first forward of its kind.
        no_grad: Whether to run the forward without grad; False keeps the graph of each value.
        device: The device of the returned values; None for that of each value.
        dtype: The dtype of returned floating-point and complex values; None for that of each value.

    Returns:
        A module that is called like the model and returns a dict. If a selector has one value, the
        selector is its name; several values of one selector are named by their sites:
        ``"encoder#1"``, ``"lstm:out[0]"``. A value has the shape that the model gave it, unless it
        is transformed.

    Raises:
        NoSiteMatched: If a selector matches nothing.
        NoSuchKind: If a selector matches a kind of value that a forward does not compute.
        ExtractError: If names are impossible or not unique, no selector is given, or the model is
            compiled and `no_grad` is False.

    Examples:
        >>> features = kedge.extract(model, ["relu", "fc"])
        >>> features(images)["relu"].shape
        torch.Size([8, 4, 6, 6])
    """
    if not isinstance(model, nn.Module):
        raise ExtractError(
            'extract takes a model first, as in extract(model, ["layer4"]), not '
            f"{not_a_model(model)}"
        )
    if not (rename is None or isinstance(rename, Mapping)):
        raise ExtractError(
            f'rename={described(rename)}: give a dict, such as rename={{"layer4": "features"}}'
        )
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ExtractError(
            f"dtype={described(dtype)}: give a torch.dtype, such as dtype=torch.float16"
        )
    place: torch.device | None = None
    try:
        if device is not None:
            place = torch.device(device or "cpu")
    except (RuntimeError, TypeError) as error:
        raise ExtractError(
            f'device={described(device)} is not a device; give one such as "cpu" or "cuda"'
        ) from error

    names: dict[str, str] = {}
    texts: list[str] = []
    transforms: list[Transform | None] = []
    for text, wish in _wishes(model, sites):
        texts.append(text)
        if not isinstance(wish, str):
            transforms.append(wish)
            continue
        if text in (rename or {}):
            raise ExtractError(
                f'"{text}" gets a name both as "{wish}" and in rename; give one of them'
            )
        transforms.append(None)
        names[text] = wish
    if not texts:
        raise ExtractError('no site given; extract(model, ["layer4"]) takes at least one selector')
    wanted = Wanted(
        tuple(texts),
        tuple(transforms),
        {**names, **(rename or {})},
        early_stop,
        no_grad,
        place,
        dtype,
    )
    try:
        return Features(model, wanted)
    except NoSiteMatched as error:
        turned = _turned(model, sites)
        if turned is None:
            raise
        raise NoSiteMatched(
            f"{error}; the dict goes from a selector to a name: extract(model, {turned})"
        ) from None


def _turned(model: nn.Module, sites: Wishes) -> dict[str, str] | None:
    """Return a dict of selectors the other way round, None if that does not select its values either."""
    if not isinstance(sites, Mapping):
        return None
    turned: dict[str, str] = {}
    for name, text in sites.items():
        if not isinstance(text, str):
            return None
        turned[text] = str(name)
    try:
        for text in turned:
            Selector(text).on(model)
    except KedgeError:
        return None
    return turned


def _wishes(model: nn.Module, sites: Wishes) -> list[tuple[str, str | Transform | None]]:
    """Return each selector with the name or the transform of its values.

    Raises:
        ExtractError: If there is something else than selectors, or the values of a dict are
            neither.
    """
    pairs: list[tuple[Any, Any]]
    if isinstance(sites, Mapping):
        pairs = [*sites.items()]
    elif isinstance(sites, (str, Selector)) or is_type_of_modules(sites):
        pairs = [(sites, None)]
    elif selects(sites):
        pairs = [(text, None) for text in sites]
    else:
        paths = {id(module): path for path, module in modules_in(model).items()}
        path = paths.get(id(sites))
        example = f', such as "{path}" for this one' if path else ""
        raise ExtractError(
            f'{described(sites)} is not a selector: extract(model, ["layer4"]) takes '
            f"the paths of modules{example}"
        )
    odd = [text for text, _ in pairs if not isinstance(text, (str, Selector))]
    if odd:
        raise ExtractError(not_a_selector(odd))

    given = [(str(text), wish) for text, wish in pairs]
    for text, wish in given:
        if wish is not None and not isinstance(wish, str) and not callable(wish):
            advice = ""
            if hasattr(wish, "update"):
                advice = (
                    "; a reducer is for a data set: dataset(loader, folder, reduce={name: reducer})"
                )
            raise ExtractError(
                f'"{text}": {wish!r} is not a name, a function of the value, or None{advice}'
            )
        if wish == "":
            raise ExtractError(
                f'"{text}": the name of its value is empty; give a name, or None for the selector'
            )
    return given
