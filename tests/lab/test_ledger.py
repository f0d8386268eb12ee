"""Attempts at a lock: counted before first contact, excluded where nothing was asked, never taken back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from samestate.engines.base import Ask, EngineError, Generation
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import AttemptEnded, AttemptStarted, EngineStarted, Outcome
from samestate.lab.errors import RunError
from samestate.lab.ledger import Ledger, Spent
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import plan_sha256
from samestate.plans.model import Plan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]
PLAN, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "mine.lock"


def test_attempts_are_numbered_and_spent(lock: Path) -> None:
    ledger = Ledger(lock, PLAN, allowed=2)
    assert [ledger.spend("one"), ledger.spend("two")] == [1, 2]
    with pytest.raises(RunError, match=r"allows 2 attempt\(s\) and the last was spent on two"):
        ledger.spend("three")


def test_an_excluded_attempt_spends_nothing_and_stays(lock: Path) -> None:
    ledger = Ledger(lock, PLAN, allowed=1)
    ledger.conclude(ledger.spend("one"), Outcome.EXCLUDED, "wrong model", None)
    assert ledger.spend("two") == 2
    kept = json.loads((ledger.folder / "0001.outcome.json").read_text())
    assert (kept["outcome"], kept["reason"]) == ("excluded", "wrong model")
    with pytest.raises(RunError, match="spent on two"):
        ledger.spend("three")


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.INTERRUPTED, Outcome.COMPLETED])
def test_every_other_end_counts(lock: Path, outcome: Outcome) -> None:
    ledger = Ledger(lock, PLAN, allowed=1)
    ledger.conclude(ledger.spend("one"), outcome, None, None)
    with pytest.raises(RunError, match="spent on one"):
        ledger.spend("two")


def test_a_ledger_belongs_to_one_plan(lock: Path) -> None:
    Ledger(lock, PLAN, allowed=None).spend("one")
    with pytest.raises(RunError, match="is the ledger of plan aaaaaaaaaaaa, this lock holds bbbbbbbbbbbb"):
        Ledger(lock, OTHER, allowed=None).spend("two")


@pytest.mark.tamper
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_an_attempt_cannot_be_taken_back(lock: Path, damage: Callable[[Path], object]) -> None:
    ledger = Ledger(lock, PLAN, allowed=5)
    ledger.spend("one")
    ledger.spend("two")
    damage(ledger.folder / "0001.json")
    with pytest.raises(RunError, match="attempt 1 is missing or unreadable"):
        ledger.spend("three")


def test_a_run_spends_one_before_contact_and_says_how_it_ended(
    small: Plan, request_for: Requests, progress: QuietProgress, lock: Path
) -> None:
    ledger = Ledger(lock, plan_sha256(small), allowed=1)
    result = run_plan(request_for(small, ledger=ledger), progress)
    assert json.loads((ledger.folder / "0001.outcome.json").read_text())["seal_sha256"] == result.seal_sha256
    refused = request_for(small, out="again", ledger=ledger)
    with pytest.raises(RunError, match="allows 1 attempt"):
        run_plan(refused, progress)
    assert not refused.out.exists()


def test_a_setup_failure_is_excluded_and_the_next_attempt_has_its_number(
    small: Plan, request_for: Requests, progress: QuietProgress, lock: Path
) -> None:
    class Broken(SimEngine):
        def start(self) -> EngineStarted:
            raise EngineError("no device")

    ledger = Ledger(lock, plan_sha256(small), allowed=1)
    failed = request_for(small, make_engine=Broken, ledger=ledger)
    with pytest.raises(RunError, match="no device"):
        run_plan(failed, progress)
    ended = [line.rec for line in Archive.open(failed.out).attempts() if isinstance(line.rec, AttemptEnded)]
    assert [rec.outcome for rec in ended] == [Outcome.EXCLUDED]
    result = run_plan(request_for(small, out="second", ledger=ledger), progress)
    started = [line.rec for line in Archive.open(result.archive).attempts() if isinstance(line.rec, AttemptStarted)]
    assert [rec.attempt for rec in started] == [2]


def test_a_failure_after_the_first_request_is_spent(
    small: Plan, request_for: Requests, progress: QuietProgress, lock: Path
) -> None:
    class Dies(SimEngine):
        def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
            raise EngineError("gone")

    ledger = Ledger(lock, plan_sha256(small), allowed=1)
    with pytest.raises(RunError, match="gone"):
        run_plan(request_for(small, make_engine=Dies, ledger=ledger), progress)
    with pytest.raises(RunError, match="allows 1 attempt"):
        run_plan(request_for(small, out="again", ledger=ledger), progress)


def test_two_runs_at_one_moment_do_not_spend_more_than_is_allowed(
    small: Plan, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run begins when this one has counted what was spent."""
    mine, other = (Ledger(lock, plan_sha256(small), allowed=1) for _ in range(2))
    count, begun = mine._spent, list[int]()

    def counted() -> list[Spent]:
        spent = count()
        begun.append(other.spend("other"))
        return spent

    monkeypatch.setattr(mine, "_spent", counted)
    with pytest.raises(RunError, match="another run began an attempt at this moment"):
        mine.spend("mine")
    assert begun == [1]
    assert [path.name for path in mine.folder.iterdir()] == ["0001.json"]
