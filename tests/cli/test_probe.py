"""`samestate probe` on servers that are honest, faulty or lying; nothing but HTTP between."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from engines.answering import Answering, Conduct, answering
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


def codes(tree: dict[str, Any]) -> set[str]:
    return {finding["code"] for one in tree["results"] for finding in one["findings"] if finding["verdict"] == "fail"}


def verdicts(tree: dict[str, Any]) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in tree["results"]}


# --- honest servers -------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_honest_server_passes_and_c_is_found(samestate: Command) -> None:
    result, tree, server = probed(samestate, Conduct())
    assert result.exit_code == 0, result.stdout
    assert tree["verdict"] == "pass" and tree["probe"]["interval"] == 16
    assert tree["comparison_kind"] == "within_one_arm"
    rows = {row["op"]: row for row in tree["table"]}
    assert [rows[f"N{n}.repeat"]["credited"] for n in (16, 17, 31, 32, 33)] == [0, 16, 16, 16, 32]
    assert tree["probe"]["spent"]["requests"] == len(server.asked)


HONEST: dict[str, tuple[Conduct, Sequence[str]]] = {
    "no usage details": (Conduct(details=False), ()),
    "no metrics": (Conduct(metrics=False), ()),
    "a configured C that is not the one": (Conduct(said_interval=8), ()),
    "C that is no power of two": (Conduct(interval=48), ()),
    "C of one token": (Conduct(interval=1, metrics=False), ("--lengths", "40,64")),
    "text alone": (Conduct(tokenizer=False, ids=False, vllm=False, metrics=False), ()),
    "token ids refused": (Conduct(ids=False, vllm=False, metrics=False), ()),
    "fields refused": (Conduct(vllm=False, refuses=("cache_salt", "return_token_ids", "seed")), ()),
    "no log-probabilities": (Conduct(logprobs=False), ()),
    "one prompt in a request": (Conduct(pairs=False), ()),
    "noise": (Conduct(noise=0.01), ()),
    "somebody else there": (Conduct(foreign=7), ()),
    "streams": (Conduct(), ("--stream",)),
    "an outside cache": (Conduct(outside=True), ("--allow-reset",)),
    "nothing outside": (Conduct(), ("--allow-reset",)),
}


@pytest.mark.parametrize("name", HONEST)
def test_whatever_a_server_tells_an_honest_one_passes(samestate: Command, name: str) -> None:
    conduct, arguments = HONEST[name]
    result, tree, _ = probed(samestate, conduct, *(SHORT if "--lengths" not in arguments else ()), *arguments)
    assert result.exit_code == 0, (tree["verdict"], verdicts(tree), codes(tree))
    assert tree["probe"]["interval"] == conduct.interval


# --- faults ---------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Conduct, Sequence[str], str]] = {
    "a stale state": (Conduct(fault="stale"), (), "state_fault"),
    "a stale state amid noise": (Conduct(fault="stale", noise=0.01), (), "state_fault"),
    "a stale state, text alone": (Conduct(fault="stale", tokenizer=False, ids=False, metrics=False), (), "state_fault"),
    "a stale state, no log-probabilities": (Conduct(fault="stale", logprobs=False), (), "state_fault"),
    "a stale state outside": (Conduct(fault="stale-outside", outside=True), ("--allow-reset",), "state_fault"),
    "a stale state outside, without salts": (
        Conduct(fault="stale-outside", outside=True, capacity=6),
        ("--allow-evict", "--budget-tokens", "60000"),
        "state_fault",
    ),
    "one taken off after the lookup": (Conduct(fault="off-by-one"), (), "state_fault"),
    "its credit": (Conduct(fault="off-by-one"), (), "unaligned_credit"),
    "its credit, by usage": (Conduct(fault="off-by-one", metrics=False), (), "unaligned_credit"),
    "a reset that keeps": (Conduct(fault="reset-keeps-local"), ("--allow-reset",), "reset_kept_local"),
    "a first repeat that misses": (Conduct(fault="late"), (), "second_sighting_missed"),
    "salts that nobody heeds": (Conduct(salts=False), (), "salt_ignored"),
    "usage beyond the prompt": (Conduct(lie="beyond"), (), "usage_beyond_prompt"),
    "the same without counters": (Conduct(lie="beyond", metrics=False), (), "usage_beyond_prompt"),
    "usage of the whole prompt": (Conduct(lie="whole"), (), "usage_whole_prompt"),
    "usage that counters contradict": (Conduct(lie="silent"), (), "usage_contradicts_counters"),
    "usage off by one": (Conduct(lie="unaligned"), (), "usage_contradicts_counters"),
    "the same without counters ": (Conduct(lie="unaligned", metrics=False), (), "unaligned_credit"),
    "usage that is no count": (Conduct(lie="negative"), (), "usage_no_count"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(samestate: Command, name: str) -> None:
    conduct, arguments, code = FAULTS[name]
    result, tree, _ = probed(samestate, conduct, *SHORT, *arguments)
    assert result.exit_code == 1 and code in codes(tree), (tree["verdict"], verdicts(tree), codes(tree))


def test_a_lying_usage_alone_leaves_equality_and_boundary_alone(samestate: Command) -> None:
    _, tree, _ = probed(samestate, Conduct(lie="beyond"), *SHORT)
    assert [check for check, word in verdicts(tree).items() if word == "fail"] == ["probe-usage"]


# --- what cannot be known -------------------------------------------------------------------------


def test_a_whole_prompt_from_outside_is_right_or_wrong_by_its_answers_alone(samestate: Command) -> None:
    conduct = Conduct(attention=True, outside=True)
    _, tree, _ = probed(samestate, conduct, *SHORT, "--allow-reset")
    told = {finding["code"] for one in tree["results"] for finding in one["findings"]}
    assert not {code for code in codes(tree) if code.startswith("usage")}
    assert "retained_lookup_boundary" in told and verdicts(tree)["probe-equality"] == "pass"


@pytest.mark.parametrize(
    "conduct", [Conduct(fault="late", foreign=7), Conduct(fault="late", vllm=False, metrics=False)]
)
def test_a_first_repeat_that_misses_is_said_where_somebody_may_have_been_there(
    samestate: Command, conduct: Conduct
) -> None:
    result, tree, _ = probed(samestate, conduct, *SHORT)
    assert result.exit_code == 0 and "missed at their first repeat" in result.stdout, codes(tree)


def test_without_usage_and_counters_nothing_is_known(samestate: Command) -> None:
    result, tree, _ = probed(samestate, Conduct(details=False, metrics=False))
    assert result.exit_code == 3 and tree["probe"]["interval"] is None
    assert "nobody tells" in tree["probe"]["interval_from"]
    assert "--enable-prompt-tokens-details" in result.stdout


def test_a_server_that_reuses_nothing_passes_nothing(samestate: Command) -> None:
    result, tree, _ = probed(samestate, Conduct(caching=False), "--budget-tokens", "20000")
    assert result.exit_code == 3 and verdicts(tree)["probe-reuse"] == "unknown"


def test_a_difference_without_a_floor_is_unknown(samestate: Command) -> None:
    result, tree, _ = probed(samestate, Conduct(fault="stale", salts=False, vllm=False, metrics=False), *SHORT)
    assert result.exit_code == 3 and verdicts(tree)["probe-equality"] == "unknown"


def test_noise_as_large_as_the_fault_is_no_state_fault(samestate: Command) -> None:
    _, tree, _ = probed(samestate, Conduct(fault="stale", noise=4.0), *SHORT)
    assert "state_fault" not in codes(tree) and tree["verdict"] == "unknown"


def test_a_server_that_was_started_again_in_between_is_another(
    samestate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Answering.exposition

    def again(self: Answering) -> str:
        self.began += 1
        return usual(self)

    monkeypatch.setattr(Answering, "exposition", again)
    result, tree, _ = probed(samestate, Conduct(), *SHORT)
    assert result.exit_code == 3 and verdicts(tree)["probe-whole"] == "unknown"


# --- the archive ----------------------------------------------------------------------------------


def test_the_archive_is_judged_again_from_its_records_alone(samestate: Command, tmp_path: Path) -> None:
    out = tmp_path / "archive"
    result, tree, _ = probed(samestate, Conduct(fault="stale"), *SHORT, "--out", out)
    again = samestate("check", out, "--json")
    assert result.exit_code == again.exit_code == 1
    assert json.loads(again.stdout)["results"] == tree["results"]
    assert samestate("probe", "http://127.0.0.1:1", "--out", out).exit_code == 2


@pytest.mark.tamper
def test_an_answer_that_was_changed_afterwards_is_no_evidence(samestate: Command, tmp_path: Path) -> None:
    out = tmp_path / "archive"
    probed(samestate, Conduct(), *SHORT, "--out", out)
    stream = out / "arms" / "server" / "client.jsonl"
    stream.write_bytes(stream.read_bytes().replace(b'"cached_tokens":16', b'"cached_tokens":17', 1))
    told = json.loads(samestate("check", out, "--json").stdout)
    assert verdicts(told)["integrity"] == "unknown" and told["verdict"] != "pass"
