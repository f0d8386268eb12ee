"""The parts of custody, each by itself: journal, locks, what is read of processes and host, smokes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from custody.house import House
from engines.serving import Played, playing, said
from samestate.custody.base import Admission, CustodyError, Router, Stopped
from samestate.custody.containers import DockerContainer, container_fields
from samestate.custody.haproxy import HAProxy, config_fields
from samestate.custody.journal import Lock, Steps, unfinished_step
from samestate.custody.observe import (
    Watch,
    await_admission,
    await_idle,
    cgroup_kills,
    host_kills,
    idle_seen,
    memory_available,
)
from samestate.custody.processes import PlainProcess, SystemdUnit, limits_of
from samestate.custody.served import Served, served
from samestate.custody.smokes import smoke
from samestate.custody.snapshot import cgroup, snapshot
from samestate.custody.spec import IdentitySpec, ProcessSpec, RouterSpec, SmokeSpec
from samestate.custody.spec_file import load_spec
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_journal import JournalWriter, read_journal
from samestate.evidence.custody_records import JOURNAL, Field, HostSeen, Step, StepBegan

# --- journal ----------------------------------------------------------------------------------------


def test_a_torn_line_is_seen_taken_away_and_written_over(tmp_path: Path) -> None:
    writer = JournalWriter.create(tmp_path)
    steps = Steps(writer)
    steps.enter(Step.SNAPSHOT)
    steps.enter(Step.DRAIN)
    steps.close()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"n":3,"pre')
    torn = read_journal(tmp_path)
    assert torn.torn and len(torn.entries) == 3
    assert unfinished_step(torn.entries) is Step.DRAIN
    again = JournalWriter.reopen(tmp_path)
    again.append(StepBegan(step=Step.VERIFY))
    again.close()
    whole = read_journal(tmp_path)
    assert not whole.torn and [entry.n for entry in whole.entries] == [0, 1, 2, 3]
    assert [defect.what for defect in whole.defects] == ["swap_started must be the first record, and only the first"]
    with pytest.raises(FileExistsError):
        JournalWriter.create(tmp_path)


def test_a_lock_is_one_swap_s_and_remembers_what_has_not_ended(tmp_path: Path) -> None:
    first = Lock(tmp_path / "lock")
    with pytest.raises(CustodyError, match="another swap of this incumbent runs"):
        Lock(tmp_path / "lock")
    first.begin(tmp_path / "records")
    first.close()
    second = Lock(tmp_path / "lock")
    assert second.unfinished == str(tmp_path / "records")
    second.end()
    assert second.unfinished == ""
    second.close()


# --- processes --------------------------------------------------------------------------------------


def process(tmp_path: Path, *argv: str, **more: object) -> PlainProcess:
    spec = {
        "url": "http://127.0.0.1:1",
        "argv": list(argv),
        "cwd": str(tmp_path),
        "environment": {"PATH": os.environ["PATH"], "MARK": "set"},
        "pid_file": str(tmp_path / "pid"),
        "log": str(tmp_path / "log"),
        "stop_seconds": 1.0,
        **more,
    }
    return PlainProcess(ProcessSpec.model_validate(spec))


def test_a_process_starts_as_told_and_ends_with_its_session(tmp_path: Path) -> None:
    kept = process(tmp_path, "sh", "-c", "sleep 100 & sleep 100")
    kept.limits = {**limits_of(os.getpid()), 7: (64, 128)}  # RLIMIT_NOFILE
    kept.start()
    pid = kept.pid
    try:
        assert kept.identity() == (tmp_path / "pid").read_text().strip()
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert sorted(word for word in environment if word)[:1] == [b"MARK=set"] and len(environment) == 3
        assert limits_of(pid)[7] == (64, 128)
        assert os.getsid(pid) == pid
    finally:
        stopped = kept.stop()
    assert (stopped.killed, stopped.left) == (False, [])
    assert not kept.alive()
    assert kept.stop() == Stopped(None, killed=False, left=[])


def test_what_does_not_listen_to_sigterm_is_killed(tmp_path: Path) -> None:
    kept = process(
        tmp_path, sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
    )
    kept.start()
    time.sleep(0.3)
    assert kept.stop().killed


def test_a_process_id_that_came_again_is_nobody_s(tmp_path: Path) -> None:
    kept = process(tmp_path, "true")
    (tmp_path / "pid").write_text(f"{os.getpid()}@1\n")
    assert kept.identity() is None
    with pytest.raises(CustodyError, match="not running"):
        _ = kept.pid


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CustodyError, match="ended at once"):
        process(tmp_path, "/nothing/there").start()


def test_systemd_that_is_not_there_is_said() -> None:
    unit = SystemdUnit(
        ProcessSpec(url="http://127.0.0.1:1", supervisor="systemd", unit="no-such-samestate.service", stop_seconds=5)
    )
    if os.path.isdir("/run/systemd/system"):
        assert unit.identity() is None
    else:
        with pytest.raises(CustodyError, match="systemctl"):
            unit.start()
        assert all(one.value is None for one in unit.fields())
    assert unit.lock.name.endswith(".lock")


PLAYED_ENGINE = """
import os
class Container:
    attrs = {"Id": "c0ffee", "Image": "sha256:745feb91", "RestartCount": 2,
             "State": {"Running": True, "Pid": os.getpid()},
             "Mounts": [{"Source": "/models", "Destination": "/m", "RW": False, "Type": "bind"}]}
    def stop(self, timeout): self.attrs["State"] = {"Running": False, "Pid": 0, "ExitCode": 137}
    def start(self): self.attrs["State"] = {"Running": True, "Pid": os.getpid()}
