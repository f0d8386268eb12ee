"""A run that was cut, or whose disk was full, is never a fail and never a pass: a missing tail contradicts nothing."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.plans.model import Plan

from . import builder as b

CUTS = 12
"""Of each stream, and as many of several at once."""


@pytest.mark.tamper
@pytest.mark.parametrize("plan", [b.small_plan(), b.instrumented_plan()], ids=lambda plan: plan.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cut_run_is_unknown(tmp_path: Path, plan: Plan, ranks: int) -> None:
    run = b.build(plan, ranks=ranks)
    run.sealed = False
    root = run.write(tmp_path / "a").root
    whole = {path: path.read_bytes().splitlines(keepends=True) for path in sorted(root.rglob("*.jsonl"))}
    chance = random.Random(7)
    alone = [[path] for path in whole for _ in range(CUTS)]
    together = [chance.sample(sorted(whole), 2) for _ in range(CUTS)]
    for cut in alone + together:
        kept = {path: chance.randrange(len(whole[path])) for path in cut}
        for path, lines in kept.items():
            path.write_bytes(b"".join(whole[path][:lines]))
        judgement = judge(Archive.open(root))
        fails = [finding for one in judgement.results for finding in one.findings if finding.verdict is Verdict.FAIL]
        assert (judgement.verdict, fails) == (Verdict.UNKNOWN, []), kept
        for path in cut:
            path.write_bytes(b"".join(whole[path]))


@pytest.mark.tamper
@pytest.mark.parametrize("process", ["scheduler", "worker-0"])
def test_a_stream_that_was_never_opened_is_unknown(tmp_path: Path, process: str) -> None:
    run = b.build(b.instrumented_plan())
    run.sealed = False
    del run.streams["candidate", process]
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN and b.failing(judgement) == set()


def test_a_cut_run_of_a_fault_still_fails_by_what_is_there(tmp_path: Path) -> None:
    run = b.build(fault="full-lookup")
    run.sealed = False
    assert run.judge(tmp_path / "a").verdict is Verdict.FAIL


def test_rows_of_one_source_alone_are_missing_and_unlike_rows_are_a_contradiction(tmp_path: Path) -> None:
    request = b.request_id("candidate", "N32.cold")

    def rows(run: b.Run) -> list[int]:
        return [
            index
            for index, rec in enumerate(run.scheduler())
            if isinstance(rec, r.BatchScheduled)
            and (rec.source, rec.rows[0].request) == (r.BatchSource.CONNECTOR, request)
        ]

    for dropped in (0, 1, -1):
        run = b.build()
        del run.scheduler()[rows(run)[dropped]]
        finding = b.only(run.judge(tmp_path / f"lone{dropped}"), "geometry")
        assert (finding.code, finding.verdict, finding.place.case) == ("missing_batches", Verdict.UNKNOWN, "N32")
    run = b.build()
    at = rows(run)[1]
    record = run.scheduler()[at]
    assert isinstance(record, r.BatchScheduled)
    longer = [msgspec.structs.replace(record.rows[0], scheduled=record.rows[0].scheduled + 1)]
    run.scheduler()[at] = msgspec.structs.replace(record, rows=longer)
    finding = b.only(run.judge(tmp_path / "unlike"), "geometry")
    assert (finding.code, finding.verdict) == ("sources_disagree", Verdict.FAIL)
