from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "save-completion"
COLD, NEXT = b.request_id("candidate", "N32.cold"), b.request_id("candidate", "N32.interposer-1")
DELAY_MS = b.instrumented_plan().instruments.save_delay_ms
DELAY_NS = DELAY_MS * 1_000_000


def save(run: b.Run) -> r.SaveSubmitted:
    return next(rec for rec in run.worker() if isinstance(rec, r.SaveSubmitted) and rec.request == COLD)


def late(run: b.Run) -> int:
    """Let the save of N32.cold be done only after the next operation; returns where it now stands."""
    worker, job = run.worker(), save(run).job
    done = [rec for rec in worker if isinstance(rec, r.SaveCompleted) and rec.job == job]
    b.drop(worker, r.SaveCompleted, job=job)
    at = next(i for i, rec in enumerate(worker) if isinstance(rec, r.SaveSubmitted) and rec.job == job + 1)
    worker[at:at] = done
    return at


def block_goes_to_next(run: b.Run) -> int:
    """Give a source block of that save to the next operation's request; returns the block."""
    rows = next(rec.rows for rec in run.worker() if isinstance(rec, r.PagesDigested) and rec.job == save(run).job)
    block = rows[0].block
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BlocksAssigned) and rec.request == NEXT:
            run.scheduler()[index] = msgspec.structs.replace(rec, blocks=[[block, *rec.blocks[0]], rec.blocks[1]])
            return block
    raise AssertionError


def wait(run: b.Run, waited_ns: int = DELAY_NS, batches: int = 1, *, timed_out: bool = False) -> None:
    """Let the worker wait for that save, `batches` batches after the next operation's request got its blocks."""
    rows = [
        index
        for index, rec in enumerate(run.scheduler())
        if isinstance(rec, r.BatchScheduled) and rec.source is r.BatchSource.SCHEDULER and rec.rows[0].request == NEXT
    ]
    waited = r.SaveWaited(rank=0, jobs=[save(run).job], waited_ns=waited_ns, timed_out=timed_out)
    b.during(run, rows[batches - 1] + 1, [waited])


def early_reuse(run: b.Run) -> None:
    late(run)
    block_goes_to_next(run)


def test_silent_when_every_save_was_done_before_it_mattered(tmp_path: Path) -> None:
    result = b.result(b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 24)
    assert result.summary == "24/24 saves completed, 24 delayed; 6 dependent reuses, waits paired 0/0: none came early"


def test_a_completion_before_the_delay_is_over_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    job, worker = save(run).job, run.worker()
    done = next(rec for rec in worker if isinstance(rec, r.SaveCompleted) and rec.job == job)
    worker.remove(done)
    at = next(i for i, rec in enumerate(worker) if isinstance(rec, r.PagesDigested) and rec.job == job)
    worker.insert(at + 1, done)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("early_complete", Verdict.FAIL)
    assert (finding.place.rank, finding.place.op) == (0, "N32.cold")
    assert f"held back for {DELAY_MS} ms and completed after 0.0 ms" in finding.message


def test_a_reuse_without_a_wait_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    early_reuse(run)
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    (finding,) = result.findings
    assert (finding.code, finding.verdict) == ("reuse_before_completion", Verdict.FAIL)
    assert "went to N32.interposer-1 before it was done; no wait names it" in finding.message
    assert "waits paired 0/1" in result.summary


