"""Study B's shape: 76 tokens traced on two ranks, 75 delivered; the close forced at 64, the stop at 74, 1654 after."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import MARKER_FROZEN_V1, MARKER_POST_STOP_V1, Judgement, judge
from samestate.checks.base import Verdict
from samestate.evidence import marker_records as m
from samestate.evidence import probe_records as p
from samestate.evidence import verify
from samestate.evidence.archive import Archive

from . import builder as b
from . import marker_run as k

TRUSTING = {"trace-reconciled", "budget-close", "budget-rows", "marker-class"}
"""Checks that need trace and API to be one thing."""


def unknowns(judgement: Judgement) -> set[str]:
    return {one.check for one in judgement.results if one.verdict is Verdict.UNKNOWN}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return k.build().write(tmp_path / "a")


def test_the_fixture_has_the_studys_numbers() -> None:
    shape = k.study_b_shape()
    committed = [token for step in shape.steps for token in step.tokens]
    assert (len(shape.prompt), len(committed), len(shape.delivered)) == (48, 76, 75)
    assert [at for at, token in enumerate(committed) if token == 154842] == [64]
    assert (committed[74], committed[75]) == (154827, 1654)
    assert shape.delivered == committed[:75]


def test_the_frozen_rule_is_unknown(archive: Archive) -> None:
    judgement = judge(archive, MARKER_FROZEN_V1)
    assert judgement.verdict is Verdict.UNKNOWN
    assert unknowns(judgement) == TRUSTING | {"plan-identity"}
    for rank, finding in enumerate(b.result(judgement, "trace-reconciled").findings):
        assert (finding.code, finding.place.rank, finding.place.op) == ("output_mismatch", rank, "exact-answer")
        assert "76 trace tokens, 75 API tokens, the first 75 agree" in finding.message
    observed = b.only(judgement, "marker-class")
    assert "forced by its rows on 2 rank(s), an observation only" in observed.message
    assert b.result(judgement, "second-close").verdict is Verdict.NOT_EXERCISED


def test_the_post_stop_rule_reconciles_with_the_witness(archive: Archive) -> None:
    judgement = judge(archive)
    assert (judgement.analyzer, judgement.verdict) == (MARKER_POST_STOP_V1, Verdict.PASS)
    assert b.result(judgement, "trace-reconciled").summary.endswith("at most 1 tokens past a stop")
    assert b.result(judgement, "marker-class").summary == (
        "forced at 64 (served exact-answer); tokens: 74 sampled, 1 forced, 1 post_stop"
    )
    assert b.result(judgement, "usage").summary == "3/3 counts are those of the ids"
    assert not judgement.performance_eligible


def untrimmed(run: b.Run) -> None:
    """The scheduler records the last step as if 75 tokens had been all that came."""
    last = next(rec for rec in k.scheduler(run) if isinstance(rec, m.TokensDelivered) and rec.finish_reason)
    b.edit(k.scheduler(run), m.TokensDelivered, {"before": last.before[: last.after]}, finish_reason="stop")


def unrecorded(run: b.Run) -> None:
    b.drop(k.scheduler(run), m.TokensDelivered, finish_reason="stop")
    k.recount(run)


def no_scheduler(run: b.Run) -> None:
    del run.streams[k.ARM, "budget-scheduler"]


@pytest.mark.parametrize("spoil", [untrimmed, unrecorded, no_scheduler])
def test_without_the_witness_it_stays_unknown(tmp_path: Path, spoil: object) -> None:
    run = k.build()
    spoil(run)  # type: ignore[operator]
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert unknowns(judgement) >= TRUSTING
    row = judgement.table[0].marker
    assert row is not None
    assert (row.marker_class, row.observed, row.tail, row.tail_known) == ("unknown", "forced", 1, False)


def test_no_second_close_is_not_exercised_and_not_required(archive: Archive) -> None:
    judgement = judge(archive)
    result = b.result(judgement, "second-close")
    assert (result.verdict, result.examined) == (Verdict.NOT_EXERCISED, 0)
    assert "second-close" not in judgement.required
    assert judgement.verdict is Verdict.PASS


def test_both_verdicts_are_of_one_seal(archive: Archive) -> None:
    one, other = judge(archive), judge(archive, MARKER_FROZEN_V1)
    assert one.seal_sha256 == other.seal_sha256 == archive.seal_sha256
    assert one.analyzer != other.analyzer
    assert [result.check for result in one.results] == [result.check for result in other.results]


def test_a_close_of_another_run_is_not_attributed(tmp_path: Path) -> None:
    """The request before had its closes at 64 and 126 and no trace; this run's trace says nothing of it (row 149)."""
    earlier = k.Shape("earlier", [k.Step([], [*k.thought(64), k.END, *k.thought(61, 3000), k.END, k.STOP])])
    run = k.build([k.study_b_shape(), earlier])
    for rank in range(2):
        k.trace(run, rank)[:] = [one for one in k.trace(run, rank) if "earlier" not in getattr(one, "request", "")]
    k.scheduler(run)[:] = [one for one in k.scheduler(run) if "earlier" not in getattr(one, "request", "")]
    k.recount(run)
    judgement = run.judge(tmp_path / "a")
    said = [finding for finding in b.result(judgement, "marker-class").findings if finding.place.op == "earlier"]
    assert [finding.code for finding in said] == ["not_attributed", "not_attributed"]
    assert ["at 64" in said[0].message, "at 126" in said[1].message] == [True, True]
    assert all("its rows differ or are not recorded" in finding.message for finding in said)
    assert b.result(judgement, "second-close").verdict is Verdict.UNKNOWN
    row = next(row.marker for row in judgement.table if row.op == "earlier")
    assert row is not None and (row.marker_class, row.observed, row.closes) == ("unknown", "unknown", 2)


def test_a_trace_under_another_request_id_is_of_nobody(tmp_path: Path) -> None:
    run = k.build()
    b.edit(k.client(run), p.ProbeAnswered, {"request": "chatcmpl-another"})
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert {"missing_trace", "unattributed_request"} <= set(b.codes(judgement, "trace-whole"))
    assert b.codes(judgement, "trace-reconciled") == ["missing_trace"]


def test_verify_does_not_cover_it(archive: Archive) -> None:
    second = verify.judge(str(archive.root))
    assert verify.EXIT_CODES.get(second.verdict, 3) == 3
    assert second.why == "analyzer marker-post-stop-v1 is not covered"
    assert [(one.check, one.verdict) for one in second.results] == [("integrity", "pass")]
    assert verify.main([str(archive.root)]) == 3
