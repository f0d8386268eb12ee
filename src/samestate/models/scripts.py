"""What `qwen3-tiny` does, token by token: a dense model whose prompt says when its reasoning ends.

The model is a chain over token ids, in its weights (`marker_weights`): a token has one successor, which leads every
other by more than 20 nats, so that sampling at temperature 0.6 and top-p 0.95 takes the tokens of greedy decoding.
Control words anywhere in the prompt say what the chain does; attention carries them to the tokens that open and close
reasoning, so a lost or foreign KV cache shows.

====================  ===========================================================================================
word in the prompt    effect
====================  ===========================================================================================
``close-after-N``     N = 0…200: N reasoning tokens (`` stepN`` … `` step1``), then ``</think>`` by itself
``close-never``       reasoning never ends by itself: `` round0`` … `` round21``, over and over; the same without a word
``again-after-M``     M = 1…40: after its close the model emits ``<think>`` again, M tokens (`` moreM`` …), ``</think>``
``again-never``       the same, and this second reasoning never ends by itself: `` lap0`` … `` lap6``, over and over
``open-think``        as the prompt's last token, outside reasoning: the model opens reasoning itself
====================  ===========================================================================================

- Reasoning opens where the last token is ``<think>`` or a single newline: the chat template ends with both, so that the
  newline is one prompt-resident reasoning token.
- A prompt that ends within reasoning, on a chain token, goes on from there (`resident_prompt`).
- After ``</think>``, natural or forced, comes the answer, `ANSWER`, in nine tokens, then ``<|im_end|>``: with a budget
  of 64 and no prompt-resident token the marker is at output position 64 and the stop at 74.
- After the stop, which only a worker sees, come `` after0`` … `` after7``, over and over.
- At most one ``close-`` and one ``again-`` word a prompt. A prompt that ends in ``<think>`` itself and holds an
  ``again-`` word starts with the second reasoning.

`qwen3-tiny-draft` does the same but for some tokens, after which it names the next but one (`draft_errs`). Their gaps
are 1, 1, 2, 3, 4, 5 and 6, so that of K ≤ 5 drafts every number 0…K gets accepted in a long request. N-gram speculation
finds the cycles, and rejects where they are left.

Markers of several tokens need no other model: a forced end such as ``so</think>`` ends in the marker of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from samestate.models.tokenizer import FIRST_BYTE, SPECIALS, VOCAB_SIZE

STEPS, MORE, ROUNDS, LAPS, TAIL = 200, 40, 22, 7, 8
_ANSWER = ("\n\n", "Answer", ": ", "95", "67", ",1", "085", ",10", "652")
ANSWER = "".join(_ANSWER).strip()
"""The text after the reasoning, without blanks around it."""

CONTROLS = (
    *(f"close-after-{n}" for n in range(STEPS + 1)),
    "close-never",
    *(f"again-after-{n}" for n in range(1, MORE + 1)),
    "again-never",
    "open-think",
)
"""Words of the tokenizer that steer the model, in the order of their ids, from `VOCAB_SIZE` on."""
WORDS = (
    *(f" step{n}" for n in range(1, STEPS + 1)),
    *(f" round{n}" for n in range(ROUNDS)),
    *(f" more{n}" for n in range(1, MORE + 1)),
    *(f" lap{n}" for n in range(LAPS)),
    *_ANSWER,
    *(f" after{n}" for n in range(TAIL)),
)
"""What only the model writes: no text is encoded into them."""

_IDS = {text: id_ for id_, text in enumerate((*CONTROLS, *WORDS), start=VOCAB_SIZE)}
START, END, STOP = (SPECIALS.index(token) for token in ("<think>", "</think>", "<|im_end|>"))
NEWLINE = FIRST_BYTE + 0x0A
LAST_ID = VOCAB_SIZE + len(CONTROLS) + len(WORDS) - 1


def token(text: str) -> int:
    """The id of a control word, or of a word that the model writes. Raises `KeyError`."""
    return _IDS[text]


def _ids(words: Iterator[str] | tuple[str, ...]) -> list[int]:
    return [token(word) for word in words]


_answer = _ids(_ANSWER)
_steps = [END, *_ids(f" step{n}" for n in range(1, STEPS + 1))]
_more = [END, *_ids(f" more{n}" for n in range(1, MORE + 1))]
_rounds = _ids(f" round{n}" for n in range(ROUNDS))
_laps = _ids(f" lap{n}" for n in range(LAPS))
_tail = _ids(f" after{n}" for n in range(TAIL))

FIRST_ENTRY = {token(f"close-after-{n}"): id_ for n, id_ in enumerate(_steps)} | {token("close-never"): _rounds[0]}
"""Control word to the first token of the reasoning that it asks for."""
SECOND_ENTRY = {token(f"again-after-{n}"): _more[n] for n in range(1, MORE + 1)} | {token("again-never"): _laps[0]}
SECOND_TOKENS = frozenset([*_more[1:], *_laps])
"""Tokens of a second reasoning: with one of them before it, a close is the last."""
AFTER_CLOSE = _answer[0]


def _cycle(ids: list[int]) -> dict[int, int]:
    return dict(zip(ids, [*ids[1:], ids[0]], strict=True))


_SUCCESSORS: dict[int, int] = {
    **FIRST_ENTRY,
    **SECOND_ENTRY,
    token("open-think"): START,
    **{_steps[n]: _steps[n - 1] for n in range(1, STEPS + 1)},
    **{_more[n]: _more[n - 1] for n in range(1, MORE + 1)},
    **_cycle(_rounds),
    **_cycle(_laps),
    **_cycle(_tail),
    **dict(zip([END, *_answer], [*_answer, STOP], strict=True)),
    STOP: _tail[0],
}
_GAPS = (0, 1, 2, 4, 7, 11, 16)
"""Places in a chain, modulo 22, after which the draft model errs."""
_ERRS = frozenset(
    chain[n] for chain in (_steps, _rounds, _more, _laps) for n in range(len(chain)) if n % ROUNDS in _GAPS
).union([_answer[2]]) - {END}


def successor(id_: int) -> int:
    """The next token where no control word has a say. Text leads into reasoning that never ends."""
    return _SUCCESSORS.get(id_, _rounds[0])


def draft_errs(id_: int) -> bool:
    """Whether the draft model names the next token but one after this one."""
    return id_ in _ERRS


def draft_successor(id_: int) -> int:
    """`successor` as the draft model has it."""
    return successor(successor(id_)) if draft_errs(id_) else successor(id_)


def next_token(context: Sequence[int]) -> int:
    """The token after `context`, which is prompt and output.

    Raises `ValueError` for an empty one and for two control words of one kind.
    """
    return _next(context, successor)


def _next(context: Sequence[int], chain: Callable[[int], int]) -> int:
    if not context:
        raise ValueError("the prompt is empty: the model needs one token at least")
    last = context[-1]
    if last not in (START, NEWLINE, END):
        return chain(last)
    first = _control(context, FIRST_ENTRY, "close-")
    second = _control(context, SECOND_ENTRY, "again-")
    if last == END:
        return AFTER_CLOSE if second is None or not SECOND_TOKENS.isdisjoint(context) else START
    if last == START and second is not None:
        return second
    return chain(last) if first is None else first


def _control(context: Sequence[int], entries: dict[int, int], kind: str) -> int | None:
    found = {entries[id_] for id_ in context if id_ in entries}
    if len(found) > 1:
        raise ValueError(f"the prompt has several {kind} words: keep one")
    return found.pop() if found else None


def expected_continuation(
    prompt_ids: Sequence[int],
    limit: int = 512,
    forced: Callable[[Sequence[int]], int | None] = lambda context: None,
) -> list[int]:
    """Token ids that the model generates: up to and with the stop token, at most `limit`.

    `forced` gets prompt and output so far and may put a token in the model's place, as a reasoning budget does.
    """
    context = list(prompt_ids)
    while len(context) - len(prompt_ids) < limit:
        own = next_token(context)
        wanted = forced(context)
        context.append(own if wanted is None else wanted)
        if context[-1] == STOP:
            break
    return context[len(prompt_ids) :]


def drafts(context: Sequence[int], count: int) -> list[int]:
    """What the draft model proposes after `context`, greedily."""
    ids = list(context)
    for _ in range(count):
        ids.append(_next(ids, draft_successor))
    return ids[len(context) :]


def chat_prompt(*controls: str) -> list[int]:
    """A short prompt in the shape of the chat template: these control words, then open reasoning with its newline."""
    return [*_text("user: "), *map(token, controls), *_text("\nassistant: "), START, NEWLINE]


def resident_prompt(*controls: str, resident: int) -> list[int]:
    """A prompt with `resident` reasoning tokens after its start marker, those with which the model would have begun."""
    ids = [*_text("user: "), *map(token, controls), START]
    return ids + list(islice(expected_continuation(ids, resident), resident))


def _text(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]
