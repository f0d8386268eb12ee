"""Repeats against cold: the simulated engine's own run of the plan, right, and with one thing spoilt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.checks.analyzers import Judgement, source_sha256
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.records import LOCAL_HITS
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan

from . import builder as b
from . import scenarios as s

C, N, HIT = 256, 1250, 1024
ARM = "candidate"


def small_plan(*lengths: str) -> Plan:
    """The shipped plan at a block size that is said, for these lengths."""
    plan = load("local-hit")
    engine = plan.engine.model_copy(update={"settings": {**plan.engine.settings, "block_size": C}})
    update = {"engine": engine, "lengths": list(lengths), "output_tokens": 8}
    return freeze(plan.model_copy(update=update), source_sha256(plan.analyzer.id))


def recorded(folder: Path, *lengths: str) -> b.Run:
    """A run of the plan on the simulated engine, taken apart into its records."""
    return s.recorded(small_plan(*lengths), folder)


@pytest.fixture
def run(tmp_path: Path) -> b.Run:
    return recorded(tmp_path, str(N))


def judged(run: b.Run, tmp_path: Path) -> Judgement:
    return run.judge(tmp_path / "judged")


def answer(run: b.Run, op: str, **change: Any) -> None:
    b.edit(run.client(), r.OperationOutput, change, op=op)


def spoil(run: b.Run, op: str, token: int) -> None:
    """Another token of an answer from `token` on."""
    (output,) = [rec for rec in run.client() if isinstance(rec, r.OperationOutput) and rec.op == op]
    answer(run, op, token_ids=[*output.token_ids[:token], *(other + 1 for other in output.token_ids[token:])])


def steps(run: b.Run, op: str, ends: list[int]) -> None:
    """Let the prefill of `op` take other steps: [first, end), [end, end), …"""
    records = run.scheduler()
    (request,) = [rec.request for rec in run.client() if isinstance(rec, r.OperationOutput) and rec.op == op]
    mine = [rec for rec in records if isinstance(rec, r.BatchScheduled) and rec.rows[0].request == request]
    prefill = [rec for rec in mine if rec.rows[0].start < N]
    at = records.index(prefill[0])
    for rec in prefill:
        records.remove(rec)
    rows = [r.BatchRow(request=request, start=start, scheduled=end - start, drafted=0) for start, end in pairwise(ends)]
    records[at:at] = [msgspec.structs.replace(prefill[0], rows=[row]) for row in rows]


def credit(run: b.Run, op: str, tokens: int) -> None:
    """Let `op` hit `tokens`, by answer, counter and schedule."""
    answer(run, op, cached_tokens=tokens)
    counters = [rec for rec in run.client() if isinstance(rec, r.CountersRead) and rec.op == op]
    before = next(rec for rec in counters if rec.when == "before").values[LOCAL_HITS]
    after = next(rec for rec in counters if rec.when == "after")
    values = {**after.values, LOCAL_HITS: before + tokens}
    b.edit(run.client(), r.CountersRead, {"values": values}, op=op, when="after")


def test_a_clean_run_passes(tmp_path: Path) -> None:
    judgement = judged(recorded(tmp_path, "640", str(N)), tmp_path)
    assert judgement.verdict is Verdict.PASS
    assert judgement.comparison_kind == "within_one_arm"
    assert b.result(judgement, "local-equality").summary == "4/4 repeats equal to cold"
    assert b.result(judgement, "local-hits").summary == "4/4 repeats hit"
    assert b.result(judgement, "block-size").summary == "steps end at multiples of 256, 3 groups, C=256"
    assert [(row.tokens, row.repeat, row.credited, row.suffix) for row in judgement.table] == [
        (640, 1, 512, 128),
        (640, 2, 512, 128),
        (N, 1, HIT, N - HIT),
        (N, 2, HIT, N - HIT),
    ]
    assert not any("bytes were not inspected" in line for line in judgement.limitations)


def test_a_repeat_that_differs_names_length_and_token(run: b.Run, tmp_path: Path) -> None:
    spoil(run, "N1250.repeat-2", 3)
    judgement = judged(run, tmp_path)
    assert b.failing(judgement) == {"local-equality"}
    assert b.result(judgement, "local-equality").summary.endswith(
        "1/2 repeats equal to cold; first wrong: N=1250 at token 3"
    )
    assert b.only(judgement, "local-equality").code == "tokens_differ"
    assert [(row.first_difference, row.verdict) for row in judgement.table] == [(None, Verdict.PASS), (3, Verdict.FAIL)]


def test_a_difference_with_other_steps_is_not_laid_to_the_hit(run: b.Run, tmp_path: Path) -> None:
    spoil(run, "N1250.repeat-1", 3)
    steps(run, "N1250.repeat-1", [HIT, HIT + 100, N])
    assert b.only(judged(run, tmp_path), "local-equality").code == "geometry_mismatch"


def test_a_hit_where_no_step_ended_is_a_fault_whatever_the_tokens(run: b.Run, tmp_path: Path) -> None:
    steps(run, "N1250.cold", [0, 896, 1152, N])
    judgement = judged(run, tmp_path)
    assert b.failing(judgement) == {"local-hits"}
    first, second = b.result(judgement, "local-hits").findings
    assert (first.code, first.place.op, first.place.boundary) == ("state_never_computed", "N1250.repeat-1", HIT)
    assert "no step of this prompt ended at 1024 (ends: 896, 1152, 1250)" in first.message
    assert second.code == "state_never_computed"


def test_and_then_a_difference_is_laid_to_the_hit(run: b.Run, tmp_path: Path) -> None:
    steps(run, "N1250.cold", [0, 896, 1152, N])
    spoil(run, "N1250.repeat-1", 0)
    finding = b.only(judged(run, tmp_path), "local-equality")
    assert (finding.code, finding.verdict) == ("tokens_differ", Verdict.FAIL)


def test_a_backend_that_saves_within_steps_is_not_held_to_step_ends(run: b.Run, tmp_path: Path) -> None:
    steps(run, "N1250.cold", [0, 896, 1152, N])
    b.edit(run.scheduler(), r.SchedulerConfigured, {"saves_within_steps": True})
    assert b.result(judged(run, tmp_path), "local-hits").verdict is Verdict.PASS


def test_steps_that_are_not_all_recorded_are_unknown(run: b.Run, tmp_path: Path) -> None:
    steps(run, "N1250.cold", [0, 896])
    judgement = judged(run, tmp_path)
    assert set(b.codes(judgement, "local-hits")) == {"missing_batches"}
    assert judgement.verdict is Verdict.UNKNOWN


def test_a_first_repeat_that_misses_fails(run: b.Run, tmp_path: Path) -> None:
    steps(run, "N1250.repeat-1", [0, 768, HIT, N])
    credit(run, "N1250.repeat-1", 0)
    judgement = judged(run, tmp_path)
    finding = next(one for one in b.result(judgement, "local-hits").findings if one.verdict is Verdict.FAIL)
    assert finding.code == "second_sighting_missed"
    assert finding.message == "N=1250: the first repeat hit 0 tokens, a later one 1024"


def test_nothing_ever_hit_is_unknown(run: b.Run, tmp_path: Path) -> None:
    for op in ("N1250.repeat-1", "N1250.repeat-2"):
        steps(run, op, [0, 768, HIT, N])
        credit(run, op, 0)
    judgement = judged(run, tmp_path)
    assert judgement.verdict is Verdict.UNKNOWN
    assert "never_hit" in b.codes(judgement, "local-hits")
    assert b.only(judgement, "non-vacuity").code == "vacuous"


def test_a_hit_that_the_answer_or_the_counter_denies_fails(run: b.Run, tmp_path: Path) -> None:
    answer(run, "N1250.repeat-1", cached_tokens=768)
    finding = b.only(judged(run, tmp_path), "local-hits")
    assert (finding.code, finding.verdict) == ("hits_disagree", Verdict.FAIL)
    assert "starts at 1024, and cached_tokens says 768" in finding.message


def test_an_answer_that_does_not_say_is_unknown(run: b.Run, tmp_path: Path) -> None:
    answer(run, "N1250.repeat-1", cached_tokens=None)
    assert b.only(judged(run, tmp_path), "local-hits").code == "not_readable"


def test_a_block_size_that_was_reset_fails(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.scheduler(), r.SchedulerConfigured, {"block_size": 128})
    judgement = judged(run, tmp_path)
    assert b.failing(judgement) == {"block-size"}
    finding = b.only(judgement, "block-size")
    assert finding.code == "block_size_reset"
    assert (
        "multiples of 128 tokens" in finding.message
        and "groups 1, 2 keep their state at multiples of 256" in finding.message
    )
    assert {row.verdict for row in judgement.table} == {Verdict.PASS}


def test_block_sizes_that_are_not_recorded_are_unknown(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.scheduler(), r.SchedulerConfigured)
    assert b.only(judged(run, tmp_path), "block-size").code == "not_recorded"


def test_a_c_that_the_groups_do_not_have_fails(run: b.Run, tmp_path: Path) -> None:
    (configured,) = [rec for rec in run.scheduler() if isinstance(rec, r.SchedulerConfigured)]
    groups = [msgspec.structs.replace(group, tokens_per_block=2 * C) for group in configured.engine_groups]
    b.edit(run.scheduler(), r.SchedulerConfigured, {"engine_groups": groups, "block_size": 2 * C})
    assert b.only(judged(run, tmp_path), "block-size").code == "wrong_checkpoint_interval"


def test_a_missing_repeat_is_unknown(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.client(), r.OperationOutput, op="N1250.repeat-2")
    judgement = judged(run, tmp_path)
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.only(judgement, "local-equality").code == "missing_output"
