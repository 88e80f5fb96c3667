"""The Fréchet distance of two normal distributions, which compares sets of images by their features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kedge.errors import ReducerError


def frechet_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the squared Fréchet distance between two results of `Covariance`, taken as normal distributions.

    On the last pooled features of an Inception network it is the FID of M. Heusel et al., "GANs
    trained by a two time-scale update rule converge to a local Nash equilibrium", NeurIPS 2017. The
    formula is ``|m_a - m_b|^2 + tr(A + B - 2 (A B)^(1/2))``: D. C. Dowson and B. V. Landau, "The
    Fréchet distance between multivariate normal distributions", Journal of Multivariate Analysis
    12(3), 1982.

    ``tr (A B)^(1/2)`` is computed as the sum of the singular values of ``A^(1/2) B^(1/2)``: both
    are roots of symmetric matrices, so there are no complex numbers and no small number on a
    diagonal. This also holds for fewer samples than channels, although the distance from few
    samples is too large.

    Args:
        a: A result with `mean` and `covariance`.
        b: Another result, of the same channels.

    Returns:
        The distance.

    Raises:
        ReducerError: If the two have different numbers of channels, or one has no finite mean and
            covariance.
    """
    for which, result in (("first", a), ("second", b)):
        if not isinstance(result, Mapping):
            raise ReducerError(
                f"the {which} is a {type(result).__name__}; a Fréchet distance takes two results: "
                "frechet_distance(a.result(), b.result())"
            )
        if "covariance" not in result or not _is_usable(result):
            raise ReducerError(
                f"the {which} result has no finite mean and covariance: a Fréchet distance needs results of Covariance() "
                "over more samples than its ddof, all finite (or nonfinite='skip')"
            )
    if a["mean"].shape != b["mean"].shape:
        raise ReducerError(
            f"the results have {len(a['mean'])} and {len(b['mean'])} channels; use the same features of both sets"
        )
    apart = (a["mean"] - b["mean"]).square().sum()
    roots = torch.linalg.svdvals(_root(a["covariance"]) @ _root(b["covariance"])).sum()
    return max(0.0, float(apart + a["covariance"].trace() + b["covariance"].trace() - 2 * roots))


def _is_usable(result: Mapping[str, Any]) -> bool:
    return bool(
        len(result["mean"])
        and result["mean"].isfinite().all()
        and result["covariance"].isfinite().all()
    )


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric root, with 0 for eigenvalues at the level of rounding, whose roots would not be small."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = len(values) * torch.finfo(values.dtype).eps * values[-1].abs()
    kept = torch.where(values > noise, values, 0).sqrt()
    root: Tensor = (vectors * kept) @ vectors.T
    return root
