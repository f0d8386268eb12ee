"""Faults that once were in what a swap does, part by part: whom it ends, what it keeps, what it takes for a value."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from custody.house import House
from custody.test_parts import process
from engines.serving import Played, playing, said
from samestate.custody.base import CustodyError, Stopped
from samestate.custody.haproxy import HAProxy
from samestate.custody.journal import Locks, lock_paths
from samestate.custody.processes import SystemdUnit, running
from samestate.custody.secrets import masked_words
from samestate.custody.smokes import smoke
from samestate.custody.snapshot import Cgroup, gpus, snapshot
from samestate.custody.spec import IdentitySpec, ProcessSpec, RouterSpec, SmokeSpec
from samestate.custody.spec_file import load_spec
from samestate.custody.vllm_router import VllmRouter
from samestate.engines.processes import identity, session_members
from samestate.evidence.custody_journal import JournalWriter, read_journal
from samestate.evidence.custody_records import JOURNAL, Step, StepBegan

pytestmark = pytest.mark.regression


# --- whom it ends -----------------------------------------------------------------------------------


def test_a_session_whose_leader_has_ended_is_ended_too(tmp_path: Path) -> None:
    kept = process(tmp_path, "sh", "-c", "sleep 100 & sleep 0.3")
    kept.start()
    who, members = kept.identity(), session_members(kept.pid)
    deadline = time.monotonic() + 5
    while kept.alive() and time.monotonic() < deadline:
        members |= session_members(int((who or "").partition("@")[0]))
        time.sleep(0.02)
    rest = [pid for pid in members if running(pid)]
    assert rest, "the sleeper outlives its leader"
    assert process(tmp_path, "true").stop() == Stopped(who, killed=False, left=[])
    assert not any(running(pid) for pid in rest)


def test_a_session_that_nobody_knows_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 100 & echo $!"], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        sleeper = int(leader.stdout.readline())
        leader.wait()
        try:
            (tmp_path / "pid").write_text(f"{leader.pid}\n")
            assert process(tmp_path, "true").stop() == Stopped(None, killed=False, left=[])
            assert running(sleeper)
        finally:
            os.kill(sleeper, 9)


def test_a_number_that_came_again_is_not_ended(tmp_path: Path) -> None:
    """The file says no more than a number, as files of init scripts do."""
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as stranger:
        try:
            (tmp_path / "pid").write_text(f"{stranger.pid}\n")
            kept = process(tmp_path, "true")
            assert kept.identity() == identity(stranger.pid)
            other = process(tmp_path, "true")
            other.knows(f"{stranger.pid}@1")
            assert other.identity() is None
            assert other.stop() == Stopped(None, killed=False, left=[])
            assert running(stranger.pid)
        finally:
            stranger.kill()


# --- what it keeps ----------------------------------------------------------------------------------


def test_an_interrupted_flush_does_not_number_two_lines_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter.create(tmp_path)
    flush = os.fsync

    def interrupted(fd: int) -> None:
        flush(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(StepBegan(step=Step.SNAPSHOT))
    monkeypatch.undo()
    writer.append(StepBegan(step=Step.DRAIN))
    writer.close()
    assert [entry.n for entry in read_journal(tmp_path).entries] == [0, 1]
    assert "chain" not in str(read_journal(tmp_path).defects)


def test_half_a_line_on_a_full_disk_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter.create(tmp_path)
    write, count = os.write, iter(range(9))

    def full(fd: int, data: memoryview) -> int:
        if next(count):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:7])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(StepBegan(step=Step.SNAPSHOT))
    monkeypatch.undo()
    assert (tmp_path / JOURNAL).read_bytes() == b""
    writer.append(StepBegan(step=Step.DRAIN))
    writer.close()
    assert [entry.n for entry in read_journal(tmp_path).entries] == [0]


MASKED = {
    ("--api-key", "k1", "k2", "--port", "1"): ("k1", "k2"),
    ("--hf-token=k1",): ("k1",),
    ("env", "API_KEY=k1", "vllm"): ("k1",),
    ("--kv-transfer-config", '{"auth": {"password": "k1"}}'): ("k1",),
    ("--download", "https://me:k1@models.example/x"): ("k1",),
    ("--api-key", "-k1"): ("k1",),
    ("--env=API_KEY=k1",): ("k1",),
    ("--header", "Authorization: Bearer k1"): ("k1",),
}


@pytest.mark.parametrize("words", MASKED, ids=" ".join)
def test_a_secret_of_a_command_line_is_hashed(words: tuple[str, ...]) -> None:
    shown = masked_words(list(words))
    assert not any(secret in word.split("sha256:")[0] for word in shown for secret in MASKED[words]), shown
    assert json.dumps(shown).count("sha256:") == len(MASKED[words])
    other = masked_words([word.replace("k1", "k3") for word in words])
    assert other != shown, "another secret is seen to be another"


def test_what_is_no_secret_stays_readable() -> None:
    words = ["vllm", "--max-num-batched-tokens", "2048", "--tokenizer", "x", "--ssl-keyfile", "/a", '{"seed": 0}', "-"]
    assert masked_words(words) == words


def test_no_secret_is_in_a_snapshot_and_no_journal_is_for_everybody(tmp_path: Path) -> None:
    config = {"vllm_config": {"model_config": {"hf_token": "hf-4711", "seed": 0, "max_tokens": 5}}}
    spec = IdentitySpec(configuration="server_info", environment=[])
    with (
        playing(said(config)) as server,
        subprocess.Popen([sys.executable, "-c", "input()", "--api-key", "key-4711"], stdin=subprocess.PIPE) as child,
    ):
        while b"4711" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        found = {one.name: one.value or "" for one in snapshot(child.pid, server.url, spec)}
        child.kill()
    assert "4711" not in json.dumps(found)
    assert found["config.model_config.hf_token"].startswith('"sha256:')
    assert (found["config.model_config.seed"], found["config.model_config.max_tokens"]) == ("0", "5")
    JournalWriter.create(tmp_path).close()
    assert stat.S_IMODE((tmp_path / JOURNAL).stat().st_mode) == 0o600


# --- what it takes for a value ----------------------------------------------------------------------

STAT = """# pxname,svname,scur,qcur,status,hrsp_5xx
b,s,0,0,UP,
b,BACKEND,0,0,UP,{failed}
"""


@contextmanager
def played_haproxy(folder: Path, answers: dict[str, str]) -> Iterator[HAProxy]:
    path = folder / "played.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            while True:
                try:
                    talk, _ = server.accept()
                except OSError:
                    return
                with talk:
                    word = talk.recv(4096).decode().strip()
                    if word:
                        talk.sendall(answers.get(word, "\n").encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield HAProxy(RouterSpec(socket=str(path), backend="b", server="s"))
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(("failed", "count"), [("", None), ("3", 3)])
def test_a_router_that_counts_no_failures_is_not_one_without_failures(
    tmp_path: Path, failed: str, count: int | None
) -> None:
    with played_haproxy(tmp_path, {"show stat": STAT.format(failed=failed)}) as router:
        assert router.admission().failed == count


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("go_threads 3\n", None),
        ("vllm_router_active_workers 2\n", 0),
        ('vllm_router_request_errors_total{a="b"} 2\n', 2),
    ],
)
def test_another_program_s_page_counts_no_failures(page: str, count: int | None) -> None:
    workers = {"workers": [{"url": "http://w:1", "is_healthy": True, "load": 0}]}
    with playing(said(workers)) as api, playing(Played(body=page.encode(), content_type="text/plain")) as metrics:
        spec = RouterSpec(kind="vllm-router", url=api.url, metrics_url=metrics.url, pid_file="x")
        assert VllmRouter(spec, "http://w:1").admission().failed == count


@pytest.mark.parametrize("number", [1, os.getpid()], ids=["init", "ours"])
def test_a_number_of_another_pid_namespace_is_not_taken_for_the_router(tmp_path: Path, number: int) -> None:
    """``1`` is somebody here too, and no HAProxy."""
    with played_haproxy(tmp_path, {"show info": f"Name: HAProxy\nPid: {number}\n"}) as router:
        found = {one.name: one for one in router.fields()}
    assert found["router.process"].value is None and found["router.process"].missing
    for name in ("router.version", "router.weight", "router.address"):
        assert found[name].value is None, "what was not said is missing"


def test_devices_that_cannot_be_listed_are_missing_and_none_is_said_where_none_are(tmp_path: Path) -> None:
    proc, devices = tmp_path / "proc", tmp_path / "dev"
    devices.mkdir()
    assert gpus(proc, devices) == "none"
    (devices / "nvidia0").touch()
    with pytest.raises(LookupError, match="nvidia0 is there"):
        gpus(proc, devices)
    (proc / "driver/nvidia/gpus/0000:01").mkdir(parents=True)
    with pytest.raises(OSError, match="information"):
        gpus(proc, devices)
    (proc / "driver/nvidia/gpus/0000:01/information").write_text("Model: X\nGPU UUID: GPU-1\n")
    assert gpus(proc, devices) == "GPU-1"


def test_a_cgroup_that_is_not_mounted_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestate.custody.snapshot.cgroup", lambda pid: Cgroup("/a", None))
    found = {one.name: one for one in snapshot(os.getpid(), "http://127.0.0.1:1", IdentitySpec(environment=[]))}
    assert found["cgroup"].value is None and "not mounted" in (found["cgroup"].missing or "")


def test_ports_that_nobody_saw_are_missing() -> None:
    found = {one.name: one for one in snapshot(os.getpid(), "http://127.0.0.1:1", IdentitySpec(environment=[]))}
    assert found["ports"].value is None and found["ports.ephemeral"].value is None


def test_a_property_that_systemd_does_not_know_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systemctl").write_text(
        '#!/bin/sh\ncase "$*" in *DropInPaths) echo DropInPaths=;; *FragmentPath) echo FragmentPath=;; '
        "*NRestarts) echo NRestarts=2;; esac\n"
    )
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    unit = SystemdUnit(ProcessSpec(url="http://127.0.0.1:1", supervisor="systemd", unit="x.service"))
    found = {one.name: one.value for one in unit.fields()}
    assert (found["unit.DropInPaths"], found["unit.NRestarts"]) == ("", "2")
    assert found["unit.FragmentPath"] is None and found["unit.User"] is None


# --- smokes, specs, locks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "schema", "words"),
    [
        (["a", "list"], {"type": "object"}, "no text"),
        ("{}", {"$ref": "#/nowhere"}, "cannot be applied"),
        ("{}", {"$ref": "#"}, "cannot be applied"),
    ],
)
def test_an_answer_that_cannot_be_held_against_its_schema_is_a_failed_smoke(
    tmp_path: Path, content: object, schema: dict[str, object], words: str
) -> None:
    spec = SmokeSpec(name="s", kind="strict-json", prompt="p", json_schema=schema)
    answer = said({"data": [{"id": "m"}], "choices": [{"message": {"content": content}}]})
    with playing(answer) as server:
        done = smoke(spec, "before", server.url, tmp_path)
    assert not done.ok and words in (done.error or ""), done.error


WRONG = {
    "observed all the time": ("period_seconds = 2.0", "period_seconds = 1e-9", "observe.period_seconds"),
    "observed once a day": ("period_seconds = 2.0", "period_seconds = 86400", "observe.period_seconds"),
    "records within the model": ('records = "records"', 'records = "model/records"', "records: lies within"),
    "everything ignored": ("[router]\nsocket", 'ignore = ["*"]\n\n[router]\nsocket', "leaves nothing to compare"),
    "log within a package": ('"incumbent.log"', '"package/incumbent.log"', "incumbent.log: lies within"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_spec_that_would_spoil_its_own_evidence_is_refused(tmp_path: Path, name: str) -> None:
    house = House(tmp_path)
    old, new, words = WRONG[name]
    house.change(old, new)
    with pytest.raises(CustodyError, match=words):
        load_spec(house.spec)


def test_a_candidate_in_the_incumbent_s_place_under_another_name_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.change(f'url = "http://127.0.0.1:{house.candidate}"', f'url = "http://localhost:{house.port}"')
    with pytest.raises(CustodyError, match="place under another name"):
        load_spec(house.spec)


def test_a_copied_pid_file_makes_no_second_incumbent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTATE_CACHE", str(tmp_path / "cache"))
    house = House(tmp_path)
    spec = load_spec(house.spec)
    house.change('pid_file = "incumbent.pid"', 'pid_file = "copy.pid"')
    other = load_spec(house.spec)
    first = Locks(lock_paths(spec, tmp_path / "incumbent.pid.lock"))
    with pytest.raises(CustodyError, match="another swap of this incumbent runs"):
        Locks(lock_paths(other, tmp_path / "copy.pid.lock"))
    first.close()
    Locks(lock_paths(other, tmp_path / "copy.pid.lock")).close()


def test_a_mark_of_records_without_a_journal_holds_nobody(tmp_path: Path) -> None:
    locks = Locks([tmp_path / "a.lock", tmp_path / "b.lock"])
    (tmp_path / "records").mkdir()
    locks.begin(tmp_path / "records")
    assert locks.unfinished == "", "the tool died before it had touched anything"
    (tmp_path / "records" / JOURNAL).touch()
    assert locks.unfinished == str(tmp_path / "records")
    locks.end(tmp_path / "other")
    assert locks.unfinished, "only its own mark"
    locks.end(tmp_path / "records")
    assert locks.unfinished == ""
    locks.close()
