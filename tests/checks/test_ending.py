"""An engine that was to be killed was killed, by the client, when all was over; any other end is another finding."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import load

from . import builder as b
from . import scenarios as s

CHECK = "coverage"
HOUR_NS = 3600 * 10**9


@pytest.fixture
def killed(tmp_path: Path) -> b.Run:
    """Three engines after each other, the first of which was killed."""
    plan = s.relay()
    control, first, *later = plan.arms
    arms = [control, first.model_copy(update={"ended": "killed"}), *later]
    run = s.recorded(plan.model_copy(update={"arms": arms}), tmp_path, type("Kept", (s.Outliving,), {}))
    for (name, _), records in run.streams.items():
        records.insert(0, b.Mark(advance_ns=HOUR_NS * (1 + [arm.name for arm in arms].index(name))))
    return run


def of(run: b.Run, kind: type[r.Record], arm: str = "candidate") -> list[tuple[list[r.Record], r.Record]]:
    streams = [records for (name, _), records in run.streams.items() if name == arm]
    return [(records, record) for records in streams for record in records if isinstance(record, kind)]


def kill(run: b.Run) -> r.EngineKilled:
    ((_, record),) = of(run, r.EngineKilled)
    assert isinstance(record, r.EngineKilled)
    return record


def test_a_planned_kill_is_the_end_and_all_is_whole(killed: b.Run, tmp_path: Path) -> None:
    assert of(killed, r.EngineStopped) == []
    assert kill(killed).process.startswith("simulated-")
    judgement = killed.judge(tmp_path / "a")
    assert b.codes(judgement, CHECK) == []
    assert judgement.verdict is Verdict.PASS


def test_the_shipped_plan_passes_on_the_simulated_engine(tmp_path: Path) -> None:
    plan = load("boundary-killed")
    arms = [arm if arm.connector == "none" else arm.model_copy(update={"connector": "native"}) for arm in plan.arms]
    judgement = judge(s.sealed(plan.model_copy(update={"arms": arms}), tmp_path, type("Kept", (s.Outliving,), {})))
    assert b.codes(judgement, CHECK) == []
    assert b.failing(judgement) == set()
    assert [row.boundary for row in judgement.table if row.arm == "candidate-2"] == [1792] * 2 + [3584] * 6 + [5376]


def test_without_its_record_the_end_is_unknown(killed: b.Run, tmp_path: Path) -> None:
    b.drop(killed.client(), r.EngineKilled)
    finding = b.only(killed.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.arm) == ("missing_kill", Verdict.UNKNOWN, "candidate")


def test_an_engine_that_stopped_instead_was_not_killed(killed: b.Run, tmp_path: Path) -> None:
    killed.scheduler().append(r.EngineStopped())
    finding = b.only(killed.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict) == ("not_killed", Verdict.FAIL)


def test_a_kill_that_nobody_planned_fails(killed: b.Run, tmp_path: Path) -> None:
    arms = [arm.model_copy(update={"ended": "stopped"}) for arm in killed.plan.arms]
    killed.plan = killed.plan.model_copy(update={"arms": arms})
    codes = b.codes(killed.judge(tmp_path / "a"), CHECK)
    assert sorted(codes) == ["missing_engine_stop", "unplanned_kill"]


def test_another_process_is_not_the_engine(killed: b.Run, tmp_path: Path) -> None:
    b.edit(killed.client(), r.EngineKilled, {"process": "simulated-0"})
    assert b.codes(killed.judge(tmp_path / "a"), CHECK) == ["wrong_process"]


def test_it_is_killed_once(killed: b.Run, tmp_path: Path) -> None:
    killed.client().append(kill(killed))
    assert b.codes(killed.judge(tmp_path / "a"), CHECK) == ["many_kills"]


def test_the_engine_itself_cannot_say_that_it_was_killed(killed: b.Run, tmp_path: Path) -> None:
    said = kill(killed)
    b.drop(killed.client(), r.EngineKilled)
    killed.scheduler().append(said)
    assert b.codes(killed.judge(tmp_path / "a"), CHECK) == ["kill_misplaced"]


def test_a_kill_comes_after_the_last_operation(killed: b.Run, tmp_path: Path) -> None:
    said, client = kill(killed), killed.client()
    client.remove(said)
    first = next(index for index, record in enumerate(client) if isinstance(record, r.OperationStarted))
    client.insert(first, said)
    assert "killed_early" in b.codes(killed.judge(tmp_path / "a"), CHECK)


def test_the_next_engine_starts_after_the_kill(killed: b.Run, tmp_path: Path) -> None:
    """As if the second had been there already, with what it has in its own memory."""
    for (name, _), records in killed.streams.items():
        if name == "candidate-2":
            records[0] = b.Mark(advance_ns=0)
    finding = b.only(killed.judge(tmp_path / "a"), CHECK)
    assert (finding.code, finding.verdict, finding.place.arm) == ("kill_too_late", Verdict.FAIL, "candidate-2")


def test_an_engine_that_died_by_itself_stays_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closed its streams, whatever the client says."""
    close = StreamWriter.close

    def cut(writer: StreamWriter) -> None:
        if writer.path.parts[-2:] == ("candidate", "scheduler.jsonl"):
            writer.flush()
        else:
            close(writer)

    monkeypatch.setattr(StreamWriter, "close", cut)
    plan = s.relay()
    arms = [arm.model_copy(update={"ended": "killed" if arm.name == "candidate" else "stopped"}) for arm in plan.arms]
    archive = s.sealed(plan.model_copy(update={"arms": arms}), tmp_path, type("Kept", (s.Outliving,), {}))
    judgement = judge(Archive.open(archive.root))
    finding = b.only(judgement, "integrity")
    assert judgement.verdict is Verdict.UNKNOWN
    assert "no stream_closed at the end" in finding.message


def test_the_record_names_a_process_and_how_many_died() -> None:
    with pytest.raises(msgspec.ValidationError, match="processes"):
        msgspec.json.decode(b'{"kind":"engine_killed","process":"1@2","processes":0}', type=r.EngineKilled)
