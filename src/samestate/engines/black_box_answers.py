"""All that a completion of an OpenAI API server tells: ids, text, log-probabilities, usage; nothing is asked here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from samestate.engines.openai_answers import DONE, ClientError, Reply, json_object, said

TOKEN_ID = "token_id:"
"""Begins vLLM's pieces where it was asked for ``return_tokens_as_token_ids``."""


class Answer(NamedTuple):
    """One choice. None: the server does not tell."""

    id: str
    token_ids: list[int] | None
    prompt_ids: list[int] | None
    text: str
    pieces: list[str] | None
    """Of the text, one a token; never `TOKEN_ID` ones."""
    logprobs: list[float] | None
    """Of the chosen tokens, natural."""
    margins: list[float] | None
    """To the runner-up."""
    finish_reason: str | None
    usage: Mapping[str, Any]
    """As it came, of all prompts of the request together."""

    def usage_count(self, name: str) -> int | None:
        """A count in `usage`."""
        value = self.usage.get(name)
        return value if type(value) is int and value >= 0 else None

    @property
    def cached(self) -> object:
        """``prompt_tokens_details.cached_tokens``, whatever it is; None: it is not said."""
        details = self.usage.get("prompt_tokens_details")
        return details.get("cached_tokens") if isinstance(details, dict) else None

    @property
    def generated(self) -> int | None:
        """Tokens of the answer."""
        told = self.token_ids if self.token_ids is not None else self.logprobs
        return len(told) if told is not None else None


def read_answers(reply: Reply, where: str, prompts: int) -> list[Answer]:
    """The first choice of each prompt, in their order. Raises `ClientError`, headed by `where`."""
    chunks = [json_object(event.data, where) for event in reply.events if event.data != DONE] or [
        json_object(reply.body, where)
    ]
    try:
        choices: list[list[dict[str, Any]]] = [[] for _ in range(prompts)]
        for chunk in chunks:
            if "error" in chunk:
                raise ClientError(f"{where}: the server broke off: {said(reply.body)}; see its log")
            for choice in chunk["choices"]:
                choices[choice.get("index", 0)].append(choice)
        usage: dict[str, Any] = next(
            (chunk["usage"] for chunk in reversed(chunks) if isinstance(chunk.get("usage"), dict)), {}
        )
        ended = [[one for one in some if one.get("finish_reason") is not None] for some in choices]
        if not all(ended):
            raise ClientError(f"{where}: an answer has no finish_reason, so it was cut; the server's log may say why")
        return [_answer(str(chunks[0].get("id", "")), some, usage) for some in choices]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ClientError(
            f"{where}: answered no completion ({type(error).__name__}); is it an OpenAI API server?"
        ) from None


def _answer(name: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> Answer:
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
    prompt = next((one["prompt_token_ids"] for one in choices if one.get("prompt_token_ids") is not None), None)
    told = [_listed(choice["logprobs"]) for choice in choices if choice.get("logprobs")]
    pieces = [str(piece) for one in told for piece in one.get("tokens") or ()]
    chosen = [value for one in told for value in one.get("token_logprobs") or ()]
    tops = [top for one in told for top in one.get("top_logprobs") or ()]
    token_ids = _ids([one for some in ids for one in some]) if ids else None
    if token_ids is None and pieces and all(piece.startswith(TOKEN_ID) for piece in pieces):
        token_ids = _ids([int(piece.removeprefix(TOKEN_ID)) for piece in pieces])
    if token_ids is None and told and all("ids" in one for one in told):
        token_ids = _ids([id_ for one in told for id_ in one["ids"]])
    whole = bool(chosen) and all(isinstance(value, int | float) and math.isfinite(value) for value in chosen)
    whole = whole and (token_ids is None or len(chosen) == len(token_ids)) and len(pieces) == len(chosen)
    return Answer(
        id=name,
        token_ids=token_ids,
        prompt_ids=_ids(prompt) if prompt is not None else None,
        text=_text("".join(str(choice.get("text") or "") for choice in choices)),
        pieces=[_text(piece) for piece in pieces] if whole and not pieces[0].startswith(TOKEN_ID) else None,
        logprobs=[float(value) for value in chosen] if whole else None,
        margins=_margins(pieces, chosen, tops) if whole else None,
        finish_reason=str(choices[-1].get("finish_reason")),
        usage=usage,
    )


def _listed(told: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities in the form of completions, where they come in that of chats, as llama.cpp sends them.

    There, each token has its id too: `ids`, where all have one.
    """
    content = told.get("content")
    if not isinstance(content, list):
        return told
    ids = [one.get("id") for one in content]
    return {
        "tokens": [one["token"] for one in content],
        "token_logprobs": [one["logprob"] for one in content],
        "top_logprobs": [{str(top["token"]): top["logprob"] for top in one["top_logprobs"]} for one in content],
    } | ({"ids": ids} if None not in ids else {})


def _text(given: str) -> str:
    """Half characters, which JSON can say and UTF-8 cannot, as question marks."""
    return given.encode(errors="replace").decode()


def _ids(given: list[Any]) -> list[int]:
    if not all(type(one) is int and one >= 0 for one in given):
        raise ValueError("token ids that are none")
    return given


def _margins(pieces: list[str], chosen: list[float], tops: list[Any]) -> list[float] | None:
    """None unless every token has a runner-up: two that read alike are one entry of the server's."""
    if len(tops) != len(chosen):
        return None
    margins = []
    for piece, value, top in zip(pieces, chosen, tops, strict=True):
        others = [other for name, other in (top or {}).items() if name != piece]
        if not others or not all(isinstance(other, int | float) and math.isfinite(other) for other in others):
            return None
        margins.append(float(value - max(others)))
    return margins
