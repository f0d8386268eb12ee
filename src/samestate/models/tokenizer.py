"""The tokenizer of the tiny models: byte-level BPE, written as the files that servers load.

Ids: 0-4 special tokens, 5-260 the bytes 0x00-0xff in order, then pairs of frequent
characters up to 511, then what a model adds. Every byte has an id, so every text can be encoded, and every id decodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice, product

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
PAD, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
FIRST_BYTE = len(SPECIALS)
FIRST_PAIR = FIRST_BYTE + 256
VOCAB_SIZE = 512
LONGEST = 65536
"""Tokens of a sequence, where a model says no more."""
DIGIT_IDS = range(FIRST_BYTE + 0x30, FIRST_BYTE + 0x3A)

_FREQUENT = "etaoinshrdlucmfwypvbg"


def readable_ids() -> list[int]:
    """Ids whose text is printable ASCII, blank or newline: any sequence of them is valid UTF-8."""
    single = [FIRST_BYTE + byte for byte in (0x0A, *range(0x20, 0x7F))]
    return single + list(range(FIRST_PAIR, VOCAB_SIZE))


def tokenizer_files(
    chat_template: str, controls: Sequence[str] = (), words: Sequence[str] = (), longest: int = LONGEST
) -> dict[str, bytes]:
    """The tokenizer files by name, the same bytes every time. `longest`: tokens of a sequence.

    Ids from `VOCAB_SIZE` on: `controls`, each one token wherever it stands in a text, then `words`, which only decode.
    """
    added = [(id_, token, token not in ("<think>", "</think>"), False) for id_, token in enumerate(SPECIALS)]
    added += [(id_, token, False, True) for id_, token in enumerate(controls, start=VOCAB_SIZE)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": token,
                "single_word": alone,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                # The thinking markers are text that a client must see; the others steer the conversation.
                "special": special,
            }
            for id_, token, special, alone in added
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id_ for id_, token in enumerate([*_vocabulary(), *controls, *map(_spelt, words)])},
            "merges": [list(pair) for pair in _pairs()],
        },
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": longest,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _vocabulary() -> list[str]:
    return [*SPECIALS, *_byte_characters(), *("".join(pair) for pair in _pairs())]


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _spelt(word: str) -> str:
    characters = _byte_characters()
    return "".join(characters[byte] for byte in word.encode())


def _pairs() -> list[tuple[str, str]]:
    """The merges: a blank or frequent letter before a frequent letter."""
    blank = _byte_characters()[0x20]
    pairs = product([blank, *_FREQUENT[:11]], _FREQUENT)
    return list(islice(pairs, VOCAB_SIZE - FIRST_PAIR))


def _json(content: object) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
