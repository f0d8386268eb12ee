"""The sample of a latency study: every planned request with its path and times, and why its times may not count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from samestate.checks.boundary import by_rank, restored
from samestate.checks.history import ArmHistory, History, Load, MissingEvidence, Schedule
from samestate.checks.latency_paths import ActualPath, CachePlace, PathEvidence, Taken, classify
from samestate.checks.latency_statistics import NANO, decode_rate, time_to_first_token, total_latency
from samestate.checks.seen import Seen
from samestate.checks.transfers import rank_bytes
from samestate.evidence.canonical import token_digest
from samestate.evidence.latency_records import TIER_LOADED_BYTES, RequestTimed
from samestate.evidence.records import OperationName
from samestate.plans.latency import trial_tokens
from samestate.plans.model import ArmPlan
from samestate.plans.operations import PlannedOperation
from samestate.plans.repetitions import RepeatedArm, repeated_arms
from samestate.plans.scenarios import CANDIDATE, CONTROL

OFF, ON = "OFF", "ON"
IN_MEMORY = ("native", "dictionary", "samestate-memory")
"""Connectors that keep pages in the host's memory and nowhere else."""
BEHIND = {
    "samestate-disk": CachePlace.DISK,
    "samestate-valkey": CachePlace.REMOTE,
    "samestate-object": CachePlace.REMOTE,
}
"""What is behind the memory tier."""


class Condition(NamedTuple):
    """What was attempted, and on which engine."""

    arm: str
    """``OFF`` or ``ON``; of engines that take turns ``OFF`` or the arm's name, which is its connector's."""
    attempted: OperationName

    def __str__(self) -> str:
        return f"{self.arm} {self.attempted.value}"


CONDITIONS = (
    Condition(OFF, OperationName.COLD),
    Condition(OFF, OperationName.REPEAT),
    Condition(ON, OperationName.COLD),
    Condition(ON, OperationName.REPEAT),
    Condition(ON, OperationName.RELOAD),
)


class Sample(NamedTuple):
    """One request. None: not recorded."""

    repetition: int
    """From 1."""
    condition: Condition
    arm: str
    """The archive's name."""
    case: str
    trial: int
    """From 1; 0: a warm-up, which never counts."""
    op: str
    request: str | None
    tokens: int
    """N."""
    credited: int | None
    """p."""
    boundaries: dict[int, int | None]
    """B by rank, as its loads describe it; empty: it loaded nothing."""
    moved: int | None
    """Bytes loaded over all ranks; 0: none."""
    taken: Taken
    output: str | None
    """Digest of the generated tokens."""
    generated: int
    first_token: float | None
    """Seconds."""
    total: float | None
    decode_rate: float | None
    """Tokens a second."""
    held_up: bool
    """Its first token was received after its last step had begun: client or server had no time to pass it on."""
    timed: tuple[Seen[RequestTimed], ...]
    evidence: tuple[str, ...]
    by_rank: Mapping[int, int] = MappingProxyType({})
    """Bytes loaded by rank; empty: none, or not told."""
    loading: float | None = None
    """Seconds from the first load's submission to the last one's completion, as the workers report them."""

    @property
    def path(self) -> ActualPath | None:
        """The actual one."""
        return self.taken.path

    @property
    def suffix(self) -> int | None:
        """Prompt tokens that were computed: N − p."""
        return None if self.credited is None else self.tokens - self.credited

    @property
    def measured(self) -> bool:
        """Planned to be; a warm-up is not."""
        return self.trial > 0


def samples(history: History) -> list[Sample]:
    """Every planned request of every arm that the archive has, in planned order. Raises MissingEvidence."""
    plan = history.plan
    if plan.latency is None:
        raise MissingEvidence("no_latency", f"plan {plan.name} measures no latency")
    trials = {trial.case(n): trial for trial, n in trial_tokens(plan, history.resolved.checkpoint_interval)}
    found: list[Sample] = []
    for one in repeated_arms(plan):
        arm = history.arms.get(one.name)
        if arm is None:
            continue
        for case, op in history.generations(arm=one.name):
            found.append(sample(arm, one, case.id, trials[case.id].number, case.tokens, op))
    return found


