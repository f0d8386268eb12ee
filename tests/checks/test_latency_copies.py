"""A reload against its bytes at the measured copy speed and a local hit: met, missed, unavailable; never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.history import History
from samestate.checks.latency_copies import (
    GOAL,
    NO_LOCAL,
    NO_RELOAD,
    NO_SPEED,
    CopySpeed,
    ReloadCost,
    copy_seconds,
    copy_speeds,
    reload_costs,
)
from samestate.checks.latency_paths import ActualPath, Taken
from samestate.checks.latency_sample import Sample, samples
from samestate.evidence.records import OperationName

from .latency_run import build, copies

RATE = 2e9
BYTES = 2 * 32 + 512
"""Of a reload of 32 tokens."""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The run's samples, its repeats on the engine with a cache made local hits that take half a reload's time."""
    history = History.read(build().write(tmp_path_factory.mktemp("copies") / "archive"))
    found = samples(history)
    reloads = {(one.arm, one.case): one for one in found if one.condition.attempted is OperationName.RELOAD}
    return [
        _local(one, reloads[one.arm, one.case]) if str(one.condition) == "ON repeat" else one
        for one in found
        if one.measured
    ]


def _local(one: Sample, reload: Sample) -> Sample:
    assert reload.first_token is not None
    return one._replace(
        taken=Taken(ActualPath.LOCAL, ""), moved=0, by_rank={}, loading=None, first_token=reload.first_token / 2
    )


def speeds(rate: float = RATE, *arms: str) -> list[CopySpeed]:
    shape = {"rank": 0, "route": "host-to-host", "device": "cpu", "bytes": 1, "copies": 3, "where": ""}
    return [
        CopySpeed(arm=arm, rate=rate, slowest=rate, fastest=rate, **shape)
        for arm in arms or ("candidate", "candidate-2")
    ]


def cost(costs: list[ReloadCost], tokens: int = 48, repetition: int = 1) -> ReloadCost:
    (found,) = [one for one in costs if (one.tokens, one.repetition) == (tokens, repetition)]
    return found


def test_a_run_s_workers_say_their_speed(tmp_path: Path) -> None:
    run = build()
    copies(run, "candidate", RATE)
    judgement = run.judge(tmp_path / "a")
    assert judgement.latency is not None
    (speed,) = judgement.latency.copies
    assert (speed.arm, speed.rank, speed.copies) == ("candidate", 0, 3)
    assert speed.rate == pytest.approx(RATE), "the median copy, not the slow one"
    assert (speed.slowest, speed.fastest) == pytest.approx((RATE / 4, RATE))
    assert speed.where.startswith("arms/candidate/worker-0.jsonl:")
    first = cost(judgement.latency.reloads)
    assert (first.moved, first.credited) == ([BYTES], [32])
    assert first.copying == pytest.approx(BYTES / RATE)
    assert first.loading is not None
    assert (first.note, first.ratio, first.met) == (NO_LOCAL, None, None), "in study A every repeat came from outside"
    other = cost(judgement.latency.reloads, repetition=2)
    assert (other.copying, other.note) == (None, NO_SPEED), "another engine's speed is not this one's"


def test_no_copy_was_measured(tmp_path: Path) -> None:
    history = History.read(build().write(tmp_path / "a"))
    assert copy_speeds(history) == []


def test_the_ratio_is_each_reload_s_own(sampled: list[Sample]) -> None:
    """Each takes twice its local hit, and its bytes take no time to speak of."""
    found = reload_costs(sampled, speeds())
    assert len(found) == 6
    for one in found:
        assert one.inputs == 3
        assert one.ratio == pytest.approx(2, abs=1e-4)
        assert one.met is False
        assert one.note == ""


def test_slow_copies_meet_the_goal(sampled: list[Sample]) -> None:
    """Where its bytes take as long as the local hit does, a reload of twice that time has a ratio of 1."""
    first = cost(reload_costs(sampled, speeds()))
    assert first.local is not None
    found = cost(reload_costs(sampled, speeds(BYTES / first.local)))
    assert found.ratio == pytest.approx(1, rel=0.1)
    assert found.met is True
    assert found.ratio <= GOAL


def test_a_local_hit_of_another_length_is_none(sampled: list[Sample]) -> None:
    shorter = [one._replace(credited=8) if one.path is ActualPath.LOCAL else one for one in sampled]
    assert {one.note for one in reload_costs(shorter, speeds())} == {NO_LOCAL}


def test_without_a_speed_there_is_no_ratio(sampled: list[Sample]) -> None:
    found = reload_costs(sampled, [])
    assert {(one.note, one.ratio, one.copying) for one in found} == {(NO_SPEED, None, None)}
    assert all(one.local is not None for one in found), "what is known is shown all the same"


def test_a_reload_that_loaded_nothing_costs_nothing_known(sampled: list[Sample]) -> None:
    empty = [one._replace(moved=0, by_rank={}) if one.moved else one for one in sampled]
    assert {(one.note, one.ratio) for one in reload_costs(empty, speeds())} == {(NO_RELOAD, None)}
    mixed = [one._replace(taken=Taken(ActualPath.MIXED, "")) if one.moved else one for one in sampled]
    assert {one.note for one in reload_costs(mixed, speeds())} == {NO_RELOAD}


def test_ranks_copy_at_once_and_each_needs_its_speed() -> None:
    assert copy_seconds({0: 100, 1: 300}, {0: 100.0, 1: 100.0}) == 3
    assert copy_seconds({0: 100, 1: 300}, {0: 100.0}) is None
    assert copy_seconds({}, {0: 100.0}) is None
