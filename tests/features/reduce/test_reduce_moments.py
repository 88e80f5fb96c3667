"""Means, covariances and the distance made of them, against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg

from kedge.errors import ReducerError
from kedge.features.reduce import Covariance, Mean, frechet_distance


def filled(reducer, values, size=13):
    """Pass values to a reducer in batches."""
    for part in values.split(size):
        reducer.update(part)
    return reducer


def result_of(values, **settings):
    """Return mean and covariance of values."""
    return filled(Covariance(**settings), values).result()


def by_scipy(a, b):
    """The distance as its formula stands, by scipy's root of a matrix."""
    root = linalg.sqrtm(a["covariance"].numpy() @ b["covariance"].numpy())
    apart = ((a["mean"] - b["mean"]) ** 2).sum()
    return float(
        apart + a["covariance"].trace() + b["covariance"].trace() - 2 * np.trace(root).real
    )


@pytest.mark.parametrize("ddof", [0, 1])
def test_they_are_numpys(ddof):
    """Mean, variance and covariance are numpy's, to the rounding of float64, with the divisor that was asked for."""
    x = torch.randn(101, 7) @ torch.randn(7, 7)
    both = result_of(x, ddof=ddof)
    alone = filled(Mean(ddof=ddof), x).result()
    y = x.double().numpy()

    np.testing.assert_allclose(both["covariance"], np.cov(y.T, ddof=ddof), rtol=1e-12)
    np.testing.assert_allclose(alone["variance"], y.var(0, ddof=ddof), rtol=1e-12)
    np.testing.assert_allclose(both["mean"], y.mean(0), rtol=1e-12, atol=1e-14)
    assert torch.equal(both["mean"], alone["mean"])
    assert both["n"] == alone["n"] == 101
    assert both["ddof"] == ddof
    assert torch.equal(both["covariance"], both["covariance"].T)


def test_a_large_mean_costs_no_digits():
    """Numbers of size 1e9 with a spread of 1 have the variance that they have; sums of squares would lose it all."""
    x = torch.randn(4000, 3, dtype=torch.float64)
    shifted = x + 1e9
    exact = (shifted - 1e9).numpy()
    naive = (shifted**2).mean(0) - shifted.mean(0) ** 2
    variance = filled(Mean(), shifted, 1).result()["variance"]

    np.testing.assert_allclose(variance, exact.var(0, ddof=1), rtol=1e-6)
    assert (naive - torch.from_numpy(exact.var(0))).abs().max() > 0.1


def test_parts_are_weighted_by_their_samples():
    """Merging parts of different sizes is not a mean of means."""
    x = torch.randn(50, 2)
    one, other = filled(Covariance(), x[:3]), filled(Covariance(), x[3:])
    one.merge(other)

    torch.testing.assert_close(
        one.result()["covariance"], result_of(x)["covariance"], rtol=1e-12, atol=1e-14
    )


def test_too_few_samples_have_no_variance():
    """With no more samples than ddof the variance is NaN, and the mean is there."""
    found = result_of(torch.tensor([[1.0, 2.0]]))

    assert found["mean"].tolist() == [1, 2]
    assert found["covariance"].isnan().all()
    assert result_of(torch.tensor([[1.0, 2.0]]), ddof=0)["covariance"].tolist() == [[0, 0], [0, 0]]


def test_what_is_not_finite_is_kept_and_counted():
    """A NaN or an infinity affects the moments of its own channel only; the number of samples with one is reported."""
    x = torch.randn(40, 3)
    x[7, 0], x[20, 1], x[20, 0] = torch.nan, torch.inf, 1.0
    found = result_of(x)

    assert found["nonfinite"] == 2
    assert found["n"] == 40
    assert found["mean"][0].isnan()
    assert found["mean"][1] == torch.inf
    assert found["covariance"][:2].isnan().all()
    torch.testing.assert_close(found["covariance"][2, 2], x[:, 2].double().var())


def test_samples_that_are_not_finite_can_be_left_out():
    """With nonfinite='skip' they are left out whole, and counted."""
    x = torch.randn(40, 3)
    bad = x.clone()
    bad[7, 0], bad[20, 1] = torch.nan, torch.inf
    found = result_of(bad, nonfinite="skip")
    rest = torch.cat([x[:7], x[8:20], x[21:]])

    assert found["nonfinite"] == 2
    assert found["n"] == 38
    torch.testing.assert_close(
        found["covariance"], result_of(rest)["covariance"], rtol=1e-12, atol=1e-14
    )


def test_numbers_too_large_to_be_added_are_no_infinities():
    """A mean of numbers near the end of float64 is infinite, as their sum is, but none is counted as not finite."""
    found = filled(
        Mean(nonfinite="skip"), torch.full((4, 1), 1.7e308, dtype=torch.float64)
    ).result()

    assert found["nonfinite"] == 0
    assert found["n"] == 4


def test_half_precision_is_summed_up_in_float64():
    """A million halves of 0.1 have a mean as exact as one of them."""
    x = torch.full((1_000_000, 1), 0.1, dtype=torch.float16)
    found = filled(Mean(), x, 250_000).result()

    assert abs(float(found["mean"]) - float(x[0])) < 1e-15


def test_the_distance_is_its_formula():
    """On covariances of full rank it is what scipy's root of a matrix gives."""
    a = result_of(torch.randn(500, 12) @ torch.randn(12, 12))
    b = result_of(torch.randn(300, 12) @ torch.randn(12, 12) + 0.5)

    assert frechet_distance(a, b) == pytest.approx(by_scipy(a, b), rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


def test_the_distance_of_one_channel_is_known():
    """For one channel it is (m_a - m_b)^2 + (s_a - s_b)^2."""
    a, b = result_of(torch.randn(90)), result_of(torch.randn(70) * 3 + 2)
    spread = a["covariance"].sqrt() - b["covariance"].sqrt()

    assert frechet_distance(a, b) == pytest.approx(
        float((a["mean"] - b["mean"]) ** 2 + spread**2), rel=1e-12
    )


def test_the_distance_holds_for_fewer_samples_than_channels():
    """Singular covariances have a distance too: none to themselves, and the right one where it is known."""
    x = torch.randn(20, 200, dtype=torch.float64)
    a, b = result_of(x), result_of(3 * x + 1)

    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9 * float(a["covariance"].trace()))
    apart = float(((a["mean"] - b["mean"]) ** 2).sum())
    assert frechet_distance(a, b) == pytest.approx(
        apart + 4 * float(a["covariance"].trace()), rel=1e-9
    )


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (result_of(torch.ones(9, 2)), result_of(torch.ones(9, 3)), "2 and 3 channels"),
        (
            result_of(torch.ones(1, 2)),
            result_of(torch.ones(9, 2)),
            "the first result has no finite",
        ),
        (
            result_of(torch.ones(9, 2)),
            filled(Mean(), torch.ones(9, 2)).result(),
            "the second result has no finite",
        ),
        (Covariance().result(), Covariance().result(), "the first result has no finite"),
        (Covariance(), Covariance(), r"a\.result\(\)"),
    ],
)
def test_a_distance_needs_two_covariances(a, b, said):
    """Results without a finite covariance, or of different channels, have no distance, nor have the reducers themselves."""
    with pytest.raises(ReducerError, match=said):
        frechet_distance(a, b)
