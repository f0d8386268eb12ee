"""What OpenAI API servers answer: raw bytes with their times, and what is read of them. No request is made here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from samestate.engines.base import EngineError

DONE = b"[DONE]"
_SHOWN = 200
"""Characters of a server's own words in an error."""


class ClientError(EngineError):
    """The server gave no answer that can be used. ``str(error)`` is one line, remedy included."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP; None: there was none, or it is not what is wrong."""


class Event(NamedTuple):
    """One server-sent event."""

    at_ns: int
    """Monotonic."""
    data: bytes
    """As it was sent, without ``data: ``."""


class Reply(NamedTuple):
    """What came back for one attempt."""

    path: str
    peer: str
    """``HOST:PORT`` that was connected to."""
    sent: bytes
    """The request's body."""
    body: bytes
    """All bytes of the answer's body, as they came."""
    events: list[Event]
    """Of a stream, ``[DONE]`` included; empty for an answer in one piece."""
    began_ns: int
    """Monotonic, before the request was handed over."""
    ended_ns: int
    """Monotonic: the answer's last byte was here."""

    @property
    def tree(self) -> dict[str, Any]:
        """The JSON object of an answer in one piece. Raises `ClientError`."""
        return json_object(self.body, f"http://{self.peer}{self.path}")


class Completion(NamedTuple):
    """The first choice of a chat or text completion, as the server said it."""

    id: str
    model: str
    prompt_token_ids: list[int] | None
    """None where the server returns no token ids; ask for them with ``return_token_ids``."""
    token_ids: list[int] | None
    text: str
    """Content, without reasoning."""
    reasoning: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    usage: dict[str, Any] | None
    reply: Reply


class Events:
    """Server-sent events out of chunks: lines end with LF or CRLF, an empty line ends an event."""

    def __init__(self) -> None:
        self.complete: list[Event] = []
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes, at_ns: int) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in (one.removesuffix(b"\r") for one in lines):
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                self.complete.append(Event(at_ns, b"\n".join(self._data)))
                self._data = []


def read_completion(chunks: list[dict[str, Any]], reply: Reply, where: str) -> Completion:
    """One choice, be it whole or in deltas. Raises `ClientError` for a shape that no OpenAI server has."""
    try:
        choices = list(_first_choices(chunks))
        parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
        if len(choices) > 1 and any("message" in choice for choice in choices):
            raise ValueError("more than the one choice that was asked for")
        if not choices:
            raise ClientError(f"{where}: answered without a choice; see its log")
        ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
        prompts = [one for one in (_prompt_ids(chunk) for chunk in chunks) if one is not None]
        reasoning = [part["reasoning"] for part in parts if part.get("reasoning") is not None]
        texts = [part.get("content") or part.get("text") or "" for part in parts]
        return Completion(
            id=str(chunks[0].get("id", "")),
            model=str(chunks[0].get("model", "")),
            prompt_token_ids=_ids(prompts[0]) if prompts else None,
            token_ids=[one for some in ids for one in _ids(some)] if ids else None,
            text="".join(texts),
            reasoning="".join(reasoning) if reasoning else None,
            finish_reason=_word(_last(choices, "finish_reason"), "finish_reason", str),
            stop_reason=_word(_last(choices, "stop_reason"), "stop_reason", str, int),
            usage=_usage(_last(chunks, "usage")),
            reply=reply,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ClientError(
            f"{where}: its answer has another shape ({one_line(error)}); is it an OpenAI API server?"
        ) from None


def _word(given: Any, name: str, *kinds: type) -> Any:
    if given is not None and type(given) not in kinds:
        raise ValueError(f"{name} of another kind")
    return given


def _ids(given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given):
        raise ValueError("token ids that are none")
    return given


def _usage(given: Any) -> dict[str, Any] | None:
    """Counts are whole numbers from 0, or absent."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("completion_tokens_details") or {}, dict):
        raise ValueError("usage that is no object")
    details = given.get("completion_tokens_details") or {}
    counts = {name: given.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts["reasoning_tokens"] = details.get("reasoning_tokens")
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError(f"usage.{name} that is no count: {count!r}")
    return given


def _first_choices(chunks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        if "error" in chunk:
            raise ClientError(f"the server broke off: {said(json.dumps(chunk).encode())}; see its log")
        if any(choice.get("index", 0) != 0 for choice in chunk["choices"]):
            raise ValueError("more than the one choice that was asked for")
        yield from chunk["choices"]


def _prompt_ids(chunk: dict[str, Any]) -> Any:
    """Chat completions have them beside the choices, text completions in them."""
    if chunk.get("prompt_token_ids") is not None:
        return chunk["prompt_token_ids"]
    return next((one["prompt_token_ids"] for one in chunk["choices"] if one.get("prompt_token_ids") is not None), None)


def _last(trees: list[dict[str, Any]], name: str) -> Any:
    return next((tree[name] for tree in reversed(trees) if tree.get(name) is not None), None)


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises `ClientError`, headed by `where`."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ClientError(f"{where}: answered no JSON object; is it an OpenAI API server?")
    return tree


def said(body: bytes) -> str:
    """What the server says of its refusal, one line."""
    try:
        tree = json.loads(body)
        error = tree.get("error", tree)
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        return ""
    return one_line(text) if text else ""


def one_line(text: object) -> str:
    """Words of a server as one line that a terminal only shows, cut after some characters."""
    line = " ".join(str(text).split())
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"
