"""Faults that once were in what a swap does, in a house: whom it ended, where it stayed, what it refused too late."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from custody.dying import swap_and_die
from custody.house import STUB, House, serving
from samestate.checks.base import Verdict
from samestate.cli.commands import samestate
from samestate.custody.base import CustodyError
from samestate.custody.haproxy import HAProxy
from samestate.custody.journal import Lock
from samestate.custody.processes import PlainProcess, running
from samestate.custody.spec_file import load_spec
from samestate.engines.processes import identity
from samestate.evidence.custody_journal import JournalWriter, read_journal
from samestate.evidence.custody_records import (
    JOURNAL,
    PRIVATE,
    CustodyRecord,
    ProcessStopped,
    Step,
    StepBegan,
    SwapEnded,
)

pytestmark = pytest.mark.regression


def admitting(house: House) -> bool:
    return HAProxy(load_spec(house.spec).router).admission().admitting


def stranger() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"], start_new_session=True)


# --- whom it ended ----------------------------------------------------------------------------------


def resumed_beside(house: House, stranger_pid: int) -> None:
    """The swap is resumed to its incumbent, and the stranger lives on."""
    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    assert running(stranger_pid)
    assert house.healthy() and admitting(house)


def test_a_file_that_names_somebody_else_by_number_is_written_anew(house: House) -> None:
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    with stranger() as other:
        try:
            (house.root / "incumbent.pid").write_text(f"{other.pid}\n")
            resumed_beside(house, other.pid)
        finally:
            other.kill()


def test_a_number_that_came_again_is_not_ended_by_a_resumption(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    with stranger() as other:
        try:
            (house.root / "incumbent.pid").write_text(f"{other.pid}\n")
            monkeypatch.setattr("samestate.custody.back.seen_identity", lambda _, when: f"{other.pid}@1")
            resumed_beside(house, other.pid)
        finally:
            other.kill()


def test_a_process_that_the_swap_never_started_is_not_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale file names somebody who lives: refused at the start, and left alone where it comes later."""
    with stranger() as other:
        try:
            stale = house.root / "candidate.pid"
            stale.write_text(f"{other.pid}\n")
            refused = house.call()
            assert (refused.exit_code, "candidate.process: runs already" in refused.output) == (2, True)
            stale.unlink()

            def failing(self: PlainProcess) -> None:
                stale.write_text(f"{other.pid}\n")
                monkeypatch.undo()
                raise CustodyError("it will not stop")

            monkeypatch.setattr(PlainProcess, "stop", failing)
            done = house.call()
            assert "it will not stop" in done.output
            assert running(other.pid)
            assert house.healthy() and admitting(house)
        finally:
            other.kill()


def test_a_candidate_without_its_leader_does_not_stay(house: House) -> None:
    script = house.root / "candidate.sh"
    served = f"{sys.executable} {STUB} {house.candidate} --label traced"
    script.write_text(f"#!/bin/sh\n{served} &\nwhile [ ! -e {house.records}/probe ]; do sleep 0.05; done\nexit 0\n")
    script.chmod(0o755)
    python = f'"{sys.executable}", "{STUB}", "{house.candidate}", "--label", "traced"'
    house.change(f"argv = [{python}]", f'argv = ["{script}"]')
    house.change('"argv", "environment",', '"argv", "executable", "environment",')
    house.call()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{house.candidate}/health", trust_env=False, verify=False)
    records = [one.rec for one in read_journal(house.records).entries]
    stops = [one for one in records if isinstance(one, ProcessStopped) and one.role == "candidate"]
    assert [one.process is None or one.left != [] for one in stops] == [False], stops
    assert house.healthy() and admitting(house)


# --- where it stayed --------------------------------------------------------------------------------