def sample(arm: ArmHistory, one: RepeatedArm, case: str, trial: int, tokens: int, op: PlannedOperation) -> Sample:
    """What an arm's records say of one request; `one`: the arm as planned."""
    output = arm.output(op.op)
    request = output.rec.request if output else None
    loads = by_rank(arm.loads.get(request, ()) if request else ())
    schedule = arm.schedule(op.op)
    first = schedule[0] if schedule else None
    moved = _moved(loads)
    credited = first.start if first else None
    places = _places(arm, one.arm, op.op, moved)
    evidence = PathEvidence(tokens, credited, _local(arm, request, credited), moved, places)
    timed = tuple(arm.timed.get(op.op, ()))
    rec = timed[0].rec if timed else None
    return Sample(
        repetition=one.repetition,
        condition=Condition({CONTROL: OFF, CANDIDATE: ON}.get(one.arm.name, one.arm.name), op.name),
        arm=one.name,
        case=case,
        trial=trial,
        op=op.op,
        request=request,
        tokens=tokens,
        credited=credited,
        boundaries={rank: restored(of_rank) for rank, of_rank in sorted(loads.items())},
        moved=moved,
        taken=classify(evidence),
        output=token_digest(output.rec.token_ids) if output else None,
        generated=len(output.rec.token_ids) if output else 0,
        first_token=time_to_first_token(rec.began_ns, rec.events) if rec else None,
        total=total_latency(rec.began_ns, rec.done_ns) if rec else None,
        decode_rate=decode_rate(rec.events) if rec else None,
        held_up=rec is not None and schedule is not None and _held_up(rec, schedule),
        timed=timed,
        evidence=tuple(_evidence(arm, op.op, first.where if first else None, timed)),
        by_rank=rank_bytes(loads) if moved else {},
        loading=_loading(loads) if moved else None,
    )


def _evidence(arm: ArmHistory, op: str, first: str | None, timed: tuple[Seen[RequestTimed], ...]) -> Iterator[str]:
    yield from ([first] if first else [])
    yield from (seen.where for seen in timed)
    output = arm.output(op)
    if output is not None:
        yield output.where


def _held_up(rec: RequestTimed, schedule: Schedule) -> bool:
    """Steps and events are of one clock. Two steps are too few to tell."""
    first = next((event.at_ns for event in rec.events if event.tokens), None)
    return first is not None and len(schedule) > 2 and first > schedule.times[-1]


def _local(arm: ArmHistory, request: str | None, credited: int | None) -> int | None:
    """Tokens of p that were local; without a connector all of them are."""
    if not arm.connected:
        return credited
    answered = [seen for seen in arm.lookups.get(request or "", ()) if seen.rec.matched_tokens is not None]
    return answered[-1].rec.local_tokens if answered else None


def _moved(loads: dict[int, list[Load]]) -> int | None:
    """Bytes over all ranks; None where one completed load does not say."""
    done = [load.completed for of_rank in loads.values() for load in of_rank]
    if any(one is None or not one.rec.ok or one.rec.bytes is None for one in done):
        return None
    return sum(rank_bytes(loads).values())


def _loading(loads: dict[int, list[Load]]) -> float | None:
    pairs = [(load.submitted.t_ns, load.completed.t_ns) for rank in loads.values() for load in rank if load.completed]
    return (max(done for _, done in pairs) - min(sent for sent, _ in pairs)) / NANO if pairs else None


def _places(arm: ArmHistory, planned: ArmPlan, op: str, moved: int | None) -> dict[CachePlace, int] | None:
    """Of the loaded bytes, how many lay where; what is behind a memory tier counts what it was asked for."""
    if moved is None:
        return None
    if planned.connector in IN_MEMORY:
        return {CachePlace.MEMORY: moved}
    place, behind = BEHIND.get(planned.connector), arm.counter(op, TIER_LOADED_BYTES)
    if place is None or behind is None:
        return None
    from_behind = min(moved, int(behind))
    return {CachePlace.MEMORY: moved - from_behind, place: from_behind}
