"""The figures of a latency study, from numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.checks.latency_statistics import (
    LEAST_FOR_INTERVAL,
    bootstrap,
    decode_rate,
    median_of_ratios,
    middle,
    over_groups,
    ratio_of_medians,
    time_to_first_token,
    total_latency,
)
from samestate.evidence.latency_records import StreamEvent

SECOND = 10**9


def events(*given: tuple[float, int]) -> list[StreamEvent]:
    return [StreamEvent(at_ns=int(at * SECOND), tokens=tokens) for at, tokens in given]


def test_the_first_token_is_the_first_event_that_brings_one() -> None:
    stream = events((2.0, 0), (3.5, 0), (4.0, 1), (5.0, 1))
    assert time_to_first_token(1 * SECOND, stream) == 3.0
    assert time_to_first_token(0, events((1.0, 0))) is None
    assert time_to_first_token(0, []) is None


def test_the_total_ends_with_the_end_marker_and_not_with_the_last_token() -> None:
    assert total_latency(1 * SECOND, 9 * SECOND) == 8.0


def test_decode_rate_counts_tokens_after_the_first_event_over_the_time_between_first_and_last() -> None:
    assert decode_rate(events((1.0, 1), (2.0, 1), (3.0, 1))) == 1.0
    several = events((1.0, 4), (2.0, 3), (3.0, 3))
    assert decode_rate(several) == 3.0, "not 10 tokens over 2 s, nor 2 events over 2 s"
    padded = events((0.5, 0), (1.0, 4), (2.0, 3), (3.0, 3), (9.0, 0))
    assert decode_rate(padded) == 3.0, "events without a token bound nothing"


@pytest.mark.parametrize("stream", [[], [(1.0, 5)], [(1.0, 5), (1.0, 5)], [(1.0, 0), (2.0, 0)]])
def test_no_rate_without_time_between_two_events(stream: list[tuple[float, int]]) -> None:
    assert decode_rate(events(*stream)) is None


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    cold = {"a": 1.0, "b": 10.0, "c": 12.0}
    reload = {"a": 0.5, "b": 2.0, "c": 11.0}
    assert median_of_ratios(cold, reload) == 2.0
    assert ratio_of_medians(list(cold.values()), list(reload.values())) == 5.0


def test_inputs_that_lack_a_side_are_left_out() -> None:
    assert median_of_ratios({"a": 3.0, "b": 100.0}, {"a": 1.0, "c": 1.0}) == 3.0
    assert median_of_ratios({"a": 3.0}, {"a": 0.0}) is None
    assert median_of_ratios({}, {}) is None
    assert ratio_of_medians([], [1.0]) is None
    assert middle([]) is None


def test_a_range_says_that_it_is_no_interval() -> None:
    spread = over_groups([1.85, 2.80, 2.0, 2.1, 2.2, 2.3])
    assert spread is not None
    assert (spread.low, spread.high) == (1.85, 2.80)
    assert spread.name == "range over 6 groups (not CI)"
    assert over_groups([]) is None


def test_no_interval_of_a_handful() -> None:
    assert bootstrap([1.0] * (LEAST_FOR_INTERVAL - 1), seed=1) is None
    assert bootstrap([1.0] * LEAST_FOR_INTERVAL, seed=1) is not None


def test_an_interval_is_the_same_for_the_same_seed() -> None:
    values = [float(n % 7) for n in range(40)]
    first = bootstrap(values, seed=7)
    assert first is not None
    assert first == bootstrap(values, seed=7)
    assert first.low <= 3.0 <= first.high
    assert first.low < first.high, "forty values that differ have some spread"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_equal_sides_have_ratio_one(values: list[float]) -> None:
    side = dict(enumerate(values))
    assert median_of_ratios(side, side) == 1.0
