"""Prompts, costs and the search for C, without a server."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple, cast

import pytest

from samestate.engines.black_box import BlackBox, Prompt
from samestate.engines.black_box_budget import Budget
from samestate.engines.black_box_facts import Facts
from samestate.evidence.records import OperationName
from samestate.lab.black_box_interval import IntervalSearch
from samestate.lab.black_box_prompts import WORDS, Prompts
from samestate.lab.black_box_record import Told
from samestate.plans import black_box as b
from samestate.plans.lengths import evaluate

FACTS = Facts("m", 8192, True, "1", True, True, None, None, None, True, None)


class Box(NamedTuple):
    budget: Budget
    salts: bool = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def box(tokens: int = 400_000) -> BlackBox:
    return cast(BlackBox, Box(Budget(1000, tokens)))


class Cache:
    """What a server of interval C says of a repeated prompt; `lie`: added to it. `late`: the first repeat misses.

    `drops`: the last C that it found is left out, as with EAGLE. `scale`: tokens of a text for each that was wanted.
    """

    def __init__(
        self, c: int, lie: int = 0, *, late: bool = False, told: bool = True, drops: bool = False, scale: float = 1
    ) -> None:
        self.c, self.lie, self.late, self.told, self.drops, self.scale = c, lie, late, told, drops, scale
        self.asked: list[int] = []

    def ask(
        self, case: str, op: str, name: OperationName, prompt: Prompt, output: int, salt: str | None = None
    ) -> Told:
        self.asked.append(prompt.tokens)
        tokens = round(prompt.tokens * self.scale)
        found = max(0, (tokens - 1) // self.c * self.c - self.c * self.drops)
        missed = op == "cold" or (self.late and op == "repeat") or not found
        return Told(cast(Any, None), tokens, (0 if missed else found + self.lie) if self.told else None)


def search(cache: Cache, facts: Facts = FACTS, tokens: int = 400_000, *, exact: bool = True) -> tuple[int | None, str]:
    one = box(tokens)
    return IntervalSearch(one, Prompts(one, "run", b.TEMPLATE, exact=exact), cache.ask, []).find(facts)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 32, 48, 100, 256, 560, 1792, 2560, 4608])
@pytest.mark.parametrize("late", [False, True])
def test_c_is_found(c: int, late: bool) -> None:
    assert search(Cache(c, late=late)) == (c, "seen in repeated prompts")


@pytest.mark.parametrize("c", [64, 100, 1792])
def test_c_is_found_though_more_than_the_prompt_is_said_to_be_reused(c: int) -> None:
    assert search(Cache(c, lie=10**6))[0] == c


@pytest.mark.regression
@pytest.mark.parametrize("c", [1, 4, 7, 9, 10, 16, 48, 80, 100, 256, 560, 1792])
@pytest.mark.parametrize("said", [False, True])
def test_c_is_found_though_the_last_that_was_found_is_left_out(c: int, said: bool) -> None:
    facts = FACTS._replace(interval=c, interval_from="/metrics") if said else FACTS
    assert search(Cache(c, drops=True), facts)[0] == c


@pytest.mark.regression
@pytest.mark.parametrize("c", [16, 48, 64, 100, 256, 1024, 1792])
@pytest.mark.parametrize("scale", [0.8, 1, 1.2, 2.5])
@pytest.mark.parametrize("drops", [False, True])
def test_c_is_found_though_texts_have_other_lengths_than_wanted(c: int, scale: float, drops: bool) -> None:
    assert search(Cache(c, scale=scale, drops=drops), exact=False)[0] == c


def test_what_is_said_of_c_is_tried_first_and_believed_where_it_is_seen() -> None:
    said = FACTS._replace(interval=256, interval_from="/metrics")
    cache = Cache(256)
    assert search(cache, said) == (256, "/metrics, and seen") and set(cache.asked) == {257}
    assert search(Cache(512), said)[0] == 512


def test_c_is_not_known_where_nobody_tells_or_nothing_is_reused() -> None:
    assert search(Cache(16, told=False))[0] is None
    c, why = search(Cache(10**6))
    assert c is None and "no prompt of up to 8,191 tokens" in why


def test_the_search_keeps_to_its_share_of_the_budget() -> None:
    cache = Cache(10**6)
    search(cache, tokens=10_000)
    assert sum(cache.asked) + len(cache.asked) <= 4_000


@pytest.mark.parametrize("tokens", [1, 15, 40, 700])
def test_a_prompt_has_its_length_and_its_own_beginning(tokens: int) -> None:
    mine, other = (Prompts(box(), run, b.TEMPLATE, exact=True) for run in ("a", "b"))
    first, second = mine.make("t", tokens), other.make("t", tokens)
    assert first.ids is not None and second.ids is not None
    assert len(first.ids) == first.most == tokens
    assert first == mine.make("t", tokens) and first.ids[:8] != mine.make("u", max(tokens, 8)).ids
    assert tokens == 1 or first.ids[:16] != second.ids[:16]


def shared(made: int, firsts: int) -> int:
    """Prompts that share their first token with another, dealt in turns."""
    dealt = [made // firsts + (one < made % firsts) for one in range(firsts)]
    return sum(count for count in dealt if count > 1)


def tags() -> list[str]:
    """Those of a long probe, and more."""
    own = [f"{b.CASE}{n}{part}" for n in range(60, 76) for part in ("", "-beside-2", "-interposer")]
    return ["hello", "hello-1", "hello-2", *(f"{b.SWEEP}{n}" for n in b.sweep_lengths(1 << 16)), *own]


@pytest.mark.regression
def test_no_two_texts_of_a_run_begin_with_the_same_word() -> None:
    """Over many runs: where C is 1, whatever two prompts begin with alike counts as reused for a new one."""
    for seed in range(200):
        prompts = Prompts(box(), f"{seed:016x}", b.TEMPLATE, exact=False)
        firsts = {prompts.make(tag, 24).text.split()[0] for tag in tags()}
        assert (len(firsts), prompts.alike) == (len(tags()), 0)


@pytest.mark.regression
@pytest.mark.parametrize("vocabulary", [40, 100, 50_000])
def test_no_two_prompts_of_a_run_begin_with_the_same_token_while_there_are_enough(vocabulary: int) -> None:
    @cache
    def encode(text: str) -> list[int]:
        return [int.from_bytes(sha256(word.encode()).digest()[:4]) % vocabulary for word in text.split()]

    class Whole(Box):
        def encode(self, text: str) -> list[int]:
            return encode(text)

    some = tags()
    for seed in range(10):
        prompts = Prompts(cast(BlackBox, Whole(Budget(1000, 400_000))), f"{seed:016x}", b.TEMPLATE, exact=True)
        beginnings = {tuple(prompts.make(tag, 24).sent[:2]) for tag in some}
        assert len(beginnings) == len(some)
        firsts = len({first for first, _ in beginnings})
        assert (firsts, prompts.alike) == ((len(some), 0) if vocabulary > 40 else (firsts, shared(len(some), firsts)))
        assert (vocabulary > 40) == (firsts == len(some))


def test_words_part_within_three_letters() -> None:
    assert len({word[:3] for word in WORDS}) == len(WORDS) == 256


def test_a_text_comes_near_its_length_once_the_server_has_counted() -> None:
    prompts = Prompts(box(), "a", b.TEMPLATE, exact=False)

    def count(prompt: Prompt) -> int:
        return 3 + 2 * len(prompt.text.split())

    for tokens in (24, 101):
        prompts.learn(prompt := prompts.make("t", tokens), count(prompt))
    assert count(prompts.make("u", 1001)) in (1001, 1002)
    assert prompts.make("u", 501).most >= 501


def test_lengths_that_do_not_fit_are_left_out_and_said() -> None:
    means = b.Means(reset=False, evict=False)
    kept, left_out = b.fitting(b.AUTO, 1792, 8192, 32, means, b.Cost(250, 400_000))
    assert [name for name, _ in kept] == ["C", "C+1", "2C-1", "2C", "2C+1", "3C+7"]
    assert len(left_out) == 2 and "8,960 tokens" in left_out[0]
    assert b.fitting(["C", "2C"], 16, None, 32, means, b.Cost(250, 10)) == (
        [],
        ["C: the budget does not allow it", "2C: the budget does not allow it"],
    )


def test_one_length_that_can_hit_stays_while_any_fits() -> None:
    means = b.Means(reset=False, evict=False)
    kept, _ = b.fitting(["C-1", "C", "2C"], 64, None, 8, means, b.Cost(12, 10**6))
    assert [name for name, _ in kept] == ["2C"]


@pytest.mark.parametrize(
    ("grown", "cached", "expected"),
    [
        ({b.LOCAL_QUERIES: 32, b.LOCAL_HITS: 16}, 3, 16),
        ({b.LOCAL_QUERIES: 32, b.LOCAL_HITS: 0, b.EXTERNAL_HITS: 16}, None, 16),
        ({b.LOCAL_QUERIES: 39, b.LOCAL_HITS: 23}, 16, 16),  # somebody else was there
        ({b.LOCAL_QUERIES: 64, b.LOCAL_HITS: 48}, 16, 16),  # and looked up just as much
        ({b.LOCAL_QUERIES: 64, b.LOCAL_HITS: 48}, None, None),
        ({b.LOCAL_QUERIES: 0, b.LOCAL_HITS: 0}, None, None),
        ({}, 5, 5),
    ],
)
def test_what_was_reused_is_told_by_counters_that_moved_for_it_alone(
    grown: dict[str, int], cached: int | None, expected: int | None
) -> None:
    assert b.reused(32, grown, cached) == expected


@pytest.mark.parametrize(
    ("counted", "tokens", "beside", "whole"),
    [
        (48, 24, 24, True),
        (24, 24, 24, False),
        (129, 128, 128, False),
        (256, 2048, 256, False),
        (2304, 2048, 256, True),
        (None, 24, 24, True),
        (7, 24, 0, True),
    ],
)
def test_a_usage_of_one_prompt_of_two_covers_no_request(
    counted: int | None, tokens: int, beside: int, whole: bool
) -> None:
    assert b.covers(counted, tokens, beside) is whole


@pytest.mark.parametrize("c", [1, 2, 3, 5, 8, 15])
def test_no_prompt_around_a_small_c_is_too_short_to_have_its_own_beginning(c: int) -> None:
    lengths = [evaluate(length, c) for length in b.around(c)]
    assert min(lengths) >= b.SHORTEST_CASE and sum(n % c == 0 for n in lengths) >= 4
    assert b.around(16) == b.AUTO and b.around(None) == b.PLAIN
