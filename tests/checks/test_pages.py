from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b
from . import scenarios as s

CHECK = "page-bytes"
COLD, RELOAD = b.request_id("candidate", "N32.cold"), b.request_id("candidate", "N32.reload")
OTHER = "f" * 32


def other_bytes(entry: int, index: int = 0, digest: str = OTHER) -> Callable[[r.PageRow], r.PageRow]:
    def change(row: r.PageRow) -> r.PageRow:
        mine = (row.entry, row.block_index) == (entry, index)
        return msgspec.structs.replace(row, digest=digest) if mine else row

    return change


def test_silent_when_every_page_arrives_as_saved(tmp_path: Path) -> None:
    result = b.result(b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.unit) == (Verdict.PASS, [], "page rows (internal checks)")
    assert result.examined > 100
    assert result.summary.startswith(f"{result.examined}/{result.examined} page rows equal")


@pytest.mark.parametrize(
    ("request_", "side", "moment", "code"),
    [
        (COLD, r.PageSide.SOURCE, "completed", "source_overwritten"),
        (COLD, r.PageSide.STORED, "completed", "stored_differs"),
        (RELOAD, r.PageSide.STORED, "submitted", "stale_page"),
        (RELOAD, r.PageSide.DESTINATION, "completed", "destination_differs"),
    ],
)
@pytest.mark.parametrize("entry", [b.ATTENTION, b.CONV, b.RECURRENT])
def test_bytes_that_change_on_the_way_are_named_where_they_changed(
    tmp_path: Path, request_: str, side: r.PageSide, moment: str, code: str, entry: int
) -> None:
    run = b.build(b.instrumented_plan(), ranks=2)
    direction = "save" if request_ == COLD else "load"
    b.edit_pages(run, other_bytes(entry), rank=1, request=request_, direction=direction, side=side, moment=moment)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, judgement.verdict) == (code, Verdict.FAIL, Verdict.FAIL)
    assert (finding.place.case, finding.place.rank, finding.place.boundary) == ("N32", 1, 16)
    assert finding.place.group == (0 if entry == b.ATTENTION else 1)
    assert f"entry {entry}" in finding.message
    assert any(where.startswith("arms/candidate/worker-1.jsonl:") for where in finding.evidence)


def test_the_first_damage_is_named_and_not_what_follows_from_it(tmp_path: Path) -> None:
    """The tier got other bytes, and they are what is loaded and saved again."""
    run = b.build(b.instrumented_plan())
    for match in ({"request": COLD, "side": r.PageSide.STORED}, {"request": RELOAD, "direction": "load"}):
        b.edit_pages(run, other_bytes(b.RECURRENT), **match)
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["stored_differs"]


def test_a_stale_page_says_whose_bytes_came(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    ids = run.inputs[next(one.sha256 for one in run.resolved.inputs if (one.case, one.role) == ("N31", "target"))]
    digest = b.page_digest(0, b.RECURRENT, ids[:16])
    b.edit_pages(run, other_bytes(b.RECURRENT, digest=digest), request=RELOAD, direction="load")
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert finding.code == "stale_page"
    assert "those of [0, 16) of N31.cold, entry 2" in finding.message


def test_two_right_digests_of_one_boundary_raise_no_alarm(tmp_path: Path) -> None:
    """After a preemption prefill recomputes what decode had computed: other bits, saved and loaded as they are."""
    plan = b.instrumented_plan()
    plan = plan.model_copy(update={"instruments": plan.instruments.model_copy(update={"save_delay_ms": 0})})
    run = b.build(plan)
    b.edit_pages(run, other_bytes(b.RECURRENT), request=RELOAD, direction="load")
    job = next(rec.job for rec in run.worker() if isinstance(rec, r.SaveSubmitted) and rec.request == COLD)
    again = [msgspec.structs.replace(rec, job=900) for rec in run.worker() if getattr(rec, "job", None) == job]
    again = [
        msgspec.structs.replace(rec, rows=[other_bytes(b.RECURRENT)(row) for row in rec.rows])
        if isinstance(rec, r.PagesDigested)
        else rec
        for rec in again
    ]
    at = next(i for i, rec in enumerate(run.worker()) if isinstance(rec, r.LoadSubmitted) and rec.request == RELOAD)
    run.worker()[at:at] = again
    judgement = run.judge(tmp_path / "a")
    assert {check: b.codes(judgement, check) for check in (CHECK, "prefix-identity", "page-coverage")} == {
        CHECK: [],
        "prefix-identity": [],
        "page-coverage": [],
    }
    assert judgement.verdict is Verdict.PASS


def test_a_page_without_its_row_is_unknown(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(
        run, lambda row: None if row.entry == b.CONV else row, request=COLD, side=r.PageSide.SOURCE, moment="completed"
    )
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("missing_rows", Verdict.UNKNOWN)
    assert "2 of 6 source pages have no row (completed)" in finding.message


@pytest.mark.parametrize(("side", "moment"), [(r.PageSide.DESTINATION, "completed"), (r.PageSide.STORED, "submitted")])
def test_a_side_that_was_never_read_is_unknown(tmp_path: Path, side: r.PageSide, moment: str) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), r.PagesDigested, request=RELOAD, side=side, moment=moment)
    assert "missing_rows" in b.codes(run.judge(tmp_path / "a"), CHECK)


