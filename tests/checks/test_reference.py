"""A recorded arm is named beforehand, and one that came out unequal stays what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from samestate.checks.base import Verdict
from samestate.cli.commands import samestate
from samestate.evidence import records as r
from samestate.evidence.archive import Archive

from . import builder as b

CHECK = "reference"


@contextmanager
def wall(time: str) -> Iterator[None]:
    """Streams and seals are written at this time."""
    with (
        patch("samestate.evidence.stream.utc_now", lambda: time),
        patch("samestate.evidence.seal.utc_now", lambda: time),
    ):
        yield


def borrowing(root: Path, control: Archive) -> Archive:
    return b.imported(b.build(arms=("candidate",)), control=control).write(root)


def referring(root: Path, reference: Archive) -> Archive:
    return b.imported(b.build(), reference=reference).write(root)


@pytest.fixture
def earlier(tmp_path: Path) -> Archive:
    with wall("2026-01-01T00:00:00.000Z"):
        return b.build().write(tmp_path / "earlier")


def test_where_all_arms_ran_live_it_does_not_come_up(tmp_path: Path) -> None:
    judgement = b.build().judge(tmp_path / "a")
    assert b.result(judgement, CHECK).verdict is Verdict.NOT_EXERCISED
    assert CHECK not in judgement.required


@pytest.mark.parametrize("take", [borrowing, referring])
@pytest.mark.parametrize("then", ["2026-01-01T00:00:00.000Z", "2026-02-01T00:00:00.000Z"])
def test_silent_where_the_recorded_arm_is_older(tmp_path: Path, earlier: Archive, take: object, then: str) -> None:
    with wall(then):
        archive = take(tmp_path / "a", earlier)  # type: ignore[operator]
    judgement = b.judge(archive)
    assert (judgement.verdict, b.codes(judgement, CHECK)) == (Verdict.PASS, [])
    assert CHECK in judgement.required


@pytest.mark.parametrize("take", [borrowing, referring])
def test_one_that_was_sealed_after_the_attempt_began_is_unknown(tmp_path: Path, earlier: Archive, take: object) -> None:
    with wall("2025-12-31T23:59:59.999Z"):
        archive = take(tmp_path / "a", earlier)  # type: ignore[operator]
    judgement = b.judge(archive)
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (Verdict.UNKNOWN, "chosen_later")


@pytest.mark.parametrize(
    "sealed",
    ["", "0", "long ago", "2025-12-31T23:00:00.000-05:00", "2026-01-01T00:00:00Z", "２０２５-12-31T23:00:00.000Z"],
)
def test_a_time_that_does_not_sort_dates_nothing(tmp_path: Path, sealed: str) -> None:
    """Each of them sorts before the attempt's, and one is later."""
    with wall(sealed):
        reference = b.build().write(tmp_path / "reference")
    with wall("2026-01-01T00:00:00.000Z"):
        archive = referring(tmp_path / "a", reference)
    judgement = b.judge(archive)
    assert (judgement.verdict, b.only(judgement, CHECK).code) == (Verdict.UNKNOWN, "not_dated")


def test_an_engine_that_began_before_the_attempt_named_its_reference_fails(tmp_path: Path, earlier: Archive) -> None:
    run = b.imported(b.build(), reference=earlier)
    with patch("checks.builder.count", lambda *_: iter(range(10, 10**6))):
        archive = run.write(tmp_path / "a")
    judgement = b.judge(archive)
    assert {one.code for one in b.result(judgement, CHECK).findings} == {"begun_before"}
    assert judgement.verdict is Verdict.FAIL


def test_an_unequal_reference_stays_a_failed_assertion(tmp_path: Path) -> None:
    """A later run against an equal one passes, and changes nothing of the earlier archive or its exit code."""
    unequal = b.build()
    (output,) = [
        one for one in unequal.client("control") if isinstance(one, r.OperationOutput) and one.op == "N32.cold"
    ]
    b.edit(
        unequal.client("control"),
        r.OperationOutput,
        {"token_ids": [*output.token_ids[:-1], output.token_ids[-1] + 500]},
        op="N32.cold",
    )
    old, new = unequal.write(tmp_path / "old"), b.build().write(tmp_path / "new")
    failed, passed = referring(tmp_path / "failed", old).root, referring(tmp_path / "passed", new).root

    def checked(root: Path) -> tuple[int, str]:
        result = CliRunner().invoke(samestate, ["check", str(root), "--json"])
        return result.exit_code, json.loads(result.stdout)["verdict"]

    assert checked(failed) == (1, "fail")
    (verdict,) = (failed / "verdicts").iterdir()
    kept = verdict.read_bytes()
    assert json.loads(kept)["verdict"] == "fail"
    assert checked(passed) == (0, "pass")
    assert checked(failed) == (1, "fail")
    assert [one.read_bytes() for one in (failed / "verdicts").iterdir()] == [kept]