only = Container()
class containers:
    @staticmethod
    def get(name):
        if name != "incumbent": raise RuntimeError("no such container")
        return only
class from_env:
    containers = containers
"""


def test_a_container_is_told_by_image_id_restarts_and_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a played engine: no real one was there to try."""
    (tmp_path / "docker.py").write_text(PLAYED_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "docker", raising=False)
    named = {one.name: one.value for one in container_fields("incumbent", "router.")}
    assert named["router.container.image"] == "sha256:745feb91"
    assert (named["router.container.id"], named["router.container.restarts"]) == ("c0ffee", "2")
    assert json.loads(named["router.container.mounts"] or "") == [
        {"Source": "/models", "Destination": "/m", "RW": False}
    ]
    assert "no such container" in (container_fields("other")[0].missing or "")
    kept = DockerContainer(ProcessSpec(url="http://127.0.0.1:1", supervisor="docker", container="incumbent"))
    assert kept.pid == os.getpid()
    assert kept.stop().killed and not kept.alive()
    kept.start()
    assert kept.alive()
    monkeypatch.delitem(sys.modules, "docker", raising=False)


# --- snapshot ---------------------------------------------------------------------------------------


def fields(spec: IdentitySpec, url: str = "http://127.0.0.1:9") -> dict[str, Field]:
    """Of a process that says nothing of itself: one that changes its title writes over its environment."""
    with subprocess.Popen(["sleep", "60"]) as kept:
        try:
            while not Path(f"/proc/{kept.pid}/cmdline").read_bytes().startswith(b"sleep"):
                time.sleep(0.01)
            return {one.name: one for one in snapshot(kept.pid, url, spec)}
        finally:
            kept.kill()


def test_a_snapshot_has_what_the_kernel_says_and_no_value_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = fields(IdentitySpec(model=str(tmp_path), sources={"here": str(tmp_path)}, mounts=[str(tmp_path)]))
    for name in ("executable", "argv", "cwd", "user", "limits", "cgroup", "model.revision", "sources.here", "boot_id"):
        assert found[name].value, found[name]
    assert json.loads(found["argv"].value or "")
    assert f"inode {tmp_path.stat().st_ino} " in (found[f"mount.{tmp_path}"].value or "")
    assert found["template"].value == "none"
    assert (found["environment.PATH"].value or "") != os.environ["PATH"]
    assert found["config"].missing and "does not say" in found["config"].missing
    assert "127.0.0.1" not in found["config"].missing, "an address stays out of the records"


def test_what_cannot_be_read_is_missing_with_its_reason(tmp_path: Path) -> None:
    found = fields(IdentitySpec(model=str(tmp_path / "none"), mounts=["/no/such"], sources={"gone": "/no/such"}))
    for name in ("model.files", "mount./no/such", "sources.gone"):
        assert found[name].value is None and found[name].missing


