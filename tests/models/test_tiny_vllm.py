"""The tiny model on vLLM: its output is no loop, and it remembers the start of a prompt."""

from typing import Any

import pytest

from samestate.models.templates import TEMPLATES, render
from samestate.models.tokenizer import DIGIT_IDS, readable_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def continuation(llm: Any, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, seed=42, max_tokens=64, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    llm.reset_prefix_cache()
    return list(answer.outputs[0].token_ids)


def prompt(llm: Any, template: str, tokens: int) -> list[int]:
    encode = llm.get_tokenizer().encode
    return render(TEMPLATES[template].parts("target"), lambda text: encode(text, add_special_tokens=False), tokens)


@pytest.mark.parametrize("template", TEMPLATES)
def test_greedy_output_is_readable_and_varied(tiny_llm: Any, template: str) -> None:
    output = continuation(tiny_llm, prompt(tiny_llm, template, 3584))
    assert len(output) == 64
    assert len(set(output)) >= 20
    assert set(output) <= set(readable_ids())


@pytest.mark.parametrize("tokens", [3584, 5377])
@pytest.mark.parametrize("template", TEMPLATES)
def test_one_early_token_changes_the_continuation(tiny_llm: Any, template: str, tokens: int) -> None:
    before = prompt(tiny_llm, template, tokens)
    place = next(index for index, id_ in enumerate(before) if id_ in DIGIT_IDS)
    assert place < 16
    after = list(before)
    after[place] = DIGIT_IDS[(before[place] + 1 - DIGIT_IDS[0]) % 10]
    assert continuation(tiny_llm, before) == continuation(tiny_llm, before)
    assert continuation(tiny_llm, before) != continuation(tiny_llm, after)


def test_chat_goes_through_the_models_own_tokenizer(tiny_llm: Any) -> None:
    from vllm import SamplingParams

    answer = tiny_llm.chat([{"role": "user", "content": "口令是什么?"}], SamplingParams(temperature=0, max_tokens=8))
    output = answer[0].outputs[0]
    assert len(output.token_ids) == 8
    assert output.text == tiny_llm.get_tokenizer().decode(output.token_ids)
