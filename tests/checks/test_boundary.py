from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b
from .test_geometry import split

CHECK = "boundary"
OP = "N32.reload"
REQUEST = b.request_id("candidate", OP)


def test_silent_on_the_strict_prefix(tmp_path: Path) -> None:
    result = b.result(b.build(ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 3)


def test_fires_on_the_lookup_over_the_full_prompt(tmp_path: Path) -> None:
    judgement = b.build(fault="full-lookup").judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, finding.place.boundary) == ("retained_lookup_boundary", Verdict.FAIL, 32)
    assert finding.message == (
        "N32.reload: checkpoint of [0, 32) restored, 31 tokens credited, 1 scheduled: "
        "the last token is applied twice (lookup over the full prompt)"
    )


def test_fires_though_outputs_are_equal(tmp_path: Path) -> None:
    """The boundary is wrong whether or not 8 tokens show it."""
    run, right = b.build(fault="full-lookup"), b.build()
    for index, rec in enumerate(run.client()):
        if isinstance(rec, r.OperationOutput):
            (same,) = [one for one in right.client() if isinstance(one, r.OperationOutput) and one.op == rec.op]
            run.client()[index] = msgspec.structs.replace(same, cached_tokens=rec.cached_tokens)
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.failing(judgement)) == (Verdict.FAIL, {CHECK})


@pytest.mark.parametrize(("boundary", "codes"), [(32, {"boundary_not_credited", "wrong_boundary", "empty_suffix"})])
def test_another_boundary_than_credited_fails(tmp_path: Path, boundary: int, codes: set[str]) -> None:
    run = b.build()
    (load,) = [rec for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == REQUEST]
    parts = [msgspec.structs.replace(part, boundary=boundary) for part in load.parts]
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": boundary, "parts": parts}, request=REQUEST)
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == codes


def test_a_boundary_that_is_not_reported_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.worker(), r.LoadSubmitted, {"boundary": None}, request=REQUEST)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.place.rank) == (Verdict.UNKNOWN, "not_reported", 0)
    row = {row.case: row for row in judgement.table}["N32"]
    assert (row.boundary, row.boundary_reported, row.verdict) == (None, False, Verdict.UNKNOWN)


def test_the_farthest_of_several_loads_is_the_boundary(tmp_path: Path) -> None:
    run = b.build()
    (index,) = [
        i
        for i, rec in enumerate(run.worker())
        if getattr(rec, "request", "") == REQUEST and isinstance(rec, r.LoadSubmitted)
    ]
    load = run.worker()[index]
    near = [msgspec.structs.replace(load.parts[0], boundary=8)]
    first = msgspec.structs.replace(load, job=999, boundary=8, parts=near)
    done = r.LoadCompleted(rank=0, job=999, ok=True, bytes=near[0].bytes)
    run.worker()[index:index] = [first, done]
    assert b.result(run.judge(tmp_path / "a"), CHECK).verdict is Verdict.PASS


def test_ranks_that_disagree_fail(tmp_path: Path) -> None:
    run = b.build(ranks=2)
    b.edit(run.worker(1), r.LoadSubmitted, {"boundary": 32}, request=REQUEST)
    assert "rank_disagreement" in b.codes(run.judge(tmp_path / "a"), CHECK)


def test_a_rank_without_a_load_is_unknown(tmp_path: Path) -> None:
    run = b.build(ranks=2)
    b.drop(run.worker(1), r.LoadSubmitted, request=REQUEST)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.rank) == ("missing_rank", Verdict.UNKNOWN, 1)


def test_a_rank_that_never_registered_is_unknown(tmp_path: Path) -> None:
    run = b.build(ranks=2)
    del run.streams["candidate", "worker-1"]
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"missing_rank"}
    assert run.judge(tmp_path / "b").verdict is Verdict.UNKNOWN


def test_no_load_at_all_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.worker(), r.LoadSubmitted, request=REQUEST)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("no_external_hit", Verdict.UNKNOWN)


def test_state_of_another_boundary_than_the_load_fails(tmp_path: Path) -> None:
    run = b.build()
    (load,) = [rec for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == REQUEST]
    attention, state = load.parts
    parts = [attention, msgspec.structs.replace(state, boundary=8)]
    b.edit(run.worker(), r.LoadSubmitted, {"parts": parts}, request=REQUEST)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.group, finding.place.boundary) == ("part_boundary", 1, 8)


def test_a_load_without_state_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    (load,) = [rec for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == REQUEST]
    b.edit(run.worker(), r.LoadSubmitted, {"parts": load.parts[:1]}, request=REQUEST)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.group) == ("no_state_loaded", Verdict.UNKNOWN, 1)


def test_a_group_that_was_never_registered_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.worker(), r.RankRegistered, {"transfer_groups": []})
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"unknown_group"}


def test_drafts_in_the_first_batch_fail(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, OP, lambda rows: [msgspec.structs.replace(rows[0], drafted=1, scheduled=17), *rows[1:]])
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "drafts_scheduled"


def test_a_suffix_in_two_steps_is_still_the_suffix(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, OP, split)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


def test_more_than_the_suffix_fails(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, OP, lambda rows: [msgspec.structs.replace(rows[0], scheduled=17), *rows[1:]])
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "wrong_suffix"


def test_less_than_the_suffix_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit_rows(run, OP, lambda rows: [msgspec.structs.replace(rows[0], scheduled=9), *rows[1:]])
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "missing_batches"


@pytest.mark.parametrize("source", list(r.BatchSource))
def test_a_first_batch_that_one_source_did_not_record_is_unknown(tmp_path: Path, source: r.BatchSource) -> None:
    run = b.build()
    run.scheduler()[:] = [
        rec
        for rec in run.scheduler()
        if not (isinstance(rec, r.BatchScheduled) and rec.source is source and rec.rows[0].request == REQUEST)
    ]
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("missing_batches", Verdict.UNKNOWN)


def test_a_connector_without_adapter_is_not_reported_rather_than_a_miss(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.worker(), r.RankRegistered, {"transfer_groups": []})
    for kind in (r.LoadSubmitted, r.LoadCompleted, r.SaveSubmitted, r.SaveCompleted):
        run.worker()[:] = [rec for rec in run.worker() if not isinstance(rec, kind)]
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert set(b.codes(judgement, CHECK)) == {"not_reported"}
