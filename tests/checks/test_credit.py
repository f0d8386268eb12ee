from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.base import Verdict
from samestate.evidence import records as r

from . import builder as b

CHECK = "transfers"
RELOAD, COLD = "N32.reload", "N32.cold"


def test_silent_when_all_sources_say_p(tmp_path: Path) -> None:
    result = b.result(b.build().judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])


@pytest.mark.parametrize(
    ("arm", "op", "tokens"), [("candidate", RELOAD, 0), ("candidate", COLD, 16), ("control", COLD, 1)]
)
def test_an_answer_that_names_other_cached_tokens_fails(tmp_path: Path, arm: str, op: str, tokens: int) -> None:
    run = b.build()
    b.edit(run.client(arm), r.OperationOutput, {"cached_tokens": tokens}, op=op)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("cached_tokens_disagree", Verdict.FAIL)
    assert (finding.place.arm, finding.place.op) == (arm, op)


def test_an_answer_that_names_none_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    b.edit(run.client(), r.OperationOutput, {"cached_tokens": None}, op=COLD)
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("not_reported", Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (RELOAD, {"matched_tokens": 0}),
        (RELOAD, {"matched_tokens": 32}),
        (RELOAD, {"queried_tokens": 1}),
        (COLD, {"matched_tokens": 16}),
    ],
)
def test_a_lookup_that_found_something_else_fails(tmp_path: Path, op: str, change: dict[str, object]) -> None:
    run = b.build()
    b.edit(run.scheduler(), r.Lookup, change, request=b.request_id("candidate", op))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("lookup_disagrees", Verdict.FAIL, op)


def test_the_last_answered_lookup_counts(tmp_path: Path) -> None:
    """A lookup may put the request off, and one that was overtaken does not count."""
    run = b.build()
    records = run.scheduler()
    (index,) = [
        i
        for i, rec in enumerate(records)
        if isinstance(rec, r.Lookup) and rec.request == b.request_id("candidate", RELOAD)
    ]
    last = records[index]
    assert isinstance(last, r.Lookup)
    put_off, overtaken = (
        r.Lookup(request=last.request, queried_tokens=32, local_tokens=0, matched_tokens=n, is_async=True, salt="")
        for n in (None, 0)
    )
    records[index : index + 1] = [put_off, overtaken, last, put_off]
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == []


@pytest.mark.parametrize("op", [RELOAD, COLD])
@pytest.mark.parametrize("answered", [True, False])
def test_no_lookup_or_no_answer_is_unknown(tmp_path: Path, op: str, answered: bool) -> None:
    run = b.build()
    if answered:
        b.drop(run.scheduler(), r.Lookup, request=b.request_id("candidate", op))
    else:
        b.edit(run.scheduler(), r.Lookup, {"matched_tokens": None}, request=b.request_id("candidate", op))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("missing_lookup", Verdict.UNKNOWN, op)


def test_a_load_without_allocation_is_unknown_and_one_for_other_tokens_fails(tmp_path: Path) -> None:
    run = b.build()
    b.drop(run.scheduler(), r.Allocated, request=b.request_id("candidate", RELOAD))
    finding = b.only(run.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.op) == ("missing_allocation", Verdict.UNKNOWN, RELOAD)
    run = b.build()
    b.edit(run.scheduler(), r.Allocated, {"external_tokens": 0}, request=b.request_id("candidate", RELOAD))
    finding = b.only(run.judge(tmp_path / "b"), CHECK)
    assert (finding.code, finding.verdict) == ("allocation_disagrees", Verdict.FAIL)
