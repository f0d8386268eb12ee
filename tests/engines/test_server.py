"""Servers that are started, watched and reaped, with a small program in vLLM's place; and servers that run already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from samestate.engines import server as servers
from samestate.engines.base import EngineError
from samestate.engines.processes import identity
from samestate.engines.server import RunningServer, ServedEngine, ServerSpec

from .serving import ANSWER, Played, free_port, playing, said

CHILD = """
import json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from samestate.engines.children.lifetime import end_session_with

serve, how = json.loads(sys.argv[1]), os.environ["HOW"]
end_session_with(int(sys.argv[2]))
print("told", serve["name"], serve["settings"], flush=True)
if how == "dies":
    sys.exit("no such model")
if how == "silent":
    time.sleep(60)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
HTTPServer((serve["host"], serve["port"]), Handler).serve_forever()
"""
Made = Callable[..., ServedEngine]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A served engine whose child is the program above."""
    (tmp_path / "playing_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(servers, "_MODULE", "playing_child")

    def make(how: str = "serves", start_seconds: float = 30.0) -> ServedEngine:
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        told = {"HOW": how, "PYTHONPATH": path}
        spec = ServerSpec("one", tmp_path, {"seed": 1}, [], tmp_path / "engine.log", None, told, start_seconds)
        return ServedEngine(spec)

    return make


def gone(pid: int) -> bool:
    """Whether a process is over; the dead that nobody has reaped yet have no name any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest-timeout ends what never comes
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_it_is_started_watched_and_reaped_with_all_its_processes(made: Made, tmp_path: Path) -> None:
    server = made()
    waited: list[float] = []
    assert server.process is None
    try:
        server.start(waited.append)
        assert server.alive()
        assert server.url.startswith("http://127.0.0.1:")
        assert server.process == identity(server.pid)
        members = [server.pid, *children(server.pid)]
        assert len(members) == 2
    finally:
        server.close()
    assert waited == sorted(waited)
    wait_until(lambda: all(map(gone, members)))
    assert not server.alive()
    server.close()
    assert "told one {'seed': 1}" in (tmp_path / "engine.log").read_text()


def test_one_that_dies_says_so_with_its_log(made: Made) -> None:
    with pytest.raises(EngineError, match=r"^server one: ended with exit code 1 before it answered; its log") as died:
        made("dies").start()
    assert "no such model" in died.value.log_tail


def test_one_that_never_answers_is_given_up_and_reaped(made: Made) -> None:
    server = made("silent", start_seconds=1.0)
    with pytest.raises(EngineError, match=r"^server one: does not answer after 1 s; its log is engine.log$"):
        server.start()
    with pytest.raises(EngineError, match="is not running"):
        _ = server.pid


def test_two_have_two_ports(made: Made) -> None:
    one, other = made(), made()
    assert one.url != other.url
    one.close()
    other.close()


def test_its_processes_end_when_whoever_started_it_is_killed(made: Made, tmp_path: Path) -> None:
    driver = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from samestate.engines import server as servers
        servers._MODULE = "playing_child"
        folder = Path({str(tmp_path)!r})
        told = {{"HOW": "serves", "PYTHONPATH": {os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])!r}}}
        server = servers.ServedEngine(servers.ServerSpec("one", folder, {{}}, [], folder / "log", None, told))
        server.start()
        print(server.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        members = [pid, *children(pid)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: all(map(gone, members)))


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server_answers_and_leaves_nothing_when_its_driver_is_killed(tmp_path: Path) -> None:
    """vLLM's engine core does not end by itself when its frontend is killed."""
    driver = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from samestate.engines.processes import session_members
        from samestate.engines.server import ServedEngine, ServerSpec
        from samestate.models.catalogue import ensure
        folder = Path({str(tmp_path)!r})
        settings = {{"max_model_len": 1024, "enforce_eager": True, "num_gpu_blocks_override": 16}}
        server = ServedEngine(ServerSpec("one", ensure("qwen3-tiny"), settings, [], folder / "engine.log", folder))
        server.start()
        with server.client(60) as client:
            answer = client.complete(
                "/v1/completions",
                {{"model": server.model, "prompt": "3", "max_tokens": 2, "temperature": 0, "return_token_ids": True,
                  "stream": True}},
            )
        print(len(answer.token_ids), *session_members(server.pid), flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tokens, *members = map(int, process.stdout.readline().split())
        assert tokens == 2
        assert len(members) >= 3, "frontend, engine core, worker"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: all(map(gone, members)))
    assert "engine_started" in (tmp_path / "frontend.jsonl").read_text()


# --- one that runs already -------------------------------------------------------------------------


def test_a_running_server_is_asked_and_left_alone() -> None:
    with playing(said({"data": [{"id": "tiny"}]})) as played:
        server = RunningServer(f"{played.url}/v1", api_key="wolf")
        server.start()
        assert (server.url, server.model, server.process) == (played.url, "tiny", None)
        assert server.alive()
        server.close()
        assert server.alive(), "it is not ours to stop"
        assert {seen.headers.get("Authorization") for seen in played.seen} == {"Bearer wolf"}


def test_nobody_runs_there() -> None:
    server = RunningServer(f"http://127.0.0.1:{free_port()}")
    assert not server.alive()
    with pytest.raises(EngineError, match="nobody answers there"):
        server.start()


@pytest.mark.parametrize("played", [Played(status=401), Played(body=b"<html>", content_type="text/html"), said(ANSWER)])
def test_what_is_no_api_server_is_refused(played: Played) -> None:
    with playing(played) as other, pytest.raises(EngineError):
        RunningServer(other.url).start()
