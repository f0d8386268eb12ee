"""Requests that were preempted go on from what their lookup found, and from a state that was computed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks import resumptions
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.counters import CHECK as PREEMPTIONS
from samestate.checks.counters import preemptions_needed
from samestate.checks.history import History
from samestate.checks.verdicts import run_check
from samestate.evidence import records as r
from samestate.plans.load import load
from samestate.plans.model import StepPlan

from . import builder as b
from . import scenarios as s

C = 256


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> b.Run:
    """Three prompts at once that do not fit, and once more."""
    plan = load("pressure")
    settings = plan.engine.settings | {"num_gpu_blocks_override": 12}
    scenario = [s.step("a", "c", "e", path="cold", arm="batched"), s.step("a", "c", "e"), s.step("e", "c", "a")]
    update = {
        "engine": plan.engine.model_copy(update={"settings": settings}),
        "prompts": [prompt for prompt in plan.prompts if prompt.name in ("a", "c", "e")],
        "scenario": scenario,
        "instruments": plan.instruments.model_copy(update={"save_delay_ms": 0}),
    }
    return s.recorded(plan.model_copy(update=update), tmp_path_factory.mktemp("preempted"))


@pytest.fixture
def run(records: b.Run) -> b.Run:
    streams = {at: list(stream) for at, stream in records.streams.items()}
    return b.Run(records.plan, records.resolved, dict(records.inputs), list(records.attempts), streams)


def checked(run: b.Run, folder: Path) -> CheckResult:
    history = History.read(run.write(folder))
    return run_check(resumptions.CHECK, resumptions.resumptions, history)


def first(run: b.Run) -> tuple[str, int]:
    """The first preempted request of the candidate, and where in the scheduler's stream it goes on."""
    for at, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BatchScheduled) and rec.preempted:
            name = rec.preempted[0]
            later = range(at + 1, len(run.scheduler()))
            return name, next(index for index in later if _holds(run.scheduler()[index], name))
    raise AssertionError("nobody was preempted")


def _holds(rec: r.Record, request: str) -> bool:
    return isinstance(rec, r.BatchScheduled) and any(row.request == request for row in rec.rows)


def move(run: b.Run, request: str, at: int, start: int) -> None:
    """Let the step with which it goes on begin elsewhere, by both sources."""
    for index in range(at, len(run.scheduler())):
        rec = run.scheduler()[index]
        if isinstance(rec, r.BatchScheduled) and _holds(rec, request):
            rows = [
                msgspec.structs.replace(row, start=start, scheduled=row.start + row.scheduled - start)
                if row.request == request
                else row
                for row in rec.rows
            ]
            run.scheduler()[index] = msgspec.structs.replace(rec, rows=rows)
            if rec.source is r.BatchSource.SCHEDULER:
                return


def test_silent_where_every_request_goes_on_rightly(run: b.Run, tmp_path: Path) -> None:
    result = checked(run, tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.examined > 0


def test_more_than_the_lookup_found(run: b.Run, tmp_path: Path) -> None:
    request, at = first(run)
    move(run, request, at, C + 7)
    result = checked(run, tmp_path / "a")
    assert {finding.code for finding in result.findings} == {"lookup_disagrees", "state_never_computed"}
    assert (result.verdict, result.findings[0].place.request) == (Verdict.FAIL, request)


def test_less_than_the_lookup_found(run: b.Run, tmp_path: Path) -> None:
    request, at = first(run)
    move(run, request, at, 0)
    result = checked(run, tmp_path / "a")
    assert [(finding.code, finding.verdict) for finding in result.findings] == [("lookup_disagrees", Verdict.FAIL)]


def test_a_state_that_nobody_computed(run: b.Run, tmp_path: Path) -> None:
    """The lookup agrees, so only who computed what tells."""
    request, at = first(run)
    lookups = [
        index
        for index, rec in enumerate(run.scheduler()[:at])
        if isinstance(rec, r.Lookup) and rec.request == request and rec.matched_tokens is not None
    ]
    changed = {"local_tokens": 0, "matched_tokens": C - 9}
    run.scheduler()[lookups[-1]] = msgspec.structs.replace(run.scheduler()[lookups[-1]], **changed)
    move(run, request, at, C - 9)
    result = checked(run, tmp_path / "a")
    assert [(finding.code, finding.verdict) for finding in result.findings] == [("state_never_computed", Verdict.FAIL)]


def test_without_a_seal_it_is_unknown(run: b.Run, tmp_path: Path) -> None:
    request, at = first(run)
    move(run, request, at, C + 7)
    run.sealed = False
    assert checked(run, tmp_path / "a").verdict is Verdict.UNKNOWN


def test_no_lookup_before_it(run: b.Run, tmp_path: Path) -> None:
    request, _ = first(run)
    b.drop(run.scheduler(), r.Lookup, request=request)
    result = checked(run, tmp_path / "a")
    assert (result.verdict, {finding.code for finding in result.findings}) == (Verdict.UNKNOWN, {"resumption_unknown"})


def test_no_lookup_before_tokens_are_taken_up_again(run: b.Run, tmp_path: Path) -> None:
    request, at = first(run)
    b.drop(run.scheduler(), r.Lookup, request=request)
    move(run, request, at - 1, 0)
    assert "lookup_missing" in {finding.code for finding in checked(run, tmp_path / "a").findings}


def forget(run: b.Run) -> None:
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BatchScheduled) and rec.preempted:
            run.scheduler()[index] = msgspec.structs.replace(rec, preempted=[])


