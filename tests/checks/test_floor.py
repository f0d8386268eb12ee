"""What company alone does to an output, ties, and outputs that part beyond it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import Finding, Verdict
from samestate.evidence import records as r
from samestate.plans.load import load
from samestate.plans.model import Plan, StepPlan

from . import builder as b
from . import scenarios as s

FLOOR, EQUALITY = "floor", "floor-equality"
TOGETHER = ["a", "b", "c", "d", "e", "f"]


def plan(scenario: list[StepPlan] | None = None) -> Plan:
    """The shipped plan without held back saves, whose clock is not kept; with another scenario where one is given."""
    shipped = load("pressure")
    watched = shipped.instruments.model_copy(update={"save_delay_ms": 0})
    shipped = shipped.model_copy(update={"instruments": watched})
    if scenario is None:
        return shipped
    asked = {name for step in scenario for name in step.prompts}
    prompts = [prompt for prompt in shipped.prompts if prompt.name in asked]
    return shipped.model_copy(update={"scenario": scenario, "prompts": prompts})


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> b.Run:
    return s.recorded(plan(), tmp_path_factory.mktemp("pressure"))


@pytest.fixture
def run(records: b.Run) -> b.Run:
    """A copy to spoil."""
    streams = {at: list(stream) for at, stream in records.streams.items()}
    return b.Run(records.plan, records.resolved, dict(records.inputs), list(records.attempts), streams)


def output(run: b.Run, op: str, arm: str) -> r.OperationOutput:
    (found,) = [rec for rec in run.client(arm) if isinstance(rec, r.OperationOutput) and rec.op == op]
    return found


def shift(run: b.Run, op: str, token: int, by: float, arm: str = "batched") -> None:
    """Another log-probability of one token."""
    logprobs = list(output(run, op, arm).logprobs or ())
    logprobs[token] += by
    b.edit(run.client(arm), r.OperationOutput, {"logprobs": logprobs}, op=op)


def margin(run: b.Run, op: str, token: int, value: float) -> None:
    """Another margin in the cold run."""
    margins = list(output(run, op, "control").margins or ())
    margins[token] = value
    b.edit(run.client("control"), r.OperationOutput, {"margins": margins}, op=op)


def about(judgement: Judgement, op: str) -> list[Finding]:
    return [finding for finding in b.result(judgement, EQUALITY).findings if finding.place.op == op]


def test_the_shipped_plan_passes_with_a_floor_of_nothing(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("pressure"), tmp_path))
    assert judgement.verdict is Verdict.PASS
    assert set(judgement.required) == {
        *load("pressure").required_checks,
        "cacheability",
        "resets",
        "controls",
        "topology",
    }
    assert b.result(judgement, FLOOR).summary == "0 over 144 tokens, alone against in company, both cold"
    assert b.result(judgement, EQUALITY).summary == "37/37 generations equal to cold; no ties below the floor of 0"
    assert not any(row.tie for row in judgement.table)


def test_a_save_that_is_lost_in_a_preemption_fails(tmp_path: Path) -> None:
    judgement = judge(s.sealed(load("pressure"), tmp_path, fault="preempted-stale"))
    assert judgement.verdict is Verdict.FAIL
    assert "source_overwritten" in b.codes(judgement, "page-bytes")
    assert {"tokens_differ", "geometry_mismatch"} == set(b.codes(judgement, EQUALITY))


def test_the_largest_difference_is_the_floor(run: b.Run, tmp_path: Path) -> None:
    shift(run, "a.1", 3, 0.25)
    shift(run, "b.1", 5, -0.5)
    judgement = run.judge(tmp_path / "a")
    assert b.result(judgement, FLOOR).summary.startswith("0.5 over 144 tokens")
    assert judgement.verdict is Verdict.PASS


def test_what_follows_the_first_other_token_is_not_in_the_floor(run: b.Run, tmp_path: Path) -> None:
    s.spoil(run, "a.1", 4, "batched")
    shift(run, "a.1", 4, 9.0)
    shift(run, "a.1", 2, 0.125)
    judgement = run.judge(tmp_path / "a")
    result = b.result(judgement, FLOOR)
    assert result.summary.startswith("0.125 over 124 tokens")
    assert result.summary.endswith("; 1 prompts then continue differently")
    assert judgement.verdict is Verdict.PASS


@pytest.mark.parametrize("op", ["a.2", "a.7"])
def test_a_tie_is_listed_apart_and_no_pass(run: b.Run, tmp_path: Path, op: str) -> None:
    """In a batch, and alone: `a.7` is reloaded by itself, in the steps of the cold run."""
    shift(run, "b.1", 5, 0.5)
    margin(run, "a.cold", 3, 0.25)
    s.spoil(run, op, 3)
    judgement = run.judge(tmp_path / "a")
    (finding,) = about(judgement, op)
    assert (judgement.verdict, finding.code, finding.verdict) == (Verdict.UNKNOWN, "tie", Verdict.UNKNOWN)
    assert finding.message.endswith("a tie: the cold run's margin there is 0.25, and the floor 0.5")
    assert b.result(judgement, EQUALITY).summary.endswith("; 1 ties below the floor of 0.5")
    marked = [(row.op, row.first_difference, row.verdict) for row in judgement.table if row.tie]
    assert marked == [(op, 3, Verdict.UNKNOWN)]


def test_a_margin_of_the_floor_is_no_tie(run: b.Run, tmp_path: Path) -> None:
    shift(run, "b.1", 5, 0.5)
    margin(run, "a.cold", 3, 0.5)
    s.spoil(run, "a.7", 3)
    judgement = run.judge(tmp_path / "a")
    (finding,) = about(judgement, "a.7")
    assert (judgement.verdict, finding.code) == (Verdict.FAIL, "tokens_differ")
    assert not any(row.tie for row in judgement.table)


def test_company_beyond_the_floor_cannot_be_attributed(run: b.Run, tmp_path: Path) -> None:
    shift(run, "b.1", 5, 0.01)
    margin(run, "a.cold", 3, 0.5)
    s.spoil(run, "a.2", 3)
    judgement = run.judge(tmp_path / "a")
    (finding,) = about(judgement, "a.2")
    assert (judgement.verdict, finding.code) == (Verdict.UNKNOWN, "geometry_mismatch")


def test_an_impossible_state_is_excused_by_no_tie(run: b.Run, tmp_path: Path) -> None:
    """The load says that it restored the whole prompt, one token more than is credited."""
    shift(run, "b.1", 5, 0.5)
    margin(run, "a.cold", 3, 0.25)
    s.spoil(run, "a.7", 3)
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": 512}, request=s.request(run, "a.7"))
    judgement = run.judge(tmp_path / "a")
    assert [finding.code for finding in about(judgement, "a.7")] == ["tokens_differ"]
    assert judgement.verdict is Verdict.FAIL


def drop_logprobs(run: b.Run) -> None:
    b.edit(run.client("batched"), r.OperationOutput, {"logprobs": None}, op="c.1")


def start_later(run: b.Run) -> None:
    """The first step of `c` in the company begins where a checkpoint ends."""
    records, name = run.scheduler("batched"), s.request(run, "c.1", "batched")
    for index, rec in enumerate(records):
        if isinstance(rec, r.BatchScheduled):
            rows = [row for row in rec.rows if not (row.request == name and row.start == 0)]
            records[index] = r.BatchScheduled(step=rec.step, source=rec.source, rows=rows, preempted=rec.preempted)


def preempt(run: b.Run) -> None:
    records, name = run.scheduler("batched"), s.request(run, "c.1", "batched")
    at = next(index for index, rec in enumerate(records) if isinstance(rec, r.BatchScheduled))
    rec = records[at]
    assert isinstance(rec, r.BatchScheduled)
    records[at] = r.BatchScheduled(step=rec.step, source=rec.source, rows=rec.rows, preempted=[name])


def drop_output(run: b.Run) -> None:
    b.drop(run.client("batched"), r.OperationOutput, op="c.1")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (drop_logprobs, "floor_not_measured"),
        (drop_output, "floor_not_measured"),
        (start_later, "floor_not_cold"),
        (preempt, "floor_not_cold"),
    ],
)
def test_without_a_floor_a_difference_is_unknown(
    run: b.Run, tmp_path: Path, spoil: Callable[[b.Run], None], code: str
) -> None:
    spoil(run)
    s.spoil(run, "a.7", 3)
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, FLOOR) == [code]
    assert b.result(judgement, FLOOR).verdict is Verdict.UNKNOWN
    (finding,) = about(judgement, "a.7")
    assert (finding.code, finding.verdict) == ("floor_unknown", Verdict.UNKNOWN)


def test_a_margin_that_is_not_recorded_is_unknown(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.client("control"), r.OperationOutput, {"margins": None}, op="a.cold")
    s.spoil(run, "a.7", 3)
    judgement = run.judge(tmp_path / "a")
    assert [finding.code for finding in about(judgement, "a.7")] == ["margin_unknown"]


def test_company_of_one_is_none(tmp_path: Path) -> None:
    alone = [s.step("a", path="cold", arm="batched"), s.step("b", path="cold", arm="batched")]
    judgement = judge(s.sealed(plan([*alone, s.step(*TOGETHER[:2])]), tmp_path))
    assert b.codes(judgement, FLOOR) == ["floor_not_batched"] * 2


def test_a_prompt_that_was_never_in_company_has_no_floor(tmp_path: Path) -> None:
    scenario = [s.step("a", "b", path="cold", arm="batched"), s.step("a", "b", "c")]
    judgement = judge(s.sealed(plan(scenario), tmp_path))
    assert b.codes(judgement, FLOOR) == ["floor_not_measured"]
    assert "never computed c" in b.only(judgement, FLOOR).message


def test_a_plan_without_company_is_unknown(tmp_path: Path) -> None:
    shipped = plan([s.step("a", "b")])
    lone = shipped.model_copy(update={"arms": [arm for arm in shipped.arms if arm.name != "batched"]})
    judgement = judge(s.sealed(lone, tmp_path))
    assert b.codes(judgement, FLOOR) == ["missing_arm"]
    assert judgement.verdict is Verdict.UNKNOWN
