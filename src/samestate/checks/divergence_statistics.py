"""The two tests behind `samestate.checks.divergence`, exact and without random numbers: pure functions over numbers.

Both have the same null hypothesis, in two readings that are stated with each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb
from typing import NamedTuple


class Stratum(NamedTuple):
    """What was measured on one input, in one unit."""

    floor: Sequence[float]
    reload: Sequence[float]


class Excess(NamedTuple):
    """What `excess` came to."""

    p: float
    largest: int
    """The p-value rests on so many largest values; 0: none is above the limit."""


def permutation(strata: Sequence[Stratum]) -> float:
    """Exact p-value, one-sided, of the stratified rank-sum permutation test; 1.0 where no input has both sides.

    Null hypothesis: on each input, values of the floor and of reloads are exchangeable (or the reloads' stochastically
    less). Statistic: the sum of the reloads' ranks among all values; equal values share their mean rank. Labels are
    permuted within an input only; the whole distribution is counted, so no seed and no order of inputs matters.
    """
    usable = [one for one in strata if one.floor and one.reload]
    ranks = _doubled_ranks([value for one in usable for value in (*one.floor, *one.reload)])
    ways, observed, total = Counter({0: 1}), 0, 1
    for one in usable:
        within = _sums([ranks[value] for value in (*one.floor, *one.reload)], len(one.reload))
        ways = _convolved(ways, within)
        observed += sum(ranks[value] for value in one.reload)
        total *= comb(len(one.floor) + len(one.reload), len(one.reload))
    return float(Fraction(sum(count for sums, count in ways.items() if sums >= observed), total))


def excess(floor: int, limit: float, reload: Sequence[float], tail: float) -> Excess:
    """An upper bound of the probability that reloads lie so far above a floor of `floor` values.

    Null hypothesis: reloads are drawn as the floor was, and beyond the floor's largest value (≤ `limit`, > 0)
    the probability of a larger one falls at least as fast as the power -`tail`: a Gaussian's, a Laplace's, a logistic's
    does, Student's t with `tail` degrees of freedom just does. Then the k-th largest of R reloads is K times the limit
    with probability at most C(R, k) / C(n + k, k) · K^(-tail·k), n = `floor`: one over the second factor is the
    expectation of the k-th power of the probability of exceeding the largest of n. Each k has 2^-k of the error.
    """
    best, among = Excess(1.0, 0), len(reload)
    for k, value in enumerate(sorted(reload, reverse=True), start=1):
        if value <= limit:
            break
        log = k * math.log(2) + _log_comb(among, k) - _log_comb(floor + k, k) - tail * k * math.log(value / limit)
        if log <= 0 and math.exp(log) <= best.p:
            best = Excess(math.exp(log), k)
    return best


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _doubled_ranks(values: Sequence[float]) -> dict[float, int]:
    """Twice the mean rank of each value: whole numbers."""
    found, below = dict[float, int](), 0
    for value, times in sorted(Counter(values).items()):
        found[value] = 2 * below + times + 1
        below += times
    return found


def _sums(ranks: Sequence[int], chosen: int) -> Counter[int]:
    """In how many ways `chosen` of the ranks come to each sum."""
    ways = [Counter({0: 1}), *(Counter[int]() for _ in range(chosen))]
    for rank in ranks:
        for size in range(chosen, 0, -1):
            for sums, count in list(ways[size - 1].items()):
                ways[size][sums + rank] += count
    return ways[chosen]


def _convolved(left: Counter[int], right: Counter[int]) -> Counter[int]:
    both = Counter[int]()
    for a, times in left.items():
        for b, more in right.items():
            both[a + b] += times * more
    return both
