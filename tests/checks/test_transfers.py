from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "transfers"
OP = "N32.reload"
REQUEST = b.request_id("candidate", OP)


def job_of_reload(run: b.Run) -> int:
    (load,) = [rec for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == REQUEST]
    return load.job


def count(run: b.Run, counter: str, add: float, arm: str = "candidate") -> None:
    """Let a counter read `add` more after the reload than it does."""
    for index, rec in enumerate(run.client(arm)):
        if isinstance(rec, r.CountersRead) and (rec.op, rec.when) == (OP, "after"):
            values = {**rec.values, counter: rec.values[counter] + add}
            run.client(arm)[index] = r.CountersRead(op=OP, when="after", values=values, missing=rec.missing)


def test_silent_when_every_reload_loaded(tmp_path: Path) -> None:
    result = b.result(b.build(ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 3)
    assert result.summary.endswith("24/24 saves completed")


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({"ok": False}, "load_failed", Verdict.UNKNOWN),
        ({"bytes": None}, "not_reported", Verdict.UNKNOWN),
        ({"bytes": 0}, "no_bytes", Verdict.UNKNOWN),
        ({"bytes": 1}, "bytes_disagree", Verdict.FAIL),
    ],
)
def test_a_load_that_did_not_move_what_it_said(
    tmp_path: Path, change: dict[str, object], code: str, verdict: Verdict
) -> None:
    run = b.build()
    b.edit(run.worker(), r.LoadCompleted, change, job=job_of_reload(run))
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.verdict) == (verdict, code, verdict)
    assert (finding.place.case, finding.place.rank) == ("N32", 0)
    assert finding.evidence[0].startswith("arms/candidate/worker-0.jsonl:")


def test_submission_is_not_completion(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.worker(), r.LoadCompleted, job=job_of_reload(run))
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "load_not_completed"
    run = b.build()
    b.drop(run.worker(), r.SaveCompleted, job=1)
    judgement = run.judge(tmp_path / "b")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.UNKNOWN, ["not_saved_here", "save_unpaired"])


def test_a_completion_without_submission_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.worker(), r.SaveSubmitted, job=1)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["not_saved_here", "save_unpaired"]
    run = b.build()
    run.worker().append(r.LoadCompleted(rank=0, job=999, ok=True, bytes=1))
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "load_unpaired"


def test_a_job_number_used_twice_pairs_once(tmp_path: Path) -> None:
    run = b.build()
    (first,) = [rec for rec in run.worker() if isinstance(rec, r.SaveSubmitted) and rec.job == 1]
    run.worker().insert(run.worker().index(first), first)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "save_unpaired"


def test_a_failed_save_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.worker(), r.SaveCompleted, {"ok": False}, job=1)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["not_saved_here", "save_failed"]


def test_a_rank_without_a_load_is_unknown(tmp_path: Path) -> None:
    run = b.build(ranks=2)
    b.drop(run.worker(1), r.LoadSubmitted, request=REQUEST)
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"missing_rank", "load_unpaired"}


@pytest.mark.parametrize(
    ("counter", "add", "code", "verdict"),
    [
        (r.EXTERNAL_HITS, -16.0, "no_external_hit", Verdict.UNKNOWN),
        (r.EXTERNAL_HITS, 1.0, "counter_disagrees", Verdict.FAIL),
        (r.LOCAL_HITS, 16.0, "local_hit", Verdict.UNKNOWN),
    ],
)
def test_counters_must_say_the_same(tmp_path: Path, counter: str, add: float, code: str, verdict: Verdict) -> None:
    run = b.build()
    count(run, counter, add)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == (code, verdict, OP)


def test_a_disagreeing_counter_is_shown_beside_both_sources(tmp_path: Path) -> None:
    run = b.build()
    count(run, r.EXTERNAL_HITS, 1.0)
    message = b.only(run.judge(tmp_path / "a"), CHECK).message
    assert message.endswith("counts 17 external tokens, the first batch credits 16, the transfer restores 16")


@pytest.mark.parametrize("counter", [r.EXTERNAL_HITS, r.LOCAL_HITS])
def test_an_unreadable_counter_is_unknown(tmp_path: Path, counter: str) -> None:
    run = b.build()
    for index, rec in enumerate(run.client()):
        if isinstance(rec, r.CountersRead) and (rec.op, rec.when) == (OP, "before"):
            values = {name: value for name, value in rec.values.items() if name != counter}
            run.client()[index] = r.CountersRead(op=OP, when="before", values=values, missing=[counter])
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "counter_unreadable"


def test_the_local_miss_is_seen_at_the_lookup(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.scheduler(), r.Lookup, {"local_tokens": 8}, request=REQUEST)
    assert "local_hit" in b.codes(run.judge(tmp_path / "a"), CHECK)
    run = b.build()
    b.drop(run.scheduler(), r.Lookup, request=REQUEST)
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "missing_lookup"


def test_a_salted_lookup_fails(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.scheduler(), r.Lookup, {"salt": "0" * 64}, request=REQUEST)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "salted"


@pytest.mark.parametrize("arm", ["control", "candidate"])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"local_reset": False}, "reset_not_confirmed"),
        ({"external_kept": False}, "external_not_kept"),
        ({"running_kept": False}, "running_not_kept"),
    ],
)
def test_a_reset_must_be_of_the_local_cache_alone(
    tmp_path: Path, arm: str, change: dict[str, object], code: str
) -> None:
    run = b.build()
    b.edit(run.client(arm), r.CacheReset, change, op="N32.reset")
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.arm) == (code, Verdict.UNKNOWN, arm)
