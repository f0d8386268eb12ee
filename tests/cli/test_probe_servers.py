"""`samestate probe` on servers that are no vLLM: what they say in their own words, and what is nobody's fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from engines.answering import Answering, Conduct, answering
from samestate.engines import black_box as box_module
from samestate.lab import black_box as lab_module

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(box_module, "IDLE_POLL_SECONDS", 0.01)


def llama(**more: Any) -> Conduct:
    return Conduct(llama=True, vllm=False, dev=False, salts=False, interval=1, **more)


def probed(samestate: Command, conduct: Conduct, *arguments: object) -> tuple[Result, dict[str, Any], Answering]:
    with answering(conduct) as server:
        result = samestate("probe", server.url, "--json", *arguments)
    return result, json.loads(result.stdout), server


def check(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in tree["results"] if one["check"] == name)


@pytest.mark.parametrize("metrics", [True, False])
def test_an_honest_llama_cpp_passes(samestate: Command, metrics: bool) -> None:
    result, tree, server = probed(samestate, llama(metrics=metrics))
    assert result.exit_code == 0, tree["results"]
    told = tree["probe"]["server"]
    assert (told["software"], told["version"], told["max_model_len"]) == ("llama.cpp", "b1-test", 4096)
    assert tree["probe"]["interval"] == 1
    rows = {row["op"]: row["credited"] for row in tree["table"]}
    assert rows["N64.repeat"] == 63 and rows["N65.cold-2"] == 0
    assert min(len(one["prompt"]) for one in server.asked if one["max_tokens"] > 1 and len(one["prompt"]) > 2) >= 64


def test_cold_runs_of_llama_cpp_are_asked_for_and_are_the_floor(samestate: Command) -> None:
    _, tree, server = probed(samestate, llama(), "--lengths", "64,65")
    floor = check(tree, "probe-floor")
    assert (floor["verdict"], floor["examined"]) == ("pass", 8)
    whole = [one for one in server.asked if one.get("cache_prompt") is False]
    assert len(whole) == 8 and all(isinstance(one["prompt"][0], list) for one in whole)


@pytest.mark.parametrize(("metrics", "code", "exit_code"), [(True, "state_fault", 1), (False, "differs", 3)])
def test_state_that_llama_cpp_reuses_wrongly_is_found_and_never_passes(
    samestate: Command, metrics: bool, code: str, exit_code: int
) -> None:
    """Without counters no cold run has company, so what a correct answer may move is not known: it cannot fail."""
    result, tree, _ = probed(samestate, llama(metrics=metrics, fault="stale"), "--lengths", "64,65,130")
    assert result.exit_code == exit_code
    assert {one["code"] for one in check(tree, "probe-equality")["findings"]} == {code}
    assert check(tree, "probe-usage")["verdict"] == "pass"


@pytest.mark.regression
def test_a_usage_of_one_prompt_of_two_is_no_lie_and_tells_nothing_of_the_other(samestate: Command) -> None:
    _, tree, server = probed(samestate, llama(metrics=False), "--lengths", "64,65")
    assert check(tree, "probe-usage")["verdict"] == "pass"
    assert any("its usage counts one prompt of two" in note for note in tree["probe"]["notes"])
    assert sum(isinstance(one["prompt"][0], list) for one in server.asked) == 1


@pytest.mark.regression
def test_a_usage_that_is_neither_of_both_prompts_nor_of_one_is_a_lie(samestate: Command) -> None:
    _, tree, _ = probed(samestate, llama(lie="beyond"), "--lengths", "64,65")
    assert check(tree, "probe-usage")["verdict"] == "fail"


def test_counters_of_llama_cpp_find_a_usage_that_is_silent(samestate: Command) -> None:
    _, tree, _ = probed(samestate, llama(lie="silent"), "--lengths", "64,65")
    assert {one["code"] for one in check(tree, "probe-usage")["findings"]} == {"usage_contradicts_counters"}


def test_a_small_c_has_lengths_of_several_of_it_and_says_what_it_means(samestate: Command) -> None:
    with answering(llama()) as server:
        shown = samestate("probe", server.url).stdout
    assert "server llama.cpp b1-test, model tiny" in shown
    assert "C = 1: state goes on from any token" in shown and "N64.cold" in shown and "N1.cold" not in shown


@pytest.mark.parametrize("details", [True, False])
def test_where_nobody_tells_what_is_reused_the_verdict_is_unknown_and_names_the_options(
    samestate: Command, details: bool
) -> None:
    conduct = Conduct(vllm=False, dev=False, salts=False, metrics=False, details=details, interval=1)
    result, tree, _ = probed(samestate, conduct, "--lengths", "64,65")
    assert result.exit_code == (0 if details else 3)
    words = " ".join(one["message"] for one in check(tree, "probe-equality")["findings"])
    assert details or ("--enable-cache-report" in words and "--metrics" in words)
