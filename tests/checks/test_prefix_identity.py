from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.plans.operations import boundary

from . import builder as b

CHECK = "prefix-identity"
COLD, RELOAD = b.request_id("candidate", "N32.cold"), b.request_id("candidate", "N32.reload")


def ids(run: b.Run, case: str, role: str = "target") -> list[int]:
    return run.inputs[next(one.sha256 for one in run.resolved.inputs if (one.case, one.role) == (case, role))]


def holds(prefix: list[int], entries: tuple[int, ...] = (b.CONV, b.RECURRENT)) -> Callable[[r.PageRow], r.PageRow]:
    """The bytes of another prefix's state in state pages."""

    def change(row: r.PageRow) -> r.PageRow:
        digest = b.page_digest(0, row.entry, prefix)
        return msgspec.structs.replace(row, digest=digest) if row.entry in entries else row

    return change


def test_silent_when_the_bytes_are_of_the_prefix_credited(tmp_path: Path) -> None:
    judgement = b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a")
    result = b.result(judgement, CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 6)
    assert result.summary.startswith("B by content is p in 6/6 loads")
    assert [row.content_boundary for row in judgement.table] == [row.credited for row in judgement.table]
    assert [row.content_boundary for row in judgement.table] == [boundary(n, b.C) for n in (31, 32, 33)]


def test_a_lookup_over_the_full_prompt_is_seen_in_the_bytes(tmp_path: Path) -> None:
    judgement = b.build(b.instrumented_plan(), fault="full-lookup").judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict) == ("content_not_credited", Verdict.FAIL)
    assert "these bytes are the state of [0, 32), 31 credited" in finding.message
    assert (finding.place.case, finding.place.rank, finding.place.group) == ("N32", 0, 1)
    assert {row.tokens: row.content_boundary for row in judgement.table} == {31: 16, 32: 32, 33: 32}
    assert [where.startswith("arms/candidate/") for where in finding.evidence] == [True] * len(finding.evidence)


def test_the_state_of_another_boundary_is_named_whatever_the_transfer_says(tmp_path: Path) -> None:
    run, request = b.build(b.instrumented_plan()), b.request_id("candidate", "N33.reload")
    b.edit_pages(run, holds(ids(run, "N33")[:16]), request=request, direction="load")
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert finding.code == "content_not_credited"
    assert "the state of [0, 16), 32 credited" in finding.message
    assert next(row for row in judgement.table if row.tokens == 33).content_boundary == 16


def test_the_state_of_another_prompt_is_named(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, holds(ids(run, "N31")[:16]), request=RELOAD, direction="load")
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert finding.code == "content_not_credited"
    assert "the state of [0, 16) of another prompt, 16 credited" in finding.message


def test_bytes_that_no_step_computed_fail_where_others_were_saved(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, holds([1, 2, 3]), request=RELOAD, direction="load", side=r.PageSide.DESTINATION)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict) == ("content_not_computed", Verdict.FAIL)
    assert next(row for row in judgement.table if row.tokens == 32).content_boundary is None


def test_a_prefix_that_was_never_computed_in_this_run_is_unknown(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, lambda row: None if row.entry != b.ATTENTION else row, request=COLD, direction="save")
    found = {finding.code: finding.verdict for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found == {"content_unknown": Verdict.UNKNOWN}


def test_every_right_digest_of_a_boundary_is_accepted(tmp_path: Path) -> None:
    """Saved twice with other bits, both computed by steps that ended there: either may be loaded."""
    for name, prefix in (("first", None), ("second", [7])):
        run = b.build(b.instrumented_plan())
        worker = run.worker()
        job = next(rec.job for rec in worker if isinstance(rec, r.SaveSubmitted) and rec.request == COLD)
        again = [
            msgspec.structs.replace(rec, job=900, **({"rows": [holds([7])(row) for row in rec.rows]} if paged else {}))
            for rec in worker
            if getattr(rec, "job", None) == job and not isinstance(rec, r.SaveDelayed)
            for paged in [isinstance(rec, r.PagesDigested)]
        ]
        at = next(i for i, rec in enumerate(worker) if isinstance(rec, r.LoadSubmitted) and rec.request == RELOAD)
        worker[at:at] = again
        if prefix:
            b.edit_pages(run, holds(prefix), request=RELOAD, direction="load")
        assert b.codes(run.judge(tmp_path / name), CHECK) == []


def test_a_save_of_the_null_block_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())

    def null(row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, block=0) if (row.entry, row.block_index) == (b.RECURRENT, 0) else row

    b.edit_pages(run, null, request=COLD, direction="save")
    found = {finding.code: finding for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found["null_block_saved"].verdict is Verdict.FAIL
    assert (found["null_block_saved"].place.boundary, found["null_block_saved"].place.op) == (16, "N32.cold")
    loaded = found["content_not_computed"]
    assert (loaded.verdict, loaded.place.op, loaded.place.boundary) == (Verdict.FAIL, "N32.reload", 16)
    assert "were saved under this key, and are no state: the null block was saved" in loaded.message


def test_a_save_of_a_block_that_no_step_ended_in_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.scheduler(), r.StateComputed, request=COLD, boundary=16)
    found = {finding.code: finding.verdict for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found["saved_uncomputed_state"] is Verdict.FAIL


def test_steps_with_drafts_file_nothing_and_accuse_nobody(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.scheduler(), r.StateComputed, request=COLD, boundary=16)
    b.edit_rows(run, "N32.cold", lambda rows: [msgspec.structs.replace(row, drafted=1) for row in rows])
    found = {finding.code: finding.verdict for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found["drafts_not_filed"] is Verdict.UNKNOWN
    assert Verdict.FAIL not in found.values()


def test_a_state_saved_under_the_key_of_another_boundary_fails_at_the_save(tmp_path: Path) -> None:
    run, request = b.build(b.instrumented_plan()), b.request_id("candidate", "N33.cold")
    b.edit(run.scheduler(), r.StateComputed, {"boundary": 16}, request=request, boundary=32)
    found = {finding.code: finding for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert "is the state of [0, 16)" in found["saved_other_boundary"].message
    assert found["saved_other_boundary"].place.boundary == 32


def test_a_batch_that_was_scheduled_before_its_state_had_arrived_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    worker = run.worker()
    at = next(i for i, rec in enumerate(worker) if isinstance(rec, r.LoadSubmitted) and rec.request == RELOAD)
    end = next(i for i in range(at, len(worker)) if isinstance(worker[i], b.Mark))
    synchronous = worker[at:end]
    del worker[at:end]
    after = next(i for i in range(at, len(worker)) if isinstance(worker[i], r.SaveSubmitted))
    worker[after:after] = synchronous
    finding = next(one for one in b.result(run.judge(tmp_path / "a"), CHECK).findings)
    assert (finding.code, finding.verdict) == ("state_read_before_load", Verdict.FAIL)
    assert "synchronous load" in finding.message


@pytest.mark.parametrize("entry", [b.CONV, b.RECURRENT])
def test_state_pages_that_were_not_read_are_unknown(tmp_path: Path, entry: int) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, lambda row: None if row.entry == entry else row, request=RELOAD, side=r.PageSide.DESTINATION)
    found = {finding.code: finding.verdict for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found == {"saved_uncomputed_state": Verdict.UNKNOWN, "missing_rows": Verdict.UNKNOWN}
