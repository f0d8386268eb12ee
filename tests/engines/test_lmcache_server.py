"""The server's process, on a stand-in of LMCache and, marked `vllm`, on its releases."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import released
from samestate.engines import lmcache_server
from samestate.engines.lmcache_server import LMCacheServer, require_known, split
from samestate.engines.services import ServiceError, ServiceSpec
from samestate.engines.shared_memory import SHARED_MEMORY
from samestate.evidence.records import Scalar

Make = Callable[..., LMCacheServer]


def running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(done: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


@pytest.fixture
def make(lmcache_package: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[LMCacheServer] = []

    def server(packages: Path = lmcache_package, **options: Scalar) -> LMCacheServer:
        data = tmp_path / f"data-{len(made)}"
        data.mkdir()
        spec = ServiceSpec("candidate", "lmcache", packages, options, 1 << 28, data, tmp_path / "service.log")
        made.append(LMCacheServer(spec))
        return made[-1]

    yield server
    for one in made:
        one.stop()


def log(tmp_path: Path) -> str:
    return (tmp_path / "service.log").read_text()


def test_options_are_split_by_the_side_they_are_for() -> None:
    connector, server = split({"lmcache.mp.mq_timeout": 5, "separate-object-groups": True, "l1_size_gb": 0.2})
    assert connector == {"lmcache.mp.mq_timeout": 5}
    assert server == {"separate_object_groups": True, "l1_size_gb": 0.2}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"chunk_siz": 5}, "option chunk_siz: LMCache's server has none; did you mean 'chunk_size'?"),
        ({"no_such": 5}, "the server's are those of `lmcache server --help`"),
        ({"separate_object_groups": "yes"}, "option separate_object_groups: takes on or off, not yes"),
        ({"chunk_size": True}, "option chunk_size: takes a value, not True"),
        ({"http-port": 4}, "option http_port: addresses are found at each start; remove it"),
        ({"lmcache.mp.mq_timout": 3}, "option lmcache.mp.mq_timout: LMCache's connector has none"),
    ],
)
def test_an_unknown_option_is_one_line(lmcache_package: Path, option: dict[str, Scalar], words: str) -> None:
    with pytest.raises(ServiceError) as refused:
        require_known(option, lmcache_package)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["host", "port", "server_urls", "autostart", "autostart.server_args"])
def test_the_engine_cannot_be_sent_to_another_server(lmcache_package: Path, name: str) -> None:
    with pytest.raises(ServiceError, match="the engine is told of the server that is started; remove it"):
        require_known({f"lmcache.mp.{name}": "elsewhere"}, lmcache_package)


def test_known_options_are_none_of_its_business(lmcache_package: Path) -> None:
    options: dict[str, Scalar] = {"chunk-size": 5, "no_separate_object_groups": True, "lmcache.mp.mq_timeout": 3}
    require_known(options, lmcache_package)


def test_a_server_that_cannot_be_asked_is_one_line(lmcache_package: Path) -> None:
    (lmcache_package / "lmcache" / "cli" / "main.py").write_text("raise ImportError('no such thing')")
    with pytest.raises(ServiceError, match=r"cannot be asked for its options: ImportError: no such thing$"):
        require_known({"chunk_size": 5}, lmcache_package)


def test_it_starts_answers_and_stops_and_keeps_its_address_over_a_restart(make: Make, tmp_path: Path) -> None:
    server = make(separate_object_groups=True, l2_adapter='{"base_path":"{data_dir}"}')
    address = server.address
    assert not server.alive()
    started = server.start(1792)
    assert (started.service, started.version, started.continues) == ("lmcache", "0.5.9", False)
    assert started.options == {
        "chunk_size": 1792,
        "l1_size_gb": 0.25,
        "eviction_policy": "LRU",
        "supported_transfer_mode": "lmcache_driven",
        "disable_metrics": True,
        "separate_object_groups": True,
        "l2_adapter": '{"base_path":"{data_dir}"}',
    }
    assert server.alive()
    first = server.pid
    assert server.stop() == 0
    assert not running(first)
    assert (server.alive(), server.stop()) == (False, 0)
    server.start(1792)
    assert server.alive()
    assert (server.address, server.pid != first) == (address, True)
    said = log(tmp_path)
    assert f"--port={address.rpartition(':')[2]}" in said
    assert "'--chunk-size=1792'" in said
    assert str(tmp_path / "data-0") in said


def test_an_option_of_the_arm_wins_and_a_switch_that_is_off_is_said(make: Make, tmp_path: Path) -> None:
    server = make(chunk_size=512, separate_object_groups=False, disable_metrics=False)
    assert server.start(1792).options["chunk_size"] == 512
    assert "'--chunk-size=512'" in log(tmp_path)
    assert "'--no-separate-object-groups'" in log(tmp_path)
    assert "--disable-metrics" not in log(tmp_path)


def test_the_connector_is_told_its_own_options_and_how_groups_are_kept(make: Make) -> None:
    assert make(separate_object_groups=True, **{"lmcache.mp.mq_timeout": 5}).connector_options == {
        "lmcache.mp.mq_timeout": 5,
        "samestate.separate_object_groups": True,
    }
    assert make().connector_options == {"lmcache.mp.mq_timeout": 60, "samestate.separate_object_groups": False}


def test_no_setting_comes_from_the_environment(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "16")
    make().start(1792)
    assert "LMCACHE_CHUNK_SIZE" not in log(tmp_path)
    assert "LMCACHE_TRACK_USAGE" in log(tmp_path)


def test_its_ports_are_given_to_nobody_else(make: Make) -> None:
    server = make()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(server.address.rpartition(":")[2])))


def test_a_server_that_dies_at_start_says_why(make: Make) -> None:
    server = make(chunk_size=7)
    with pytest.raises(ServiceError) as died:
        server.start(1792)
    assert str(died.value) == (
        "arm candidate: LMCache's server ended with exit code 1 before it answered "
        "(ValueError: chunk size 7 is odd); its log is service.log"
    )
    assert "Traceback" in died.value.log_tail


def test_a_server_that_never_answers_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_server, "START_SECONDS", 2.0)
    server = make(hang=True)
    with pytest.raises(ServiceError, match=r"does not answer after 2 s"):
        server.start(1792)
    assert not server.alive()


def test_a_server_that_is_late_is_waited_for(make: Make) -> None:
    server = make(late=1.5)
    assert server.start(1792).service == "lmcache"
    assert server.alive()


def test_a_killed_server_is_seen_and_reaped(make: Make) -> None:
    server = make()
    server.start(1792)
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not server.alive())
    server.stop()
    assert not running(pid)


def test_a_server_that_ignores_sigterm_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_server, "STOP_SECONDS", 0.5)
    server = make(deaf=True)
    server.start(1792)
    pid = server.pid
    server.stop()
    assert not running(pid)


def test_shared_memory_of_the_gone_is_removed_and_that_of_the_living_is_not(make: Make) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    theirs = SHARED_MEMORY / f"torch_{living.pid}_samestate_0"
    try:
        one, other = make(leave=gone.pid), make(leave=living.pid)
        one.start(1792)
        other.start(1792)
        left = [SHARED_MEMORY / f"torch_{pid}_samestate_0" for pid in (one.pid, gone.pid, other.pid)]
        assert all(path.exists() for path in [*left, theirs])
        assert (one.stop(), other.stop()) == (2, 1)
        assert not any(path.exists() for path in left)
        assert theirs.exists()
    finally:
        living.kill()
        living.wait()
        theirs.unlink(missing_ok=True)


def test_it_ends_with_its_driver(lmcache_package: Path, tmp_path: Path) -> None:
    driver = f"""
