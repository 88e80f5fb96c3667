"""The states of Python's and NumPy's generators: told once, and again only if a number may have been drawn."""

# ruff: noqa: NPY002 - models draw from NumPy's own generator

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kedge.torch_internals.random_state import RandomState, set_random_state


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave the generators as they are."""
    python = random.getstate()
    numpy = np.random.get_bit_generator()
    state = np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_bit_generator(numpy)
    np.random.set_state(state)


def draw() -> tuple[float, ...]:
    """Draw a few numbers of each kind."""
    return random.random(), random.gauss(0, 1), np.random.rand(), *np.random.randn(3)


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "python": random.random,
    "uniform": np.random.rand,
    "normal": np.random.randn,
    "two normal": lambda: np.random.randn(2),
    "a word": lambda: np.random.randint(2, dtype=np.uint32),
    "seed": lambda: np.random.seed(5),
    "permutation": lambda: np.random.permutation(4),
    "other generator": lambda: np.random.set_bit_generator(np.random.MT19937(3)),
}


@pytest.mark.parametrize("before", ["uniform", "normal", "two normal"])
@pytest.mark.parametrize("between", DRAWS)
def test_a_state_is_put_back_whatever_is_drawn_in_between(before: str, between: str) -> None:
    """The same numbers follow once more, and afterwards those that would have followed in between."""
    DRAWS[before]()
    state = RandomState()
    expected = draw()
    state.restore(RandomState(state))

    DRAWS[between]()
    present = RandomState(state)
    following = draw()
    present.restore(RandomState(present))

    if between != "other generator":
        state.restore(RandomState(present))
        assert draw() == expected
        present.restore(RandomState(state))
    assert draw() == following


def test_a_generator_of_another_kind_is_put_back_without_a_warning() -> None:
    """NumPy's own functions may draw from any generator; a recording has no words for its state."""
    np.random.set_bit_generator(np.random.PCG64(3))
    state = RandomState()
    expected = draw()
    state.restore(RandomState(state))
    assert draw() == expected

    entries = state.entries()
    assert entries["numpy"] is None
    random.random()
    set_random_state(entries)
    assert random.random() == expected[0]


def test_entries_hold_both_states() -> None:
    """What a recording has puts Python's and NumPy's generator back, with a normal number that was left over."""
    np.random.randn()
    entries = RandomState().entries()
    expected = draw()
    set_random_state(entries)
    assert draw() == expected


def test_the_number_left_over_is_a_part_of_the_state() -> None:
    """Two states with the same words differ if one still has the second number of a pair."""
    np.random.seed(1)
    np.random.randn()
    with_one = RandomState()
    np.random.randn()
    present = RandomState(with_one)
    following = draw()
    present.restore(RandomState(present))

    with_one.restore(present)
    present.restore(RandomState(present))
    assert draw() == following
