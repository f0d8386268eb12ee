"""``samestate watch``: one reading, a window, and servers that are no use, each in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from engines.serving import Played, playing
from reports.test_watch import AUDITED, FIRST
from samestate.cli import commands

Watch = Callable[..., Result]


def metrics(text: str) -> Played:
    return Played(body=text.encode(), content_type="text/plain; version=0.0.4; charset=utf-8")


def watch(*arguments: str) -> Result:
    return CliRunner().invoke(commands.samestate, ["watch", *arguments])


def test_one_reading_for_people() -> None:
    with playing(metrics(FIRST + AUDITED)) as server:
        done = watch(server.url, "--once")
        assert [(one.method, one.path) for one in server.seen] == [("GET", "/metrics")], "nothing else is asked"
    assert done.exit_code == 0, done.output
    assert "tiny at http://127.0.0.1" in done.output
    assert "C = 1,792; 3 reloads, 0 with a boundary that no state has" in done.output


def test_one_reading_for_a_script_and_a_wrong_boundary_is_exit_code_1() -> None:
    wrong = 'vllm:samestate_audit_boundary_faults_total{engine="0"} 1.0\n'
    with playing(metrics(FIRST + AUDITED + wrong)) as server:
        done = watch(server.url, "--once", "--json")
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert facts["audit"]["boundary_faults"] == 1.0
    assert facts["rates"]["external"] == 0.4
    assert facts["alarms"] == ["1 reloads with a boundary that no state has"]


def test_a_window_takes_two_readings() -> None:
    with playing(metrics(FIRST)) as server:
        done = watch(server.url, "--once", "--window", "0.2", "--json")
        assert len(server.seen) == 2
    facts = json.loads(done.stdout)
    assert facts["seconds"] >= 0.2
    assert facts["window"]["prompt_tokens_per_second"] == 0


def test_it_goes_on_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) > 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("samestate.cli.watch.time.sleep", nap)
    with playing(metrics(FIRST)) as server:
        done = watch(server.url, "--json", "--interval", "1.5")
    assert naps == [1.5] * 3
    assert done.exit_code == 2
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("prompt_tokens") for line in lines] == [1000.0, 1000.0, 1000.0, None]
    assert lines[-1] == {"error": "interrupted"}


def test_a_server_that_falls_silent_is_said_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = iter(range(10))

    def nap(_: float) -> None:
        if next(naps) == 0:
            server.close()
        else:
            raise KeyboardInterrupt

    class Closing:
        def __init__(self) -> None:
            self.playing = playing(metrics(FIRST))
            self.url = self.playing.__enter__().url

        def close(self) -> None:
            self.playing.__exit__(None, None, None)

    monkeypatch.setattr("samestate.cli.watch.time.sleep", nap)
    server = Closing()
    done = watch(server.url, "--json")
    first, second, _ = (json.loads(line) for line in done.stdout.splitlines())
    assert first["note"] is None
    assert "nobody answers there" in second["note"]
    assert second["prompt_tokens"] == 1000.0, "the last that was known stays"


@pytest.mark.parametrize(
    ("played", "says"),
    [
        (metrics("process_cpu_seconds_total 3.0\n"), "names no metric of vLLM"),
        (Played(body=b"<html></html>", content_type="text/html"), "answered text/html instead of text/plain"),
        (Played(status=401, body=b"{}"), "name the variable that holds it with --api-key-env VAR"),
        (Played(status=404, body=b"{}"), "answered 404"),
        (Played(status=429, body=b"{}"), "it is busy"),
        (Played(status=500, body=b"{}"), "see its log"),
        (Played(silent=True), "gave no answer in 0.5 s"),
        (Played(body=b"vllm:", announced=500, content_type="text/plain"), "the answer was cut"),
    ],
    ids=["other", "html", "401", "404", "429", "500", "hangs", "cut"],
)
def test_a_server_that_is_no_use_is_one_line_and_exit_code_2(played: Played, says: str) -> None:
    began = time.monotonic()
    with playing(played) as server:
        done = watch(server.url, "--once", "--timeout", "0.5" if played.silent else "30")
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:9", "--once"], "nobody answers there"),
        (["localhost", "--once"], "is no address of a server"),
        (["http://127.0.0.1:9"], "standard output is no terminal; add --once or --json"),
        (["http://127.0.0.1:9", "--window", "2"], "--window: belongs to --once"),
        (["http://127.0.0.1:9", "--once", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env: NO_SUCH_KEY is not set"),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments: list[str], says: str) -> None:
    done = watch(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_key_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret-word")
    with playing(metrics(FIRST)) as server:
        done = watch(server.url, "--once", "--api-key-env", "SERVER_KEY")
        assert server.seen[0].headers["Authorization"] == "Bearer secret-word"
    assert done.exit_code == 0
    assert "secret-word" not in done.output
