"""`upstream-count-v1` by itself; tests/instruments holds it against vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.checks.budget_oracle import (
    Course,
    Markers,
    decide,
    decide_outputs,
    decide_rows,
    resident_prompt,
    stored_rows,
    v1_leaves,
)

START, END, WORD = 1, 2, 5
PLAIN = Markers((START,), (END,))
TWO = Markers((START,), (END, 3))
SAYS_MORE = Markers((START,), (WORD, END), (END,))


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([WORD], 0, ("outside", None, None)),
        ([START, END], 0, ("closed", None, None)),
        ([START], 0, ("spent", 0, END)),
        ([START], 1, ("within", 0, None)),
        ([START, WORD], 1, ("spent", 1, END)),
        ([START, WORD, WORD], 1, ("spent", 2, END)),
        ([START, WORD, START], 1, ("within", 0, None)),
        ([START, END, START, WORD], 1, ("spent", 1, END)),
    ],
)
def test_a_row(tokens: list[int], budget: int, expected: tuple[str, int | None, int | None]) -> None:
    found = decide(tokens, PLAIN, budget)
    assert (found.why, found.count, found.forced) == expected


def test_a_marker_of_two_ids_goes_on_where_its_beginning_stands() -> None:
    assert [found.forced for found in decide_outputs([START], [WORD, END, 3], TWO, 1)] == [None, END, 3, None]
    assert decide([START, END], TWO, 1).why == "closing"


def test_a_word_before_the_natural_end() -> None:
    assert [found.why for found in decide_outputs([START], [WORD, END], SAYS_MORE, 0)] == ["spent", "closing", "closed"]
    assert decide([START, 7, END], SAYS_MORE, 0).why == "closed"


def test_rows_of_a_step() -> None:
    before = [START, *[WORD] * 62]
    assert stored_rows(decide_rows(before, [WORD] * 3, PLAIN, 64)) == {2: END, 3: END}
    assert stored_rows(decide_rows(before, [WORD] * 3, PLAIN, 64, "v1")) == {2: END}
    assert stored_rows(decide_rows(before, [WORD, END, WORD], PLAIN, 64)) == {}
    assert stored_rows(decide_rows(before, [WORD, END, WORD], PLAIN, 64, "v1")) == {2: END}


@given(st.integers(0, 9), st.integers(0, 5))
def test_a_budget_falls_on_any_row_of_a_step(left: int, drafted: int) -> None:
    stores = stored_rows(decide_rows([START, WORD], [WORD] * drafted, PLAIN, 1 + left))
    assert stores == dict.fromkeys(range(left, drafted + 1), END)
    older = stored_rows(decide_rows([START, WORD], [WORD] * drafted, PLAIN, 1 + left, "v1"))
    assert older == ({left: END} if left <= drafted else {})


@given(st.lists(st.sampled_from([START, END, WORD, 3])), st.lists(st.sampled_from([START, END, WORD, 3])))
def test_outputs_and_rows_are_one_policy(prefix: list[int], rest: list[int]) -> None:
    for markers in (PLAIN, TWO, SAYS_MORE):
        said = decide_outputs(prefix, rest, markers, 2)
        assert said == decide_rows(prefix, rest, markers, 2)
        assert said == [decide([*prefix, *rest[:place]], markers, 2) for place in range(len(rest) + 1)]


@given(st.lists(st.sampled_from([WORD, 3, END])), st.integers(0, 9))
def test_nothing_is_forced_after_a_committed_close_until_a_start(tail: list[int], budget: int) -> None:
    closed = [START, WORD, END]
    assert stored_rows(decide_outputs(closed, tail, PLAIN, budget)) == {}
    assert decide([*closed, *tail, START], PLAIN, 0).forced == END


@pytest.mark.parametrize("resident", [0, 1, 7])
def test_a_prompt_of_which_the_resident_count_is_known(resident: int) -> None:
    known = resident_prompt(resident, PLAIN)
    assert decide(known, PLAIN, resident + 1).count == resident
    assert decide(known, PLAIN, resident).forced == END
    assert decide(resident_prompt(None, PLAIN), PLAIN, 0).why == "outside"


@pytest.mark.parametrize(
    ("prompt", "output", "place"),
    [
        ([START], [WORD, END, WORD], None),
        ([WORD], [WORD, START, WORD, END], None),
        ([START], [WORD, END, START], 3),
        ([START], [START], 1),
        ([WORD], [END, WORD, START], 3),
        ([WORD], [START, WORD, START], 3),
    ],
)
def test_where_the_older_runner_is_not_modelled(prompt: list[int], output: list[int], place: int | None) -> None:
    assert v1_leaves(prompt, output, PLAIN) == place


def test_what_the_older_runner_miscounts_is_not_modelled() -> None:
    assert v1_leaves([START, 4], [WORD], Markers((START, 4), (END,))) == 0
    with pytest.raises(ValueError, match="end: an end marker of several ids with drafts is not modelled"):
        decide_rows([START], [WORD], TWO, 1, "v1")
    assert stored_rows(decide_rows([START, END], [], TWO, 1, "v1")) == {0: 3}


@pytest.mark.parametrize(
    ("markers", "budget", "line"),
    [
        (Markers((), (END,)), 1, "markers: start and end need at least one id"),
        (Markers((START,), ()), 1, "markers: start and end need at least one id"),
        (PLAIN, -1, "budget: -1 is negative"),
    ],
)
def test_bad_markers_and_budgets(markers: Markers, budget: int, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        decide([START], markers, budget)


_IDS = st.lists(st.sampled_from([START, END, WORD, 3]), max_size=8)


@given(
    prompt=_IDS,
    output=st.lists(st.sampled_from([START, END, WORD, 3]), max_size=12),
    drafts=_IDS,
    budget=st.integers(0, 4),
    markers=st.sampled_from([PLAIN, TWO, SAYS_MORE, Markers((START, WORD), (END, 3))]),
    place=st.integers(0, 12),
)
def test_a_course_has_the_rows_of_every_step(
    prompt: list[int], output: list[int], drafts: list[int], budget: int, markers: Markers, place: int
) -> None:
    course, position = Course(prompt, output, markers, budget), min(place, len(output))
    prefix = [*prompt, *output[:position]]
    assert course.rows(position, drafts, "v2") == decide_rows(prefix, drafts, markers, budget, "v2")
    if drafts and len(markers.end) > 1:
        with pytest.raises(ValueError, match="not modelled for runner v1"):
            course.rows(position, drafts, "v1")
    else:
        assert course.rows(position, drafts, "v1") == decide_rows(prefix, drafts, markers, budget, "v1")
