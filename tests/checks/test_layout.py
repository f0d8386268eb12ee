from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "layout"


def registered(run: b.Run, rank: int = 0) -> r.RankRegistered:
    (found,) = [rec for rec in run.worker(rank) if isinstance(rec, r.RankRegistered)]
    return found


def change_entry(run: b.Run, index: int, rank: int = 0, **fields: object) -> None:
    entries = [
        msgspec.structs.replace(entry, **fields) if entry.entry == index else entry
        for entry in registered(run, rank).entries
    ]
    b.edit(run.worker(rank), r.RankRegistered, {"entries": entries})


def test_silent_on_a_layout_that_holds_together(tmp_path: Path) -> None:
    result = b.result(b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 6)


@pytest.mark.parametrize(
    ("entry", "fields", "code", "verdict"),
    [
        (b.RECURRENT, {"storage_offset": 64}, "entries_overlap", Verdict.FAIL),
        (b.RECURRENT, {"storage_offset": 1 << 16}, "page_overrun", Verdict.FAIL),
        (b.ATTENTION, {"page_bytes": 8}, "page_overrun", Verdict.FAIL),
        (b.CONV, {"effective_bytes": 64}, "bytes_disagree", Verdict.FAIL),
        (b.CONV, {"entry": 5}, "wrong_index", Verdict.FAIL),
    ],
)
def test_entries_that_do_not_fit(
    tmp_path: Path, entry: int, fields: dict[str, object], code: str, verdict: Verdict
) -> None:
    run = b.build(b.instrumented_plan())
    change_entry(run, entry, **fields)
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.verdict, finding.place.rank) == (code, verdict, 0)
    assert judgement.verdict is Verdict.FAIL


def packed(run: b.Run, moved: int = 1 << 16, stride: int = 1 << 16) -> None:
    """Every transfer group moves whole blocks, in which vLLM packs a group's layers (GLM-5-Next on vLLM 0.33)."""
    before = registered(run)
    groups = [msgspec.structs.replace(group, bytes_per_block=moved) for group in before.transfer_groups]
    entries = [msgspec.structs.replace(entry, block_stride=stride) for entry in before.entries]
    b.edit(run.worker(0), r.RankRegistered, {"transfer_groups": groups, "entries": entries})


@pytest.mark.parametrize(
    ("moved", "stride", "entry", "wrong"),
    [
        (1 << 16, 1 << 16, {}, 0),
        ((1 << 16) - 1, 1 << 16, {}, 2),  # less than the block
        (1 << 16, 1 << 17, {}, 2),  # another block than the entries lie in
        (1 << 16, 1 << 16, {"storage_offset": (1 << 16) - 8}, 1),  # an entry that ends beyond the block
    ],
)
def test_a_group_may_move_the_whole_block_that_holds_its_entries(
    tmp_path: Path, moved: int, stride: int, entry: dict[str, int], wrong: int
) -> None:
    run = b.build(b.instrumented_plan())
    packed(run, moved, stride)
    change_entry(run, b.ATTENTION, **entry)
    findings = b.result(run.judge(tmp_path / "a"), CHECK).findings
    assert [one.code for one in findings] == ["bytes_disagree"] * wrong


def test_other_counts_than_the_plan_expects_are_a_drift(tmp_path: Path) -> None:
    plan = b.instrumented_plan()
    assert plan.expected_layout is not None
    layout = plan.expected_layout.model_copy(update={"entries": 7})
    judgement = b.build(plan.model_copy(update={"expected_layout": layout})).judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, judgement.verdict) == ("layout_drift", Verdict.UNKNOWN)
    assert "registered 3 entries, the plan expects 7" in finding.message


def test_ranks_that_registered_other_tables_fail(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan(), ranks=2)
    change_entry(run, b.ATTENTION, rank=1, logical_dtype="float16")
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.rank) == ("ranks_differ", 1)


def test_a_run_without_a_layout_is_unknown(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit(run.worker(), r.RankRegistered, {"entries": []})
    judgement = run.judge(tmp_path / "a")
    for check in (CHECK, "page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity"):
        assert (b.only(judgement, check).code, b.only(judgement, check).verdict) == ("no_layout", Verdict.UNKNOWN)
    run = b.build(b.instrumented_plan(), ranks=2)
    b.drop(run.worker(1), r.RankRegistered)
    assert b.only(run.judge(tmp_path / "b"), CHECK).code == "missing_rank"
