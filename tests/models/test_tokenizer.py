"""The tokenizer as `transformers`, and so every server, loads it."""

from pathlib import Path
from typing import Any

import pytest

from samestate.models import scripts
from samestate.models.build import build
from samestate.models.tokenizer import DIGIT_IDS, SPECIALS, VOCAB_SIZE, readable_ids

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    build("qwen3-next-tiny", folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    ["the answer is 166 crates", "口令是什么？\n回答：", "  blanks\t\n", "😀 é ß", "".join(map(chr, range(1, 0x250)))],
)
def test_text_survives(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == text


def test_every_id_decodes_and_has_one_token(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    tokens = tokenizer.convert_ids_to_tokens(list(range(VOCAB_SIZE)))
    assert len(set(tokens)) == VOCAB_SIZE
    assert all(tokenizer.decode([id_]) for id_ in range(VOCAB_SIZE))


def test_any_sequence_of_readable_ids_is_text(tokenizer: Any) -> None:
    text = tokenizer.decode(readable_ids())
    assert text.isascii() and "<|" not in text.replace("<=>", "")
    assert text == "".join(tokenizer.decode([id_]) for id_ in readable_ids())


def test_special_tokens_are_one_id_each(tokenizer: Any) -> None:
    for id_, token in enumerate(SPECIALS):
        assert tokenizer.encode(token, add_special_tokens=False) == [id_]
    assert tokenizer.eos_token_id == SPECIALS.index("<|im_end|>")
    assert tokenizer.decode([3, 4], skip_special_tokens=True) == "<think></think>"
    assert tokenizer.decode(list(DIGIT_IDS)) == "0123456789"


def test_chat_template_opens_a_thought_and_drops_old_ones(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhidden\n</think>\n\ntwo"},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    quick = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert quick.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("models") / "scripted"
    build("qwen3-tiny", folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_control_words_are_one_token_wherever_they_stand(scripted: Any) -> None:
    ids = scripted.encode("Think, close-after-3.\nThen again-after-37", add_special_tokens=False)
    assert {scripts.token("close-after-3"), scripts.token("again-after-37")} < set(ids)
    assert not set(ids).intersection(map(scripts.token, ["close-after-37", "again-after-3"]))
    assert all(scripted.encode(word, add_special_tokens=False) == [scripts.token(word)] for word in scripts.CONTROLS)
    assert not set(scripted.encode("disclose-after-30 close-after-3000")).intersection(scripts.FIRST_ENTRY)


def test_what_the_model_writes_decodes_and_is_never_encoded(scripted: Any) -> None:
    assert scripted.decode(scripts.expected_continuation([scripts.END])[:-1]).strip() == scripts.ANSWER
    assert len(scripted) == scripts.LAST_ID + 1
    for word in scripts.WORDS:
        assert scripted.decode([scripts.token(word)]) == word
        assert scripts.token(word) not in scripted.encode(word, add_special_tokens=False)


def test_the_chat_template_reaches_the_script(scripted: Any) -> None:
    ids = scripted.apply_chat_template(
        [{"role": "user", "content": "What is it? close-after-2"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[-2:] == [scripts.START, scripts.NEWLINE]
    text = scripted.decode(scripts.expected_continuation(ids), skip_special_tokens=True)
    assert text == f" step2 step1</think>\n\n{scripts.ANSWER}"
