"""Faults armed in turn in a running engine: what is found is laid to the fault whose prompt it names.

The simulated engine stands in for vLLM; the same drills run there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.cli import live
from samestate.engines.sim import Conduct, SimEngine
from samestate.faults.catalogue import FAULTS, faults_on
from samestate.lab.zoo import Unseen, nameless_model
from samestate.plans.drills import RANK_DRILLS

TIMED = {"overwritten-before-read"}
"""Needs saves that outlive the request: a simulated engine is idle only when they are done."""


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "ENGINE", "sim")
    monkeypatch.setattr(live, "model_folder", lambda plan, model: nameless_model(tmp_path / "model"))


@pytest.mark.slow
def test_every_live_fault_is_caught_in_turn_and_clean_prompts_between_them_are_clean(tmp_path: Path) -> None:
    chosen = [fault for fault in faults_on("vllm").values() if "sim" in fault.engines and fault.name not in TIMED]
    outcomes, alarms, clean = live.run_live(chosen, tmp_path / "archives", Unseen())
    assert [one.fault.name for one in outcomes] == [fault.name for fault in chosen]
    assert [one.fault.name for one in outcomes if not one.caught] == []
    assert alarms == []
    assert clean == 2 * len(chosen)
    assert (tmp_path / "archives" / "two-ranks").is_dir()
    assert all(one.seconds > 0 for one in outcomes)


def test_a_fault_that_does_nothing_is_not_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SimEngine.conducts, "zero-page", Conduct)
    chosen = [FAULTS["zero-page"], FAULTS["stale-page"]]
    outcomes, alarms, _ = live.run_live(chosen, tmp_path / "archives", Unseen())
    assert [one.caught for one in outcomes] == [False, True]
    assert alarms == []


def test_a_fault_that_is_not_taken_back_is_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stays(SimEngine):
        def arm_fault(self, name: str | None) -> None:
            if name is not None:
                super().arm_fault(name)

    monkeypatch.setattr(live, "engine_maker", lambda name: Stays)
    _, alarms, _ = live.run_live([FAULTS["zero-page"]], tmp_path / "archives", Unseen())
    assert alarms
    assert any("zero-page-clean" in alarm for alarm in alarms)


def test_faults_of_ranks_run_on_two(tmp_path: Path) -> None:
    (outcome,), alarms, _ = live.run_live([FAULTS["silent-rank"]], tmp_path / "archives", Unseen())
    assert "silent-rank" in RANK_DRILLS
    assert (outcome.exercise, outcome.caught, alarms) == ("two-ranks", True, [])
    assert outcome.best is not None and outcome.best.finding.place.rank == 1
