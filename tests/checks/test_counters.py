from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "preemptions"


def test_silent_when_none_was_preempted(tmp_path: Path) -> None:
    result = b.result(b.build().judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 30)


@pytest.mark.parametrize("arm", ["control", "candidate"])
def test_a_count_fails(tmp_path: Path, arm: str) -> None:
    run = b.build()
    (read,) = [
        rec
        for rec in run.client(arm)
        if isinstance(rec, r.CountersRead) and (rec.op, rec.when) == ("N32.cold", "after")
    ]
    b.edit(
        run.client(arm), r.CountersRead, {"values": {**read.values, r.PREEMPTIONS: 1.0}}, op="N32.cold", when="after"
    )
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (judgement.verdict, finding.code, finding.place.arm) == (Verdict.FAIL, "preempted", arm)


def test_a_preempted_row_fails_whatever_the_counter_says(tmp_path: Path) -> None:
    run = b.build()
    for index, rec in enumerate(run.scheduler()):
        if isinstance(rec, r.BatchScheduled):
            run.scheduler()[index] = msgspec.structs.replace(rec, preempted=["x"])
            break
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.place.request) == ("preempted", "x")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unreadable_counter_is_unknown_not_zero(tmp_path: Path, when: str) -> None:
    run = b.build()
    b.edit(run.client(), r.CountersRead, {"values": {}, "missing": [r.PREEMPTIONS]}, op="N32.cold", when=when)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("counter_unreadable", Verdict.UNKNOWN)


def test_a_counter_both_read_and_missing_is_unreadable(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.CountersRead, {"missing": [r.PREEMPTIONS]}, op="N32.cold", when="after")
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "counter_unreadable"
