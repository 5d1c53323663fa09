"""The interval of a median, from the ranks of its values alone.

The usual interval of a mean assumes a distribution, and a bootstrap of ten values promises more than it keeps. Each
value lies above the true median with a chance of a half, whatever the distribution and however far its outliers; so
the number of values above it is binomial, and two ranks enclose it with a chance that can be computed. A disturbance
that hits a few of the values, on a machine that others use too, moves the interval by a rank or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 6
"""Values that an interval takes: of five, the smallest and the largest enclose the median with a chance of 0.94."""


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest pair of values, of equal rank from either end, with at least that confidence; None if too few."""
    count, ordered = len(values), sorted(values)
    rank, outside = 0, 0.0
    # The chance that the true median is below the value of rank r (from 0): at most r values are below it.
    while rank < count // 2:
        outside += math.comb(count, rank) * 2.0**-count
        if 2 * outside > 1 - confidence:
            break
        rank += 1
    if rank == 0:
        return None
    return Interval(ordered[rank - 1], ordered[count - rank])
