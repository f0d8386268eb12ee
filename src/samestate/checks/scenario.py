"""The generations of a scenario, and ``cold-equality``: each against the control's cold run of the same prompt.

The control computes every prompt alone and whole; a candidate reuses what its scenario left behind, so its steps are at
best a part of the cold run's. Where they are not, nor those that computed what it reused (`sources`), unequal tokens
cannot be laid to reuse, unless the state that was reused cannot be right (`provenance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.boundary import by_rank, restored
from samestate.checks.equality import first_difference, wrong_length
from samestate.checks.geometry import Mismatch, mismatch, missing_steps
from samestate.checks.history import ArmHistory, History, Load, MissingEvidence, Row, Schedule
from samestate.checks.prefix_identity import content_boundaries
from samestate.checks.prefixes import Prefixes
from samestate.checks.seen import Seen
from samestate.checks.table import CaseRow, TakenPath, at_most, verdict_of
from samestate.checks.transfers import rank_bytes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import Lookup, OperationOutput
from samestate.plans.operations import PlannedOperation
from samestate.plans.scenarios import CONTROL, cold_op

COLD_EQUALITY = "cold-equality"


class Generation(NamedTuple):
    """One planned generation of a scenario, as far as it is recorded."""

    arm: ArmHistory
    prompt: str
    tokens: int
    """N."""
    op: PlannedOperation

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}: {self.op.op}"

    @property
    def place(self) -> Place:
        return Place(arm=self.arm.name, case=self.prompt, op=self.op.op, request=self.request)

    @property
    def output(self) -> Seen[OperationOutput] | None:
        return self.arm.output(self.op.op)

    @property
    def request(self) -> str | None:
        return self.output.rec.request if self.output else None

    @property
    def schedule(self) -> Schedule | None:
        return self.arm.schedule(self.op.op)

    @property
    def first(self) -> Row | None:
        """The first step: p is its start."""
        return self.schedule[0] if self.schedule else None

    @property
    def lookup(self) -> Seen[Lookup] | None:
        """The last one that was answered before the first step."""
        first, seen = self.first, self.arm.lookups.get(self.request or "", ())
        answered = [one for one in seen if one.rec.matched_tokens is not None and (not first or one.n < first.n)]
        return answered[-1] if answered else None

    @property
    def local(self) -> int | None:
        """Tokens of p that the local cache held; None: not known."""
        if self.first is None or (self.arm.connected and self.lookup is None):
            return None
        return min(self.lookup.rec.local_tokens, self.first.start) if self.lookup else self.first.start

    @property
    def external(self) -> int | None:
        """The other tokens of p."""
        return None if self.first is None or self.local is None else self.first.start - self.local

    @property
    def path(self) -> TakenPath | None:
        """Where the reused tokens came from; None: not known."""
        if self.local is None or self.external is None:
            return None
        if self.local and self.external:
            return "mixed"
        return "local" if self.local else "external" if self.external else "cold"

    @property
    def loads(self) -> dict[int, list[Load]]:
        """By rank."""
        return by_rank(self.arm.loads.get(self.request or "", ()))

    @property
    def first_loads(self) -> dict[int, list[Load]]:
        """By rank, the loads that its first step went on from; a preempted request may load for later ones."""
        found = {rank: self.resumptions(rank).get(self.first, []) for rank in self.loads} if self.first else self.loads
        return {rank: loads for rank, loads in found.items() if loads}

    def resumptions(self, rank: int) -> dict[Row, list[Load]]:
        """Loads of a rank by the step that went on from them: a preempted request loads again."""
        found: dict[Row, list[Load]] = {}
        for load in self.loads.get(rank, ()):
            row = self.arm.resumed(self.request or "", load.submitted.t_ns)
            if row is not None:
                found.setdefault(row, []).append(load)
        return found


def generations(history: History, arms: Sequence[ArmHistory]) -> list[Generation]:
    """The planned generations of `arms`, in order; raises MissingEvidence, also for a plan without a scenario."""
    if not history.plan.scenario:
        raise MissingEvidence("no_scenario", "the plan has no scenario")
    return [Generation(arm, case.id, case.tokens, op) for arm in arms for case, op in history.generations(arm=arm.name)]


def lineage(history: History, arm: ArmHistory) -> list[ArmHistory]:
    """The arm, and those whose external cache it finds, the nearest first; raises MissingEvidence."""
    found = [arm]
    while (before := history.follows(found[-1].name)) is not None and before not in {one.name for one in found}:
        found.append(history.arm(before))
    return found


def holds_local(prefixes: Prefixes, one: Generation, other: Generation) -> bool:
    """Whether `other` begins as `one` does and had computed what `one` found locally. `prefixes`: of their arm."""
    reached = max((row.end for row in other.schedule or ()), default=0)
    return reached >= (one.local or 0) and prefixes.shared(one.request or "", other.request or "", one.local or 0)


def neighbours(generation: Generation, others: Sequence[Generation]) -> list[str]:
    """Operations that were in a step with this one."""
    mine = {row.n for row in generation.schedule or ()}
    return [
        other.op.op
        for other in others
        if other.op.together is not None
        and (other.arm.name, other.op.together) == (generation.arm.name, generation.op.together)
        and other.op.op != generation.op.op
        and any(row.n in mine for row in other.schedule or ())
    ]


class Excuse(NamedTuple):
    """Why unequal tokens are no evidence of a wrong state."""

    code: str
    message: str


Excused = Callable[[Generation, int], Excuse | None]
"""Of a generation and the first token that differs; None: nothing excuses it."""

Unlike = Callable[[Generation], Mismatch | None]
"""How what a generation reused was computed in other steps than the cold run's; None: it was not."""


