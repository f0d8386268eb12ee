"""One operation on somebody else's server, written down as the client saw it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from samestate.engines.base import EngineError
from samestate.engines.black_box import BlackBox, Prompt, Reading
from samestate.engines.black_box_answers import Answer
from samestate.evidence.canonical import sha256_hex, token_digest
from samestate.evidence.probe_records import ProbeAnswered, ProbeUsage
from samestate.evidence.records import (
    COUNTERS,
    CacheReset,
    CountersRead,
    OperationEnded,
    OperationName,
    OperationOutput,
    OperationStarted,
    Scalar,
)
from samestate.evidence.stream import StreamWriter
from samestate.plans.black_box import BESIDE, CACHED, EVICTION, PIECES, covers, reused

_AGAIN = re.compile(r"\.cold-\d+$")
"""Ends the operations that are cold though their prompt has been asked."""
_HOST = re.compile(r"https?://[^\s/]+")


class Told(NamedTuple):
    """An answer, and what was reused for it."""

    answer: Answer
    tokens: int
    """N, by the server where it was sent as text."""
    reused: int | None
    """Tokens; None: nobody tells."""


class Recorder:
    """Asks one server and records it. Every method raises `EngineError`, once the record says so too."""

    def __init__(self, box: BlackBox, client: StreamWriter, patience: float) -> None:
        self.box = box
        self.client = client
        self.inputs: dict[str, list[int]] = {}
        """Token ids of all prompts, by digest."""
        self.waited = 0.0
        """Seconds, for others who were served."""
        self._patience = patience

    def ask(
        self,
        op: str,
        case: str,
        name: OperationName,
        prompt: Prompt,
        output_tokens: int,
        salt: str,
        beside: Prompt | None = None,
    ) -> Told:
        """A completion."""
        before = self._counters(op, "before")
        together = f"{op}.beside" if beside is not None else None
        digest = self._kept(prompt, keep=case != EVICTION)
        self.client.append(
            OperationStarted(
                op=op,
                case=case,
                name=name,
                prompt_tokens=prompt.tokens,
                prompt_sha256=digest,
                salt=sha256_hex(salt.encode()) if self.box.salts else "",
                together=together,
            )
        )
        self.client.flush()
        try:
            answer = self.box.ask(prompt, output_tokens, salt, beside, whole=_AGAIN.search(op) is not None)
        except EngineError as error:
            self._end(op, str(error))
            raise
        for record in _answered(op, self.box.model, answer, beside):
            self.client.append(record)
        self._end(op, None)
        after = self._counters(op, "after")
        grown = {name: int(value - before[name]) for name, value in after.items() if name in before}
        used, others = answer.usage_count("prompt_tokens"), beside.tokens if beside else 0
        cached = _count(answer.cached) if covers(used, prompt.tokens, others) else None
        tokens = prompt.tokens if prompt.ids is not None or others else used or prompt.tokens
        return Told(answer, tokens, reused(tokens + others, grown, cached))

    def reset(self, op: str) -> bool:
        """Drop the server's local cache."""
        self._counters(op, "before")
        self.client.append(
            OperationStarted(
                op=op,
                case=op,
                name=OperationName.RESET,
                prompt_tokens=0,
                prompt_sha256=None,
                salt="",
                together=None,
            )
        )
        try:
            done, attempts = self.box.reset()
        except EngineError as error:
            self._end(op, str(error))
            raise
        self.client.append(
            CacheReset(op=op, local_reset=done, external_kept=True, running_kept=True, attempts=attempts)
        )
        self._end(op, None)
        self._counters(op, "after")
        return done

    def _kept(self, prompt: Prompt, *, keep: bool) -> str | None:
        if prompt.ids is None:
            return None
        digest = token_digest(list(prompt.ids))
        if keep:
            self.inputs[digest] = list(prompt.ids)
        return digest

    def _end(self, op: str, error: str | None) -> None:
        words = without_address(" ".join(error.split()), self.box.url) if error is not None else None
        self.client.append(OperationEnded(op=op, ok=words is None, error=words))
        self.client.flush()

    def _counters(self, op: str, when: Literal["before", "after"]) -> Mapping[str, float]:
        """Before, once the server is idle, as far as it says that and patience lasts."""
        if when == "before":
            began = time.monotonic()
            reading, waited = self.box.idle(self._patience)
            self.waited += waited
            self._patience = max(0.0, self._patience - (time.monotonic() - began if waited else 0.0))
        else:
            reading = self.box.reading()
        self.client.append(_read(op, when, reading))
        return reading.values if reading else {}


def without_address(words: str, url: str) -> str:
    """As an archive keeps them: without `url`, and without any host that a server or a socket names instead."""
    return _HOST.sub("", words.replace(url, ""))


def _read(op: str, when: Literal["before", "after"], reading: Reading | None) -> CountersRead:
    values = {name: value for name, value in (reading.values if reading else {}).items() if name in COUNTERS}
    return CountersRead(op=op, when=when, values=values, missing=[name for name in COUNTERS if name not in values])


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _answered(op: str, model: str, answer: Answer, beside: Prompt | None) -> Sequence[ProbeAnswered | OperationOutput]:
    cached = answer.cached
    echo: dict[str, Scalar] = {"model": model, BESIDE: beside.tokens if beside is not None else 0}
    if answer.token_ids is None and answer.pieces is not None:
        echo[PIECES] = json.dumps(answer.pieces, ensure_ascii=False)
    if cached is not None and _count(cached) is None:
        echo[CACHED] = repr(cached)[:80]
    return [
        ProbeAnswered(
            probe=op,
            request=answer.id,
            status=200,
            prompt_token_ids=answer.prompt_ids or [],
            token_ids=answer.token_ids or [],
            finish_reason=answer.finish_reason,
            stop_reason=None,
            usage=ProbeUsage(
                prompt=answer.usage_count("prompt_tokens"),
                completion=answer.usage_count("completion_tokens"),
                reasoning=None,
            ),
            echo=echo,
            content=answer.text,
            reasoning=None,
            text_sha256=sha256_hex(answer.text.encode(errors="surrogatepass")),
            anomalies=[],
        ),
        OperationOutput(
            op=op,
            request=answer.id,
            token_ids=answer.token_ids or [],
            logprobs=answer.logprobs,
            margins=answer.margins,
            finish_reason=answer.finish_reason,
            cached_tokens=_count(cached),
        ),
    ]
