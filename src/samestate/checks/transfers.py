"""``transfers``: every reload really came from the external cache, on every rank, and every save was completed.

Submission is not completion, and a metric is not a transfer: bytes (`parts`), counters, lookup, answer
(`credit`) and first batch are separate sources, and a disagreement is a finding (requirements 24, 36, 79).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import Reload, expected_ranks, nothing_due, reloads
from samestate.checks.credit import credits_agree
from samestate.checks.history import ArmHistory, History, Load
from samestate.checks.parts import load_parts, save_parts
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, OperationName
from samestate.plans.scenarios import CANDIDATE, CONTROL

CHECK = "transfers"


def transfers(history: History) -> CheckResult:
    """Loads, counters, lookups and resets of every reload of the candidate; saves of the arm."""
    arm = history.arm(CANDIDATE)
    ranks = expected_ranks(arm)
    findings: list[Finding] = []
    checked = []
    for reload in reloads(history):
        if nothing_due(history, reload) and _no_hit(arm, reload):
            findings += _lookup(arm, reload)
        else:
            checked.append(reload)
    good = moved = 0
    for reload in checked:
        counters = _counters(arm, reload, whole=history.whole(CANDIDATE))
        found = [*_loads(reload, ranks), *load_parts(arm, reload), *_lookup(arm, reload), *counters]
        good += not found
        moved += sum(rank_bytes(reload.loads).values())
        findings += found
    findings += credits_agree(history)
    findings += _resets(history)
    findings += [*saves_completed(arm), *save_parts(arm)]
    summary = (
        f"{good}/{len(checked)} reloads loaded on every rank and counted alike by all sources, {moved} bytes; "
        f"{arm.saves.submitted - len(arm.saves.open)}/{arm.saves.submitted} saves completed"
    )
    return conclude(CHECK, findings, unit="reloads", examined=len(checked), summary=summary)


def _no_hit(arm: ArmHistory, reload: Reload) -> bool:
    """The engine counts that nothing came from outside."""
    return arm.counter(reload.op, EXTERNAL_HITS) == 0


def rank_bytes(loads: Mapping[int, Sequence[Load]]) -> dict[int, int]:
    """Bytes that completed loads moved, by rank."""
    return {rank: sum(_bytes(load) or 0 for load in of_rank) for rank, of_rank in sorted(loads.items())}


def _bytes(load: Load) -> int | None:
    return load.completed.rec.bytes if load.completed and load.completed.rec.ok else None


def _loads(reload: Reload, ranks: set[int]) -> Iterator[Finding]:
    for rank in sorted(ranks | set(reload.loads)):
        place = reload.place.model_copy(update={"rank": rank})
        if rank not in reload.loads:
            yield unknown("missing_rank", f"{reload.op}: rank {rank} records no load", place)
            continue
        for load in reload.loads[rank]:
            yield from load_done(reload.op, load, place)


def load_done(op: str, load: Load, place: Place) -> Iterator[Finding]:
    """A load was completed, and moved what it described."""
    rank, done = place.rank, load.completed
    described = sum(part.bytes for part in load.submitted.rec.parts)
    if done is None:
        message = f"{op}: rank {rank}: load {load.submitted.rec.job} was submitted and never completed"
        yield unknown("load_not_completed", message, place, [load.submitted.where])
        return
    evidence = [load.submitted.where, done.where]
    if not done.rec.ok:
        yield unknown("load_failed", f"{op}: rank {rank}: load {done.rec.job} failed", place, evidence)
    elif done.rec.bytes is None:
        yield unknown("not_reported", f"{op}: rank {rank} does not report the bytes loaded", place, evidence)
    elif done.rec.bytes == 0:
        yield unknown("no_bytes", f"{op}: rank {rank} loaded 0 bytes", place, evidence)
    elif done.rec.bytes != described:
        message = f"{op}: rank {rank} loaded {done.rec.bytes} bytes, the transfer describes {described}"
        yield fail("bytes_disagree", message, place, evidence)


def _lookup(arm: ArmHistory, reload: Reload) -> Iterator[Finding]:
    """The connector was asked with nothing local: the local miss, seen where it happens."""
    lookups = arm.lookups.get(reload.request, []) if reload.request else []
    for seen in lookups:
        if seen.rec.local_tokens:
            message = f"{reload.op}: {seen.rec.local_tokens} tokens were still in the local cache"
            yield unknown("local_hit", message, reload.place, [seen.where])
        if seen.rec.salt:
            message = f"{reload.op}: the lookup was salted, the plan has no salt"
            yield fail("salted", message, reload.place, [seen.where])


def _counters(arm: ArmHistory, reload: Reload, *, whole: bool) -> Iterator[Finding]:
    hits, evidence = arm.counter(reload.op, EXTERNAL_HITS), arm.evidence(reload.op)
    lookups = arm.lookups.get(reload.request, []) if reload.request else []
    local = max((seen.rec.local_tokens for seen in lookups), default=0)
    if hits is None:
        yield unknown("counter_unreadable", f"{reload.op}: {EXTERNAL_HITS} cannot be read", reload.place, evidence)
    elif hits <= 0:
        message = f"{reload.op}: the engine counts no external hit"
        yield unknown("no_external_hit", message, reload.place, evidence)
    elif reload.first is not None and hits != reload.first.start - local:
        restored = ", ".join(str(b) for b in sorted({b for b in reload.boundaries.values() if b is not None}))
        message = (
            f"{reload.op}: the engine counts {hits:.0f} external tokens, the first batch credits "
            f"{reload.first.start}, the transfer restores {restored or 'a prefix it does not report'}"
        )
        make = fail if whole else unknown
        yield make("counter_disagrees", message, reload.place, [*evidence, *reload.evidence])


def _resets(history: History) -> Iterator[Finding]:
    """Both arms dropped their local cache before each reload, and a counter shows that they missed."""
    for name in (CONTROL, CANDIDATE):
        arm = history.arm(name)
        for case, op in history.generations(OperationName.RELOAD):
            place = Place(arm=name, case=case.id, op=op.op)
            local = arm.counter(op.op, LOCAL_HITS)
            if local is None:
                message = f"arm {name}: {op.op}: {LOCAL_HITS} cannot be read: the local miss is not proven"
                yield unknown("counter_unreadable", message, place, arm.evidence(op.op))
            elif local:
                message = f"arm {name}: {op.op}: {local:.0f} tokens came from the local cache"
                yield unknown("local_hit", message, place, arm.evidence(op.op))
        for case in history.cases(name):
            for op in case.operations:
                if op.name is OperationName.RESET:
                    yield from confirmed(arm, case.id, op.op)


def confirmed(arm: ArmHistory, case: str | None, op: str) -> Iterator[Finding]:
    """A reset took the local cache, and nothing else."""
    place = Place(arm=arm.name, case=case, op=op)
    seen = arm.resets.get(op, [])
    if not seen:
        yield unknown("missing_reset", f"arm {arm.name}: {op} is not recorded", place)
    for one in seen:
        if not one.rec.local_reset:
            message = f"arm {arm.name}: {op}: the engine did not confirm the reset"
            yield unknown("reset_not_confirmed", message, place, [one.where])
        if not one.rec.external_kept:
            message = f"arm {arm.name}: {op}: the external cache was reset too"
            yield unknown("external_not_kept", message, place, [one.where])
        if not one.rec.running_kept:
            message = f"arm {arm.name}: {op}: running requests were reset too"
            yield unknown("running_not_kept", message, place, [one.where])


def saves_completed(arm: ArmHistory, *, must_save: bool = True) -> Iterator[Finding]:
    """Every save and every load of the arm has a submission and a good completion, and there are saves if must be."""
    place = Place(arm=arm.name)
    if must_save and not arm.saves.submitted:
        yield unknown(
            "no_saves", f"arm {arm.name} records no save: nothing that was loaded is known to be saved", place
        )
    for seen in [*arm.saves.open.values(), *arm.saves.unpaired]:
        message = f"save {seen.rec.job} of rank {seen.rec.rank} has a submission or a completion, not both"
        yield unknown("save_unpaired", message, place.model_copy(update={"rank": seen.rec.rank}), [seen.where])
    for done in arm.saves.failed:
        message = f"save {done.rec.job} of rank {done.rec.rank} failed"
        yield unknown("save_failed", message, place.model_copy(update={"rank": done.rec.rank}), [done.where])
    for done in arm.saves.unlike:
        message = (
            f"save {done.rec.job} of rank {done.rec.rank} moved {done.rec.bytes} bytes, its submission says others"
        )
        yield fail("bytes_disagree", message, place.model_copy(update={"rank": done.rec.rank}), [done.where])
    for loaded in arm.stray_loads:
        message = f"load {loaded.rec.job} of rank {loaded.rec.rank} completed and was never submitted"
        yield unknown("load_unpaired", message, place.model_copy(update={"rank": loaded.rec.rank}), [loaded.where])