def cold_equality(
    history: History,
    impossible: set[tuple[str, str]],
    check: str = COLD_EQUALITY,
    excused: Excused = lambda one, difference: None,
    unlike: Unlike = lambda one: None,
) -> CheckResult:
    """Every generation of every candidate against the cold one, token by token.

    `impossible`: arm and operation of those whose reused state cannot be right. `excused`: differences that are
    unknown, whatever their steps, under codes of their own. `unlike`: asked last, of differences after the same steps.
    """
    checked = generations(history, history.candidates)
    findings: list[Finding] = []
    equal, wrong = 0, ""
    for generation in checked:
        found = list(_equal(history, generation, checked, impossible, excused, unlike))
        equal += not found
        findings += found
        difference = first_unequal(history, generation)
        if difference is not None and not wrong:
            wrong = f"; first wrong: {generation.op.op} (N={generation.tokens}) at token {difference}"
    summary = f"{equal}/{len(checked)} generations equal to cold{wrong}"
    return conclude(check, findings, unit="comparisons", examined=len(checked), summary=summary)


def _equal(
    history: History,
    one: Generation,
    others: Sequence[Generation],
    impossible: set[tuple[str, str]],
    excused: Excused,
    unlike: Unlike,
) -> Iterator[Finding]:
    cold_name = cold_op(one.prompt)
    cold, output = history.arm(CONTROL).output(cold_name), one.output
    if cold is None or output is None:
        absent = f"arm {CONTROL}: {cold_name}" if cold is None else one.name
        yield unknown("missing_output", f"no output of {absent} to compare", one.place)
        return
    reference = history.arm(CONTROL).schedule(cold_name)
    gap = missing_steps(reference, one.tokens + len(cold.rec.token_ids) - 1)
    if gap is not None:
        yield unknown("missing_batches", f"arm {CONTROL}: {cold_name}: {gap}", one.place, [cold.where])
    evidence = [cold.where, output.where]
    planned = one.op.output_tokens
    yield from wrong_length(history, f"arm {CONTROL}: {cold_name}", cold, history.plan.output_tokens, one.place)
    yield from wrong_length(history, one.name, output, planned, one.place)
    difference = first_unequal(history, one)
    if difference is None:
        return
    p = one.first.start if one.first else "?"
    message = f"{one.name} (N={one.tokens}, {p} tokens reused) differs from {cold_name} from token {difference} on"
    if (one.arm.name, one.op.op) in impossible:
        yield fail("tokens_differ", f"{message}: what was reused cannot be its state", one.place, evidence)
        return
    if excuse := excused(one, difference):
        yield unknown(excuse.code, f"{message}: {excuse.message}", one.place, evidence)
        return
    beside = neighbours(one, others)
    # A shorter output has fewer steps: only those that both have can part.
    steps = [row for row in reference or () if row.end < one.tokens + planned]
    parted = mismatch(steps, one.schedule, whole=False)
    if beside:
        message += f", and cannot be attributed: it ran in steps with {', '.join(beside)}"
        yield unknown("geometry_mismatch", message, one.place, evidence)
    elif parted := parted or unlike(one):
        message += f", and cannot be attributed: {parted.message}"
        yield unknown("geometry_mismatch", message, one.place, [*evidence, *parted.evidence])
    else:
        yield fail("tokens_differ", message, one.place, evidence)


def first_unequal(history: History, one: Generation) -> int | None:
    """The first token in which a generation differs from the cold one; None: none, or one of them is not recorded."""
    cold, output = history.arm(CONTROL).output(cold_op(one.prompt)), one.output
    if cold is None or output is None:
        return None
    return first_difference(cold.rec.token_ids[: one.op.output_tokens], output.rec.token_ids)


def scenario_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """A row for every generation of every candidate; raises MissingEvidence."""
    contents = content_boundaries(history)
    return [
        _row(history, one, contents.get((one.arm.name, one.op.op)), verdict_of(one.place, results, required))
        for one in generations(history, history.candidates)
    ]


def _row(history: History, one: Generation, content: int | None, verdict: Verdict) -> CaseRow:
    compared = history.arm(CONTROL).output(cold_op(one.prompt)) is not None and one.output is not None
    difference = first_unequal(history, one)
    first = one.first_loads
    ranks = {rank: restored(loads) for rank, loads in first.items()}
    boundaries = set(ranks.values())
    boundary = boundaries.pop() if len(boundaries) == 1 else None
    p = one.first.start if one.first else None
    return CaseRow(
        case=one.prompt,
        tokens=one.tokens,
        first_difference=difference,
        equal=difference is None if compared else None,
        boundary=boundary,
        boundary_reported=bool(ranks) and None not in ranks.values(),
        content_boundary=content,
        credited=p,
        scheduled=one.first.scheduled if one.first else None,
        suffix=one.tokens - p if p is not None else None,
        rank_bytes=list(rank_bytes(first).values()),
        verdict=at_most(
            verdict,
            unlike=difference is not None or (boundary is not None and boundary != p),
            known=compared and one.path is not None,
        ),
        arm=one.arm.name,
        op=one.op.op,
        path=one.path,
        planned_path=one.op.path,
        local=one.local,
        external=one.external,
        together=one.op.together,
        salted=one.op.salt is not None,
    )