def test_a_tier_that_cannot_be_read_is_said_and_the_rest_is_compared(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), r.PagesDigested, side=r.PageSide.STORED)
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])
    assert result.summary.endswith("the tier cannot be read")
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), r.PagesDigested, side=r.PageSide.STORED)
    b.edit_pages(run, other_bytes(b.CONV), request=RELOAD, direction="load")
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "stale_page"


@pytest.mark.parametrize(("moved", "found"), [(1024, ["stale_page"]), (None, [])])
def test_a_save_that_does_not_say_that_it_moved_anything_replaces_nothing(
    tmp_path: Path, moved: int | None, found: list[str]
) -> None:
    """A server that has a key already skips it: what was saved first is then right to come back."""
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), r.PagesDigested, side=r.PageSide.STORED)
    kinds = (r.SaveSubmitted, r.PagesDigested, r.SaveDelayed, r.SaveCompleted)
    first = next(rec for rec in run.worker() if isinstance(rec, r.SaveSubmitted) and rec.request == COLD)
    mine = [rec for rec in run.worker() if isinstance(rec, kinds) and rec.job == first.job]
    again: list[r.Record] = []
    for rec in (rec for rec in mine if getattr(rec, "direction", "save") == "save"):
        copy = msgspec.structs.replace(rec, job=999)
        if isinstance(copy, r.PagesDigested):
            copy = msgspec.structs.replace(copy, rows=[other_bytes(b.CONV)(row) for row in copy.rows])
        if isinstance(copy, r.SaveCompleted):
            copy = msgspec.structs.replace(copy, bytes=moved)
        again.append(copy)
    looked_up = [isinstance(rec, r.Lookup) and rec.request == RELOAD for rec in run.scheduler()]
    b.during(run, looked_up.index(True), again)
    codes = b.codes(run.judge(tmp_path / "a"), CHECK)
    assert [code for code in codes if code == "stale_page"] == found


def test_a_page_that_was_never_saved_here_is_unknown(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, lambda row: None if row.entry == b.RECURRENT else row, request=COLD, direction="save")
    assert set(b.codes(run.judge(tmp_path / "a"), CHECK)) == {"missing_rows", "not_saved_here"}


@pytest.mark.parametrize("group", [0, 1])
def test_a_load_without_one_of_its_groups_fails(tmp_path: Path, group: int) -> None:
    run = b.build(b.instrumented_plan())
    for index, rec in enumerate(run.worker()):
        if isinstance(rec, r.LoadSubmitted) and rec.request == RELOAD:
            parts = [part for part in rec.parts if part.group != group]
            run.worker()[index] = msgspec.structs.replace(rec, parts=parts)
    mine = (b.ATTENTION,) if group == 0 else (b.CONV, b.RECURRENT)
    b.edit_pages(run, lambda row: None if row.entry in mine else row, request=RELOAD, direction="load")
    found = {finding.code: finding for finding in b.result(run.judge(tmp_path / "a"), CHECK).findings}
    assert found["missing_group"].verdict is Verdict.FAIL
    assert (found["missing_group"].place.group, found["missing_group"].place.boundary) == (group, 16)


