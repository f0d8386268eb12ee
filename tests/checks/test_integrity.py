from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.archive import Archive

from . import builder as b

CHECK = "integrity"


def test_silent_on_a_whole_archive(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.PASS
    assert b.result(judgement, CHECK).examined > 100


@pytest.mark.tamper
def test_no_seal_is_unknown(tmp_path: Path) -> None:
    run = b.build()
    run.sealed = False
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.result(judgement, CHECK).verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
    assert any("seal.json" in finding.message for finding in b.result(judgement, CHECK).findings)


@pytest.mark.tamper
def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    archive = b.build().write(tmp_path / "a")
    stream = archive.root / "arms/candidate/worker-0.jsonl"
    data = bytearray(stream.read_bytes())
    data[data.index(b'"bytes":') + 8] ^= 1
    stream.write_bytes(bytes(data))
    judgement = judge(Archive.open(archive.root))
    assert judgement.verdict is not Verdict.PASS
    assert any("arms/candidate/worker-0.jsonl" in finding.message for finding in b.result(judgement, CHECK).findings)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(r.Outcome.INTERRUPTED, "attempt_not_completed"), (None, "attempt_not_ended")],
)
def test_an_attempt_that_did_not_complete_is_unknown(tmp_path: Path, outcome: r.Outcome | None, code: str) -> None:
    run = b.build()
    ended = run.attempts.pop()
    if outcome is not None:
        run.attempts.append(msgspec.structs.replace(ended, outcome=outcome, reason="stopped by the user"))
    judgement = run.judge(tmp_path / "a")
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (Verdict.UNKNOWN, code)


@pytest.mark.parametrize("level", [r.ContactLevel.HOST, r.ContactLevel.MODEL, r.ContactLevel.REQUEST])
def test_a_level_of_contact_that_is_not_recorded_is_unknown(tmp_path: Path, level: r.ContactLevel) -> None:
    run = b.build()
    b.drop(run.attempts, r.ContactReached, level=level)
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "missing_contact"


@pytest.mark.parametrize(
    ("ends", "codes"),
    [
        ([("interrupted", "stopped"), ("completed", None)], ["attempt_not_completed", "many_ends", "after_the_end"]),
        ([("completed", None), ("completed", None)], ["many_ends", "after_the_end"]),
        ([("completed", "the engine died")], ["attempt_not_completed", "after_the_end"]),
    ],
)
def test_an_attempt_that_does_not_end_once_and_last_is_unknown(
    tmp_path: Path, ends: list[tuple[str, str | None]], codes: list[str]
) -> None:
    run = b.build()
    run.attempts[-1:] = [r.AttemptEnded(outcome=r.Outcome(outcome), reason=reason) for outcome, reason in ends]
    run.attempts.append(r.ContactReached(level=r.ContactLevel.GPU))
    assert b.codes(run.judge(tmp_path / "a"), CHECK) == codes


def test_two_attempts_are_unknown(tmp_path: Path) -> None:
    run = b.build()
    run.attempts += run.attempts
    assert b.only(run.judge(tmp_path / "a"), CHECK).code == "many_attempts"
