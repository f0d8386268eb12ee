"""The operations of one arm on a running engine, written down as the client saw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

from samestate.engines.base import Ask, Engine, EngineError, Timing
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.latency_records import HostSampled, RequestTimed, StreamEvent
from samestate.evidence.records import CacheReset, CountersRead, OperationEnded, OperationOutput, OperationStarted
from samestate.evidence.stream import StreamWriter
from samestate.lab.turns import Turns
from samestate.plans.model import Plan
from samestate.plans.operations import Case, PlannedOperation

When = Literal["before", "after"]
Done = Callable[[str], None]
"""Told the id of every operation that is over."""


class _Step(NamedTuple):
    case: Case
    op: PlannedOperation


class Operator:
    """Drives one engine through its arm's cases and writes the client's stream.

    `host`: samples the host around every operation; None: it cannot be.
    `armed`: by operation, the fault that must be armed in the running engine when it begins; none for the others.
    Raises `EngineError` when the engine fails, the operation's end then says so.
    """

    def __init__(
        self,
        plan: Plan,
        turns: Turns,
        engine: Engine,
        client: StreamWriter,
        armed: Mapping[str, str | None] = MappingProxyType({}),
        host: Callable[[str, When], HostSampled | None] = lambda op, when: None,
    ) -> None:
        self._plan = plan
        self._turns = turns
        self._engine = engine
        self._client = client
        self._armed_at = armed
        self._host = host
        self._armed: str | None = None

    def perform(self, cases: list[Case], done: Done) -> None:
        """All operations, in order; those that the plan puts together at once."""
        for steps in _units(cases):
            self._arm(self._armed_at.get(steps[0].op.op))
            self._read_counters(steps, "before")
            self._sample(steps, "before")
            for step in steps:
                self._start(step)
            try:
                if steps[0].op.role is None:
                    self._reset(steps[0].op)
                else:
                    self._generate(steps)
            except EngineError as error:
                self._end(steps, " ".join(str(error).split()))
                raise
            self._end(steps, None)
            self._sample(steps, "after")
            self._read_counters(steps, "after")
            for step in steps:
                done(step.op.op)

    def _arm(self, fault: str | None) -> None:
        if fault != self._armed:
            self._engine.arm_fault(fault)
            self._armed = fault

    def _start(self, step: _Step) -> None:
        case, op = step
        prompt = self._turns.prompt(case.id, op.role) if op.role else None
        self._client.append(
            OperationStarted(
                op=op.op,
                case=case.id,
                name=op.name,
                prompt_tokens=prompt.tokens if prompt else 0,
                prompt_sha256=prompt.sha256 if prompt else None,
                salt=sha256_hex(op.salt.encode()) if op.salt else "",
                together=op.together,
            )
        )

    def _reset(self, op: PlannedOperation) -> None:
        self._client.append(CacheReset(op=op.op, **self._engine.reset_local_cache()._asdict()))

    def _generate(self, steps: list[_Step]) -> None:
        plan = self._plan
        asks = []
        for case, op in steps:
            assert op.role is not None
            prompt = self._turns.prompt(case.id, op.role)
            asks.append(Ask(op.op, self._turns.ids(prompt), op.salt))
        answers = self._engine.generate(asks, steps[0].op.output_tokens, plan.seed, plan.ignore_eos)
        for step, answer in zip(steps, answers, strict=True):
            self._turns.answered(step.op.op, answer.token_ids)
            self._client.append(
                OperationOutput(
                    op=step.op.op,
                    request=answer.request,
                    token_ids=answer.token_ids,
                    logprobs=answer.logprobs,
                    margins=answer.margins,
                    finish_reason=answer.finish_reason,
                    cached_tokens=answer.cached_tokens,
                )
            )
            if answer.timing is not None:
                self._client.append(request_timed(step.op.op, answer.request, answer.timing))

    def _end(self, steps: list[_Step], error: str | None) -> None:
        for step in steps:
            self._client.append(OperationEnded(op=step.op.op, ok=error is None, error=error))
        self._client.flush()

    def _sample(self, steps: list[_Step], when: When) -> None:
        for step in steps:
            sampled = self._host(step.op.op, when)
            if sampled is not None:
                self._client.append(sampled)

    def _read_counters(self, steps: list[_Step], when: When) -> None:
        values, missing = self._engine.counters()
        for step in steps:
            self._client.append(CountersRead(op=step.op.op, when=when, values=values, missing=missing))
        self._client.flush()


def request_timed(op: str, request: str, timing: Timing) -> RequestTimed:
    """The record of what a client measured of `op`."""
    return RequestTimed(
        op=op,
        request=request,
        peer=timing.peer,
        concurrency=timing.concurrency,
        attempts=timing.attempts,
        began_ns=timing.began_ns,
        done_ns=timing.done_ns,
        events=[StreamEvent(at_ns=at_ns, tokens=tokens) for at_ns, tokens in timing.events],
    )


def _units(cases: list[Case]) -> Iterator[list[_Step]]:
    """Operations one by one, those with the same word together."""
    steps = [_Step(case, op) for case in cases for op in case.operations]
    for _, unit in groupby(enumerate(steps), key=lambda at: at[1].op.together or at[0]):
        yield [step for _, step in unit]
