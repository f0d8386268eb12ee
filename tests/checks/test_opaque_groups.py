"""Workers that register groups whose spec may hold any kind: the scheduler's word counts, where it is of the same
layers. The shape is that of GLM-5-Next under vLLM 0.33 on one H200.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from samestate.checks.base import Verdict
from samestate.checks.opaque_groups import WRAPPER
from samestate.evidence import records as r

from . import builder as b

TRANSFERS = "transfers"


def wrapped(run: b.Run, **change: object) -> None:
    """The candidate's rank says of no group what it is; further changes are of its recurrent one."""
    (registered,) = [record for record in run.worker() if isinstance(record, r.RankRegistered)]
    groups = [
        replace(group, spec=WRAPPER, entry_kind=r.EntryKind.ATTENTION, **(change if group.group == 1 else {}))
        for group in registered.engine_groups
    ]
    b.edit(run.worker(), r.RankRegistered, {"engine_groups": groups})


def test_the_scheduler_says_which_group_is_state(tmp_path: Path) -> None:
    run = b.build()
    wrapped(run)
    assert run.judge(tmp_path / "a").verdict is Verdict.PASS


def test_state_that_a_load_left_out_is_still_missed(tmp_path: Path) -> None:
    run = b.build()
    wrapped(run)
    for index, record in enumerate(run.worker()):
        if isinstance(record, r.LoadSubmitted):
            run.worker()[index] = replace(record, parts=[part for part in record.parts if part.group == 0])
    judgement = run.judge(tmp_path / "a")
    assert "missing_part" in b.codes(judgement, TRANSFERS)
    assert judgement.verdict is not Verdict.PASS


@pytest.mark.parametrize("silent", [False, True])
def test_nobodys_word_is_not_known(tmp_path: Path, silent: bool) -> None:
    """The scheduler's group has other layers, or the scheduler says nothing: state then counts as pages."""
    run = b.build()
    wrapped(run, **({} if silent else {"layers": ["another"]}))
    if silent:
        run.scheduler()[:] = [one for one in run.scheduler() if not isinstance(one, r.SchedulerConfigured)]
    judgement = run.judge(tmp_path / "a")
    assert judgement.verdict is Verdict.UNKNOWN
    assert "missing_part" in b.codes(judgement, TRANSFERS)
