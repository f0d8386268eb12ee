"""What once passed a server that shows nothing, or accused an honest one: each held shut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from click.testing import Result

from engines import answering as server_module
from engines.answering import Answering, Conduct, answering, encode
from samestate.engines import black_box as box_module
from samestate.lab import black_box as lab_module

pytestmark = pytest.mark.regression

Command = Callable[..., Result]
Tree = dict[str, Any]
Edit = Callable[[Tree, int, int], None]
SHORT = ("--lengths", "C+1,2C,3C+7")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(box_module, "IDLE_POLL_SECONDS", 0.01)


def answered(monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    """Every answer goes through `edit`: its tree, N of the last prompt, tokens that were reused."""
    usual = Answering.complete

    def complete(self: Answering, body: Tree) -> tuple[int, Tree]:
        status, tree = usual(self, body)
        if status == 200:
            given = body["prompt"]
            last = given if isinstance(given, str) or isinstance(given[0], int) else given[-1]
            tokens = len(encode(last)) if isinstance(last, str) else len(last)
            edit(tree, tokens, tree["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0))
        return status, tree

    monkeypatch.setattr(Answering, "complete", complete)


def probed(samestate: Command, conduct: Conduct, *arguments: object) -> tuple[Result, Tree, Answering]:
    with answering(conduct) as server:
        result = samestate("probe", server.url, "--json", *arguments)
    return result, json.loads(result.stdout), server


def codes(tree: Tree, verdict: str) -> set[str]:
    return {one["code"] for result in tree["results"] for one in result["findings"] if one["verdict"] == verdict}


# --- answers that show nothing --------------------------------------------------------------------


def cut_to(tokens: int) -> Edit:
    def cut(tree: Tree, *_: int) -> None:
        for choice in tree["choices"]:
            choice["token_ids"] = choice["token_ids"][:tokens]
            choice["logprobs"] = {name: some[:tokens] for name, some in choice["logprobs"].items()}
            choice["text"], choice["finish_reason"] = choice["text"] if tokens else "", "abort"

    return cut


def one_text_token(tree: Tree, *_: int) -> None:
    """Of several characters, and nothing tells tokens but the usage."""
    for choice in tree["choices"]:
        choice.pop("token_ids", None)
        choice.pop("logprobs", None)
        choice["text"] = " whole"
    tree["usage"]["completion_tokens"] = len(tree["choices"])


def constant(tree: Tree, tokens: int, _: int) -> None:
    """Whatever the prompt, unless nothing of it can be reused."""
    for choice in tree["choices"] if tokens != 16 else ():
        count = len(choice["token_ids"])
        choice["token_ids"] = [7] * count
        choice["logprobs"] = {
            "tokens": ["token_id:7"] * count,
            "token_logprobs": [-0.1] * count,
            "top_logprobs": [{"token_id:7": -0.1, "token_id:8": -2.0}] * count,
        }


EMPTY: dict[str, tuple[Edit, Sequence[str], str]] = {
    "empty": (cut_to(0), SHORT, "too_short"),
    "empty, one length": (cut_to(0), ("--lengths", "2C+1"), "too_short"),
    "one token": (cut_to(1), SHORT, "too_short"),
    "one token of text": (one_text_token, SHORT, "too_short"),
    "constant where anything is reused": (constant, ("--lengths", "C,C+1,2C"), "same_answers"),
    "constant, one length that reuses": (constant, ("--lengths", "C,2C"), "same_answers"),
    "constant, one length": (constant, ("--lengths", "2C+1"), "same_answers"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_answers_that_a_wrong_state_would_leave_alone_pass_nothing(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    edit, lengths, code = EMPTY[name]
    answered(monkeypatch, edit)
    conduct = Conduct(fault=None if name == "one token" else "stale")
    result, tree, _ = probed(samestate, conduct, *lengths)
    assert result.exit_code == 3 and code in codes(tree, "unknown"), (tree["verdict"], codes(tree, "unknown"))


@pytest.mark.parametrize("lengths", ["2C+1", "C,2C"])
def test_two_tokens_and_one_length_are_enough(samestate: Command, lengths: str) -> None:
    result, _, _ = probed(samestate, Conduct(), "--lengths", lengths, "--output-tokens", "2")
    assert result.exit_code == 0
    result, _, _ = probed(samestate, Conduct(fault="stale"), "--lengths", lengths, "--output-tokens", "2")
    assert result.exit_code == 1


def moved(by: float) -> Edit:
    def move(tree: Tree, _: int, reused: int) -> None:
        for choice in tree["choices"] if reused else ():
            told = choice["logprobs"]
            told["token_logprobs"] = [value - by for value in told["token_logprobs"]]

    return move


@pytest.mark.parametrize("conduct", [Conduct(pairs=False), Conduct(salts=False, vllm=False, metrics=False)])
@pytest.mark.parametrize(("by", "code"), [(5.0, 3), (0.01, 0)])
def test_without_a_floor_log_probabilities_that_moved_far_are_unknown(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, conduct: Conduct, by: float, code: int
) -> None:
    answered(monkeypatch, moved(by))
    result, tree, _ = probed(samestate, conduct, *SHORT)
    assert result.exit_code == code
    assert ("logprobs_moved" in codes(tree, "unknown")) == (code == 3)


# --- honest servers that were accused -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_somebody_else_who_looks_up_as_much_as_we_do_is_not_us(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random, usual = Random(seed), Answering.complete

    def complete(self: Answering, body: Tree) -> tuple[int, Tree]:
        done = usual(self, body)
        one = body["prompt"] if isinstance(body["prompt"][0], int) else body["prompt"][-1]
        self.counters["queries"] += len(one) * random.randint(1, 3)
        self.counters["hits"] += 16
        return done

    monkeypatch.setattr(Answering, "complete", complete)
    result, tree, _ = probed(samestate, Conduct(), *SHORT)
    assert result.exit_code == 0, codes(tree, "fail")


@pytest.mark.parametrize(("engines", "code"), [(1, "second_sighting_missed"), (2, None)])
def test_engines_that_each_have_a_cache_may_miss_at_the_second_sighting(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, engines: int, code: str | None
) -> None:
    usual = Answering.exposition

    def exposition(self: Answering) -> str:
        lines = usual(self).splitlines()
        others = [line.replace("{", '{engine="1",') for line in lines if "cache_config_info" in line] * (engines - 1)
        return "\n".join([*lines, *others]) + "\n"

    monkeypatch.setattr(Answering, "exposition", exposition)
    _, tree, _ = probed(samestate, Conduct(fault="late"), *SHORT)
    assert codes(tree, "fail") == ({code} if code else set())


@pytest.mark.parametrize("conduct", [Conduct(), Conduct(interval=48, metrics=False), Conduct(interval=80)])
def test_a_server_that_drops_the_last_c_it_found_is_honest(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, conduct: Conduct
) -> None:
    """As vLLM does with EAGLE and MTP."""

    def restored(self: Answering, ids: tuple[int, ...], salt: str) -> tuple[int, tuple[bytes, int], bool]:
        c, found = self.conduct.interval, 0
        while found + c < len(ids) and (salt, ids[: found + c]) in self.local:
            found += c
        kept = max(0, found - c)
        return kept, self.local[salt, ids[:kept]] if kept else (b"", 0), False

    monkeypatch.setattr(Answering, "restored", restored)
    result, tree, _ = probed(samestate, conduct)
    assert (result.exit_code, tree["probe"]["interval"]) == (0, conduct.interval), codes(tree, "fail")


@pytest.mark.parametrize("conduct", [Conduct(interval=64), Conduct(interval=256), Conduct(interval=784)])
def test_texts_of_several_tokens_a_word_find_c(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, conduct: Conduct
) -> None:
    def several(text: str) -> list[int]:
        return [1, *(token for word in text.split() for part in "abcde" for token in encode(word + part)[1:])]

    monkeypatch.setattr(server_module, "encode", several)
    conduct.tokenizer = conduct.ids = False
    result, tree, _ = probed(samestate, conduct)
    assert (result.exit_code, tree["probe"]["interval"]) == (0, conduct.interval), codes(tree, "fail")


@pytest.mark.parametrize(("shared", "exit_code"), [(3, 0), (4, 0), (9, 1)])
def test_a_beginning_that_all_prompts_share_is_no_reuse(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, shared: int, exit_code: int
) -> None:
    """C = 1, and `shared` tokens that the server puts before each text; nine of them are no such beginning.

    No two prompts begin alike beyond it, by chance or otherwise.
    """
    seen: dict[int, list[tuple[int, ...]]] = {}

    def compute(
        self: Answering, ids: tuple[int, ...], salt: str, *, whole: bool = False
    ) -> tuple[tuple[bytes, int], int, bool]:
        known = seen.setdefault(id(self), [])
        alike = [
            next((at for at, (a, b) in enumerate(zip(one, ids, strict=False)) if a != b), len(ids)) for one in known
        ]
        known.append(ids)
        return self.computed((b"", 0), ids), min(max(alike, default=0), len(ids) - 1), False

    monkeypatch.setattr(Answering, "compute", compute)
    monkeypatch.setattr(server_module, "encode", lambda text: [*range(2, 1 + shared), *encode(text)])
    conduct = Conduct(interval=1, vllm=False, metrics=False, tokenizer=False, ids=False, salts=False)
    result, tree, _ = probed(samestate, conduct, "--lengths", "40,64,200")
    assert result.exit_code == exit_code, codes(tree, "fail")
    assert ("reused_when_new" in codes(tree, "fail")) == bool(exit_code)
