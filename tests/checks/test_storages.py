"""Parameters and buffers: the same in all arms, and at the end as at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from samestate.checks.base import Verdict
from samestate.checks.storages import LIMITATION
from samestate.evidence import records as r

from . import builder as b

CHECK = "storages"
ROWS = [
    r.StorageRow(name="layers.0.conv", role="buffer", shape=[4], dtype="torch.float32", digest="1" * 32),
    r.StorageRow(name="layers.0.weight", role="parameter", shape=[2, 3], dtype="torch.bfloat16", digest="2" * 32),
]
Moment = Literal["start", "end"]


def taken(rank: int, moment: Moment, rows: list[r.StorageRow] = ROWS) -> r.StoragesDigested:
    return r.StoragesDigested(rank=rank, moment=moment, digest="xxh3-128", rows=rows)


def digested(ranks: int = 1) -> b.Run:
    """A run whose ranks digested their parameters at the start and at the end."""
    run = b.build(ranks=ranks)
    for arm in ("control", "candidate"):
        for rank in range(ranks):
            run.scheduler(arm).insert(0, taken(rank, "start"))
            run.scheduler(arm).append(taken(rank, "end"))
    return run


def changed(row: int, **change: Any) -> list[r.StorageRow]:
    return [msgspec.structs.replace(one, **change) if at == row else one for at, one in enumerate(ROWS)]


def spoil(run: b.Run, moments: tuple[Moment, ...], **change: Any) -> b.Run:
    for moment in moments:
        b.edit(run.scheduler(), r.StoragesDigested, change, moment=moment)
    return run


def test_where_nobody_asked_the_question_does_not_come_up(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.NOT_EXERCISED
    assert CHECK not in judgement.required and LIMITATION not in judgement.limitations


@pytest.mark.parametrize("ranks", [1, 2])
def test_silent_where_all_are_the_same(tmp_path: Path, ranks: int) -> None:
    judgement = digested(ranks).judge(tmp_path / "a")
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert b.result(judgement, CHECK).summary == f"2 parameters and buffers on {ranks} ranks in 2 arms"
    assert LIMITATION in judgement.limitations


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (changed(1, digest="3" * 32), "layers.0.weight is bfloat16[2, 3] 222222222222, then"),
        (changed(0, digest="3" * 32), "layers.0.conv is float32[4]"),
        (changed(1, shape=[3, 2]), "layers.0.weight"),
        (changed(1, dtype="torch.float16"), "layers.0.weight"),
        (ROWS[:1], "layers.0.weight is bfloat16[2, 3] 222222222222, then absent"),
    ],
)
def test_a_changed_weight_or_buffer_is_named(tmp_path: Path, rows: list[r.StorageRow], name: str) -> None:
    judgement = spoil(digested(), ("start", "end"), rows=rows).judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, judgement.verdict) == ("storage_differs", Verdict.FAIL)
    assert finding.message.startswith(f"rank 0: arm candidate against control: {name}")


def test_a_weight_that_changes_while_the_engine_runs_is_named(tmp_path: Path) -> None:
    judgement = spoil(digested(), ("end",), rows=changed(1, digest="3" * 32)).judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert finding.message.startswith("arm candidate: rank 0: since its start: layers.0.weight")


@pytest.mark.parametrize(("change", "code"), [({"rows": []}, "no_storages"), ({"digest": "mix128"}, "other_digest")])
def test_what_cannot_be_compared_is_unknown(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    moments: tuple[Moment, ...] = ("start", "end")
    judgement = spoil(digested(), moments, **change).judge(tmp_path / "a")
    assert code in b.codes(judgement, CHECK)
    if code == "other_digest":
        assert judgement.verdict is Verdict.UNKNOWN


def test_a_moment_that_was_not_digested_is_unknown(tmp_path: Path) -> None:
    run = digested(2)
    b.drop(run.scheduler(), r.StoragesDigested, rank=1, moment="end")
    judgement = run.judge(tmp_path / "a")
    finding = b.only(judgement, CHECK)
    assert (finding.code, finding.place.rank, judgement.verdict) == ("missing_storages", 1, Verdict.UNKNOWN)
