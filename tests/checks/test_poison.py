from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "poison"
RELOAD = b.request_id("candidate", "N33.reload")


def job(run: b.Run) -> int:
    return next(rec.job for rec in run.worker() if isinstance(rec, r.LoadSubmitted) and rec.request == RELOAD)


def test_silent_when_nothing_is_left_and_the_guards_hold(tmp_path: Path) -> None:
    result = b.result(b.build(b.instrumented_plan(), ranks=2).judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 6)
    assert result.summary.startswith("0 poisoned bytes left in 20 pages of 6 loads; 24 guards")


def test_poison_that_is_left_is_named_by_place_and_bytes(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan(), ranks=2)

    def short(row: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(row, sentinel=48) if row.entry == b.RECURRENT else row

    b.edit_pages(run, short, rank=1, request=RELOAD, direction="load", side=r.PageSide.DESTINATION)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("sentinel_left", Verdict.FAIL)
    assert (finding.place.rank, finding.place.group, finding.place.layer, finding.place.boundary) == (1, 1, "b", 32)
    assert "entry 2" in finding.message and "48 poisoned bytes are left" in finding.message


@pytest.mark.parametrize(("kind", "code"), [(r.PagesPoisoned, "not_poisoned"), (r.GuardsChecked, "guards_not_checked")])
def test_a_load_that_was_not_poisoned_or_not_checked_is_unknown(
    tmp_path: Path, kind: type[r.Record], code: str
) -> None:
    run = b.build(b.instrumented_plan())
    b.drop(run.worker(), kind, job=job(run))
    judgement = run.judge(tmp_path / "a")
    assert (b.only(judgement, CHECK).code, judgement.verdict) == (code, Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("change", "code"), [({"pages": 0}, "not_poisoned"), ({"guards": 0}, "no_guards"), ({"pages": 99}, "missing_rows")]
)
def test_poison_over_nothing_is_unknown(tmp_path: Path, change: dict[str, object], code: str) -> None:
    run = b.build(b.instrumented_plan())
    b.edit(run.worker(), r.PagesPoisoned, change, job=job(run))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == (code, Verdict.UNKNOWN)


def test_a_neighbour_that_changed_before_any_step_fails(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit(run.worker(), r.GuardsChecked, {"changed": [[b.RECURRENT, 60]]}, job=job(run))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.layer) == ("guard_changed", Verdict.FAIL, "b")
    assert "block 60 of entry 2" in finding.message


def test_a_neighbour_that_changed_while_steps_ran_is_unknown_unless_the_engine_gave_it_away(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    change = {"changed": [[b.RECURRENT, 60]], "steps_between": 2}
    b.edit(run.worker(), r.GuardsChecked, change, job=job(run))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("guard_changed", Verdict.UNKNOWN)
    # A block that another request got meanwhile: a phase of its own between poison and check.
    worker, scheduler = run.worker(), run.scheduler()
    poisoned = next(i for i, rec in enumerate(worker) if isinstance(rec, r.PagesPoisoned) and rec.job == job(run))
    marks = sum(isinstance(rec, b.Mark) for rec in worker[:poisoned])
    for records in (run.client(), scheduler):
        at = [i for i, rec in enumerate(records) if isinstance(rec, b.Mark)][marks]
        given = [r.BlocksAssigned(step=1, request="another", blocks=[[60], []])] if records is scheduler else []
        records[at:at] = [b.Mark(advance_ns=0), *given, b.Mark(advance_ns=0)]
    worker[poisoned + 1 : poisoned + 1] = [b.Mark(advance_ns=0), b.Mark(advance_ns=0)]
    assert b.codes(run.judge(tmp_path / "b"), CHECK) == []
