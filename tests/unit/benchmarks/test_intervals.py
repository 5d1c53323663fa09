"""The interval of a median by ranks holds the true median as often as it says, whatever the distribution."""

from __future__ import annotations

import random

import pytest

from benchmarks.intervals import FEWEST, Interval, median_interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # The ranks of the sign test's interval, as tables of it have them, from 0.
    [(6, 0, 5), (8, 0, 7), (9, 1, 7), (10, 1, 8), (12, 2, 9), (15, 3, 11), (20, 5, 14), (25, 7, 17)],
)
def test_ranks_are_those_of_the_sign_test(count: int, low: int, high: int) -> None:
    assert median_interval(list(map(float, range(count)))) == Interval(low, high)


def test_too_few_values_have_no_interval() -> None:
    assert median_interval([1.0] * (FEWEST - 1)) is None
    assert median_interval([]) is None


def test_order_and_outliers_do_not_matter() -> None:
    values = [1.01, 0.99, 50.0, 1.0, 1.02, 0.98, 1.0, 1.01, 0.01, 1.0]
    interval = median_interval(values)
    assert interval == Interval(0.98, 1.02)


def test_a_skewed_distribution_is_covered_as_often_as_promised() -> None:
    """Exponential values have their median at ln 2; of 2,000 intervals at most 5 % may miss it, plus chance."""
    source = random.Random(18)
    missed = 0
    for _ in range(2000):
        interval = median_interval([source.expovariate(1) for _ in range(10)])
        assert interval is not None
        missed += not interval.low <= 0.6931 <= interval.high
    assert missed < 100
