"""``block-size``, ``local-equality``, ``local-hits``, ``non-vacuity``: reuse within the engine's own prefix cache.

A case is a prompt computed cold and then given again, the local cache kept. p is where a repeat's first
step starts. In align mode, and where no kernel saves states within a step, a recurrent page
holds the state of [0, p) only if a step ended at p, so a hit at any other p is a fault whatever the tokens are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.continuation import with_varied_outputs
from samestate.checks.equality import first_difference, wrong_length
from samestate.checks.geometry import mismatch, only_step_ends
from samestate.checks.history import ArmHistory, History, Row
from samestate.checks.seen import Seen
from samestate.checks.table import CaseRow, verdict_of
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import LOCAL_HITS, EntryKind, OperationName, OperationOutput
from samestate.plans.operations import boundary
from samestate.plans.scenarios import CANDIDATE

BLOCK_SIZE = "block-size"
EQUALITY = "local-equality"
HITS = "local-hits"


class Repeat(NamedTuple):
    """One repetition of a prompt, as far as it is recorded."""

    arm: ArmHistory
    case: str
    tokens: int
    """N."""
    number: int
    """From 1."""
    op: str
    earlier: list[str]
    """Operations that had the same prompt before, the cold one first."""
    aligned: bool
    """Recurrent state lies where steps ended, and nowhere else."""
    output_tokens: int
    """As planned."""

    @property
    def place(self) -> Place:
        return Place(arm=self.arm.name, case=self.case, op=self.op)

    @property
    def cold(self) -> Seen[OperationOutput] | None:
        return self.arm.output(self.earlier[0])

    @property
    def output(self) -> Seen[OperationOutput] | None:
        return self.arm.output(self.op)

    @property
    def first(self) -> Row | None:
        """The first step: p is its start."""
        schedule = self.arm.schedule(self.op)
        return schedule[0] if schedule else None

    @property
    def difference(self) -> int | None:
        """Zero-based index of the first token that is not the cold run's; None: equal, or nothing to compare."""
        if self.cold is None or self.output is None:
            return None
        return first_difference(self.cold.rec.token_ids, self.output.rec.token_ids)

    @property
    def step_ends(self) -> set[int] | None:
        """Where steps of the earlier runs ended; None: not all of them are recorded."""
        ends: set[int] = set()
        for op in self.earlier:
            rows = list(self.arm.schedule(op) or ())
            if not rows or any(after.start > row.end for row, after in pairwise(rows)):
                return None
            ends.update(row.end for row in rows)
        return ends

    @property
    def stateless_hit(self) -> int | None:
        """p, where only a step that ended there can have left the state, and none did; None: not so, or not known."""
        ends = self.step_ends
        if not self.aligned or self.first is None or not self.first.start or ends is None:
            return None
        return None if self.first.start in ends else self.first.start

    @property
    def unattributable(self) -> str | None:
        """Why unequal tokens cannot be laid to the hit; None: they can."""
        if self.stateless_hit is not None:
            return None
        parted = mismatch(self.arm.schedule(self.earlier[0]), self.arm.schedule(self.op), whole=False)
        return parted.message if parted else None


def repeats(history: History) -> list[Repeat]:
    """The planned repeats, in order; raises MissingEvidence."""
    arm = history.arm(CANDIDATE)
    aligned = only_step_ends(arm)
    found = []
    for case in history.cases(CANDIDATE):
        same = [op for op in case.operations if op.name in (OperationName.COLD, OperationName.REPEAT)]
        for number, op in enumerate(same[1:], 1):
            earlier = [one.op for one in same[:number]]
            found.append(Repeat(arm, case.id, case.tokens, number, op.op, earlier, aligned, op.output_tokens))
    return found


