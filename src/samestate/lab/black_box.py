"""Probes a server that somebody else runs: finds C, asks prompts cold and again, into a sealed archive; judges nothing.

Every prompt begins with words of this run and, where the server heeds them, has salts of its own: nobody else's prefix
is ever reused, and nobody can reuse ours.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import samestate
from samestate.engines.base import EngineError
from samestate.engines.black_box import BlackBox, Prompt
from samestate.engines.black_box_facts import Facts
from samestate.engines.openai_client import ClientError
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import canonical_json
from samestate.evidence.probe_records import IdentityRead
from samestate.evidence.records import (
    AttemptEnded,
    AttemptStarted,
    ContactLevel,
    ContactReached,
    OperationName,
    Outcome,
    PlanResolved,
    Scalar,
)
from samestate.evidence.stream import StreamWriter
from samestate.lab.black_box_cases import Case, chosen_lengths, make_cases, resolved_plan
from samestate.lab.black_box_interval import IntervalSearch
from samestate.lab.black_box_prompts import Prompts
from samestate.lab.black_box_record import Recorder, Told, without_address
from samestate.lab.endings import one_line
from samestate.lab.source import source_commit, source_sha256
from samestate.plans import black_box as b
from samestate.plans.load import plan_json
from samestate.plans.model import Plan

SETTLE_SECONDS = 1.0
"""Idle time before a reset, so that what is saved outside is there."""
COMPANY_TOKENS = 256
FILLER_TOKENS = 4096
"""Of a prompt that only fills the cache."""
Done = Callable[[int, int, str], None]
"""Told of operations done, of how many as far as known, and which one."""


class ProbeRequest(NamedTuple):
    """What to probe, and how far."""

    plan: Plan
    """Frozen."""
    lengths: list[str] | None
    """None: those of the plan, or others where C cannot be found."""
    model: str | None
    means: b.Means
    out: Path
    patience: float = 30.0
    """Seconds in all to wait while others are served."""


class Found(NamedTuple):
    """What the probe came to know, for who reads it."""

    facts: Facts
    interval: int | None
    """C; None: not known."""
    interval_from: str
    left_out: list[str]
    """Lengths that were not asked, and why."""
    notes: list[str]


def require_reset(facts: Facts, means: b.Means) -> None:
    """Raise `EngineError` for a reset that the server does not have."""
    if means.reset and not facts.can_reset:
        raise EngineError(
            "--allow-reset: the server has no /reset_prefix_cache; vLLM has it with VLLM_SERVER_DEV_MODE=1; else say "
            "--allow-evict"
        )


def probe(request: ProbeRequest, box: BlackBox, done: Done) -> Found:
    """Probe, and seal the archive. Raises `ArchiveError`, and `EngineError` with the archive left unsealed."""
    archive = ArchiveWriter.create(request.out, plan_json(request.plan))
    try:
        found = _Probe(request, box, archive, done).run()
        archive.attempts.append(AttemptEnded(outcome=Outcome.COMPLETED, reason=None))
        archive.seal()
    except BaseException as error:
        outcome = Outcome.FAILED if isinstance(error, Exception) else Outcome.INTERRUPTED
        with suppress(OSError, ValueError):
            archive.attempts.append(AttemptEnded(outcome=outcome, reason=without_address(one_line(error), box.url)))
        archive.abandon()
        raise
    return found


class _Probe:
    def __init__(self, request: ProbeRequest, box: BlackBox, archive: ArchiveWriter, done: Done) -> None:
        self._request = request
        self._box = box
        self._archive = archive
        self._told = done
        self._run = secrets.token_hex(8)
        self._done = 0
        self._total = 0
        self._notes: list[str] = []

    def run(self) -> Found:
        self._begin()
        client = StreamWriter(self._archive.arm_dir(b.SERVER) / "client.jsonl", b.SERVER, "client")
        try:
            return self._probe(client)
        finally:
            client.close()

    def _begin(self) -> None:
        self._archive.attempts.append(
            AttemptStarted(
                attempt=1,
                plan_sha256=self._archive.plan_sha256,
                samestate_version=samestate.__version__,
                source_sha256=source_sha256(),
                source_commit=source_commit(),
                fault=None,
                arms=[b.SERVER],
                control_seal_sha256=None,
                reference_seal_sha256=None,
                options={},
            )
        )
        self._reach(ContactLevel.HOST)

    def _probe(self, client: StreamWriter) -> Found:
        facts = self._box.survey(self._request.model)
        require_reset(facts, self._request.means)
        self._reach(ContactLevel.MODEL)
        client.append(_identity(facts, "before", {}))
        client.flush()
        self._recorder = Recorder(self._box, client, self._request.patience)
        self._reach(ContactLevel.REQUEST)
        self._hello(facts)
        search = IntervalSearch(self._box, self._prompts, self._ask, self._notes)
        interval, source = search.find(facts)
        kept, left_out = self._lengths(facts, interval)
        cases = make_cases(self._prompts, [n for _, n in kept], again=self._box.salts or self._box.recomputes)
        self._resolve(client, cases, interval)
        for case in cases:
            self._compare(case, interval)
        self._reload(cases, facts)
        found: dict[str, Scalar] = {
            "interval": interval,
            "refused": ", ".join(self._box.refused),
            "salts": self._box.salts,
        }
        client.append(_identity(self._box.survey(self._request.model), "after", found))
        self._archive.write_inputs(self._recorder.inputs)
        if self._recorder.waited >= 1:
            self._notes.append(f"waited {self._recorder.waited:.0f} s while the server said that requests ran")
        if self._prompts.alike:
            self._notes.append(
                f"{self._prompts.alike} prompts begin with a token that another one begins with too: there were no more"
            )
        return Found(facts, interval, source, left_out, self._notes)

    def _reach(self, level: ContactLevel) -> None:
        self._archive.attempts.append(ContactReached(level=level))
        self._archive.attempts.flush()

    # --- what can be asked ----------------------------------------------------------------------

    def _hello(self, facts: Facts) -> None:
        """One short prompt, to see what the server takes."""
        self._prompts = Prompts(self._box, self._run, self._request.plan.template, exact=facts.tokenizer)
        try:
            alone = self._ask("hello", "cold", OperationName.COLD, self._prompts.make("hello", b.HELLO_TOKENS), 1)
        except ClientError as error:
            if error.status not in (400, 422) or not self._prompts.exact:
                raise
            self._box.forget()
            self._prompts.exact = False
            text = self._prompts.make("hello", b.HELLO_TOKENS)
            alone = self._ask("hello", "cold-2", OperationName.COLD, text, 1)
        first, second = (self._prompts.make(f"hello-{number}", b.HELLO_TOKENS) for number in (1, 2))
        try:
            two = self._ask("hello", "two", OperationName.COLD, first, 1, None, second)
            if two.reused is None and alone.reused is not None:
                self._box.companions = False
                self._notes.append(
                    "its usage counts one prompt of two, so no cold run has company (llama.cpp: --metrics)"
                )
        except ClientError as error:
            if error.status in (401, 403, 429):
                raise
            self._box.companions = False
            self._notes.append("the server takes one prompt in a request, so no cold run has company")
        if not self._prompts.exact:
            self._notes.append("prompts were sent as text, so their lengths are near what was wanted, not exact")

    # --- comparing ------------------------------------------------------------------------------

    def _lengths(self, facts: Facts, interval: int | None) -> tuple[list[tuple[str, int]], list[str]]:
        request, budget = self._request, self._box.budget
        most = 1 if self._prompts.exact else b.TEXT_BYTES  # a text is taken for as many tokens as it has bytes
        left = b.Cost(budget.requests_left, budget.tokens_left // most)
        return chosen_lengths(request.plan, request.lengths, facts.max_model_len, interval, request.means, left)

    def _resolve(self, client: StreamWriter, cases: list[Case], interval: int | None) -> None:
        plan = self._request.plan
        resolved = resolved_plan(plan, cases, interval, self._box.model, reload=self._means_reload)
        digest = self._archive.write_resolved(canonical_json(resolved.model_dump(mode="json")))
        client.append(PlanResolved(resolved_sha256=digest))
        client.flush()
        self._total = self._done + len(resolved.operations)

    @property
    def _means_reload(self) -> bool:
        return self._request.means.reset or self._request.means.evict

    def _compare(self, case: Case, interval: int | None) -> None:
        """One prompt cold, in company, again, and again after another one."""
        output, tokens = self._request.plan.output_tokens, case.prompt.tokens
        between = b.interposer_tokens(tokens, interval)
        self._ask(case.name, "cold", OperationName.COLD, case.prompt, output, case.salt)
        for number, salt in enumerate(case.others, 2):
            beside = self._prompts.make(f"{case.name}-beside-{number}", between)
            company = beside if self._box.companions else None
            self._ask(case.name, f"cold-{number}", OperationName.COLD, case.prompt, output, salt, company)
        self._ask(case.name, "repeat", OperationName.REPEAT, case.prompt, output, case.salt)
        other = self._prompts.make(f"{case.name}-interposer", between)
        self._ask(case.name, "interposer", OperationName.INTERPOSER, other, 1)
        self._ask(case.name, "repeat-2", OperationName.REPEAT, case.prompt, output, case.salt)

    def _reload(self, cases: list[Case], facts: Facts) -> None:
        means = self._request.means
        if not self._means_reload:
            return
        time.sleep(SETTLE_SECONDS)
        if means.reset and not self._recorder.reset("reset"):
            raise EngineError("--allow-reset: the server did not reset its cache; it may be busy with other requests")
        if not means.reset:
            self._evict(facts, cases)
        output = self._request.plan.output_tokens
        for case in cases:
            for op, salt in zip(case.reloads, [case.salt, *case.others], strict=False):
                self._ask(case.name, op, OperationName.RELOAD, case.prompt, output, salt, self._company(case))

    def _company(self, case: Case) -> Prompt | None:
        """Without salts a reload that finds nothing outside is the one other cold run: it has company then."""
        if case.others or not self._box.companions:
            return None
        return self._prompts.make(f"{case.name}-beside", min(case.prompt.tokens, COMPANY_TOKENS))

    def _evict(self, facts: Facts, cases: list[Case]) -> None:
        """Prompts of our own, until they would fill the local cache, as far as the budget goes."""
        output, budget = self._request.plan.output_tokens, self._box.budget
        needed = 2 * sum(case.prompt.most + output for case in cases)
        most = min(FILLER_TOKENS, (facts.max_model_len or FILLER_TOKENS) - 1)
        sent = number = 0
        while facts.capacity is None or sent < facts.capacity:
            if not budget.allows(2 * len(cases) + 1, needed + most + 1):
                break
            number += 1
            filler = self._prompts.make(f"{b.EVICTION}-{number}", most)
            self._ask(b.EVICTION, str(number), OperationName.INTERPOSER, filler, 1)
            sent += most
        full = facts.capacity is not None and sent >= facts.capacity
        self._notes.append(
            f"{sent:,} tokens of our own prompts were sent to fill the local cache"
            + ("" if full else ", as many as the budget allows; whether that evicts anything is not known")
        )

    def _ask(
        self,
        case: str,
        op: str,
        name: OperationName,
        prompt: Prompt,
        output_tokens: int,
        salt: str | None = None,
        beside: Prompt | None = None,
    ) -> Told:
        salt = salt or secrets.token_urlsafe(24)
        told = self._recorder.ask(f"{case}.{op}", case, name, prompt, output_tokens, salt, beside)
        if beside is None:
            self._prompts.learn(prompt, told.tokens)
        self._done += 1
        self._told(self._done, max(self._done, self._total), f"{case}.{op}")
        return told


def _identity(facts: Facts, when: Literal["before", "after"], found: dict[str, Scalar]) -> IdentityRead:
    values = {name: value for name, value in facts._asdict().items() if value is not None}
    missing = [name for name, value in facts._asdict().items() if value is None]
    return IdentityRead(when=when, values=values | found, missing=missing)
