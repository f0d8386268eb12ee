"""What a scenario's loads moved, and what was saved before them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.base import Finding, Verdict
from samestate.checks.reuse import CHECK
from samestate.evidence import records as r

from . import builder as b
from . import scenarios as s


@pytest.fixture
def run(tmp_path: Path) -> b.Run:
    return s.recorded(s.small(), tmp_path)


def findings(run: b.Run, folder: Path) -> list[Finding]:
    return b.result(run.judge(folder), CHECK).findings


def of(run: b.Run, kind: type[r.Record], op: str) -> int:
    """Index of the worker's first record of the kind for an operation."""
    request = s.request(run, op)
    return next(
        at for at, rec in enumerate(run.worker()) if isinstance(rec, kind) and getattr(rec, "request", None) == request
    )


def test_silent_on_a_clean_tour(run: b.Run, tmp_path: Path) -> None:
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings, result.examined) == (Verdict.PASS, [], 10)


def test_silent_where_an_arm_loads_what_another_saved(tmp_path: Path) -> None:
    run = s.recorded(s.relay(), tmp_path, type("Kept", (s.Outliving,), {}))
    result = b.result(run.judge(tmp_path / "a"), CHECK)
    assert (result.verdict, result.findings) == (Verdict.PASS, [])


def test_one_that_follows_nobody_loads_what_was_never_saved_for_it(tmp_path: Path) -> None:
    run = s.recorded(s.relay(follows=False), tmp_path, type("Kept", (s.Outliving,), {}))
    (first, *_) = findings(run, tmp_path / "a")
    assert (first.code, first.verdict, first.place.arm) == ("not_saved_here", Verdict.UNKNOWN, "candidate-2")


def test_a_load_without_the_pages_of_tokens_is_unknown(run: b.Run, tmp_path: Path) -> None:
    at = of(run, r.LoadSubmitted, "trunk.2")
    load = run.worker()[at]
    assert isinstance(load, r.LoadSubmitted)
    parts = [part for part in load.parts if part.group]
    run.worker()[at] = msgspec.structs.replace(load, parts=parts)
    b.edit(run.worker(), r.LoadCompleted, {"bytes": sum(part.bytes for part in parts)}, job=load.job)
    (finding,) = findings(run, tmp_path / "a")
    assert (finding.code, finding.place.op, finding.place.group) == ("missing_part", "trunk.2", 0)


def test_a_mixed_path_needs_from_outside_only_what_is_not_local(run: b.Run, tmp_path: Path) -> None:
    """Its load brings the blocks beyond the local ones; without the lookup's word for them they are missing."""
    op = "trunk.4"
    lookup = next(rec for rec in run.scheduler() if isinstance(rec, r.Lookup) and rec.request == s.request(run, op))
    assert lookup.local_tokens == s.C
    b.edit(run.scheduler(), r.Lookup, {"local_tokens": 0}, request=lookup.request)
    assert [one.code for one in findings(run, tmp_path / "a") if one.place.op == op] == ["missing_part"]


def test_part_of_a_block_fails(run: b.Run, tmp_path: Path) -> None:
    at = of(run, r.SaveSubmitted, "trunk.1")
    save = run.worker()[at]
    assert isinstance(save, r.SaveSubmitted)
    first, *others = save.parts
    part = msgspec.structs.replace(first, bytes=first.bytes - 1)
    run.worker()[at] = msgspec.structs.replace(save, parts=[part, *others])
    b.edit(run.worker(), r.SaveCompleted, {"bytes": sum(one.bytes for one in (part, *others))}, job=save.job)
    assert [(one.code, one.verdict) for one in findings(run, tmp_path / "a")] == [("bytes_disagree", Verdict.FAIL)]


def test_a_load_of_another_prompts_pages_is_unknown(run: b.Run, tmp_path: Path) -> None:
    """``one`` shares C+5 tokens with the trunk: the state that it loads is of its own first step or of the trunk's."""
    for rec in list(run.worker()):
        if isinstance(rec, r.SaveSubmitted) and rec.request == s.request(run, "one.1"):
            run.worker().remove(rec)
            run.worker().remove(next(o for o in run.worker() if isinstance(o, r.SaveCompleted) and o.job == rec.job))
    codes = {(one.code, one.place.op) for one in findings(run, tmp_path / "a")}
    assert codes == {("not_saved_here", "one.2"), ("not_saved_here", "one.3")}


@pytest.mark.parametrize(("op", "salt"), [("trunk.2", "f" * 64), ("trunk.6", ""), ("trunk.6", "f" * 64)])
def test_a_lookup_under_another_salt_fails(run: b.Run, tmp_path: Path, op: str, salt: str) -> None:
    b.edit(run.scheduler(), r.Lookup, {"salt": salt}, request=s.request(run, op))
    (finding,) = findings(run, tmp_path / "a")
    assert (finding.code, finding.verdict, finding.place.op) == ("wrong_salt", Verdict.FAIL, op)


def test_a_load_that_was_never_submitted_is_unknown(run: b.Run, tmp_path: Path) -> None:
    run.worker().append(r.LoadCompleted(rank=0, job=999, ok=True, bytes=1))
    assert [one.code for one in findings(run, tmp_path / "a")] == ["load_unpaired"]


def test_a_save_that_never_ends_is_unknown(run: b.Run, tmp_path: Path) -> None:
    at = of(run, r.SaveSubmitted, "trunk.1")
    job = run.worker()[at].job  # type: ignore[attr-defined]
    run.worker().remove(next(o for o in run.worker() if isinstance(o, r.SaveCompleted) and o.job == job))
    codes = {one.code for one in findings(run, tmp_path / "a")}
    assert codes >= {"save_unpaired", "not_saved_here"}


def test_transfers_of_groups_that_were_never_registered_are_unknown(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.worker(), r.RankRegistered, {"transfer_groups": []})
    codes = {one.code for one in findings(run, tmp_path / "a")}
    assert "unknown_group" in codes


def test_a_save_that_moved_other_bytes_than_it_said_fails(run: b.Run, tmp_path: Path) -> None:
    job = run.worker()[of(run, r.SaveSubmitted, "trunk.1")].job  # type: ignore[attr-defined]
    b.edit(run.worker(), r.SaveCompleted, {"bytes": 1}, job=job)
    assert [(one.code, one.verdict) for one in findings(run, tmp_path / "a")] == [("bytes_disagree", Verdict.FAIL)]


def test_a_connector_that_reports_no_bytes_of_its_saves_is_believed(run: b.Run, tmp_path: Path) -> None:
    b.edit(run.worker(), r.SaveCompleted, {"bytes": None})
    assert findings(run, tmp_path / "a") == []