def test_nobody_was_preempted(run: b.Run, tmp_path: Path) -> None:
    forget(run)
    result = checked(run, tmp_path / "a")
    assert [(finding.code, finding.verdict) for finding in result.findings] == [("never_resumed", Verdict.UNKNOWN)]


def test_a_preempted_request_that_answered_nothing(run: b.Run, tmp_path: Path) -> None:
    at = next(index for index, rec in enumerate(run.scheduler()) if isinstance(rec, r.BatchScheduled))
    run.scheduler()[at] = msgspec.structs.replace(run.scheduler()[at], preempted=["stranger"])
    assert "resumption_unknown" in {finding.code for finding in checked(run, tmp_path / "a").findings}


# --- preemptions, where they are needed -------------------------------------------------------------


def needed(run: b.Run, folder: Path) -> CheckResult:
    return run_check(PREEMPTIONS, preemptions_needed, History.read(run.write(folder)))


def never_counted(run: b.Run) -> None:
    for index, rec in enumerate(run.client()):
        if isinstance(rec, r.CountersRead):
            run.client()[index] = msgspec.structs.replace(rec, values={**rec.values, r.PREEMPTIONS: 0.0})


def test_preemptions_that_counter_and_rows_name_pass(run: b.Run, tmp_path: Path) -> None:
    result = needed(run, tmp_path / "a")
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert "preemptions of" in result.summary


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ((forget, never_counted), "never_preempted"),
        ((forget,), "counter_disagrees"),
        ((never_counted,), "counter_disagrees"),
    ],
)
def test_no_preemption_is_no_pass(run: b.Run, tmp_path: Path, spoil: tuple[object, ...], code: str) -> None:
    for one in spoil:
        assert callable(one)
        one(run)
    result = needed(run, tmp_path / "a")
    assert [(finding.code, finding.verdict) for finding in result.findings] == [(code, Verdict.UNKNOWN)]


def test_a_preemption_in_the_company_alone_is_none_of_a_candidate(run: b.Run, tmp_path: Path) -> None:
    forget(run)
    never_counted(run)
    for index, rec in enumerate(run.scheduler("batched")):
        if isinstance(rec, r.BatchScheduled):
            run.scheduler("batched")[index] = msgspec.structs.replace(rec, preempted=[rec.rows[0].request])
            break
    assert [finding.code for finding in needed(run, tmp_path / "a").findings] == ["never_preempted"]


def test_a_request_that_was_cold_before_it_was_preempted_has_a_row_of_its_first_step(
    run: b.Run, tmp_path: Path
) -> None:
    """What it loaded when it went on is not the B of its beginning."""
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.PASS
    cold = [row for row in judgement.table if row.path == "cold"]
    assert cold
    assert {(row.boundary, row.credited) for row in cold} == {(None, 0)}


def test_steps_of_a_plan_without_preemption_are_not_touched(tmp_path: Path) -> None:
    plan = load("shared-prefix").model_copy(update={"scenario": [StepPlan(prompts=["short"])], "prompts": []})
    plan = plan.model_copy(update={"prompts": [one for one in load("shared-prefix").prompts if one.name == "short"]})
    judgement = s.recorded(plan, tmp_path).judge(tmp_path / "a")
    assert resumptions.CHECK not in {result.check for result in judgement.results}
