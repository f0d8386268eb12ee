"""The soak's own judgement: that it sees a wrong answer, and calls none wrong that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache import soak_harm, soak_work
from cache.soak_harm import Harm
from cache.soak_verdict import compare, floor
from cache.soak_work import ANSWER_TOKENS, Answered, C, Resumed, Turns

PROMPT = [7] * 300


def answered(tokens: list[int], *, margin: float = 2.0, logprob: float = -1.0, cached: int = 0) -> Answered:
    return Answered(0, 0, PROMPT, tokens, [logprob] * len(tokens), [margin] * len(tokens), cached, [])


def test_equal_answers_are_equal_and_another_one_is_wrong() -> None:
    alone = [answered([1, 2, 3])]
    assert compare(alone, [answered([1, 2, 3], cached=256)], 0.1) == (1, [], [], [])
    equal, _, ties, wrong = compare(alone, [answered([1, 9, 3], cached=256)], 0.1)
    assert (equal, ties) == (0, [])
    assert wrong == ["0.0: token 1, margin 2, 256 of 300 cached"]


def test_a_tie_below_the_floor_is_neither_equal_nor_wrong() -> None:
    equal, _, ties, wrong = compare([answered([1, 2, 3], margin=0.01)], [answered([1, 9, 3])], 0.1)
    assert (equal, len(ties), wrong) == (0, 1, [])


def test_an_answer_that_is_missing_or_of_another_prompt_is_no_comparison() -> None:
    alone = [answered([1])]
    with pytest.raises(AssertionError):
        compare(alone, [], 0.1)
    with pytest.raises(AssertionError):
        compare(alone, [alone[0]._replace(prompt=[8])], 0.1)


def test_the_floor_is_the_largest_difference_where_both_are_cold() -> None:
    alone = [answered([1, 2, 3])]
    found = floor(alone, [answered([1, 9, 3], logprob=-1.25)])
    assert found == (0.25, 1, 1), "what follows a difference is not compared"
    with pytest.raises(AssertionError, match="not cold"):
        floor(alone, [answered([1, 2, 3], cached=256)])
    with pytest.raises(AssertionError, match="preempted"):
        floor(alone, [alone[0]._replace(preempted=[0])])
    with pytest.raises(AssertionError, match="nothing was compared"):
        floor(alone, [answered([9, 2, 3])])


def test_what_followed_a_preemption_is_held_against_what_was_computed_as_it_was() -> None:
    alone, other = [answered([1, 2, 3])], answered([1, 2, 9])._replace(preempted=[0, 2])
    again = answered([9, 9, 9])._replace(prompt=[*PROMPT, 1, 2])
    assert compare(alone, [other], 0.1, [again]) == (1, ["0.0: token 2, preempted at [0, 2]"], [], [])
    wrong = compare(alone, [other], 0.1, [again._replace(tokens=[8, 8, 8])]).wrong
    assert wrong == ["0.0: token 2, margin 2, 0 of 300 cached, preempted at [0, 2]"]
    with pytest.raises(KeyError):
        compare(alone, [other], 0.1, [])
    before = answered([1, 9, 9])._replace(preempted=[2])
    assert len(compare(alone, [before], 0.1, [again]).wrong) == 1, "it differed before"
    assert [one.prompt for one in iter(Resumed([other]).take, None)] == [again.prompt]


def test_turns_continue_the_answer_before_them_and_end() -> None:
    work = soak_work.conversations(30, seed=1)
    turns, seen = Turns(work, seed=1), {}
    while (request := turns.take()) is not None:
        seen[request.name] = request.prompt
        turns.answered(request, [9] * ANSWER_TOKENS)
    assert len(seen) == 30
    assert seen["0.1"] == [*seen["0.0"], *[9] * ANSWER_TOKENS, *work[0].said[1]]
    known = [Answered(0, 0, seen["0.0"], [8] * ANSWER_TOKENS, [], [], 0, [])]
    follows = Turns(work[:1], 1, known)
    first = follows.take()
    assert first is not None
    follows.answered(first, [9] * ANSWER_TOKENS)
    second = follows.take()
    assert second is not None
    assert second.prompt == [*seen["0.0"], *[8] * ANSWER_TOKENS, *work[0].said[1]], "the control's, whatever it said"


def test_the_work_has_prompts_on_boundaries_and_shared_openings() -> None:
    work = soak_work.conversations(400, seed=1)
    lengths = [
        len(one.opening) + sum(map(len, one.said[: turn + 1])) + turn * ANSWER_TOKENS
        for one in work
        for turn in range(len(one.said))
    ]
    assert {0, 1, C - 1} <= {length % C for length in lengths}
    assert max(lengths) + ANSWER_TOKENS < 2560
    assert len({tuple(one.opening) for one in work}) == soak_work.OPENINGS


class Away:
    """In the place of a server."""

    def __init__(self) -> None:
        self.started = 0
        self.pid = -1

    def stop(self) -> int:
        return 0

    def start(self, interval: int) -> None:
        self.started += 1


def test_harm_never_falls_on_a_file_twice_and_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(soak_harm.os, "kill", lambda pid, signal: killed.append(pid))
    limits: list[tuple[int, ...]] = []

    def prlimit(pid: int, what: int, *new: tuple[int, int]) -> tuple[int, int]:
        limits.extend(new)
        return (-1, -1)

    monkeypatch.setattr(soak_harm.resource, "prlimit", prlimit)
    space = tmp_path / "pages" / "v1" / "digest"
    space.mkdir(parents=True)
    (space / "namespace.txt").write_text("a model")
    for number in range(50):
        (space / f"{number}.page").write_bytes(bytes(1000))
    server = Away()
    harm = Harm(tmp_path, False, server, 4711, 100, seed=1)  # type: ignore[arg-type]
    for answered_ in range(1, 101):
        harm.after(answered_)
    done = harm.end()
    changed = [path for path in space.glob("*.page") if path.read_bytes() != bytes(1000)]
    assert len(changed) == done.flipped + done.cut == 50
    assert (done.server_kills, server.started, len(killed)) == (2, 2, 2)
    assert done.disk_full == "EFBIG"
    assert limits == [(soak_harm.SMALL_FILE, -1), (-1, -1)]
