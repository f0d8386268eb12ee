"""What a latency study shows: study A's table of paths, groups, comparisons over equal suffixes, cells left empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.checks.latency_study import ASKED, Comparison, Study, break_even
from samestate.evidence import records as r
from samestate.evidence.latency_records import HostSampled, RequestTimed

from .latency_run import LatencyRun, build, small_plan

RELOAD, ENABLED, REPEAT, AGAIN = (asked.name for asked in ASKED)


def studied(run: LatencyRun, root: Path) -> Study:
    made = run.judge(root / "archive").latency
    assert made is not None
    return made


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return studied(build(), tmp_path)


def of(study: Study, name: str) -> list[Comparison]:
    return [one for one in study.comparisons if one.name == name]


def test_attempted_paths_are_not_actual_paths(study: Study) -> None:
    """Study A: of 18 OFF repeats 12 recompute and 6 are local; of 18 ON repeats all come from outside."""
    assert {one.condition: one.actual for one in study.attempted} == {
        "OFF cold": {"recompute": 18},
        "OFF repeat": {"recompute": 12, "local": 6},
        "ON cold": {"recompute": 18},
        "ON repeat": {"external-memory": 18},
        "ON reload": {"external-memory": 18},
    }


def test_counts_are_kept_apart(study: Study) -> None:
    assert (study.pairs, study.tasks, study.inputs, study.measured_inputs) == (2, 1, 12, 9)
    assert (study.requests, study.measured, study.counted, study.not_counted) == (120, 90, 90, [])
    assert study.order == "ascending by trial, then by length"


def test_six_groups_with_medians_of_three(study: Study) -> None:
    assert len(study.cells) == 30
    assert {one.trials for one in study.cells} == {3}
    (cell,) = [one for one in study.cells if (one.repetition, one.tokens, one.condition) == (1, 48, "ON reload")]
    assert (cell.credited, cell.suffix, cell.moved) == ([32], [16], [2 * 32 + 512])
    for name in (RELOAD, ENABLED, AGAIN):
        assert [(one.repetition, one.tokens) for one in of(study, name)] == [
            (repetition, tokens) for repetition in (1, 2) for tokens in (31, 32, 48)
        ]


def test_what_a_reload_saves_shows_both_suffixes(study: Study) -> None:
    for one in of(study, RELOAD):
        assert one.note == ""
        assert one.first_token is not None
        assert one.first_token > 1
        assert one.suffix == [[one.tokens], [15 if one.tokens == 31 else 16]]


def test_repeats_with_other_suffix_work_are_not_compared(study: Study) -> None:
    """At the longest length the local hit credits 16 tokens, the reload 32."""
    notes = {(one.tokens, one.note) for one in of(study, REPEAT)}
    assert notes == {
        (31, "not comparable: 31 tokens computed against 15"),
        (32, "not comparable: 32 tokens computed against 16"),
        (48, "not comparable: 32 tokens computed against 16"),
    }
    assert all(one.first_token is None and one.total is None for one in of(study, REPEAT))
    assert not [one for one in study.spreads if one.name == REPEAT]


def test_paths_that_nothing_took_are_left_empty(study: Study) -> None:
    empty = {(one.tokens, one.path) for one in study.paths if one.requests == 0}
    assert empty == {
        (31, "local"),
        (32, "local"),
        *((tokens, f"external-{place}") for tokens in (31, 32, 48) for place in ("disk", "remote")),
    }
    assert all(one.first_token is None for one in study.paths if one.requests == 0)
    (local,) = [one for one in study.paths if (one.tokens, one.path) == (48, "local")]
    assert (local.requests, local.suffix) == (6, [32])


def test_ranges_are_over_six_groups_and_no_interval(study: Study) -> None:
    for spread in study.spreads:
        assert (spread.groups, spread.called) == (6, "range over 6 groups (not CI)")
        assert spread.interval is None, "nine inputs are too few"
        assert spread.low <= spread.high


def test_an_interval_where_inputs_suffice(tmp_path: Path) -> None:
    """Seven trials of three lengths are 21 inputs; the second repetition of an input is no other input."""
    made = studied(build(small_plan(trials=7)), tmp_path)
    spread = next(one for one in made.spreads if (one.name, one.measure) == (RELOAD, "first token"))
    assert spread.inputs == 21
    assert spread.interval is not None
    assert spread.interval[0] <= spread.interval[1]


def slower(rec: RequestTimed) -> RequestTimed:
    """Its first token much later, all else as it was."""
    events = [rec.events[0], *(msgspec.structs.replace(one, at_ns=rec.done_ns) for one in rec.events[1:])]
    return msgspec.structs.replace(rec, events=events)


def test_ratios_are_medians_of_each_inputs_own_ratio(tmp_path: Path) -> None:
    run = build()
    run.edit("control", RequestTimed, slower, op="t1-N32.cold")
    run.edit("candidate", RequestTimed, slower, op="t1-N32.reload")
    made = studied(run, tmp_path)
    (one,) = [one for one in of(made, RELOAD) if (one.repetition, one.tokens) == (1, 32)]
    assert one.first_token is not None
    assert 1.9 < one.first_token < 2.05, "one odd input of three moves neither median"


def test_a_warm_up_never_counts(tmp_path: Path) -> None:
    run = build()
    before = studied(run, tmp_path)
    run.edit("candidate", RequestTimed, slower, op="w1-N32.reload")
    (tmp_path / "other").mkdir()
    after = studied(run, tmp_path / "other")
    assert after.cells == before.cells
    assert after.comparisons == before.comparisons


def test_no_time_counts_when_pages_were_read(tmp_path: Path) -> None:
    run = build()
    digest: Any = lambda rec: msgspec.structs.replace(rec, audit_level="digest")  # noqa: E731
    run.edit("candidate", r.EngineStarted, digest)
    made = studied(run, tmp_path)
    assert (made.counted, len(made.not_counted)) == (0, 90)
    assert made.not_counted[0].endswith("arm candidate was watched at level digest")
    assert {one.note for one in made.comparisons} == {"unavailable"}
    assert all(one.first_token is None for one in made.cells)
    assert made.spreads == []


def test_a_cold_request_that_reused_makes_no_saving(tmp_path: Path) -> None:
    run = build()

    def begun(rec: r.BatchScheduled) -> r.BatchScheduled:
        row = rec.rows[0]
        if row.request != "control-t1-N48.cold-0" or row.start:
            return rec
        return msgspec.structs.replace(rec, rows=[r.BatchRow(request=row.request, start=16, scheduled=32, drafted=0)])

    run.edit("control", r.BatchScheduled, begun)
    made = studied(run, tmp_path)
    (one,) = [one for one in of(made, RELOAD) if (one.repetition, one.tokens) == (1, 48)]
    assert one.note == "not comparable: OFF cold took path local, not recompute"
    assert one.first_token is None


def test_a_missing_trial_leaves_the_others(tmp_path: Path) -> None:
    run = build()
    run.edit("candidate", RequestTimed, lambda rec: None, op="t1-N32.reload")
    made = studied(run, tmp_path)
    (one,) = [one for one in of(made, RELOAD) if (one.repetition, one.tokens) == (1, 32)]
    assert one.inputs == 2
    assert made.counted == 89
    assert made.not_counted == ["candidate: t1-N32.reload: it was not timed, or not once"]


def test_shuffled_trials_say_their_seed(tmp_path: Path) -> None:
    made = studied(build(small_plan(order_seed=5)), tmp_path)
    assert made.order == "shuffled by seed 5"
    assert made.counted == 90


def ratios(*given: tuple[int, int, float | None]) -> list[Comparison]:
    return [
        Comparison(
            repetition=1,
            tokens=tokens,
            name=RELOAD,
            inputs=3,
            first_token=first_token,
            total=first_token,
            suffix=[[tokens], [suffix]],
            note="" if first_token is not None else "unavailable",
        )
        for tokens, suffix, first_token in given
    ]


def test_reuse_pays_from_the_shortest_prefix_on_behind_which_all_pay() -> None:
    paying = ratios((32, 16, 1.4), (48, 16, 0.9), (64, 16, 1.1), (80, 16, 2.0))
    assert break_even(paying, RELOAD) == "break-even: reuse paid from 48 reused tokens on (measured: 16, 32, 48, 64)"
    again = ratios((64, 16, 1.1), (64, 16, 0.99), (80, 16, 2.0))
    assert break_even(again, RELOAD) == "break-even: reuse paid from 64 reused tokens on (measured: 48, 64)"


def test_reuse_that_never_pays_or_was_not_measured_says_so() -> None:
    assert break_even(ratios((32, 16, 0.9)), RELOAD) == (
        "break-even: none of the measured reused prefixes paid (16 tokens)"
    )
    assert break_even(ratios((32, 16, None)), RELOAD) == "break-even: unavailable"
    assert break_even([], RELOAD) == "break-even: unavailable"


def test_order_and_host_are_limitations(tmp_path: Path) -> None:
    said = build().judge(tmp_path / "a").limitations
    assert "Trials ran in fixed ascending order of trial and length; request history is not randomized." in said
    assert (
        "The host's load was 1.0 to 1.0 on 2 processors, 50% of its memory or more was free: other work was sampled, "
        "and its influence not removed."
    ) in said
    assert "Trials were shuffled by seed 5, once, for all engines alike." in (
        build(small_plan(order_seed=5)).judge(tmp_path / "b").limitations
    )


def test_a_host_that_was_not_sampled_is_told(tmp_path: Path) -> None:
    run = build()
    for entries in run.arms.values():
        entries[:] = [entry for entry in entries if not isinstance(entry.record, HostSampled)]
    said = run.judge(tmp_path / "a").limitations
    assert "The host's load was not sampled: what else worked there is not known." in said


def test_no_time_counts_where_a_fault_was_injected(tmp_path: Path) -> None:
    run = build()
    run.fault = "zero-page"
    made = studied(run, tmp_path)
    assert (made.counted, len(made.not_counted)) == (0, 90)
    assert made.not_counted[0].endswith("the run is tagged as no normal one")


def test_tokens_that_arrive_all_at_the_end_were_held_up(tmp_path: Path) -> None:
    run = build()
    assert studied(run, tmp_path).held_up == []
    run.edit("candidate", RequestTimed, slower, op="t1-N32.reload")
    (tmp_path / "other").mkdir()
    made = studied(run, tmp_path / "other")
    assert made.held_up == ["candidate: t1-N32.reload"]
    assert made.counted == 90, "told, and left in"