@pytest.mark.parametrize(
    ("words", "model", "template"),
    [
        (["serve", "m"], "m", None),
        (["--model", "n", "--model=m"], "m", None),
        (["serve", "--port", "1"], None, None),
        (["--model", "org/name"], None, None),
        (["--chat_template", "t", "--model-path={}/m"], "m", "t"),
        (["--chat-template", "no such file", "--model"], None, None),
    ],
)
def test_what_a_process_was_told_to_serve(tmp_path: Path, words: list[str], model: str, template: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "n").mkdir()
    (tmp_path / "t").touch()
    given = [word.format(tmp_path) for word in words]
    child = subprocess.Popen([sys.executable, "-c", "input()", *given], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        while not served(child.pid).model and model and child.poll() is None:
            time.sleep(0.01)
        assert served(child.pid) == Served(*(name and f"{tmp_path}/{name}" for name in (model, template)))
    finally:
        child.kill()
        child.communicate()
    assert served(child.pid) == Served(None, None)


def test_a_model_that_the_process_does_not_serve_is_missing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    (tmp_path / "link").symlink_to("one")
    words = [sys.executable, "-c", "input()", "--model", str(tmp_path / "one")]
    child = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        while not served(child.pid).model and child.poll() is None:
            time.sleep(0.01)
        found = {
            name: {
                one.name: one
                for one in snapshot(child.pid, "http://127.0.0.1:9", IdentitySpec(model=str(tmp_path / name)))
            }
            for name in ("link", "two")
        }
    finally:
        child.kill()
        child.communicate()
    assert found["link"]["model.files.config.json"].value == sha256_hex(b"one")
    assert "model.files.config.json" not in found["two"]
    assert found["two"]["model.files"].missing == f"the process serves {tmp_path}/one, not {tmp_path}/two"
    assert found["two"]["model.revision"].missing


def test_a_snapshot_of_a_hub_names_its_revision(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "76348ddb"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert fields(IdentitySpec(model=str(folder)))["model.revision"].value == "76348ddb"


def test_the_effective_configuration_is_read_field_by_field() -> None:
    config = {"vllm_config": {"model_config": {"seed": 0}, "instance_id": "x"}}
    with playing(said(config)) as server:
        found = fields(IdentitySpec(configuration="server_info"), server.url)
    assert (found["config.model_config.seed"].value, found["config.instance_id"].value) == ("0", '"x"')


def test_ports_that_the_kernel_chose_are_counted_and_not_named() -> None:
    """No start has them again; the server's own, wherever it lies, is named."""
    program = """
import socket, threading
kept = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
def hang_up():
    while True:
        kept[0].accept()[0].close()
threading.Thread(target=hang_up, daemon=True).start()
print(kept[0].getsockname()[1], flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes) as child:  # type: ignore[call-overload]
        port = int(child.stdout.readline())
        spec = IdentitySpec(environment=[])
        found = {one.name: one.value for one in snapshot(child.pid, f"http://127.0.0.1:{port}", spec)}
        child.stdin.close()
    assert found["ports"] == f"tcp 0100007F:{port}"
    assert found["ports.ephemeral"] == "2"


def test_memory_cgroups_of_both_versions(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "5").mkdir(parents=True)
    (proc / "5/cgroup").write_text("9:memory:/a\n0::/\n")
    (root / "memory/a").mkdir(parents=True)
    (root / "memory/a/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    first = cgroup(5, proc, root).folder
    assert first is not None
    kills = cgroup_kills(first)
    assert kills is not None and (kills.inode, kills.kills) == (first.stat().st_ino, 3)
    (proc / "5/cgroup").write_text("0::/b\n")
    (root / "b").mkdir()
    second = cgroup(5, proc, root).folder
    assert second == root / "b"
    silent = cgroup_kills(second)
    assert silent is not None and silent.kills is None
    (root / "b/memory.events").write_text("low 0\noom 1\noom_kill 4\n")
    told = cgroup_kills(second)
    assert told is not None and told.kills == 4
    assert cgroup_kills(root / "gone") is None
    (proc / "5/cgroup").write_text("4:cpu:/\n")
    with pytest.raises(LookupError):
        cgroup(5, proc, root)


def test_the_host_s_counters(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 12\n")
    assert (memory_available(tmp_path), host_kills(tmp_path)) == (7 * 1024, 12)
    assert (memory_available(tmp_path / "none"), host_kills(tmp_path / "none")) == (None, None)


def test_the_watch_observes_twice_a_period() -> None:
    seen: list[HostSeen] = []
    watch = Watch(0.2, seen.append)  # type: ignore[arg-type]
    watch.watch(os.getpid())
    watch.start()
    time.sleep(0.75)
    watch.close()
    assert len(seen) >= 5
    assert watch.failure is None


# --- engine and router ------------------------------------------------------------------------------

METRICS = """vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
"""


def test_the_engine_s_counters_are_summed_over_its_engines() -> None:
    with playing(Played(body=METRICS.encode(), content_type="text/plain")) as server:
        seen = idle_seen("after", server.url)
        assert (seen.running, seen.waiting, seen.missing) == (4, 2, None)
        assert not await_idle("after", server.url, 2, 0.01, 0.05, lambda record: None)
    with playing(Played(body=b"nothing\n", content_type="text/plain")) as server:
        assert "no vllm:num_requests_running" in (idle_seen("after", server.url).missing or "")


class PlayedRouter(Router):
    """Says what it is told to, in turn; the last one for ever."""

    def __init__(self, *turns: Admission) -> None:
        self._turns: Iterator[Admission] = iter(turns)
        self._last = turns[-1]

    def fields(self) -> list[Field]:
        return []

    def admission(self) -> Admission:
        return next(self._turns, self._last)

    def drain(self) -> None: ...
    def ready(self) -> None: ...


def test_a_place_is_drained_once_it_is_closed_and_empty() -> None:
    turns = [Admission(True, 2, 0), Admission(False, 1, 0), Admission(False, 0, 0)]
    assert await_admission(PlayedRouter(*turns), 5, admitting=False)
    assert not await_admission(PlayedRouter(*turns[:2]), 0.1, admitting=False)
    assert not await_admission(PlayedRouter(turns[2]), 0.1, admitting=True)


def test_a_router_that_is_not_there_is_said(tmp_path: Path) -> None:
    router = HAProxy(RouterSpec(socket=str(tmp_path / "none"), backend="b", server="s"))
    with pytest.raises(CustodyError, match="gives no answer"):
        router.admission()
    assert config_fields(tmp_path / "none.cfg")[0].missing


def test_haproxy_says_who_it_is_and_takes_two_commands(house: House) -> None:
    router = HAProxy(load_spec(house.spec).router)
    named = {one.name: one.value for one in router.fields()}
    assert named.keys() >= {
        "router.version", "router.process", "router.executable", "router.weight", "router.address",
        "router.config.haproxy.cfg", "router.file.haproxy.cfg",
    }  # fmt: skip
    router.drain()
    assert not router.admission().admitting
    router.ready()
    assert await_admission(router, 5, admitting=True)
    assert {one.name: one.value for one in router.fields()} == named
    house.config.write_text(house.config.read_text())
    assert {one.name: one.value for one in router.fields()} == named


# --- smokes and tickets -----------------------------------------------------------------------------


def answered(content: str) -> Played:
    return said({"data": [{"id": "m"}], "choices": [{"message": {"content": content}}]})


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("played", "words"),
    [
        (answered('{"a": 1}'), None),
        (answered('{"a": "x"}'), "is not of type"),
        (answered("no"), "strict JSON: "),
        (answered(""), "the message is empty"),
        (said({"data": [{"id": "m"}]}), "no message"),
        (Played(status=500, body=b'{"error": {"message": "broken"}}'), "see its log"),
    ],
)
def test_a_smoke_keeps_its_bytes_and_says_what_is_wrong(tmp_path: Path, played: Played, words: str | None) -> None:
    spec = SmokeSpec(name="strict", kind="strict-json", prompt="p", json_schema=SCHEMA)
    with playing(played) as server:
        done = smoke(spec, "before", server.url, tmp_path)
    assert (done.ok, done.error is None) == (words is None, words is None)
    assert words is None or words in (done.error or "")
    if done.response is not None:
        assert (tmp_path / "raw" / done.response).read_bytes() == played.body
    assert "127.0.0.1" not in (done.error or "")
