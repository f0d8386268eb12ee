"""What a completion tells, what a budget allows, and what a server says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samestate.engines import black_box_facts as facts
from samestate.engines.black_box_answers import read_answers
from samestate.engines.black_box_budget import Budget, BudgetSpent
from samestate.engines.openai_answers import DONE, ClientError, Event, Reply

from .answering import Conduct, answering
from .serving import playing, said

WHERE = "http://there/v1/completions"


def choice(index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": "ab", "finish_reason": "length"} | more


def told(tokens: list[str], tops: list[dict[str, float]]) -> dict[str, Any]:
    chosen = [top[token] for token, top in zip(tokens, tops, strict=True)]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops}


def reply(*chunks: dict[str, Any]) -> Reply:
    body = json.dumps(chunks[0]).encode() if len(chunks) == 1 else b""
    events = [Event(1, json.dumps(one).encode()) for one in chunks] if len(chunks) > 1 else []
    return Reply("/v1/completions", "there", b"", body, [*events, Event(2, DONE)] if events else [], 0, 1)


def test_ids_logprobs_and_margins_are_read_whole_and_streamed() -> None:
    first = told(["token_id:7"], [{"token_id:7": -0.25, "token_id:9": -1.5}])
    second = told(["token_id:8"], [{"token_id:8": -0.5, "token_id:1": -0.75}])
    whole = choice(token_ids=[7, 8], logprobs={name: first[name] + second[name] for name in first})
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    streamed = (
        {"id": "x", "choices": [choice(finish_reason=None, text="a", token_ids=[7], logprobs=first)]},
        {"choices": [choice(text="b", token_ids=[8], logprobs=second)]},
        {"choices": [], "usage": usage},
    )
    for chunks in (({"id": "x", "choices": [whole], "usage": usage},), streamed):
        (answer,) = read_answers(reply(*chunks), WHERE, 1)
        assert (answer.token_ids, answer.text, answer.logprobs) == ([7, 8], "ab", [-0.25, -0.5])
        assert answer.margins == [1.25, 0.25]
        assert (answer.cached, answer.usage_count("prompt_tokens"), answer.pieces) == (2, 3, None)


def test_ids_are_read_from_pieces_where_they_are_all_that_is_told() -> None:
    pieces = told(["token_id:7"], [{"token_id:7": -0.25, "token_id:9": -1.5}])
    (answer,) = read_answers(reply({"choices": [choice(logprobs=pieces)]}), WHERE, 1)
    assert answer.token_ids == [7]


def test_two_tokens_that_read_alike_leave_no_margin() -> None:
    (answer,) = read_answers(reply({"choices": [choice(logprobs=told(["a"], [{"a": -0.5}]))]}), WHERE, 1)
    assert (answer.margins, answer.logprobs, answer.pieces) == (None, [-0.5], ["a"])


@pytest.mark.parametrize("value", [None, "x", float("nan")])
def test_a_logprob_that_is_none_leaves_none_at_all(value: object) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [value], "top_logprobs": [{"a": -1.0}]}
    (answer,) = read_answers(reply({"choices": [choice(logprobs=logprobs)]}), WHERE, 1)
    assert (answer.logprobs, answer.margins) == (None, None)


def test_half_characters_can_be_written_down() -> None:
    (answer,) = read_answers(reply({"choices": [choice(text="a\ud800")]}), WHERE, 1)
    assert answer.text == "a?"


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"choices": None},
        {"choices": [choice(1)]},
        {"choices": [choice(token_ids=[-1])]},
        {"choices": [choice(finish_reason=None)]},
        {"choices": []},
        {"choices": ["x"]},
        {"error": "no"},
    ],
)
def test_what_is_no_completion_is_one_line(tree: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        read_answers(reply(tree), WHERE, 1)
    assert str(caught.value).startswith(WHERE) and "\n" not in str(caught.value)


def test_the_second_prompt_is_the_last_answer() -> None:
    first, second = read_answers(reply({"choices": [choice(1, text="b"), choice(0, text="a")]}), WHERE, 2)
    assert (first.text, second.text) == ("a", "b")


def test_a_budget_is_taken_before_and_corrected_after() -> None:
    budget = Budget(2, 100)
    budget.take(60)
    with pytest.raises(BudgetSpent, match="--budget-tokens: 40 of 100 are left"):
        budget.take(41)
    budget.correct(60, 10)
    budget.take(41)
    assert (budget.requests_left, budget.tokens_left) == (0, 49)
    with pytest.raises(BudgetSpent, match="--budget-requests: all 2 are spent"):
        budget.take(0)


@pytest.mark.regression
def test_what_was_used_beyond_what_was_foreseen_is_left_to_nobody() -> None:
    budget = Budget(4, 100)
    budget.take(60)
    budget.correct(60, 90)
    assert (budget.tokens_spent, budget.tokens_left) == (90, 10)
    with pytest.raises(BudgetSpent, match="--budget-tokens: 10 of 100 are left"):
        budget.take(11)
    budget.take(10)
    budget.correct(10, 300)
    assert (budget.tokens_spent, budget.tokens_left) == (390, 0)
    with pytest.raises(BudgetSpent):
        budget.take(1)


@pytest.mark.regression
@pytest.mark.parametrize(("counted", "left"), [(3, 92), (1, 92), (50, 45), (None, 92)])
def test_an_answer_costs_what_the_server_counts_and_no_less_than_what_came(counted: int | None, left: int) -> None:
    from samestate.engines.black_box import BlackBox, Prompt

    usage = {"prompt_tokens": 5} | ({"completion_tokens": counted} if counted is not None else {})
    with playing(said({"choices": [choice(token_ids=[7, 8, 9])], "usage": usage})) as server:
        box = BlackBox(server.url, Budget(9, 100))
        box.ask(Prompt([1] * 5, "", 5), 3, "salt")
        box.close()
    assert box.budget.tokens_left == left


def test_what_metrics_say_of_the_cache() -> None:
    text = 'vllm:cache_config_info{block_size="16",mamba_block_size="256",num_gpu_blocks="10",x="a\\"b"} 1.0\n'
    labels = facts.labels(text, "vllm:cache_config_info")
    sizes = {name: facts.count_of(value) for name, value in labels.items()}
    assert facts.interval_in(sizes) == 256 and labels["x"] == 'a\\"b'
    assert facts.interval_in({"block_size": "None", "mamba_block_size": None}) is None
    assert facts.value("a 1.0\na 2.5\n", "a") == 3.5 and facts.value("a x\n", "a") is None


@pytest.mark.regression
def test_caches_of_several_engines_are_no_one_cache() -> None:
    line = 'vllm:cache_config_info{engine="ENGINE",block_size="16",num_gpu_blocks="10"} 1.0\n'
    one, two = line.replace("ENGINE", "0"), line.replace("ENGINE", "1")
    assert facts.capacity(one, None) == 160 and facts.capacity(one, 256) == 2560
    assert facts.capacity(one + two, None) is None and facts.capacity("", 16) is None


def test_a_survey_costs_nothing() -> None:
    from samestate.engines.black_box import BlackBox

    with answering(Conduct(interval=32)) as server:
        box = BlackBox(server.url, Budget(1, 1))
        found = box.survey(None)
        box.close()
    assert (found.interval, found.vllm, found.tokenizer, found.can_reset, found.capacity) == (
        32,
        True,
        True,
        True,
        8192,
    )
    assert not server.asked and box.budget.requests_spent == 0


def test_logprobs_in_the_form_of_chats_tell_ids_pieces_and_margins() -> None:
    content = [
        {
            "id": 7,
            "token": "a",
            "logprob": -0.25,
            "top_logprobs": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -1.0}],
        },
        {
            "id": 9,
            "token": "b",
            "logprob": -0.5,
            "top_logprobs": [{"token": "b", "logprob": -0.5}, {"token": "c", "logprob": -2.0}],
        },
    ]
    (answer,) = read_answers(reply({"choices": [choice(logprobs={"content": content})]}), WHERE, 1)
    assert (answer.token_ids, answer.pieces) == ([7, 9], ["a", "b"])
    assert (answer.logprobs, answer.margins) == ([-0.25, -0.5], [0.75, 1.5])
    del content[0]["id"]
    (answer,) = read_answers(reply({"choices": [choice(logprobs={"content": content})]}), WHERE, 1)
    assert (answer.token_ids, answer.logprobs) == (None, [-0.25, -0.5])


@pytest.mark.parametrize("content", [["x"], [{}], [{"token": "a", "logprob": -1.0}]])
def test_logprobs_in_the_form_of_chats_that_lack_something_are_one_line(content: list[Any]) -> None:
    with pytest.raises(ClientError):
        read_answers(reply({"choices": [choice(logprobs={"content": content})]}), WHERE, 1)


def test_metrics_of_llama_cpp_are_read_as_counters_of_reuse() -> None:
    text = "llamacpp:prompt_tokens_total 30\nllamacpp:prompt_tokens_cached_total 12\nllamacpp:requests_processing 1\n"
    assert facts.counters(text) == {"vllm:prefix_cache_queries": 42.0, "vllm:prefix_cache_hits": 12.0}
    assert facts.counters("llamacpp:prompt_tokens_total 30\n") == {} and facts.waiting(text) == 1
    assert facts.waiting("sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\n") == 3 and facts.waiting("") is None


def test_a_server_is_called_by_its_own_name() -> None:
    assert facts.title_in({"info": {"title": "a server", "version": "0.3"}}) == ("a server", "0.3")
    assert facts.title_in({"info": {"title": "FastAPI", "version": "0.1.0"}}) == facts.title_in({}) == (None, None)
    assert facts.owner({"owned_by": "sglang"}) == "SGLang" and facts.owner({"owned_by": "me"}) is None
    assert facts.context_in({"default_generation_settings": {"n_ctx": 8192}}) == 8192 and facts.context_in({}) is None
