"""`samestate probe` with servers that other people use, and with servers that are none: budgets, salts, obstacles."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from engines.answering import MODEL, Answering, Conduct, answering
from engines.serving import Played, free_port, playing, said
from samestate.engines import black_box as box_module
from samestate.lab import black_box as lab_module

Command = Callable[..., Result]
SHORT = ("--lengths", "C+1,2C,3C+7")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(box_module, "IDLE_POLL_SECONDS", 0.01)


def probed(samestate: Command, conduct: Conduct, *arguments: object) -> tuple[Result, dict[str, Any], Answering]:
    with answering(conduct) as server:
        result = samestate("probe", server.url, "--json", *arguments)
    return result, json.loads(result.stdout), server


def verdicts(tree: dict[str, Any]) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in tree["results"]}


def flat(prompt: Any) -> bool:
    """Of one prompt, not of two."""
    return isinstance(prompt[0], int)


def test_every_prompt_has_a_beginning_and_a_salt_of_its_own(samestate: Command) -> None:
    _, _, first = probed(samestate, Conduct(), *SHORT)
    _, _, second = probed(samestate, Conduct(), *SHORT)
    assert first.most_open == second.most_open == 1
    starts: dict[tuple[int, ...], set[str]] = {}
    for server in (first, second):
        for body in server.asked:
            prompts = [body["prompt"]] if isinstance(body["prompt"][0], int) else body["prompt"]
            for prompt in prompts:
                starts.setdefault(tuple(prompt[:8]), set()).add(body["cache_salt"])
    salts = [body["cache_salt"] for body in first.asked]
    assert len({salt for salt in salts if len(salt) >= 32}) == len(set(salts)) > 10
    assert not {body["cache_salt"] for body in first.asked} & {body["cache_salt"] for body in second.asked}
    mine = {tuple(body["prompt"][:8]) for body in first.asked if isinstance(body["prompt"][0], int)}
    others = {tuple(body["prompt"][:8]) for body in second.asked if isinstance(body["prompt"][0], int)}
    assert not mine & others


@pytest.mark.parametrize(("option", "budget"), [("requests", 25), ("requests", 40), ("tokens", 1500), ("tokens", 3000)])
def test_a_budget_is_never_exceeded(samestate: Command, option: str, budget: int) -> None:
    result, tree, server = probed(samestate, Conduct(), f"--budget-{option}", budget)
    prompts = [one for body in server.asked for one in ([body["prompt"]] if flat(body["prompt"]) else body["prompt"])]
    tokens = sum(map(len, prompts)) + sum(
        body["max_tokens"] * (1 if flat(body["prompt"]) else 2) for body in server.asked
    )
    spent = {"requests": len(server.asked), "tokens": tokens}
    assert spent[option] <= budget and tree["probe"]["spent"] == spent
    assert tree["probe"]["left_out"] and result.exit_code in (0, 3)


def test_a_budget_for_nothing_is_refused_before_the_first_request(samestate: Command) -> None:
    with answering() as server:
        result = samestate("probe", server.url, "--budget-tokens", "10")
    assert result.exit_code == 2 and "--budget-tokens" in result.stderr and not server.asked


def test_a_dry_run_sends_nothing(samestate: Command) -> None:
    with answering() as server:
        result = samestate("probe", server.url, "--dry-run")
        told = json.loads(samestate("probe", server.url, "--dry-run", "--json").stdout)
    assert result.exit_code == 0 and not server.asked
    assert "lengths: C = 16" in result.stdout and "nothing was sent" in result.stdout
    assert told["requests"] <= 250 and "/reset_prefix_cache" not in {path for path in server.paths if "?" in path}


def test_a_dry_run_foresees_no_less_than_is_spent(samestate: Command) -> None:
    with answering() as server:
        told = json.loads(samestate("probe", server.url, "--dry-run", "--json", *SHORT).stdout)
    _, tree, _ = probed(samestate, Conduct(), *SHORT)
    search = 8  # hello, and the search for C that is told
    assert tree["probe"]["spent"]["requests"] <= told["requests"] + search


@pytest.mark.parametrize("arguments", [(), ("--allow-evict", "--budget-tokens", "9000")])
def test_no_cache_is_reset_unless_that_is_allowed(samestate: Command, arguments: Sequence[str]) -> None:
    _, _, server = probed(samestate, Conduct(), *SHORT, *arguments)
    assert not [path for path in server.paths if path.startswith("/reset_prefix_cache?")]


def test_a_reset_is_made_once(samestate: Command) -> None:
    _, tree, server = probed(samestate, Conduct(outside=True), *SHORT, "--allow-reset")
    resets = [path for path in server.paths if path.startswith("/reset_prefix_cache?")]
    assert len(resets) == 1 and "reset_external=false" in resets[0]
    assert verdicts(tree)["probe-reload"] == "pass"
    assert {row["path"] for row in tree["table"] if ".reload" in row["op"]} == {"external"}


def test_eviction_by_own_prompts_reaches_what_lies_outside(samestate: Command) -> None:
    result, tree, _ = probed(samestate, Conduct(outside=True, capacity=40), *SHORT, "--allow-evict")
    assert result.exit_code == 0 and verdicts(tree)["probe-reload"] == "pass"


def test_it_waits_while_others_are_served(samestate: Command) -> None:
    _, tree, server = probed(samestate, Conduct(busy=5), *SHORT)
    assert tree["verdict"] == "pass" and server.readings > 5


# --- obstacles ------------------------------------------------------------------------------------

MODELS = said({"data": [{"id": MODEL}]})
TOKENS = said({"tokens": [1, 2, 3]})


def obstructed(samestate: Command, usual: Played, *arguments: object, **others: Played) -> tuple[Result, float]:
    paths = {"/v1/models": MODELS, **{f"/{name.replace('_', '/')}": played for name, played in others.items()}}
    began = time.monotonic()
    with playing(usual, paths) as server:
        result = samestate("probe", server.url, *arguments)
    return result, time.monotonic() - began


HTML = Played(body=b"<html>sorry</html>", content_type="text/html")
CUT = Played(body=b'{"choices": [', announced=400)
OBSTACLES: dict[str, tuple[Played, Sequence[str], str]] = {
    "401": (Played(status=401, body=b'{"error": "no"}'), (), "--api-key-env"),
    "429": (Played(status=429, body=b'{"error": "slow down"}'), (), "it is busy"),
    "500": (Played(status=500, body=b"{}"), (), "see its log"),
    "html": (HTML, (), "is it an OpenAI API server?"),
    "cut": (CUT, (), "was cut"),
    "cut stream": (
        Played(content_type="text/event-stream", chunks=(b'data: {"choices": []}\n\n',)),
        ("--stream",),
        "the stream was cut",
    ),
    "no choice": (said({"choices": []}), (), "no finish_reason"),
    "no completion": (said({"hello": 1}), (), "is it an OpenAI API server?"),
    "error in a stream": (
        Played(content_type="text/event-stream", chunks=(b'data: {"error": "oom"}\n\n', b"data: [DONE]\n\n")),
        ("--stream",),
        "broke off",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_one_line_with_its_remedy(samestate: Command, name: str) -> None:
    played, arguments, words = OBSTACLES[name]
    result, _ = obstructed(samestate, played, *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("samestate:")]) == 1


@pytest.mark.parametrize("played", [HTML, Played(status=401), Played(status=429)])
def test_obstacles_before_the_first_completion(samestate: Command, played: Played) -> None:
    with playing(played) as server:
        result = samestate("probe", server.url, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["error"]


def test_a_dead_address(samestate: Command) -> None:
    result = samestate("probe", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2 and "nobody answers there" in result.stderr


@pytest.mark.parametrize("where", ["everywhere", "completions"])
def test_a_server_that_hangs_is_left_within_the_time_limit(samestate: Command, where: str) -> None:
    silent = Played(silent=True)
    if where == "completions":
        usual = Played(status=404, body=b"{}")
        result, seconds = obstructed(samestate, usual, "--timeout", "1", v1_completions=silent)
    else:
        began = time.monotonic()
        with playing(silent) as server:
            result = samestate("probe", server.url, "--timeout", "1")
        seconds = time.monotonic() - began
    assert result.exit_code == 2 and "gave no answer in 1 s" in result.stderr and "--timeout" in result.stderr
    assert seconds < 10


def test_metrics_that_hang_are_asked_for_once_a_survey(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "QUESTION_SECONDS", 1.0)
    asked = []

    def slow(self: Answering) -> str:
        asked.append(1)
        time.sleep(1.5)
        return ""

    monkeypatch.setattr(Answering, "exposition", slow)
    _, tree, _ = probed(samestate, Conduct(), *SHORT)
    assert len(asked) == 2 and tree["verdict"] == "pass"


def test_a_model_that_is_not_served(samestate: Command) -> None:
    with answering() as server:
        result = samestate("probe", server.url, "--model", "other")
    assert result.exit_code == 2 and "other is not served there; it serves tiny" in result.stderr


def test_a_key_is_read_from_the_environment_and_never_shown(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROBE_KEY", "s3cr3t-key")
    out = tmp_path / "archive"
    with answering(Conduct(key="s3cr3t-key")) as server:
        without = samestate("probe", server.url)
        result = samestate("probe", server.url, "--api-key-env", "PROBE_KEY", "--out", out, *SHORT)
    assert without.exit_code == 2 and "--api-key-env VAR" in without.stderr
    assert result.exit_code == 0, result.stderr
    held = [path for path in out.rglob("*") if path.is_file() and b"s3cr3t-key" in path.read_bytes()]
    assert not held and "s3cr3t-key" not in result.stdout


REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "a length that is none": (("--lengths", "2C,x"), "--lengths: "),
    "a length too long": (("--lengths", "999999999"), "--lengths: "),
    "an empty length": (("--lengths", ""), "--lengths: "),
    "a key that is not there": (("--api-key-env", "NOT_SET_ANYWHERE"), "--api-key-env: "),
    "both means": (("--allow-reset", "--allow-evict"), "--allow-evict: "),
    "no budget": (("--budget-requests", "0"), "--budget-requests"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(samestate: Command, name: str) -> None:
    arguments, words = REFUSED[name]
    with answering() as server:
        result = samestate("probe", server.url, *arguments)
    assert result.exit_code == 2 and words in result.stderr and not server.asked


def test_a_reset_that_the_server_does_not_have_is_refused_first(samestate: Command) -> None:
    with answering(Conduct(dev=False)) as server:
        result = samestate("probe", server.url, "--allow-reset")
    assert result.exit_code == 2 and "VLLM_SERVER_DEV_MODE=1" in result.stderr and not server.asked


def test_a_server_without_completions_is_told_what_is_needed(samestate: Command) -> None:
    result, _ = obstructed(samestate, Played(status=404, body=b"{}"))
    assert result.exit_code == 2 and "the probe needs /v1/completions" in result.stderr
