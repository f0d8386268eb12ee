"""A vLLM engine behind its own API server, driven over a loopback connection: streamed answers, every event timed.

To the lab it is an engine like any other; one request at a time, each sent once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from samestate.engines.base import (
    Ask,
    CounterValues,
    Engine,
    EngineError,
    EngineSpec,
    Generation,
    ResetResult,
    Timing,
)
from samestate.engines.openai_client import COMPLETIONS, DONE, ClientError, Completion, Event, OpenAIClient
from samestate.engines.server import ServedEngine, Server, ServerSpec
from samestate.engines.vllm import start_command
from samestate.evidence.latency_records import MEASURE_COPIES, TIER_LOADED_BYTES
from samestate.evidence.records import COUNTERS, EngineStarted
from samestate.evidence.stream import read_lines

RESET = "/reset_prefix_cache?reset_running_requests=false&reset_external=false"
RESET_SECONDS = 10.0
"""Longest wait for finished requests to give their blocks back."""
SETTLE_SECONDS = 0.25
"""Idle time after an answer, so that its saves end before what follows; not part of any measured time."""
ANSWER_IDS = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
"""An answer then names its request as the engine's own records do."""
RESERVED_CPUS = "VLLM_CPU_NUM_OF_RESERVED_CPU"
"""Unset, vLLM's CPU platform keeps one core more from the workers of an engine with a connector
(``vllm/utils/ompmultiprocessing.py``): OFF and ON would not compute on the same cores. The user's own value wins."""
READ = (*COUNTERS, TIER_LOADED_BYTES)
_FRONTEND = "frontend"


class StreamingClient:
    """What can be asked of a server that answers, whoever started it. Raises `EngineError`."""

    def __init__(self, server: Server, settle: float | None = None) -> None:
        """`settle`: idle seconds after an answer, 0 for a client that is one of many; None: `SETTLE_SECONDS`."""
        self._server = server
        self._settle = settle
        self._client: OpenAIClient | None = None

    @property
    def url(self) -> str:
        """``http://HOST:PORT``."""
        return self._server.url

    @property
    def _open(self) -> OpenAIClient:
        if self._client is None:
            raise EngineError(f"{self._server.url}: was not started")
        return self._client

    def connect(self) -> None:
        """Wait until the server answers."""
        self._server.start()
        self._client = self._server.client()
        self._model = self._server.model

    def encode(self, text: str) -> list[int]:
        """Token ids by the server's own tokenizer."""
        return self._open.encode(text)

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        """One request, streamed, sent once; its saves may end before this returns."""
        if len(asks) != 1:
            raise EngineError(f"{len(asks)} requests at once: a timed one runs alone")
        (ask,) = asks
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.token_ids),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "request_id": ask.request,
        }
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        before = self._open.attempts
        completion = self._open.complete(COMPLETIONS, body)
        generation = _generation(completion, self._open.attempts - before)
        time.sleep(SETTLE_SECONDS if self._settle is None else self._settle)
        return [generation]

    def reset_local_cache(self) -> ResetResult:
        """Drop the local cache and keep the external one (vLLM's ``/reset_prefix_cache``)."""
        deadline, attempts = time.monotonic() + RESET_SECONDS, 0
        while True:
            attempts += 1
            done = self._open.post(RESET, b"").tree.get("success") is True
            if done or time.monotonic() > deadline:
                return ResetResult(local_reset=done, external_kept=True, running_kept=True, attempts=attempts)
            time.sleep(0.05)

    def counters(self) -> CounterValues:
        """Of `READ`, from ``/metrics``."""
        values = read_metrics(self._open.text("/metrics"))
        return CounterValues(values, [name for name in COUNTERS if name not in values])

    def block_size(self) -> int | None:
        """``cache_config.block_size``, C where prefixes are found whole; None: the server does not say."""
        try:
            size = self._open.get("/server_info?config_format=json").tree["vllm_config"]["cache_config"]["block_size"]
        except (ClientError, KeyError, TypeError):
            return None
        return size if type(size) is int and size > 0 else None

    def close(self) -> None:
        """Close the connection, and the server where it is ours."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._server.close()


class ServedVllm(StreamingClient, Engine):
    """vLLM's API server in a session of its own, its engine core watched as `spec` says."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        core = start_command(spec._replace(stream_dir=spec.stream_dir.resolve()))
        served = ServedEngine(
            ServerSpec(
                name=spec.arm,
                model=spec.model,
                settings=spec.settings,
                serve_args=spec.serve_args,
                log_path=spec.log_path,
                stream_dir=spec.stream_dir.resolve(),
                environment={
                    RESERVED_CPUS: os.environ.get(RESERVED_CPUS, "1"),
                    MEASURE_COPIES: "1",
                    **ANSWER_IDS,
                    **spec.environment,
                },
                core=core,
            )
        )
        super().__init__(served)

    @override
    def start(self) -> EngineStarted:
        self.connect()
        return started_in(self._spec.stream_dir, self._spec.arm)


def started_in(stream_dir: Path, arm: str) -> EngineStarted:
    """What a server's frontend said of its engine. Raises `EngineError` where it said nothing."""
    for line in read_lines(stream_dir / f"{_FRONTEND}.jsonl"):
        if isinstance(line.rec, EngineStarted):
            return line.rec
    raise EngineError(f"arm {arm}: the server answers, and did not say what it serves; see its log")


def read_metrics(text: str) -> dict[str, float]:
    """Counters of `READ` in a Prometheus exposition, each the sum over its labels.

    One that is announced and has no value yet is 0.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        announced = line.startswith("# TYPE ")
        words = line.removeprefix("# TYPE ").replace("{", " {").split()
        name = words[0].removesuffix("_total") if words else ""
        if name not in READ:
            continue
        values.setdefault(name, 0.0)
        if not announced and not line.startswith("#"):
            with suppress(ValueError):
                values[name] += float(words[-1])
    return values


def _generation(completion: Completion, attempts: int) -> Generation:
    reply = completion.reply
    if completion.token_ids is None:
        raise ClientError(f"{COMPLETIONS}: returned no token ids; is it a vLLM server?")
    details = (completion.usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Generation(
        request=f"{completion.id}-0",  # of the first prompt in the request, as the engine has it
        token_ids=completion.token_ids,
        logprobs=None,
        finish_reason=completion.finish_reason,
        cached_tokens=cached if isinstance(cached, int) else None,
        timing=Timing(
            peer=reply.peer,
            concurrency=1,
            attempts=attempts,
            began_ns=reply.began_ns,
            done_ns=next(event.at_ns for event in reversed(reply.events) if event.data == DONE),
            events=list(_events(reply.events)),
        ),
    )


def _events(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """When each event came, and how many tokens it brought."""
    for event in events:
        if event.data == DONE:
            return
        choices = json.loads(event.data).get("choices") or []
        tokens = sum(len(choice.get("token_ids") or ()) for choice in choices if choice.get("index", 0) == 0)
        yield event.at_ns, tokens
