"""What `samestate explain` counts: what was done, and never what was only begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checks import builder as b
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.reports.contents import ArmContents, contents, verdicts_said


def counted(run: b.Run, root: Path) -> dict[str, ArmContents]:
    return {arm.arm: arm for arm in contents(History.read(run.write(root)))}


def last(run: b.Run, kind: type[r.Record]) -> Any:
    """The last record of a kind that the candidate's worker wrote."""
    return [one for one in run.worker() if isinstance(one, kind)][-1]


def test_a_load_and_a_save_count_once_they_are_completed(tmp_path: Path) -> None:
    whole = counted(b.build(), tmp_path / "whole")["candidate"]
    assert whole.saves == whole.saves_submitted > 0 and whole.loads == whole.loads_submitted > 0
    run = b.build()
    for kind in (r.SaveCompleted, r.LoadCompleted):
        run.worker().remove(last(run, kind))
    cut = counted(run, tmp_path / "cut")["candidate"]
    assert (cut.saves, cut.loads) == (whole.saves - 1, whole.loads - 1)
    assert (cut.saves_submitted, cut.loads_submitted) == (whole.saves_submitted, whole.loads_submitted)
    assert f"{cut.saves} of {cut.saves_submitted} saves completed" in cut.said()


def test_a_transfer_that_failed_is_none_that_was_completed(tmp_path: Path) -> None:
    whole = counted(b.build(), tmp_path / "whole")["candidate"]
    run = b.build()
    for kind in (r.SaveCompleted, r.LoadCompleted):
        b.edit(run.worker(), kind, {"ok": False}, job=last(run, kind).job)
    failed = counted(run, tmp_path / "failed")["candidate"]
    assert (failed.saves, failed.loads) == (whole.saves - 1, whole.loads - 1)


def test_a_generation_counts_where_it_put_out_a_token(tmp_path: Path) -> None:
    whole = counted(b.build(), tmp_path / "whole")["control"]
    run = b.build()
    b.edit(run.client("control"), r.OperationOutput, {"token_ids": []}, op="N32.cold")
    empty = counted(run, tmp_path / "empty")["control"]
    assert sum(empty.generations.values()) == sum(whole.generations.values()) - 1
    assert empty.tokens < whole.tokens


def test_every_check_is_named_once_and_what_is_not_asked_for_in_parentheses() -> None:
    some = [
        CheckResult(check=name, verdict=verdict, summary="", unit="records", examined=1)
        for name, verdict in (("a", Verdict.PASS), ("b", Verdict.NOT_EXERCISED), ("c", Verdict.PASS))
    ]
    assert list(verdicts_said(some, ["a"])) == ["pass: a, (c)", "not exercised: (b)"]
