"""``coverage``: every arm did exactly the planned operations, in order, counted from raw records.

Missing operations are unknown, and so are missing traces of them (`traces`). Operations that
contradict the plan are a fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.traces import traces
from samestate.checks.turns import known_inputs
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence import records as r
from samestate.evidence.canonical import sha256_hex
from samestate.plans.model import InputIdentity
from samestate.plans.operations import PlannedOperation
from samestate.plans.turns import continuing

CHECK = "coverage"


def coverage(history: History) -> CheckResult:
    """Compare each arm's operations with the plan; imported arms are held to the same."""
    inputs = {(given.case, given.role): given for given in known_inputs(history)}
    turns = {prompt.name for prompt in continuing(history.plan)}
    findings: list[Finding] = []
    summaries: list[str] = []
    examined = 0
    for name in [arm.name for arm in history.plan.arms] + sorted(_unplanned_arms(history)):
        if name not in history.arms:
            message = f"arm {name} is planned and not in the archive"
            findings.append(unknown("missing_arm", message, Place(arm=name)))
            continue
        planned = {op.op: (case.id, op) for case in history.cases(name) for op in case.operations}
        arm = _Arm(history.arms[name], planned, inputs, turns)
        findings += [*arm.findings(), *traces(history, arm.arm)]
        summaries.append(f"{name} {arm.counts()}")
        examined += len(arm.arm.started)
    return conclude(CHECK, findings, unit="operations", examined=examined, summary="; ".join(summaries) or "no arm")


def _unplanned_arms(history: History) -> set[str]:
    return set(history.arms) - {arm.name for arm in history.plan.arms}


