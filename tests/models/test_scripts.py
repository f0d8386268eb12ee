"""The behaviour of `qwen3-tiny` as pure functions: what each control word does, and where the draft model errs."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from samestate.models import scripts
from samestate.models.scripts import (
    END,
    NEWLINE,
    START,
    STOP,
    chat_prompt,
    draft_errs,
    drafts,
    expected_continuation,
    next_token,
    resident_prompt,
    token,
)
from samestate.models.tokenizer import FIRST_BYTE


def words(ids: list[int]) -> list[str]:
    names = {scripts.token(text): text for text in (*scripts.CONTROLS, *scripts.WORDS)}
    return [names.get(id_) or {START: "<think>", END: "</think>", STOP: "<|im_end|>"}[id_] for id_ in ids]


def answer() -> list[int]:
    return expected_continuation([END])


@pytest.mark.parametrize("count", [0, 1, 2, 37, 200])
def test_reasoning_closes_after_the_named_number_of_tokens(count: int) -> None:
    output = expected_continuation(chat_prompt(f"close-after-{count}"))
    assert output[count] == END and END not in output[:count]
    assert output[count + 1 :] == answer()


def test_the_answer_is_nine_tokens_and_the_stop() -> None:
    assert len(answer()) == 10 and answer()[-1] == STOP
    assert "".join(words(answer()[:-1])).strip() == scripts.ANSWER == "Answer: 9567,1085,10652"


@pytest.mark.parametrize("controls", [("close-never",), ()])
def test_reasoning_that_never_ends_goes_round(controls: tuple[str, ...]) -> None:
    output = expected_continuation(chat_prompt(*controls), 100)
    assert len(output) == 100 and END not in output
    assert output[:78] == output[22:]


def test_a_forced_close_is_answered_too() -> None:
    prompt = [*chat_prompt("close-never")[:-1]]
    output = expected_continuation(prompt, forced=lambda context: END if len(context) == len(prompt) + 64 else None)
    assert output[64] == END and output[74] == STOP and len(output) == 75


def test_reasoning_is_entered_again_once() -> None:
    output = expected_continuation(chat_prompt("close-after-2", "again-after-3"))
    assert words(output[:8]) == [" step2", " step1", "</think>", "<think>", " more3", " more2", " more1", "</think>"]
    assert output[8:] == answer()


def test_the_second_reasoning_may_never_end() -> None:
    output = expected_continuation(chat_prompt("close-after-2", "again-never"), 40)
    assert output.count(START) == output.count(END) == 1 and output[-7:] == output[-14:-7]


def test_the_model_opens_reasoning_itself() -> None:
    output = expected_continuation([token("close-after-1"), token("open-think")])
    assert words(output[:3]) == ["<think>", " step1", "</think>"]


@pytest.mark.parametrize("resident", [0, 1, 9])
def test_a_prompt_may_end_within_reasoning(resident: int) -> None:
    prompt = resident_prompt("close-after-12", resident=resident)
    assert prompt[-resident - 1] == START
    assert expected_continuation(prompt).index(END) == 12 - resident


def test_after_the_stop_the_chain_goes_on() -> None:
    tail = [next_token([STOP])]
    for _ in range(8):
        tail.append(next_token(tail))
    assert words(tail) == [*(f" after{n}" for n in range(8)), " after0"]


@pytest.mark.parametrize("prompt", [[], [token("close-after-1"), token("close-never"), NEWLINE]])
def test_refuses_what_has_no_one_answer(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="the prompt"):
        next_token(prompt)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("controls", [("close-after-200",), ("close-never",)])
def test_drafts_are_accepted_in_every_number(controls: tuple[str, ...], depth: int) -> None:
    prompt = chat_prompt(*controls)
    output = expected_continuation(prompt, 300)
    seen, place = set(), 0
    while place + depth < len(output):
        proposed = drafts(prompt + output[:place], depth)
        accepted = next((n for n, id_ in enumerate(proposed) if id_ != output[place + n]), depth)
        seen.add(accepted)
        place += accepted + 1
    assert seen == set(range(depth + 1))


def test_the_draft_errs_where_it_says() -> None:
    context = chat_prompt("close-after-30")
    output = expected_continuation(context)
    wrong = [a for a, b in pairwise(output[:-1]) if drafts([a], 1) != [b]]
    assert wrong == [a for a in output[:-2] if draft_errs(a)] != []


def test_a_forced_end_of_several_tokens_ends_in_the_marker_of_the_chain() -> None:
    end = [FIRST_BYTE + ord("s"), FIRST_BYTE + ord("o"), END]
    prompt = chat_prompt("close-never")

    def forced(context: Sequence[int]) -> int | None:
        place = len(context) - len(prompt) - 8
        return end[place] if 0 <= place < len(end) else None

    output = expected_continuation(prompt, forced=forced)
    assert output[8:11] == end and output[11:] == answer()
