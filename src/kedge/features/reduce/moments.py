"""Mean, variance and covariance in one pass, merged in float64.

# Note [Merging moments]
The state is the mean `m` and the scatter ``M = sum((x - m) (x - m)^T)`` of `n` samples. Two parts
are joined by

    d = m_b - m_a,   n = n_a + n_b,   m = m_a + d n_b / n,   M = M_a + M_b + d d^T n_a n_b / n

which, unlike sums of squares, loses no digits to a large mean: T. F. Chan, G. H. Golub and R. J.
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", Stanford
STAN-CS-79-773, 1979; for covariances P. Pebay, "Formulas for robust, one-pass parallel computation
of covariances and arbitrary-order statistical moments", Sandia SAND2008-6212, 2008. With one sample
as the second part it is the method of B. P. Welford, Technometrics 4(3), 1962. The scatter of a
batch takes two passes over the batch, the first for its mean.

For an infinite or NaN mean `d` is useless; there the weighted means are added, so that the result
is infinite or NaN in any order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.reducer import Positions, Reducer, State


class Moments(Reducer):
    """The part that `Mean` and `Covariance` share; see Note [Merging moments].

    Args:
        ddof: The divisor is the number of samples less this: 1 for an unbiased estimate, 0 for the
            samples' own variance.
        nonfinite: "keep": a NaN or an infinity makes its channel's moments non-finite; "skip":
            samples with such a value are left out whole. Either way they are counted.
        positions: The treatment of values with more than two dimensions: "samples", "mean", "max"
            or "elements".
        channel: The dimension of the channels.
    """

    def __init__(
        self,
        *,
        ddof: int = 1,
        nonfinite: Literal["keep", "skip"] = "keep",
        positions: Positions | None = None,
        channel: int = 1,
    ) -> None:
        super().__init__(ddof=ddof, nonfinite=nonfinite, positions=positions, channel=channel)
        if nonfinite not in ("keep", "skip") or ddof < 0:
            raise ReducerError(f"{self!r}: nonfinite must be 'keep' or 'skip', and ddof at least 0")
        self.n = 0
        self.nonfinite = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, dtype=torch.float64)

    @abstractmethod
    def _add(self, rows: Tensor) -> None:
        """Add the products of rows to the scatter."""

    @abstractmethod
    def _nothing(self, channels: int, device: torch.device) -> Tensor:
        """Return the scatter of no rows."""

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for rows in self._pieces(values):
            self._take_rows(rows.double())

    def _take_rows(self, rows: Tensor) -> None:
        mean = rows.mean(0)
        if not mean.isfinite().all():  # or the sum overflowed, which costs only this check
            finite = rows.isfinite().all(1)
            self.nonfinite += len(rows) - int(finite.sum())
            if self.settings["nonfinite"] == "skip":
                rows = rows[finite]
                mean = rows.mean(0)
        if len(rows):
            self._join(len(rows), mean, rows - mean)

    def _join(self, n: int, mean: Tensor, centred: Tensor) -> None:
        """Join a part of `n` samples and add the products of its centred rows to the scatter."""
        if not self.n:
            self.mean = torch.zeros_like(mean)
            self.scatter = self._nothing(len(mean), mean.device)
        mean = mean.to(self.mean.device)
        centred = centred.to(self.mean.device)
        total = self.n + n
        delta = mean - self.mean
        # The term of the means is one more row, so that one pass over the scatter suffices.
        if self.n:
            apart = delta * math.sqrt(self.n * n / total)
            centred = torch.cat([centred, apart[None]])
            weighted = self.mean * (self.n / total) + mean * (n / total)
            mean = torch.where(delta.isfinite(), self.mean + delta * (n / total), weighted)
        self._add(centred)
        self.n, self.mean = total, mean

    def _merge(self, other: Self) -> None:
        self.nonfinite += other.nonfinite
        if other.n:
            no_rows = other.mean.new_zeros(0, len(other.mean))
            self._join(other.n, other.mean.clone(), no_rows)
            self.scatter.add_(other.scatter.to(self.scatter.device))

    def _state(self) -> State:
        counts = torch.tensor([self.n, self.nonfinite])
        return {"counts": counts, "mean": self.mean, "scatter": self.scatter}

    def _load(self, state: State) -> None:
        self.n, self.nonfinite = state["counts"].tolist()
        self.mean, self.scatter = state["mean"], state["scatter"]

    def _moments(self) -> tuple[dict[str, Any], Tensor]:
        """Return the entries common to both results, and the scatter over its divisor."""
        divisor = self.n - self.settings["ddof"]
        second = torch.full_like(self.scatter, torch.nan, device="cpu")
        if divisor > 0:
            second = self.scatter.cpu() / divisor
        moments = {
            "n": self.n,
            "nonfinite": self.nonfinite,
            "ddof": self.settings["ddof"],
            "mean": self.mean.cpu().clone(),
        }
        return moments, second


class Mean(Moments):
    """A reducer for the mean and variance of each channel, in float64.

    The result has `n`, `nonfinite` (samples with a NaN or an infinity), `ddof`, `mean` and
    `variance`, each ``[channels]``: ``variance = sum((x - mean)^2) / (n - ddof)``, NaN unless `n`
    is above `ddof`. Integers beyond 2^53 are rounded.

    Examples:
        >>> moments = recipes.Mean()
        >>> moments.update(torch.ones(10, 4))
        >>> moments.result()["n"]
        10
    """

    def result(self) -> dict[str, Any]:
        """Return `n`, `nonfinite`, `ddof`, `mean` and `variance`."""
        moments, variance = self._moments()
        return moments | {"variance": variance}

    def _add(self, rows: Tensor) -> None:
        self.scatter.add_(rows.square().sum(0))

    def _nothing(self, channels: int, device: torch.device) -> Tensor:
        return torch.zeros(channels, dtype=torch.float64, device=device)


class Covariance(Moments):
    """A reducer for the mean and covariance matrix of the channels, in float64, as `frechet_distance` takes them.

    The result has `n`, `nonfinite` (samples with a NaN or an infinity), `ddof`, `mean`
    ``[channels]`` and `covariance` ``[channels, channels]``: ``sum((x - mean) (x - mean)^T) / (n -
    ddof)``, NaN unless `n` is above `ddof`. It takes 8 bytes for each pair of channels.

    Examples:
        >>> covariance = recipes.Covariance()
        >>> covariance.update(torch.rand(10, 4))
        >>> covariance.result()["covariance"].shape
        torch.Size([4, 4])
    """

    def result(self) -> dict[str, Any]:
        """Return `n`, `nonfinite`, `ddof`, `mean` and `covariance`."""
        moments, covariance = self._moments()
        if covariance.dim() == 2:
            covariance = (covariance + covariance.T) / 2
        return moments | {"covariance": covariance}

    def _add(self, rows: Tensor) -> None:
        self.scatter.addmm_(rows.T, rows)

    def _nothing(self, channels: int, device: torch.device) -> Tensor:
        return torch.zeros(channels, channels, dtype=torch.float64, device=device)


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
                f"the {which} is a {type(result).__name__}; a Fréchet distance takes "
                "two results: frechet_distance(a.result(), b.result())"
            )
        if "covariance" not in result or not _is_usable(result):
            raise ReducerError(
                f"the {which} result has no finite mean and covariance: a Fréchet "
                "distance needs results of Covariance() over more samples than its "
                "ddof, all finite (or nonfinite='skip')"
            )
    if a["mean"].shape != b["mean"].shape:
        raise ReducerError(
            f"the results have {len(a['mean'])} and {len(b['mean'])} channels; use the "
            "same features of both sets"
        )
    apart = (a["mean"] - b["mean"]).square().sum()
    roots = torch.linalg.svdvals(_root(a["covariance"]) @ _root(b["covariance"])).sum()
    variances = a["covariance"].trace() + b["covariance"].trace()
    return max(0.0, float(apart + variances - 2 * roots))


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