class _Arm:
    """One arm held against the plan."""

    def __init__(
        self,
        arm: ArmHistory,
        planned: dict[str, tuple[str, PlannedOperation]],
        inputs: dict[tuple[str, str], InputIdentity],
        turns: set[str],
    ) -> None:
        """`turns`: cases whose prompt continues an answer."""
        self.arm = arm
        self._turns = turns
        self._planned = planned
        wanted = {(case, op.role) for case, op in planned.values()}
        self._inputs = {at: given for at, given in inputs.items() if at in wanted}
        self._seen = Counter(seen.rec.op for seen in arm.started)

    def findings(self) -> Iterator[Finding]:
        yield from self._engine()
        yield from self._sequence()
        for index, seen in enumerate(self.arm.started):
            if seen.rec.op in self._planned:
                after = (self.arm.started[at] for at in range(index + 1, len(self.arm.started)))
                later = (one.n for one in after if not self._together(seen, one))
                yield from self._operation(seen, next(later, None))
        yield from self._strays()
        yield from self._requests()
        yield from self._distinct_inputs()

    def counts(self) -> str:
        """``45/45 operations, 36/36 generations, 9/9 resets, 27/27 inputs``."""
        planned = [op.name for _, op in self._planned.values()]
        done = [self._planned[op][1].name for op in self._seen if op in self._planned]
        resets, all_resets = done.count(r.OperationName.RESET), planned.count(r.OperationName.RESET)
        return (
            f"{len(done)}/{len(planned)} operations, {len(done) - resets}/{len(planned) - all_resets} generations, "
            f"{resets}/{all_resets} resets, {len(self._digests())}/{len(self._inputs)} inputs"
        )

    def _engine(self) -> Iterator[Finding]:
        engines = self.arm.engines
        if not engines:
            yield self._unknown("missing_engine", "no engine_started record")
        elif len(engines) > 1:
            evidence = [seen.where for seen in engines]
            yield self._fail("engine_restarted", f"{len(engines)} engine starts in one arm, planned 1", None, evidence)

    def _sequence(self) -> Iterator[Finding]:
        order = {op: index for index, op in enumerate(self._planned)}
        missing = [op for op in order if op not in self._seen]
        if missing:
            done = len(order) - len(missing)
            message = f"{done} of {len(order)} planned operations done, first missing: {missing[0]}"
            yield self._unknown("missing_operations", message, missing[0])
        last, counted = -1, set[str]()
        for seen in self.arm.started:
            op = seen.rec.op
            if op not in order:
                yield self._fail("unplanned_operation", f"{op} is not in the plan", op, [seen.where])
            elif op in counted:
                yield self._fail("repeated_operation", f"{op} was done {self._seen[op]} times", op, [seen.where])
            else:
                counted.add(op)
                if order[op] < last:
                    yield self._fail("out_of_order", f"{op} came after its place in the plan", op, [seen.where])
                last = max(last, order[op])

    def _operation(self, seen: Seen[r.OperationStarted], following: int | None) -> Iterator[Finding]:
        """What one started operation was asked, answered, and whether it ended before the next."""
        case, op = self._planned[seen.rec.op]
        yield from self._prompt(seen, case, op)
        reset = op.name is r.OperationName.RESET
        answers: list[Seen[r.OperationOutput]] | list[Seen[r.CacheReset]]
        answers = self.arm.resets.get(op.op, []) if reset else self.arm.outputs.get(op.op, [])
        ends = self.arm.ends.get(op.op, [])
        for what, given in (("reset" if reset else "output", answers), ("end", ends)):
            if not given:
                yield self._unknown(f"missing_{what}", f"{op.op} has no {what}", op.op, [seen.where])
            if len(given) > max(1, self._seen[op.op]):
                wheres = [one.where for one in given]
                yield self._fail(f"repeated_{what}", f"{op.op} has {len(given)} {what}s", op.op, wheres)
        for output in self.arm.outputs.get(op.op, ()):
            for name, values in (("logprobs", output.rec.logprobs), ("margins", output.rec.margins)):
                if values is not None and len(values) != len(output.rec.token_ids):
                    message = f"{op.op} has {len(output.rec.token_ids)} tokens and {len(values)} {name}"
                    yield self._fail("wrong_length", message, op.op, [output.where])
        for end in ends:
            if not end.rec.ok:
                yield self._unknown(
                    "operation_failed", f"{op.op} ended with an error: {end.rec.error}", op.op, [end.where]
                )
        if self._seen[op.op] == 1:
            lines = [seen.n, *(one.n for one in answers), *(one.n for one in ends)]
            if lines != sorted(lines) or (following is not None and seen.n < following < lines[-1]):
                yield self._fail("overlap", f"{op.op} did not start, answer and end by itself", op.op, [seen.where])

    def _together(self, one: Seen[r.OperationStarted], other: Seen[r.OperationStarted]) -> bool:
        """Whether the plan hands both to the engine at once."""
        if one.rec.op not in self._planned or other.rec.op not in self._planned:
            return False
        together = self._planned[one.rec.op][1].together
        return together is not None and together == self._planned[other.rec.op][1].together

    def _prompt(self, seen: Seen[r.OperationStarted], case: str, op: PlannedOperation) -> Iterator[Finding]:
        rec = seen.rec
        if (rec.case, rec.name) != (case, op.name):
            message = f"{op.op} was run as {rec.name.value} of case {rec.case}, planned {op.name.value} of {case}"
            yield self._fail("wrong_operation", message, op.op, [seen.where])
        if rec.salt != (sha256_hex(op.salt.encode()) if op.salt else ""):
            yield self._fail("wrong_salt", f"{op.op} had another cache salt than planned", op.op, [seen.where])
        if rec.together != op.together:
            message = f"{op.op} was run {rec.together or 'alone'}, planned {op.together or 'alone'}"
            yield self._fail("wrong_batch", message, op.op, [seen.where])
        given = self._inputs.get((case, op.role)) if op.role else None
        if op.role and given is None:
            yield self._unknown("missing_input", f"resolved.json names no {op.role} of case {case}", op.op)
            return
        if given is not None and given.sha256 is None and case in self._turns:
            message = f"{op.op} continues an answer of the control that is not recorded: what it is asked is not known"
            yield self._unknown("missing_answer", message, op.op, [seen.where])
            return
        tokens, digest = (given.tokens, given.sha256) if given else (0, None)
        if rec.prompt_tokens != tokens:
            message = f"{op.op} had a prompt of {rec.prompt_tokens} tokens, planned {tokens}"
            yield self._fail("wrong_prompt_length", message, op.op, [seen.where])
        if rec.prompt_sha256 != digest:
            message = f"{op.op} had another prompt than resolved.json names"
            yield self._fail("wrong_prompt", message, op.op, [seen.where])

    def _strays(self) -> Iterator[Finding]:
        """Answers and ends without a start: of unplanned operations, or of the wrong sort."""
        for op, given in self._answers():
            if op not in self._planned:
                wheres = [seen.where for seen in given]
                yield self._fail("unplanned_operation", f"{op} was answered and is not in the plan", op, wheres)
        for op, outputs in self.arm.outputs.items():
            if op in self._planned and self._planned[op][1].name is r.OperationName.RESET:
                yield self._fail("wrong_operation", f"{op} is a reset and has an output", op, [outputs[0].where])
        for op, resets in self.arm.resets.items():
            if op in self._planned and self._planned[op][1].name is not r.OperationName.RESET:
                yield self._fail("wrong_operation", f"{op} is a generation and reset a cache", op, [resets[0].where])

    def _answers(
        self,
    ) -> Iterator[tuple[str, list[Seen[r.OperationOutput]] | list[Seen[r.CacheReset]] | list[Seen[r.OperationEnded]]]]:
        yield from self.arm.outputs.items()
        yield from self.arm.resets.items()
        yield from self.arm.ends.items()

    def _requests(self) -> Iterator[Finding]:
        """One request id names one generation, or its schedule belongs to nobody."""
        by_request: dict[str, list[Seen[r.OperationOutput]]] = {}
        for outputs in self.arm.outputs.values():
            for seen in outputs:
                by_request.setdefault(seen.rec.request, []).append(seen)
        for request, outputs in by_request.items():
            if len({seen.rec.op for seen in outputs}) > 1:
                ops = ", ".join(seen.rec.op for seen in outputs)
                wheres = [seen.where for seen in outputs]
                yield self._fail("request_reused", f"request {request} answered {ops}", outputs[0].rec.op, wheres)

    def _distinct_inputs(self) -> Iterator[Finding]:
        known = [given.sha256 for (case, _), given in self._inputs.items() if given.sha256 or case not in self._turns]
        if len(set(known)) != len(known):
            message = f"{len(set(known))} distinct inputs, planned {len(known)}"
            yield self._fail("inputs_not_distinct", message, None, [])

    def _digests(self) -> set[str]:
        return {seen.rec.prompt_sha256 for seen in self.arm.started if seen.rec.prompt_sha256}

    def _fail(self, code: str, message: str, op: str | None, evidence: Iterable[str]) -> Finding:
        return fail(code, f"arm {self.arm.name}: {message}", self._place(op), evidence)

    def _unknown(self, code: str, message: str, op: str | None = None, evidence: Iterable[str] = ()) -> Finding:
        return unknown(code, f"arm {self.arm.name}: {message}", self._place(op), evidence)

    def _place(self, op: str | None) -> Place:
        return Place(arm=self.arm.name, case=self._planned[op][0] if op in self._planned else None, op=op)