import os, signal
from pathlib import Path
from samestate.engines.lmcache_server import LMCacheServer, ServiceSpec
data = Path({str(tmp_path)!r})
server = LMCacheServer(ServiceSpec("a", "lmcache", Path({str(lmcache_package)!r}), {{}}, 1 << 28, data, data / "log"))
server.start(16)
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    assert until(lambda: not running(pid))


def test_a_misspelt_option_is_no_abbreviation(lmcache_package: Path) -> None:
    command = [sys.executable, "-m", "samestate.engines.children.lmcache_server", str(os.getpid()), "--chunk=5"]
    environment = os.environ | {"PYTHONPATH": str(lmcache_package)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unrecognized arguments: --chunk=5" in done.stderr


def test_a_release_that_is_not_there_is_one_line(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"^arm candidate: lmcache: is not in "):
        make(tmp_path / "nothing")


@pytest.mark.lmcache
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.5.5", "0.5.6"])
def test_a_real_release_starts_and_takes_its_own_options(make: Make, version: str) -> None:
    packages = released.lmcache(version)
    server = make(packages, separate_object_groups=True, l2_adapter='{"type":"fs_native","base_path":"{data_dir}"}')
    assert server.start(1792).version == version
    assert server.alive()
    assert server.stop() == 0
    with pytest.raises(ServiceError, match="did you mean 'chunk_size'"):
        require_known({"chunk_siz": 5}, packages)