def block_size(history: History) -> CheckResult:
    """Steps end where recurrent pages do, by what the scheduler has once the start is over."""
    arm = history.arm(CANDIDATE)
    place, c = Place(arm=arm.name), history.resolved.checkpoint_interval
    findings: list[Finding] = []
    examined, sizes = 0, set[int]()
    for seen in arm.schedulers:
        groups, size = seen.rec.engine_groups, seen.rec.block_size
        examined += len(groups)
        sizes.add(size)
        recurrent = [group for group in groups if group.entry_kind is EntryKind.RECURRENT]
        astray = [group for group in recurrent if size % group.tokens_per_block]
        if astray:
            named = ", ".join(str(group.group) for group in astray)
            kept = " and ".join(map(str, sorted({group.tokens_per_block for group in astray})))
            message = (
                f"the scheduler ends steps at multiples of {size} tokens (cache_config.block_size), and recurrent "
                f"groups {named} keep their state at multiples of {kept}"
            )
            findings.append(fail("block_size_reset", message, place, [seen.where]))
        largest = max((group.tokens_per_block for group in recurrent or groups), default=c)
        if largest != c:
            message = f"C is {c} in resolved.json, and the scheduler's groups have blocks of {largest} tokens"
            findings.append(fail("wrong_checkpoint_interval", message, place, [seen.where]))
    if not arm.schedulers:
        findings.append(unknown("not_recorded", "no scheduler_configured record: sizes are not known", place))
    summary = f"steps end at multiples of {', '.join(map(str, sorted(sizes)))}, {examined} groups, C={c}"
    return conclude(BLOCK_SIZE, findings, unit="groups", examined=examined, summary=summary)


def local_equality(history: History) -> CheckResult:
    """Every repeat against the cold run, token by token."""
    checked = repeats(history)
    findings = [finding for repeat in checked for finding in _equal(history, repeat)]
    unequal = {finding.place.op for finding in findings}
    wrong = next((repeat for repeat in checked if repeat.difference is not None), None)
    summary = f"{len(checked) - len(unequal)}/{len(checked)} repeats equal to cold"
    if wrong is not None:
        summary += f"; first wrong: N={wrong.tokens} at token {wrong.difference}"
    return conclude(EQUALITY, findings, unit="comparisons", examined=len(checked), summary=summary)


def _equal(history: History, repeat: Repeat) -> Iterator[Finding]:
    if repeat.cold is None or repeat.output is None:
        absent = repeat.earlier[0] if repeat.cold is None else repeat.op
        yield unknown("missing_output", f"no output of {absent} to compare", repeat.place)
        return
    evidence = [repeat.cold.where, repeat.output.where]
    for seen in (repeat.cold, repeat.output):
        yield from wrong_length(history, seen.rec.op, seen, repeat.output_tokens, repeat.place)
    if repeat.difference is None:
        return
    p = repeat.first.start if repeat.first else "?"
    message = (
        f"N={repeat.tokens}: {repeat.op} (hit of {p}) differs from {repeat.earlier[0]} from token "
        f"{repeat.difference} on"
    )
    if why := repeat.unattributable:
        yield unknown("geometry_mismatch", f"{message}, and cannot be attributed: {why}", repeat.place, evidence)
    else:
        yield fail("tokens_differ", message, repeat.place, evidence)


def local_hits(history: History) -> CheckResult:
    """What was hit, by the schedule, the answer and the counter; at the first repeat as at later ones."""
    checked = repeats(history)
    findings: list[Finding] = []
    for repeat in checked:
        if repeat.number == 1:
            findings += _cold_hits(repeat)
            findings += _first_repeat([one for one in checked if one.case == repeat.case])
        findings += _hit(repeat)
    hit = sum(1 for repeat in checked if repeat.first and repeat.first.start)
    missed = sum(finding.code == "second_sighting_missed" for finding in findings)
    lost = sum(finding.code == "state_never_computed" for finding in findings)
    summary = f"{hit}/{len(checked)} repeats hit"
    if missed or lost:
        summary += f"; first repeats that missed: {missed}, hits of a state never computed: {lost}"
    return conclude(HITS, findings, unit="repeats", examined=len(checked), summary=summary)


