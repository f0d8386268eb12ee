"""The weights of `qwen3-tiny` and `qwen3-tiny-draft`: Qwen3 (dense), with the chain of `scripts` in them.

Channels of the residual stream, 384 in all:

======== ============================================================================================
0        the same for every token
1-15     flags of control words, of the tokens that open and close reasoning, of a second reasoning
16-127   ±1: who the token is
128-255  ±1: a control word's own copy of the code of the token that it leads to; else 0
256-383  ±1: the code of the next token. The output matrix holds every token's code and nothing else
======== ============================================================================================

Layer 0 carries the control words: one head looks from an opening token for the control word and adds its copy, another
from ``</think>`` for an ``again-`` word. Their keys lie in the three slowest rotary channels: distance does not count.
The other heads, layers and all MLPs are drawn at random and write little: the output depends on the whole context, in
its bits, and the chain's lead over every other token stays (the build refuses small ones; a test measures it on vLLM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import sqrt

from samestate.models import scripts
from samestate.models.weights import ZERO, Weight, bits, constant, drawn

HIDDEN, CODE = 384, 128
EVEN, FIRST_WORD, SECOND_WORD, SECOND_TOKEN, AT_NEWLINE, AT_START, AT_END = range(7)
WHO, COPY, NEXT = 16, 128, 256
FLAG, EVENLY = 4.0, 2.0
IDLE, SOUGHT, SOUGHT_MORE = 61, 62, 63
"""Channels of a head of 128 whose rotation is slowest (0.016 radian over 8,192 tokens)."""
SHARP = 4.0
"""Of the carrying layer's queries: what is sought scores 20 and more above everything else."""
CARRIED = 2.5
"""A carried code against the token's own one."""
NOISE = 0.05
"""Standard deviation of what a random part writes, the stream's own code being ±1."""
OUTPUT = 1.0
LARGEST_OVERLAP = 36
"""Of two codes of 128 channels."""
LEAST_LEAD = 60.0
"""Nats, before the random parts have their say."""


def target(config: dict[str, int], stream: str) -> Iterator[Weight]:
    """Every tensor of `qwen3-tiny`. Raises `ValueError` if a token's lead is too small."""
    return _weights(config, stream, scripts.successor)


def draft(config: dict[str, int], stream: str) -> Iterator[Weight]:
    """Every tensor of `qwen3-tiny-draft`. Raises `ValueError` if a token's lead is too small."""
    return _weights(config, stream, scripts.draft_successor)


def _weights(config: dict[str, int], stream: str, successor: Callable[[int], int]) -> Iterator[Weight]:
    if config["hidden_size"] != HIDDEN or config["head_dim"] != CODE or config["vocab_size"] <= scripts.LAST_ID:
        raise ValueError(
            "config.json: hidden_size, head_dim and vocab_size are not those that these weights are made for"
        )
    _refuse_small_leads(successor)
    yield _embedding(config["vocab_size"], stream, successor)
    for index in range(config["num_hidden_layers"]):
        yield from _layer(f"model.layers.{index}", config, stream, carries=index == 0)
    yield constant("model.norm.weight", HIDDEN, value=1.0)
    yield _output(config["vocab_size"])


@cache
def codes() -> dict[int, int]:
    """The code of every token that the model writes: 128 signs as bits, no two too much alike."""
    written = sorted({scripts.successor(id_) for id_ in range(scripts.LAST_ID + 1)})
    found: dict[int, int] = {}
    attempt = 0
    for id_ in written:
        while True:
            code = bits(f"code/{attempt}", CODE)
            attempt += 1
            if all(abs(_overlap(code, other)) <= LARGEST_OVERLAP for other in found.values()):
                break
        found[id_] = code
    return found


def _overlap(one: int, other: int) -> int:
    return CODE - 2 * (one ^ other).bit_count()


def _signs(code: int, count: int) -> list[float]:
    return [1.0 if code >> n & 1 else -1.0 for n in range(count)]


def _refuse_small_leads(successor: Callable[[int], int]) -> None:
    """Hold every token's lead, and that of every carried word, against the codes."""
    every = codes()

    def lead(wanted: int, parts: dict[int, float], squares: float) -> float:
        def score(id_: int) -> float:
            return sum(weight * _overlap(every[id_], every[part]) for part, weight in parts.items())

        best = max(score(id_) for id_ in every if id_ != wanted)
        return OUTPUT * (score(wanted) - best) / sqrt(squares / HIDDEN)

    own = EVENLY**2 + COPY - WHO + CODE
    leads = {id_: lead(successor(id_), {successor(id_): 1.0}, own + CODE) for id_ in range(scripts.LAST_ID + 1)}
    carried = [(scripts.NEWLINE, entry) for entry in scripts.FIRST_ENTRY.values()]
    carried += [(scripts.START, entry) for entry in (*scripts.FIRST_ENTRY.values(), *scripts.SECOND_ENTRY.values())]
    carried += [(scripts.END, scripts.START), (scripts.END, scripts.AFTER_CLOSE)]
    for opener, entry in carried:
        if entry != successor(opener):
            squares = own + FLAG**2 + (1 + CARRIED) ** 2 * CODE
            leads[entry] = min(leads[entry], lead(entry, {successor(opener): 1.0, entry: CARRIED}, squares))
    token, least = min(leads.items(), key=lambda item: item[1])
    if least < LEAST_LEAD:
        raise ValueError(f"the weights do not do: token {token} leads by {least:.1f} nats, less than {LEAST_LEAD:.0f}")