def test_pages_that_the_local_cache_holds_need_not_be_loaded(tmp_path: Path) -> None:
    run, request = b.build(b.instrumented_plan()), b.request_id("candidate", "N33.reload")

    def without_first(row: r.PageRow) -> r.PageRow | None:
        return None if (row.entry, row.block_index) == (b.ATTENTION, 0) else row

    for index, rec in enumerate(run.worker()):
        if isinstance(rec, r.LoadSubmitted) and rec.request == request:
            first = msgspec.structs.replace(rec.parts[0], first_block=1, pages=1)
            run.worker()[index] = msgspec.structs.replace(rec, parts=[first, rec.parts[1]])
    b.edit_pages(run, without_first, request=request, direction="load")
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == ["missing_group"]
    b.edit(run.scheduler(), r.Lookup, {"local_tokens": 16}, request=request)
    assert b.codes(run.judge(tmp_path / "b"), CHECK) == []


def relayed(tmp_path: Path) -> b.Run:
    """Three engines after each other, one tier."""
    return s.recorded(s.relay(), tmp_path, type("Kept", (s.Outliving,), {}))


def test_what_was_saved_in_an_arm_is_known_in_the_arms_that_follow(tmp_path: Path) -> None:
    judgement = relayed(tmp_path).judge(tmp_path / "a")
    for check in ("layout", CHECK, "page-coverage", "save-completion", "prefix-identity"):
        assert b.result(judgement, check).verdict is Verdict.PASS
    assert {row.arm: row.content_boundary for row in judgement.table} == {
        "candidate": 3 * s.C,
        "candidate-2": None,
        "candidate-3": 3 * s.C,
    }


def test_other_bytes_in_a_later_arm_are_named_there(tmp_path: Path) -> None:
    run = relayed(tmp_path)
    name = s.request(run, "trunk.4", "candidate-3")
    stream = run.worker(arm="candidate-3")
    for index, record in enumerate(stream):
        if isinstance(record, r.PagesDigested) and (record.request, record.direction) == (name, "load"):
            rows = [msgspec.structs.replace(row, digest=OTHER) for row in record.rows]
            stream[index] = msgspec.structs.replace(record, rows=rows)
    judgement = run.judge(tmp_path / "a")
    found = b.result(judgement, CHECK).findings
    assert {(finding.code, finding.place.arm, finding.place.op) for finding in found} == {
        ("stale_page", "candidate-3", "trunk.4")
    }
    assert b.codes(judgement, "prefix-identity") == ["content_not_computed"]


def test_an_arm_that_follows_nobody_knows_of_no_save_before_it(tmp_path: Path) -> None:
    run = s.recorded(s.relay(follows=False), tmp_path, type("Kept", (s.Outliving,), {}))
    judgement = run.judge(tmp_path / "a")
    found = b.result(judgement, CHECK).findings
    assert {(finding.code, finding.verdict) for finding in found} == {("not_saved_here", Verdict.UNKNOWN)}
    assert {finding.place.arm for finding in found} == {"candidate-2", "candidate-3"}
    assert set(b.codes(judgement, "prefix-identity")) == {"content_unknown"}


def test_the_same_tokens_under_another_salt_are_another_page(tmp_path: Path) -> None:
    """Bytes that were saved under one salt and come under another: equal, and not to be shared."""
    run = s.recorded(s.small(), tmp_path)
    b.edit(run.client(), r.OperationStarted, {"salt": "0" * 64}, op="trunk.5")
    judgement = run.judge(tmp_path / "a")
    assert {finding.place.op for finding in b.result(judgement, CHECK).findings} == {"trunk.6"}
    assert b.codes(judgement, CHECK) == ["not_saved_here"] * len(b.codes(judgement, CHECK))
    finding = b.only(judgement, "prefix-identity")
    assert finding.code == "content_not_credited"
    assert "under another cache salt" in finding.message


def test_layouts_of_arms_are_compared(tmp_path: Path) -> None:
    run = relayed(tmp_path)
    (rank,) = [rec for rec in run.worker(arm="candidate-2") if isinstance(rec, r.RankRegistered)]
    entries = [msgspec.structs.replace(entry, layer=f"other.{entry.layer}") for entry in rank.entries]
    b.edit(run.worker(arm="candidate-2"), r.RankRegistered, {"entries": entries})
    finding = b.only(run.judge(tmp_path / "a"), "layout")
    assert (finding.code, finding.place.arm) == ("ranks_differ", "candidate-2")
    assert "other tables than rank 0 of arm candidate" in finding.message