def test_an_incumbent_that_ended_before_its_stop_is_started(house: House) -> None:
    assert swap_and_die(house.spec, "drain", "ended") == -signal.SIGKILL
    os.kill(house.incumbent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while house.incumbent.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    assert house.healthy() and admitting(house)
    assert house.judged().incumbent == "restored"
    assert house.result("custody-restored").verdict is Verdict.PASS


def test_a_machine_that_was_started_again_does_not_hold_the_swap(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    for where in ("back", "swap", "snapshot"):
        monkeypatch.setattr(f"samestate.custody.{where}.boot_id", lambda: "another")
    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    assert house.healthy() and admitting(house)


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), RuntimeError("nobody foresaw it")], ids=lambda one: type(one).__name__
)
def test_whatever_stops_the_way_back_its_remedy_is_said(
    house: House, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("samestate.custody.candidate.run_probe", stop)
    monkeypatch.setattr("samestate.custody.back.await_answer", stop)
    done = house.call()
    assert (done.exit_code, f"`samestate swap {house.records} --resume`" in done.output) == (2, True), done.output
    assert (house.records / "summary.md").is_file()
    monkeypatch.undo()
    os.environ["SAMESTATE_CACHE"] = str(house.root / "cache")
    resumed = CliRunner().invoke(samestate, ["swap", str(house.records), "--resume"])
    assert resumed.exit_code == 3, resumed.output
    assert house.healthy() and admitting(house)


def test_a_full_disk_does_not_keep_the_incumbent_down(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full until the reserve is freed: nothing can be recorded."""
    append, reserved, full = JournalWriter.append, house.records / PRIVATE / "reserve", []

    def appending(self: JournalWriter, record: CustodyRecord) -> None:
        if full and reserved.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, record)

    def probe(*_: object) -> None:
        assert reserved.stat().st_blocks * 512 >= 1 << 20
        full.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JournalWriter, "append", appending)
    monkeypatch.setattr("samestate.custody.candidate.run_probe", probe)
    done = house.call()
    assert done.exit_code == 3, done.output
    assert full and "No space left" in done.output
    assert not reserved.exists()
    assert house.healthy() and admitting(house)


def test_a_tool_that_died_after_the_last_record_leaves_no_dead_end(house: House) -> None:
    assert house.call().exit_code == 0
    held = Lock(house.process().lock)
    held.begin(house.records)  # as where it was killed right after the last record
    held.close()
    resumed = house.call("--resume")
    assert (resumed.exit_code, "nothing to resume" in resumed.output) == (2, True)
    house.change('records = "records"', 'records = "more"')
    (house.root / "more" / PRIVATE).mkdir(parents=True)  # as where it was killed right before the first
    (house.root / "more" / PRIVATE / "spec.json").write_text("{}")
    assert house.call().exit_code == 0


def test_an_incumbent_that_was_never_stopped_is_admitted_again(house: House) -> None:
    assert swap_and_die(house.spec, "drain", "ended") == -signal.SIGKILL
    (house.root / "model/new.json").write_text("{}")
    done = house.call("--resume")
    assert done.exit_code == 1, done.output
    assert admitting(house)
    assert house.judged().incumbent == "untouched"
    assert house.result("custody-restored").verdict is Verdict.FAIL


def test_a_line_that_cannot_be_read_does_not_leave_the_route_closed(house: House) -> None:
    assert swap_and_die(house.spec, "drain", "ended") == -signal.SIGKILL
    path = house.records / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [b"#" + line if b'"step_began","step":"drain"' in line else line for line in lines]
    assert damaged != lines
    path.write_bytes(b"".join(damaged))
    assert not admitting(house)
    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    assert admitting(house)


def test_what_runs_as_another_is_started_again_once_mended(house: House) -> None:
    """It read what was wrong when it started."""
    assert swap_and_die(house.spec, "restore", "began") == -signal.SIGKILL
    path = house.root / "incumbent.env"
    before = path.read_text()
    path.write_text(before + "NOT_ON_THE_LIST=1\n")
    assert house.call("--resume").exit_code == 2
    wrong = house.process().identity()
    path.write_text(before)
    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    assert house.process().identity() != wrong
    assert house.result("custody-restored").verdict is Verdict.PASS
    assert admitting(house)


# --- what it refused too late -----------------------------------------------------------------------


def test_a_spec_that_would_start_another_incumbent_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with serving(tmp_path) as house:
        who, text = house.process().identity(), house.spec.read_text()
        for old, new, words in (
            ('argv = ["./serve.sh"]', 'argv = ["./serve.sh", "--wait", "3"]', "incumbent.argv"),
            ('environment_file = "incumbent.env"', 'environment_file = "less.env"', "incumbent.environment"),
        ):
            (house.root / "less.env").write_text(f"PATH={os.environ['PATH']}\nOMP_NUM_THREADS=2\n")
            house.change(old, new)
            done = house.call()
            assert (done.exit_code, words in done.output) == (2, True), done.output
            assert not (house.records / JOURNAL).exists()
            house.spec.write_text(text)
        assert house.process().identity() == who and admitting(house)


def test_a_folder_that_is_not_the_incumbent_s_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as house:
        house.change('argv = ["./serve.sh"]', f'argv = ["{sys.executable}", "{STUB}", "{house.port}"]')
        house.change('cwd = "."', 'cwd = "mounted"')
        done = house.call()
        assert (done.exit_code, "incumbent.cwd: is not the folder" in done.output) == (2, True), done.output


def test_a_server_with_a_key_is_asked_with_it_and_no_record_has_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--key", "s3cr3t-4711") as house:
        house.change('log = "incumbent.log"\n', 'log = "incumbent.log"\napi_key_env = "API_TOKEN"\n')
        done = house.call()
        assert done.exit_code == 0, done.output
        for path in house.records.rglob("*"):
            assert not path.is_file() or b"s3cr3t-4711" not in path.read_bytes(), path
        argv = next(
            field.value or ""
            for one in read_journal(house.records).entries
            if one.rec.__class__.__name__ == "SnapshotTaken"
            for field in one.rec.fields  # type: ignore[union-attr]
            if field.name == "argv"
        )
        assert "sha256:" in json.dumps(argv)


def test_the_records_say_where_to_go_on_without_the_spec(house: House) -> None:
    assert swap_and_die(house.spec, "drain", "began") == -signal.SIGKILL
    house.spec.write_text("no TOML at all [")
    done = CliRunner().invoke(samestate, ["swap", str(house.records), "--resume"])
    assert done.exit_code == 3, done.output
    records = [one.rec for one in read_journal(house.records).entries]
    assert isinstance(records[-1], SwapEnded)
    assert any(isinstance(one, StepBegan) and one.step is Step.READMIT for one in records)
    assert identity(house.incumbent.pid) is not None
