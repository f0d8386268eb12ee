"""What the lab needs of an engine: types and one ABC.

An engine is one process (or one simulated one) under one configuration. The lab starts
it, drives it serially and always closes it. Engines write the ``scheduler`` and
``worker-<rank>`` streams of their arm themselves; the lab writes ``client``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from samestate.evidence.records import EngineStarted, Scalar


class EngineError(Exception):
    """The engine could not start, died or broke the protocol.

    ``str(error)`` is one line that says what to do; ``log_tail`` holds the end of the
    engine's own log, possibly empty.
    """

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class EngineSpec(NamedTuple):
    """One engine under one configuration."""

    arm: str
    model: Path
    settings: dict[str, Scalar]
    """vLLM engine arguments by name; must not contain ``model`` or ``kv_transfer_config``."""
    serve_args: list[str]
    """Further arguments in ``vllm serve`` form; they win over `settings`."""
    connector: str
    """``none``, ``native``, ``dictionary`` or ``lmcache``."""
    external_cache_bytes: int
    audit_level: str
    """``metadata``, or ``off`` (an arm without connector has no audit)."""
    save_delay_ms: int
    """Completions of saves are held back this long."""
    fault: str | None
    """Armed when the engine starts."""
    stream_dir: Path
    """Where the engine's processes append their streams."""
    log_path: Path
    core: str = "here"
    """Where scheduler and engine core run: ``here``, in the engine's one process, or ``own-process``."""
    connector_options: Mapping[str, Scalar] = MappingProxyType({})
    """Of the connector, under upstream's names."""
    packages: Path | None = None
    """Folder with the connector's package, before the environment's own."""
    service: str | None = None
    """``HOST:PORT`` of the server beside the engine, where the connector has one."""
    repair: str | None = None
    """Put onto the connector when the engine starts."""
    reply_seconds: float = 1800.0
    """The longest that one command may take, the start included."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Beside ours, for all of its processes: what instruments are told."""


class Ask(NamedTuple):
    """One request to an engine."""

    request: str
    """Its name; the engine's own id may be longer."""
    token_ids: Sequence[int]
    salt: str | None = None
    """Cache salt."""


class ProbeAsk(NamedTuple):
    """One request with a reasoning budget."""

    request: str
    """Its name; the engine's own id may be longer."""
    token_ids: Sequence[int]
    budget: int | None
    """Reasoning tokens, those in the prompt included; None: unlimited."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool


class ProbeResult(NamedTuple):
    """What the engine delivered of one request."""

    request: str
    """The engine's own request id."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str
    """All of the output, as the engine's tokenizer reads it."""
    echo: dict[str, Scalar]
    """The parameters as the engine has them, under the names of `ProbeAsk`."""


class Timing(NamedTuple):
    """When a streamed answer came; times of the host's monotonic clock."""

    peer: str
    """``HOST:PORT`` that was connected to."""
    concurrency: int
    """Requests of this client that were open at once."""
    attempts: int
    """Requests that went out for it."""
    began_ns: int
    done_ns: int
    """The stream's end marker was here."""
    events: Sequence[tuple[int, int]]
    """(when, tokens) of every event before it."""


class Generation(NamedTuple):
    """The answer to one request."""

    request: str
    """The engine's own request id."""
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    cached_tokens: int | None
    first_token_s: float | None = None
    """Seconds from handing the request to the engine to its first output, in the engine's process."""
    margins: list[float] | None = None
    """By how much each token's log-probability is above the runner-up's."""
    timing: Timing | None = None
    """Of an answer that was streamed over a connection."""


class ResetResult(NamedTuple):
    """A reset of the local cache; the external cache is always left alone."""

    local_reset: bool
    external_kept: bool
    running_kept: bool
    attempts: int


class Kill(NamedTuple):
    """An engine that was killed."""

    process: str
    """As `EngineStarted` names it."""
    processes: int
    """That were killed."""


class CounterValues(NamedTuple):
    """Engine counters by their Prometheus name; unreadable ones are listed, never zero."""

    values: dict[str, float]
    missing: list[str]


class Engine(ABC):
    """One engine. Only safe when driven by one thread, one call at a time.

    Every method raises `EngineError` when the engine has died or refuses.
    """

    def prepare(self) -> None:  # noqa: B027 (an optional hook)
        """Begin what touches neither model nor device, e.g. imports, and return at once.

        Lets the next engine's process warm up while this arm still runs. Never required.
        """

    @abstractmethod
    def start(self) -> EngineStarted:
        """Start, and say what was started. No request has run when this returns."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text` under the engine's own tokenizer, no special tokens added."""

    @abstractmethod
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        """Hand in all requests at once, and generate greedily until `output_tokens` each (or EOS, unless ignored).

        Answers are in the order of `asks`. On return all the engine's saves for these requests have been
        submitted and the engine is idle; their completion is in the records.
        """

    def generate_one(
        self, request: str, token_ids: Sequence[int], output_tokens: int, seed: int, ignore_eos: bool
    ) -> Generation:
        """`generate` for one request alone."""
        (answer,) = self.generate([Ask(request, token_ids)], output_tokens, seed, ignore_eos)
        return answer

    def token(self, text: str) -> list[int]:
        """Ids of the vocabulary that read exactly as `text`, whether or not any text is encoded so."""
        raise EngineError(f"this engine cannot look tokens up: {text!r}")

    def probe(self, ask: ProbeAsk) -> ProbeResult:
        """Run one request with a reasoning budget to its end. Raises `EngineError` where that cannot be done."""
        raise EngineError(f"this engine takes no requests with a reasoning budget: {ask.request}")

    def identity(self) -> dict[str, Scalar]:
        """What it is at this moment, as effective values by name: process, versions, settings; no paths."""
        raise EngineError("this engine does not say what it is")

    @abstractmethod
    def reset_local_cache(self) -> ResetResult:
        """Drop the local prefix cache and keep the external one."""

    @abstractmethod
    def counters(self) -> CounterValues:
        """Read the counters named in `samestate.evidence.records.COUNTERS`."""

    def arm_fault(self, name: str | None) -> None:
        """Arm a fault in the running engine; None disarms. Raises `EngineError` where that cannot be done."""
        raise EngineError(f"this engine cannot arm faults while it runs: {name}")

    def kill(self) -> Kill:
        """Have its saves end and its streams closed, then kill all of its processes: no shutdown, nothing handed over.

        Raises `EngineError` too where it was dead already.
        """
        raise EngineError("this engine cannot be killed; make the arm's `ended` stopped")

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and reap its processes. Safe to call twice, and after a death."""
