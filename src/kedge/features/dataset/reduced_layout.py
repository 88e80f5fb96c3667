"""Whether the reducers of values with positions take them as the model laid them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kedge.errors import ExtractionFailed
from kedge.features.axes.arguments import Arguments
from kedge.features.axes.layout import Layout
from kedge.features.forward import FeatureForward
from kedge.features.reduce.reducer import Reducer


@contextmanager
def reduced_as_laid_out(forward: Any, reducers: Mapping[str, Sequence[Reducer]]) -> Iterator[None]:
    """Context of an extraction in which a reducer that would take positions for channels is an error.

    Args:
        forward: The features' forwards; nothing is known about those of features not from Kedge.
        reducers: The reducers of each value.
    """
    if not (reducers and isinstance(forward, FeatureForward)):
        yield
        return

    def inspect(name: str, layout: Layout, given: Arguments) -> None:
        for reducer in reducers.get(name, ()):
            if hasattr(reducer, "layout"):
                _check(name, reducer, layout, given)

    followed = forward.follows
    forward.follows, forward.inspect = True, inspect
    try:
        yield
    finally:
        forward.follows, forward.inspect = followed, None


def _check(name: str, reducer: Reducer, layout: Layout, given: Arguments) -> None:
    """Check one reducer of a value.

    Raises:
        ExtractionFailed: It would take another dimension for the channels, or count padding.
    """
    how, channel = reducer.layout.positions, reducer.layout.channel
    if not layout.positions or how in (None, "elements"):
        return
    shown = f"reduce: {reducer.settings['reducer']} of {name!r}"
    dims = range(layout.dims)
    channels = [dim for dim in dims if dim != layout.samples and dim not in layout.positions]
    per_channel = reducer.settings.get("per", "channel") == "channel"
    if per_channel and channels and channels != [channel % layout.dims]:
        raise ExtractionFailed(
            f"{shown} takes dimension {channel} for the channels, and the model has them in dimension {channels[0]} of "
            f"{layout.dims}; give channel={channels[0] - layout.dims}, or pool the values first, with --transform or Pool"
        )
    for mask in given.masks():
        if any(sources & mask.covers for sources in layout.sources) and not bool(mask.kept.all()):
            raise ExtractionFailed(
                f"{shown} would count padding, which {mask.name} marks; pool the values first, such as with --transform "
                "mean or kedge.features.pooling.Pool('mean'), or use batches of one sample"
            )