def test_a_wait_that_covers_the_reuse_is_paired(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    early_reuse(run)
    wait(run)
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert "waits paired 1/1" in result.summary


def test_a_wait_that_ends_before_the_delay_does_not_cover(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    early_reuse(run)
    b.edit(run.worker(), r.SaveDelayed, {"delay_ms": DELAY_MS + 1}, job=save(run).job)
    wait(run, waited_ns=1)
    assert "reuse_before_completion" in b.codes(run.judge(tmp_path / "a"), CHECK)


@pytest.mark.parametrize(("batches", "codes"), [(1, []), (2, []), (3, ["reuse_before_completion"])])
def test_a_wait_that_comes_steps_later_does_not_cover(tmp_path: Path, batches: int, codes: list[str]) -> None:
    run = b.build(b.instrumented_plan())
    early_reuse(run)
    wait(run, batches=batches)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == codes


def test_a_wait_that_gave_up_fails_and_covers_nothing(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    early_reuse(run)
    wait(run, timed_out=True)
    found = {finding.code: finding for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert set(found) == {"wait_timed_out", "reuse_before_completion"}
    gave_up = found["wait_timed_out"]
    assert (gave_up.verdict, gave_up.place.rank, gave_up.place.op) == (Verdict.FAIL, 0, "N32.cold")
    assert f"rank 0: the wait for save {save(run).job} gave up after {DELAY_MS} ms" in gave_up.message


def test_a_wait_that_gave_up_on_an_unknown_job_fails_too(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    run.worker().append(r.SaveWaited(rank=0, jobs=[900], waited_ns=1, timed_out=True))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.request) == ("wait_timed_out", None)


def test_a_load_of_a_page_whose_save_is_not_done_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    job, worker = save(run).job, run.worker()
    done = next(rec for rec in worker if isinstance(rec, r.SaveCompleted) and rec.job == job)
    worker.remove(done)
    reload_ = b.request_id("candidate", "N32.reload")
    at = next(i for i, rec in enumerate(worker) if isinstance(rec, r.LoadSubmitted) and rec.request == reload_)
    worker.insert(at + 1, done)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.op) == ("reuse_before_completion", "N32.cold")
    assert "of N32.reload read its page before it was done" in finding.message


def test_a_shared_block_is_not_reused(tmp_path: Path) -> None:
    """The reload of a prompt that the local cache still holds shares the blocks of its cold run."""
    run = b.build(b.instrumented_plan())
    worker, job = run.worker(), save(run).job
    rows = next(rec.rows for rec in worker if isinstance(rec, r.PagesDigested) and rec.job == job)
    reload_ = b.request_id("candidate", "N32.reload")
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BlocksAssigned) and rec.request == reload_ and rec.blocks[0]:
            run.scheduler()[index] = msgspec.structs.replace(rec, blocks=[[rows[0].block], rec.blocks[1]])
    done = next(rec for rec in worker if isinstance(rec, r.SaveCompleted) and rec.job == job)
    before = b.result(run.judge(tmp_path / "a"), CHECK)
    b.edit(run.scheduler(), r.Lookup, {"local_tokens": 16}, request=reload_)
    after = b.result(run.judge(tmp_path / "b"), CHECK)
    assert done.ok and "4 dependent" in before.summary and "3 dependent" in after.summary


@pytest.mark.parametrize(
    ("kind", "code", "verdict"),
    [
        (r.SaveCompleted, "save_not_completed", Verdict.UNKNOWN),
        (r.SaveSubmitted, "save_unpaired", Verdict.UNKNOWN),
    ],
)
def test_half_a_save_is_unknown(tmp_path: Path, kind: type[r.Record], code: str, verdict: Verdict) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), kind, job=2)
    found = {finding.code: finding.verdict for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found[code] is verdict


@pytest.mark.parametrize("delay_ms", [None, DELAY_MS - 1])
def test_a_save_that_was_not_held_back_as_planned_is_unknown(tmp_path: Path, delay_ms: int | None) -> None:
    run = b.build(b.instrumented_plan())
    if delay_ms is None:
        b.drop(run.worker(), r.SaveDelayed, job=2)
    else:
        b.edit(run.worker(), r.SaveDelayed, {"delay_ms": delay_ms}, job=2)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("not_delayed", Verdict.UNKNOWN)


def test_a_failed_save_is_unknown_and_two_completions_fail(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit(run.worker(), r.SaveCompleted, {"ok": False}, job=2)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "save_failed"
    run = b.build(b.instrumented_plan())
    done = next(rec for rec in run.worker() if isinstance(rec, r.SaveCompleted) and rec.job == 2)
    run.worker().insert(run.worker().index(done), done)
    finding = b.only(run.judge(tmp_path / "b"), CHECK)
    assert (finding.code, finding.verdict) == ("completed_twice", Verdict.FAIL)


def test_saves_on_which_nothing_depends_are_vacuous(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    for kind in (r.LoadSubmitted, r.LoadCompleted, r.PagesPoisoned, r.GuardsChecked):
        b.drop(run.worker(), kind)
    b.drop(run.worker(), r.PagesDigested, direction="load")
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["vacuous"]
