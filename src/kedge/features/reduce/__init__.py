"""Summaries of any number of samples in constant memory, which merge."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.histogram import Histogram
from kedge.features.reduce.moments import Covariance, Mean, frechet_distance
from kedge.features.reduce.quantiles import Quantiles
from kedge.features.reduce.reducer import Reducer, settings_of
from kedge.features.reduce.topk import TopK

__all__ = [
    "Covariance",
    "Histogram",
    "Mean",
    "Quantiles",
    "Reducer",
    "TopK",
    "frechet_distance",
    "restore",
]


_KINDS: dict[str, type[Reducer]] = {
    kind.__name__: kind for kind in (Mean, Covariance, Histogram, Quantiles, TopK)
}


def restore(state: Mapping[str, Tensor]) -> Reducer:
    """Return a reducer with the settings and the summary in a state.

    Raises:
        ReducerError: If it is not a reducer's state, or that of a class of your own: create the
            reducer and call `load`.
    """
    settings = settings_of(state)
    name = settings.pop("reducer")
    if name not in _KINDS:
        raise ReducerError(
            f"the state belongs to a reducer {name!r}, which is not one of "
            f"{', '.join(_KINDS)}; create the reducer yourself and call its load()"
        )
    try:
        reducer = _KINDS[name](**settings)
    except TypeError as error:
        raise ReducerError(
            f"the state of {name} was written by another version of Kedge, whose "
            f"settings were {', '.join(settings)}; reduce the features again, into "
            "another folder"
        ) from error
    reducer.load(state)
    return reducer
