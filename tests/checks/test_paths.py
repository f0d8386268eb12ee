"""Where reused tokens came from, and that something did."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.engines.base import ResetResult
from samestate.engines.sim import SimEngine
from samestate.evidence import records as r
from samestate.plans.model import Plan

from . import builder as b
from . import scenarios as s

CHECK = "paths"


@pytest.fixture
def run(tmp_path: Path) -> b.Run:
    return s.recorded(s.small(), tmp_path)


def planned(path: str, index: int) -> Plan:
    """The tour with another path planned for one step."""
    scenario = list(s.TOUR)
    scenario[index] = scenario[index].model_copy(update={"path": path})
    return s.small(scenario)


def count(run: b.Run, op: str, counter: str, by: float | None, arm: str = "candidate") -> None:
    """Let a counter around `op` say more; None: let it be unreadable."""
    (read,) = [
        rec for rec in run.client(arm) if isinstance(rec, r.CountersRead) and (rec.op, rec.when) == (op, "after")
    ]
    if by is None:
        values = {name: value for name, value in read.values.items() if name != counter}
        change: dict[str, object] = {"values": values, "missing": [counter]}
    else:
        change = {"values": {**read.values, counter: read.values[counter] + by}}
    b.edit(run.client(arm), r.CountersRead, change, op=op, when="after")


def test_silent_when_every_path_was_taken(run: b.Run, tmp_path: Path) -> None:
    judgement = run.judge(tmp_path / "a")
    result = b.result(judgement, CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 12)
    assert result.summary == (
        "12/12 generations took the planned path; candidates: cold 3, local 1, external 5, mixed 1"
    )
    assert b.result(judgement, "non-vacuity").summary == "6 generations moved bytes, 12 generations varied"


@pytest.mark.parametrize(
    ("index", "path", "op", "taken"),
    [
        (2, "cold", "trunk.2", "external"),
        (2, "mixed", "trunk.2", "external"),
        (3, "external", "trunk.3", "local"),
        (5, "external", "one.1", "cold"),
        (8, "local", "trunk.4", "mixed"),
    ],
)
def test_another_path_than_planned_is_unknown(tmp_path: Path, index: int, path: str, op: str, taken: str) -> None:
    judgement = s.recorded(planned(path, index), tmp_path).judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("path_not_taken", Verdict.UNKNOWN, op)
    assert f"{op}: planned {path}, and it was {taken} (" in finding.message
    assert judgement.verdict is Verdict.UNKNOWN
    row = next(row for row in judgement.table if row.op == op)
    assert (row.path, row.planned_path, row.verdict) == (taken, path, Verdict.UNKNOWN)


def test_a_control_that_is_not_cold_is_unknown(run: b.Run, tmp_path: Path) -> None:
    s.prefill(run, "one.cold", [s.C, s.ONE], arm="control")
    codes = {finding.code: finding.place.op for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert codes["path_not_taken"] == "one.cold"


def test_without_a_lookup_the_path_is_not_known(run: b.Run, tmp_path: Path) -> None:
    b.drop(run.scheduler(), r.Lookup, request=s.request(run, "trunk.2"))
    codes = b.codes(run.judge(tmp_path / "a"), CHECK)
    assert codes == ["path_unknown", "missing_lookup"]


def test_a_lookup_that_was_put_off_is_no_answer(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.scheduler(), r.Lookup, {"matched_tokens": None}, request=s.request(run, "trunk.2"))
    assert "path_unknown" in b.codes(run.judge(tmp_path / "a"), CHECK)


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        (r.Lookup, {"matched_tokens": s.C}, "lookup_disagrees"),
        (r.Allocated, {"external_tokens": s.C}, "allocation_disagrees"),
    ],
)
def test_sources_that_disagree_fail(
    run: b.Run, tmp_path: Path, kind: type[r.Record], change: dict[str, object], code: str
) -> None:
    b.edit(run.scheduler(), kind, change, request=s.request(run, "trunk.2"))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == (code, Verdict.FAIL, "trunk.2")


@pytest.mark.parametrize(("tokens", "code"), [(5, "cached_tokens_disagree"), (None, "not_reported")])
def test_an_answer_of_other_cached_tokens_is_named(run: b.Run, tmp_path: Path, tokens: int | None, code: str) -> None:
    b.edit(run.client(), r.OperationOutput, {"cached_tokens": tokens}, op="trunk.2")
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == code


@pytest.mark.parametrize("counter", [r.LOCAL_HITS, r.EXTERNAL_HITS])
@pytest.mark.parametrize(("by", "code"), [(16, "counter_disagrees"), (None, "counter_unreadable")])
def test_counters_that_disagree_or_cannot_be_read(
    run: b.Run, tmp_path: Path, counter: str, by: float | None, code: str
) -> None:
    count(run, "trunk.6", counter, by)
    finding = next(one for one in b.result(run.judge(tmp_path / "a"), CHECK).findings if one.place.op == "trunk.6")
    assert (finding.code, finding.verdict is Verdict.FAIL) == (code, by is not None)


def test_a_batch_is_counted_as_a_whole(run: b.Run, tmp_path: Path) -> None:
    """The counters around each of its operations hold the sum."""
    for op in ("trunk.7", "one.3"):
        count(run, op, r.EXTERNAL_HITS, -s.C)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("counter_disagrees", Verdict.FAIL)
    assert f"trunk.7, one.3: {r.EXTERNAL_HITS} counts {3 * s.C} tokens" in finding.message


def test_a_preempted_request_is_counted_twice_and_not_compared(run: b.Run, tmp_path: Path) -> None:
    last = [rec for rec in run.scheduler() if isinstance(rec, r.BatchScheduled)][-1]
    b.edit(run.scheduler(), r.BatchScheduled, {"preempted": [s.request(run, "trunk.6")]}, rows=last.rows)
    count(run, "trunk.6", r.EXTERNAL_HITS, 16)
    assert not any(finding.place.op == "trunk.6" for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings)


@pytest.mark.parametrize(
    ("field", "code"), [("local_reset", "reset_not_confirmed"), ("external_kept", "external_not_kept")]
)
def test_a_reset_that_was_not_one_is_unknown(run: b.Run, tmp_path: Path, field: str, code: str) -> None:
    b.edit(run.client(), r.CacheReset, {field: False}, op="reset-1")
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == (code, Verdict.UNKNOWN)


def test_nothing_from_outside_is_vacuous(tmp_path: Path) -> None:
    """Local hits alone, where external ones were planned."""
    scenario = [s.step("trunk", path="cold"), s.step("trunk", path="external"), s.step("one", path="any")]
    judgement = s.recorded(s.small(scenario), tmp_path).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    finding = b.only(judgement, "non-vacuity")
    assert (finding.code, finding.place.arm) == ("vacuous", "candidate")


def test_hits_that_moved_no_bytes_are_vacuous(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.worker(), r.LoadCompleted, {"bytes": 0})
    assert b.only(run.judge(tmp_path / "a"), "non-vacuity").code == "vacuous"


def test_a_control_that_loads_is_vacuous(run: b.Run, tmp_path: Path) -> None:
    count(run, "one.cold", r.EXTERNAL_HITS, 16, arm="control")
    judgement = run.judge(tmp_path / "a")
    assert b.codes(judgement, "non-vacuity") == ["vacuous"]
    assert "the control counts external hits in one.cold" in b.only(judgement, "non-vacuity").message


def test_every_arm_that_plans_it_must_reuse(tmp_path: Path) -> None:
    judgement = s.recorded(s.relay(), tmp_path).judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert b.only(judgement, "non-vacuity").place.arm == "candidate-2", "the third reuses what it computed itself"


class Keeping(SimEngine):
    """Its second reset of the local cache is confirmed and does nothing."""

    resets = 0

    def reset_local_cache(self) -> ResetResult:
        self.resets += 1
        before = dict(self._pool._by_key), dict(self._pool._key_of)
        done = super().reset_local_cache()
        if self._connected and self.resets > 1:
            self._pool._by_key, self._pool._key_of = before
        return done


def test_a_reset_that_leaves_state_behind_is_unknown_whatever_was_planned(tmp_path: Path) -> None:
    """Confirmed by the engine; the next prompts hit locally all the same, and their path is up to the engine."""
    scenario = [
        s.step("trunk", path="cold"),
        s.RESET,
        s.step("trunk"),
        s.RESET,
        s.step("one"),
        s.RESET,
        s.step("trunk"),
    ]
    finding = b.only(s.recorded(s.small(scenario), tmp_path, Keeping).judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("stale_local", Verdict.UNKNOWN, "trunk.3")
    right = s.recorded(s.small(scenario), tmp_path / "right").judge(tmp_path / "b")
    assert right.verdict is Verdict.PASS


def test_a_load_beside_a_local_hit_is_unknown(run: b.Run, tmp_path: Path) -> None:
    """`trunk.3` takes all of p from the local cache, says every source; and its pages were loaded."""
    local, loaded, worker = s.request(run, "trunk.3"), s.request(run, "trunk.2"), run.worker()
    (job,) = [rec.job for rec in worker if isinstance(rec, r.LoadSubmitted) and rec.request == loaded]
    asked = run.scheduler().index(next(x for x in run.scheduler() if isinstance(x, r.Lookup) and x.request == local))
    phase = sum(isinstance(record, b.Mark) for record in run.scheduler()[:asked])
    again: list[r.Record] = []
    for rec in worker:
        if isinstance(rec, r.LoadCompleted) and rec.job == job:
            again.append(msgspec.structs.replace(rec, job=999))
        elif isinstance(rec, r.LoadSubmitted | r.PagesDigested) and rec.job == job and rec.request == loaded:
            again.append(msgspec.structs.replace(rec, job=999, request=local))
    pause = b.Mark(advance_ns=0)
    run.scheduler()[asked + 1 : asked + 1] = [pause, pause]
    for records, put in ((worker, [pause, *again, pause]), (run.client(), [pause, pause])):
        marks = [at for at, record in enumerate(records) if isinstance(record, b.Mark)]
        records[marks[phase] : marks[phase]] = put
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("load_not_credited", Verdict.UNKNOWN, "trunk.3")
