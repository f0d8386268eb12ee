"""A changed marker archive never passes: under its old seal no change does, under a new one none of a rank's trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence import verify
from samestate.evidence.archive import Archive

from . import marker_run as k
from . import tampering as t

TRACE = [f"arms/{k.ARM}/budget-{rank}.jsonl" for rank in range(2)]
SCHEDULER = f"arms/{k.ARM}/budget-scheduler.jsonl"
EDITS = 40
LINES_OF_THE_STREAM = ("stream_opened", "stream_closed")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return k.build([k.study_b_shape()]).write(tmp_path / "a").root


@pytest.mark.tamper
@pytest.mark.parametrize("seed", range(EDITS))
def test_no_change_under_the_old_seal_passes(archive: Path, seed: int) -> None:
    chance, before = Random(seed), t.read(archive)
    files, said = dict(before), ""
    while files == before:
        said = chance.choice(t.EDITS)(chance, files)
    t.write(archive, before, files)
    assert judge(Archive.open(archive)).verdict is not Verdict.PASS, said
    assert verify.EXIT_CODES.get(verify.judge(str(archive)).verdict, 3) != 0, said


@pytest.mark.tamper
@pytest.mark.parametrize("seed", range(EDITS))
def test_no_change_of_a_ranks_trace_under_a_new_seal_passes(archive: Path, seed: int) -> None:
    chance, before = Random(seed), t.read(archive)
    name = chance.choice(TRACE)
    trace, said = {name: before[name]}, ""
    while _recorded(trace[name]) == _recorded(before[name]):
        trace = {name: before[name]}
        said = t._record(chance, trace)
    t.write(archive, before, t.sealed({**before, **trace}))
    judgement = judge(Archive.open(archive))
    assert judgement.verdict is not Verdict.PASS, said


def _recorded(data: bytes) -> list[str]:
    """The trace's records; not the first and the last line of the file, which are about the file."""
    return [json.dumps(line["rec"]) for line in t.records(data) if line["rec"]["kind"] not in LINES_OF_THE_STREAM]


@pytest.mark.tamper
@pytest.mark.parametrize("line", range(1, 22))
def test_no_line_of_the_scheduler_can_go(archive: Path, line: int) -> None:
    """Every delivery is part of the account: without one the ids do not add up, or the ring's count does not."""
    before = t.read(archive)
    kept = t.records(before[SCHEDULER])
    assert len(kept) == 24
    del kept[line]
    t.write(archive, before, t.sealed({**before, SCHEDULER: t.stream(kept)}))
    assert judge(Archive.open(archive)).verdict is Verdict.UNKNOWN