def _flags(id_: int) -> Iterator[int]:
    marks = {
        FIRST_WORD: id_ in scripts.FIRST_ENTRY,
        SECOND_WORD: id_ in scripts.SECOND_ENTRY,
        SECOND_TOKEN: id_ in scripts.SECOND_TOKENS,
        AT_NEWLINE: id_ == scripts.NEWLINE,
        AT_START: id_ == scripts.START,
        AT_END: id_ == scripts.END,
    }
    return (channel for channel, marked in marks.items() if marked)


def _embedding(vocabulary: int, stream: str, successor: Callable[[int], int]) -> Weight:
    weight = constant("model.embed_tokens.weight", vocabulary, HIDDEN, value=0.0)
    entries = scripts.FIRST_ENTRY | scripts.SECOND_ENTRY
    for id_ in range(vocabulary):
        weight.set(id_, EVEN, EVENLY)
        for channel in _flags(id_):
            weight.set(id_, channel, FLAG)
        for n, sign in enumerate(_signs(bits(f"{stream}/who/{id_}", COPY - WHO), COPY - WHO)):
            weight.set(id_, WHO + n, sign)
        for n, sign in enumerate(_signs(codes()[successor(id_)], CODE)):
            weight.set(id_, NEXT + n, sign)
        if id_ in entries:
            for n, sign in enumerate(_signs(codes()[entries[id_]], CODE)):
                weight.set(id_, COPY + n, sign)
    return weight


def _output(vocabulary: int) -> Weight:
    weight = constant("lm_head.weight", vocabulary, HIDDEN, value=0.0)
    for id_, code in codes().items():
        for n, sign in enumerate(_signs(code, CODE)):
            weight.set(id_, NEXT + n, OUTPUT * sign)
    return weight


def _layer(layer: str, config: dict[str, int], stream: str, carries: bool) -> Iterator[Weight]:
    heads, inner = config["num_attention_heads"] * CODE, config["intermediate_size"]

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> Weight:
        return drawn(stream, f"{layer}.{name}.weight", rows, columns, std=gain / sqrt(columns))

    def write_back(name: str, columns: int) -> Weight:
        """A projection into the residual stream that leaves flags alone."""
        weight = linear(name, HIDDEN, columns, NOISE)
        for place in range(WHO * columns):
            weight.values[place] = ZERO
        return weight

    attention = {name: linear(f"self_attn.{name}_proj", heads, HIDDEN) for name in ("q", "k", "v")}
    attention["o"] = write_back("self_attn.o_proj", heads)
    if carries:
        _carry(attention)
    yield from attention.values()
    yield constant(f"{layer}.self_attn.q_norm.weight", CODE, value=SHARP)
    yield constant(f"{layer}.self_attn.k_norm.weight", CODE, value=1.0)
    yield linear("mlp.gate_proj", inner, HIDDEN)
    yield linear("mlp.up_proj", inner, HIDDEN)
    yield write_back("mlp.down_proj", inner)
    yield constant(f"{layer}.input_layernorm.weight", HIDDEN, value=1.0)
    yield constant(f"{layer}.post_attention_layernorm.weight", HIDDEN, value=1.0)


def _carry(attention: dict[str, Weight]) -> None:
    """Heads 0 and 1 look for control words instead."""
    queries, keys, values, out = (attention[name] for name in ("q", "k", "v", "o"))
    for weight in (queries, keys, values):
        for place in range(2 * CODE * HIDDEN):
            weight.values[place] = ZERO
    for row in range(HIDDEN):
        for column in range(2 * CODE):
            out.set(row, column, 0.0)
    seek, seek_more = 20.0, 40.0
    opening, closing = 0, CODE
    for head in (opening, closing):
        queries.set(head + IDLE, EVEN, 1.0)
        keys.set(head + IDLE, EVEN, 1.0)
    queries.set(opening + SOUGHT, AT_NEWLINE, seek)
    queries.set(opening + SOUGHT, AT_START, seek)
    queries.set(opening + SOUGHT_MORE, AT_START, seek_more)
    keys.set(opening + SOUGHT, FIRST_WORD, seek)
    keys.set(opening + SOUGHT_MORE, SECOND_WORD, seek)
    queries.set(closing + SOUGHT, AT_END, seek)
    queries.set(closing + SOUGHT_MORE, AT_END, seek_more)
    keys.set(closing + SOUGHT, SECOND_WORD, seek)
    keys.set(closing + SOUGHT_MORE, SECOND_TOKEN, seek)
    for n in range(CODE):
        values.set(opening + n, COPY + n, 1.0)
        out.set(NEXT + n, opening + n, CARRIED)
    # A value is a flag alone: 1 of the word that reopens, 1 of the token that says that it has been done.
    values.set(closing, SECOND_WORD, 1 / FLAG)
    values.set(closing + 1, SECOND_TOKEN, 1 / FLAG)
    again, done = (_signs(codes()[id_], CODE) for id_ in (scripts.START, scripts.AFTER_CLOSE))
    for n in range(CODE):
        out.set(NEXT + n, closing, CARRIED * again[n])
        out.set(NEXT + n, closing + 1, CARRIED * done[n])
