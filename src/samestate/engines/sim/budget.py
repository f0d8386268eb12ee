"""The simulated engine of marker plans: the chain of `samestate.models.scripts`, drafts, a budget, and its recorder.

No weights and no torch: the next token is the script's. Steps, rows, commits and trims are recorded as vLLM's V1 runner
leaves them. Tokens are greedy whatever the temperature, as the chain's lead makes them on the real model.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import ClassVar, NamedTuple, NoReturn

from typing_extensions import override

from samestate.engines.base import (
    Ask,
    CounterValues,
    Engine,
    EngineError,
    EngineSpec,
    Generation,
    ProbeAsk,
    ProbeResult,
    ResetResult,
)
from samestate.evidence.marker_records import (
    REPAIRS,
    SAMPLING_GUARD,
    LogitsRow,
    LogitsRows,
    ReasoningRequest,
    RecorderStarted,
    RecorderStopped,
    TokensCommitted,
    TokensDelivered,
)
from samestate.evidence.records import EngineStarted, EngineStopped, InterventionApplied, Scalar
from samestate.evidence.stream import StreamWriter
from samestate.models import scripts
from samestate.models.tokenizer import FIRST_BYTE, SPECIALS, VOCAB_SIZE

BLOCK_SIZE = 128
CAPACITY = 4096
_ENGINES = count(1)
_WORDS = {text: id_ for id_, text in enumerate((*scripts.CONTROLS, *scripts.WORDS), start=VOCAB_SIZE)}
_SPELT = {text: id_ for id_, text in enumerate(SPECIALS)} | {text: _WORDS[text] for text in scripts.CONTROLS}
"""What a text may hold as one token."""
_LONGEST_FIRST = sorted(_SPELT, key=len, reverse=True)
"""So that ``close-after-1`` is not found in ``close-after-12``."""
_TEXTS = {id_: text for text, id_ in {**_SPELT, **_WORDS}.items()}


class _Drafting(NamedTuple):
    """How an arm speculates."""

    method: str | None
    most: int
    lookup: int

    def propose(self, context: Sequence[int]) -> list[int]:
        """At most `most` tokens that may come after `context`."""
        if self.method == "draft_model":
            return scripts.drafts(context, self.most)
        if self.method != "ngram":
            return []
        last = list(context[-self.lookup :])
        for at in range(len(context) - self.lookup - 1, -1, -1):
            if list(context[at : at + self.lookup]) == last:
                return list(context[at + self.lookup : at + self.lookup + self.most])
        return []


class SimBudgetEngine(Engine):
    """One simulated engine for probes; it has no cache, and no faults."""

    markers: ClassVar[Mapping[str, str]] = {"start": "<think>", "end": "</think>"}
    # Texts of the only markers that it has, as plans name them.

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process = f"simulated-budget-{next(_ENGINES)}"
        self._started = False
        self._steps = count()
        self._requests = 0

    @override
    def start(self) -> EngineStarted:
        if self._spec.fault is not None:
            raise EngineError(f"fault {self._spec.fault!r}: the simulated engine of marker plans has none; use vLLM")
        self._drafting = _drafting(self._spec.settings)
        self._spec.log_path.write_text(f"simulated engine for probes, arm {self._spec.arm}\n", encoding="utf-8")
        self._streams = {name: self._open(name) for name in ("scheduler", "budget-0", "budget-scheduler")}
        started = self._describe()
        self._streams["scheduler"].append(started)
        for name in ("budget-0", "budget-scheduler"):
            self._streams[name].append(self._recorder(name))
        self._written = dict.fromkeys(self._streams, 1)  # what says that it watches counts too
        for name in _asked_for(self._spec.environment):
            self._write("budget-0", InterventionApplied(name=name, functions=[]))
        self._started = True
        return started

    @override
    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            word = next((one for one in _LONGEST_FIRST if text.startswith(one, at)), None)
            if word is None:
                ids += [FIRST_BYTE + byte for byte in text[at].encode()]
                at += 1
            else:
                ids.append(_SPELT[word])
                at += len(word)
        return ids

    @override
    def token(self, text: str) -> list[int]:
        return [_WORDS[text]] if text in _WORDS else []

    @override
    def identity(self) -> dict[str, Scalar]:
        self._require_running()
        return {"process": self._process, **self._describe().settings}

    @override
    def probe(self, ask: ProbeAsk) -> ProbeResult:
        self._require_running()
        self._requests += 1
        request = f"{ask.request}-{self._requests:08x}"
        if ask.budget is not None:
            self._write("budget-0", _asked(request, ask))
        output: list[int] = []
        reason: str | None = None
        stop: int | None = None
        while reason is None:
            committed = self._step(request, ask, output)
            kept, reason, stop = _trim(ask, len(output), committed)
            if ask.budget is not None:
                self._write("budget-scheduler", _delivered(request, len(output), committed, kept, reason, stop))
            output += committed[:kept]
        return ProbeResult(
            request=request,
            prompt_token_ids=list(ask.token_ids),
            token_ids=output,
            finish_reason=reason,
            stop_reason=stop,
            text="".join(map(_text, output)),
            echo={
                "budget": ask.budget,
                "max_tokens": ask.max_tokens,
                "temperature": ask.temperature,
                "top_p": ask.top_p,
                "ignore_eos": ask.ignore_eos,
            },
        )

    @override
    def close(self) -> None:
        if not self._started:
            return
        self._started = False
        for name, rank in (("budget-0", 0), ("budget-scheduler", None)):
            self._streams[name].append(RecorderStopped(rank=rank, written=self._written[name], dropped=0))
        self._streams["scheduler"].append(EngineStopped())
        for stream in self._streams.values():
            stream.close()

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        _only_probes()

    @override
    def reset_local_cache(self) -> ResetResult:
        _only_probes()

    @override
    def counters(self) -> CounterValues:
        _only_probes()

    # --- one step -------------------------------------------------------------------------------

    def _step(self, request: str, ask: ProbeAsk, output: Sequence[int]) -> list[int]:
        """The tokens that the worker commits, recorded where the request has a budget."""
        context = [*ask.token_ids, *output]
        drafts = self._drafting.propose(context) if output else []
        rows = list(_rows(context, drafts, ask.budget))
        committed: list[int] = []
        for row in rows:
            token = row.argmax if row.stored is None else row.stored
            committed.append(token)
            if token != row.drafted:
                break
        step = next(self._steps)
        if ask.budget is not None:
            at = len(output)
            self._write("budget-0", LogitsRows(rank=0, step=step, request=request, slot=0, position=at, rows=rows))
            self._write(
                "budget-0",
                TokensCommitted(
                    rank=0,
                    step=step,
                    request=request,
                    position=at,
                    tokens=committed,
                    rows=[row.local for row in rows[: len(committed)]],
                ),
            )
        return committed

    # --- records --------------------------------------------------------------------------------

    def _open(self, name: str) -> StreamWriter:
        return StreamWriter(self._spec.stream_dir / f"{name}.jsonl", self._spec.arm, name, tolerant=True)

    def _write(
        self,
        name: str,
        record: InterventionApplied | ReasoningRequest | LogitsRows | TokensCommitted | TokensDelivered,
    ) -> None:
        self._streams[name].append(record)
        self._written[name] += 1

    def _recorder(self, name: str) -> RecorderStarted:
        ranked = name == "budget-0"
        return RecorderStarted(
            role="rank" if ranked else "scheduler",
            rank=0 if ranked else None,
            ranks=1,
            runner="v1",
            capacity=CAPACITY,
            speculative_tokens=self._drafting.most,
            asynchronous=False,
            start_ids=[scripts.START],
            end_ids=[scripts.END],
            functions=[],
        )

    def _describe(self) -> EngineStarted:
        length = self._spec.settings.get("max_model_len")
        return EngineStarted(
            engine="sim",
            process=self._process,
            versions={"python": platform.python_version()},
            checkpoint_interval=BLOCK_SIZE,
            max_model_len=length if isinstance(length, int) else 2048,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=None,
            audit_level=None,
            settings={
                "cache_config.block_size": BLOCK_SIZE,
                "scheduler_config.async_scheduling": False,
                "speculative_config.num_speculative_tokens": self._drafting.most,
            },
            eos_token_ids=[scripts.STOP],
        )

    def _require_running(self) -> None:
        if not self._started:
            raise EngineError(f"the engine of arm {self._spec.arm!r} is not running: start it first")


def _asked_for(environment: Mapping[str, str]) -> list[str]:
    """Guard and repairs: in force as nothing, since there is no code of vLLM's here that needs them."""
    return [name for name in (environment.get(SAMPLING_GUARD), *environment.get(REPAIRS, "").split(",")) if name]