def _hit(repeat: Repeat) -> Iterator[Finding]:
    if repeat.first is None or repeat.output is None:
        yield unknown("missing_batches", f"{repeat.op}: no step or no output is recorded", repeat.place)
        return
    p = repeat.first.start
    evidence = [repeat.first.where, repeat.output.where, *repeat.arm.evidence(repeat.op)]
    said = {"cached_tokens": repeat.output.rec.cached_tokens, LOCAL_HITS: repeat.arm.counter(repeat.op, LOCAL_HITS)}
    for name, value in said.items():
        if value is None:
            yield unknown("not_readable", f"{repeat.op}: {name} cannot be read", repeat.place, evidence)
        elif value != p:
            message = f"{repeat.op}: the first step starts at {p}, and {name} says {value:.0f}"
            yield fail("hits_disagree", message, repeat.place, evidence)
    ends = repeat.step_ends
    if repeat.aligned and p and ends is None:
        message = f"{repeat.op}: hit of {p}, and not every earlier step of this prompt is recorded"
        yield unknown("missing_batches", message, repeat.place, evidence)
    elif ends is not None and repeat.stateless_hit is not None:
        near = ", ".join(str(end) for end in sorted(ends) if end <= repeat.tokens)
        message = f"{repeat.op}: hit of {p}, and no step of this prompt ended at {p} (ends: {near})"
        place = repeat.place.model_copy(update={"boundary": p})
        yield fail("state_never_computed", message, place, evidence)


def _cold_hits(repeat: Repeat) -> Iterator[Finding]:
    op = repeat.earlier[0]
    schedule = repeat.arm.schedule(op)
    if schedule and schedule[0].start:
        message = f"{op} should compute everything and starts at {schedule[0].start}"
        place = repeat.place.model_copy(update={"op": op})
        yield unknown("not_cold", message, place, [schedule[0].where])


def _first_repeat(same: Sequence[Repeat]) -> Iterator[Finding]:
    """A first repeat that hits less than a later one, or a case in which nothing was ever hit."""
    firsts = [repeat.first for repeat in same]
    hits = [first.start for first in firsts if first]
    if len(hits) < len(same):
        return
    evidence = [first.where for first in firsts if first]
    case = same[0]
    if hits[0] < max(hits):
        message = f"N={case.tokens}: the first repeat hit {hits[0]} tokens, a later one {max(hits)}"
        yield fail("second_sighting_missed", message, case.place, evidence)
    elif not max(hits) and boundary(case.tokens, _interval(case.arm), drops_last=case.arm.drops_last_block):
        yield unknown("never_hit", f"N={case.tokens}: no repeat hit anything", case.place, evidence)


def _interval(arm: ArmHistory) -> int:
    return arm.engine.rec.checkpoint_interval


def non_vacuity(history: History) -> CheckResult:
    """Something was hit, and the outputs depend on their prompts."""
    hits = sum(1 for repeat in repeats(history) if repeat.first and repeat.first.start)
    nothing = unknown("vacuous", "no repeat hit the local cache: nothing was tested", Place(arm=CANDIDATE))
    return with_varied_outputs(history, [] if hits else [nothing], f"{hits} repeats hit")


def repeat_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """A row for every planned repeat; raises MissingEvidence where not even the cases are known."""
    # A block size that was reset is the cause, and every row would fail for it: rows show where it does harm.
    own = [check for check in required if check != BLOCK_SIZE]
    return [_row(repeat, verdict_of(repeat.place, results, own)) for repeat in repeats(history)]


def _row(repeat: Repeat, verdict: Verdict) -> CaseRow:
    compared = repeat.cold is not None and repeat.output is not None
    return CaseRow(
        case=repeat.case,
        tokens=repeat.tokens,
        repeat=repeat.number,
        first_difference=repeat.difference,
        equal=repeat.difference is None if compared else None,
        boundary=None,
        boundary_reported=False,
        content_boundary=None,
        credited=repeat.first.start if repeat.first else None,
        scheduled=repeat.first.scheduled if repeat.first else None,
        suffix=repeat.tokens - repeat.first.start if repeat.first else None,
        rank_bytes=[],
        verdict=verdict,
    )
