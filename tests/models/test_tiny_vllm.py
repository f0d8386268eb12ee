"""The tiny model on vLLM: its output is no loop, and it remembers the start of a prompt."""

from pathlib import Path

import pytest

from samestate.engines.vllm import VllmEngine
from samestate.models.templates import TEMPLATES, render
from samestate.models.tokenizer import DIGIT_IDS, readable_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def continuation(engine: VllmEngine, prompt: list[int]) -> list[int]:
    answer = engine.generate_one("probe", prompt, 64, 42, True)
    assert engine.reset_local_cache().local_reset
    return answer.token_ids


def prompt(engine: VllmEngine, template: str, tokens: int) -> list[int]:
    return render(TEMPLATES[template].parts("target"), engine.encode, tokens)


@pytest.mark.parametrize("template", TEMPLATES)
def test_greedy_output_is_readable_and_varied(tiny_engine: VllmEngine, template: str) -> None:
    output = continuation(tiny_engine, prompt(tiny_engine, template, 3584))
    assert len(output) == 64
    assert len(set(output)) >= 20
    assert set(output) <= set(readable_ids())


@pytest.mark.parametrize("tokens", [3584, pytest.param(5377, marks=pytest.mark.deep)])
@pytest.mark.parametrize("template", TEMPLATES)
def test_one_early_token_changes_the_continuation(tiny_engine: VllmEngine, template: str, tokens: int) -> None:
    before = prompt(tiny_engine, template, tokens)
    place = next(index for index, id_ in enumerate(before) if id_ in DIGIT_IDS)
    assert place < 16
    after = list(before)
    after[place] = DIGIT_IDS[(before[place] + 1 - DIGIT_IDS[0]) % 10]
    assert continuation(tiny_engine, before) == continuation(tiny_engine, before)
    assert continuation(tiny_engine, before) != continuation(tiny_engine, after)


def test_chat_goes_through_the_models_own_tokenizer(tiny_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "口令是什么?"}], tokenize=False, add_generation_prompt=True
    )
    assert "口令是什么?" in text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
