"""Token classes: a store is a forced token only on the exact row that the token came from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.checks.budget_oracle import Markers
from samestate.checks.marker_classes import TokenClass, class_of, class_of_marker, classify, closes, counted
from samestate.checks.marker_history import Committed, TracedStep
from samestate.checks.marker_server import reasoning_tokens
from samestate.checks.seen import Seen
from samestate.evidence.marker_records import LogitsRow, LogitsRows, TokensCommitted

END = 9
MARKERS = Markers((8,), (END,))


def row(*, store: bool = False, stored: int | None = None, argmax: int = 1, local: int = 0) -> LogitsRow:
    return LogitsRow(local=local, drafted=None, store=store, stored=stored, argmax=argmax, logprob=-1.0)


@pytest.mark.parametrize(
    ("token", "of", "expected"),
    [
        (END, row(store=True, stored=END, argmax=1), TokenClass.FORCED),
        (END, row(store=True, stored=END, argmax=END), TokenClass.NATURAL_COINCIDENT),
        (END, row(argmax=END), TokenClass.SAMPLED),
        (5, row(argmax=1), TokenClass.SAMPLED),
        (5, row(store=True, stored=END), TokenClass.STORE_OVERRIDDEN),
        (END, None, TokenClass.UNKNOWN),
        (END, row(store=True, stored=None), TokenClass.UNKNOWN),
        (END, row(store=False, stored=END), TokenClass.UNKNOWN),
    ],
)
def test_class_of(token: int, of: LogitsRow | None, expected: TokenClass) -> None:
    assert class_of(token, of) is expected


def step(rows: list[LogitsRow], tokens: list[int], locals_: list[int]) -> TracedStep:
    at = {"rank": 0, "step": 0, "request": "r", "position": 62}
    return TracedStep(
        0,
        Seen(LogitsRows(**at, slot=0, rows=rows), "s", 0, 0),
        Seen(TokensCommitted(**at, tokens=tokens, rows=locals_), "s", 1, 0),
    )


def test_of_two_stores_only_the_committed_row_counts() -> None:
    """Budget 64, three drafts, 62 tokens before: rows –, –, END, END. One END is committed."""
    rows = [row(local=0), row(local=1), *(row(local=at, store=True, stored=END) for at in (2, 3))]
    whole = step(rows, [5, 6, END], [0, 1, 2])
    committed = [Committed(62 + at, token, at, whole) for at, token in enumerate([5, 6, END])]
    assert classify(committed, 3, tail_known=True) == [TokenClass.SAMPLED, TokenClass.SAMPLED, TokenClass.FORCED]
    short = step(rows, [5], [0])
    assert classify([Committed(62, 5, 0, short)], 1, tail_known=True) == [TokenClass.SAMPLED]


def test_the_tail_is_post_stop_only_where_it_is_accounted_for() -> None:
    whole = step([row(local=0), row(local=1)], [5, 6], [0, 1])
    committed = [Committed(62, 5, 0, whole), Committed(63, 6, 1, whole)]
    assert classify(committed, 1, tail_known=True)[1] is TokenClass.POST_STOP
    assert classify(committed, 1, tail_known=False)[1] is TokenClass.UNKNOWN


def test_a_marker_of_several_ids_has_the_class_of_its_first() -> None:
    assert class_of_marker([TokenClass.FORCED, TokenClass.NATURAL_COINCIDENT]) is TokenClass.FORCED
    assert class_of_marker([TokenClass.SAMPLED, TokenClass.FORCED]) is TokenClass.SAMPLED
    assert class_of_marker([TokenClass.FORCED, TokenClass.UNKNOWN]) is TokenClass.UNKNOWN
    assert class_of_marker([]) is TokenClass.UNKNOWN


def test_closes_are_whole_markers_that_do_not_overlap() -> None:
    twice = Markers((8,), (9, 9))
    assert [one.position for one in closes([9, 9, 9, 1, 9, 9], twice)] == [0, 4]
    assert closes([9, 1, 9], twice) == []
    assert [one.position for one in closes([END, 1, END], MARKERS)] == [0, 2]


@given(st.lists(st.integers(0, 11)), st.lists(st.integers(0, 11)))
def test_reasoning_tokens_are_no_markers_and_no_more_than_there_are(prompt: list[int], tokens: list[int]) -> None:
    count = reasoning_tokens(prompt, tokens, MARKERS)
    plain = [token for token in tokens if token not in (8, END)]
    assert 0 <= count <= len(plain)
    assert reasoning_tokens([*prompt, 8], tokens, MARKERS) >= count
    assert reasoning_tokens([*prompt, END], tokens, MARKERS) <= count


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [([8], [1, 2, END, 3], 2), ([], [8, 1, END, 2, 8, 3], 2), ([8, 1, END], [4], 0), ([8, 1], [2, 3], 2)],
)
def test_reasoning_tokens(prompt: list[int], tokens: list[int], expected: int) -> None:
    assert reasoning_tokens(prompt, tokens, MARKERS) == expected


@given(
    token=st.integers(0, 3),
    store=st.booleans(),
    stored=st.none() | st.integers(0, 3),
    argmax=st.integers(0, 3),
)
def test_a_forced_token_always_has_its_own_store(token: int, store: bool, stored: int | None, argmax: int) -> None:
    found = class_of(token, row(store=store, stored=stored, argmax=argmax))
    forced = found in (TokenClass.FORCED, TokenClass.NATURAL_COINCIDENT)
    assert forced == (store and stored == token)
    assert found is not TokenClass.POST_STOP


def test_counted() -> None:
    assert counted([TokenClass.SAMPLED] * 2 + [TokenClass.FORCED]) == "2 sampled, 1 forced"
    assert counted([]) == "no token"