def _only_probes() -> NoReturn:
    raise EngineError(
        "the simulated engine of marker plans takes probes alone; use the simulated engine of other plans"
    )


def _drafting(settings: dict[str, Scalar]) -> _Drafting:
    said = settings.get("speculative_config")
    if not isinstance(said, str):
        return _Drafting(None, 0, 0)
    config = json.loads(said)
    return _Drafting(config["method"], config["num_speculative_tokens"], config.get("prompt_lookup_max", 2))


def _rows(context: Sequence[int], drafts: Sequence[int], budget: int | None) -> Iterator[LogitsRow]:
    """One row after the last committed token, and one after each draft; only the rows that are needed hold a store."""
    for local, drafted in enumerate((*drafts, None)):
        before = [*context, *drafts[:local]]
        store = budget is not None and _due(before, budget)
        yield LogitsRow(
            local=local,
            drafted=drafted,
            store=store,
            stored=scripts.END if store else None,
            argmax=scripts.next_token(before),
            logprob=0.0,
        )


def _due(context: Sequence[int], budget: int) -> bool:
    """Whether reasoning is open after `context` and has used its budget: tokens since the last start marker."""
    for since, token in enumerate(reversed(context)):
        if token == scripts.END:
            return False
        if token == scripts.START:
            return since >= budget
    return False


def _trim(ask: ProbeAsk, done: int, committed: Sequence[int]) -> tuple[int, str | None, int | None]:
    """How many of a step's tokens are delivered, and why the request is over, if it is."""
    for at, token in enumerate(committed, 1):
        if token == scripts.STOP and not ask.ignore_eos:
            return at, "stop", None
        if token in ask.stop_token_ids:
            return at, "stop", token
        if done + at == ask.max_tokens:
            return at, "length", None
    return len(committed), None, None


def _asked(request: str, ask: ProbeAsk) -> ReasoningRequest:
    start = next((n for n, token in enumerate(reversed(ask.token_ids)) if token == scripts.START), None)
    end = next((n for n, token in enumerate(reversed(ask.token_ids)) if token == scripts.END), None)
    inside = start is not None and (end is None or start < end)
    return ReasoningRequest(
        rank=0,
        request=request,
        slot=0,
        budget=ask.budget or 0,
        prompt_tokens=len(ask.token_ids),
        resident=start if inside else None,
    )


def _delivered(
    request: str, position: int, committed: list[int], kept: int, reason: str | None, stop: int | None
) -> TokensDelivered:
    return TokensDelivered(
        request=request, position=position, before=committed, after=kept, finish_reason=reason, stop_reason=stop
    )


def _text(id_: int) -> str:
    return _TEXTS.get(id_) or bytes([id_ - FIRST_BYTE]).decode("latin-1")
