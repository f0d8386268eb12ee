"""``plan-identity``: what was planned, resolved, frozen and run is one thing, and no input shares a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.equality import first_difference
from samestate.checks.history import REFERENCE, ArmHistory, History
from samestate.checks.turns import known_inputs
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.canonical import canonical_json, sha256_hex, token_digest
from samestate.plans.lending import objection
from samestate.plans.markers import probes
from samestate.plans.operations import beginnings, operation_ids, planned_inputs
from samestate.plans.repetitions import repeated_arms
from samestate.plans.scenarios import CONTROL
from samestate.plans.turns import OWN, continuing

CHECK = "plan-identity"
TARGET = "target"


class Running(NamedTuple):
    """The analyzer that judges, by id and source."""

    id: str
    source_sha256: str


def plan_identity(history: History, running: Running) -> CheckResult:
    """Hold plan, attempt, `resolved.json`, inputs, engines, imports and analyzer against each other."""
    findings = [
        *_hashes(history),
        *_lenders(history),
        *_expansion(history),
        *_inputs(history),
        *_shared_checkpoints(history),
        *_analyzer(history, running),
        *_arms(history),
    ]
    inputs = len(history.resolved.inputs)
    summary = f"plan {(history.plan_sha256 or '')[:12]}, {inputs} inputs, {len(history.arms)} arms agree"
    if findings:
        summary = findings[0].message
    return conclude(CHECK, findings, unit="inputs", examined=inputs, summary=summary)


def _hashes(history: History) -> Iterator[Finding]:
    attempt, actual = history.attempt, history.plan_sha256
    if attempt.plan_sha256 != actual:
        yield fail("wrong_plan", f"the attempt is of plan {attempt.plan_sha256[:12]}", evidence=[attempt.where])
    if history.resolved.plan_sha256 != actual:
        yield fail("wrong_plan", f"resolved.json is of plan {history.resolved.plan_sha256[:12]}")
    for arm in history.arms.values():
        place = Place(arm=arm.name)
        if not arm.resolved:
            yield unknown("missing_resolved", f"arm {arm.name}: no plan_resolved record", place)
        expected = _resolved_sha256(history, arm)
        for seen in arm.resolved:
            if seen.rec.resolved_sha256 != expected:
                message = f"arm {arm.name} ran another resolved.json ({seen.rec.resolved_sha256[:12]})"
                yield fail("wrong_resolved", message, place, [seen.where])
            firsts = [(one.stream, one.n, one.where) for one in arm.started[:1]]
            firsts += [(one.stream, one.n, one.where) for one in arm.markers.sent[:1]]
            for stream, n, where in firsts:
                if stream == seen.stream and n < seen.n:
                    message = f"arm {arm.name} resolved its plan after its first operation"
                    yield fail("resolved_late", message, place, [seen.where, where])


def _resolved_sha256(history: History, arm: ArmHistory) -> str | None:
    """Of the `resolved.json` that an arm must have run: this archive's, or the same one under the lender's plan."""
    if arm.source_plan_sha256 is None:
        return history.resolved_sha256
    resolved = history.resolved.model_copy(update={"plan_sha256": arm.source_plan_sha256})
    return sha256_hex(canonical_json(resolved.model_dump(mode="json")))


def _lenders(history: History) -> Iterator[Finding]:
    """An arm of another plan comes from the plan that this one names, and was run alike."""
    for arm in history.arms.values():
        if arm.source_plan_sha256 is None:
            continue
        place = Place(arm=arm.name)
        if arm.source_plan is None:
            yield unknown("missing_source", f"arm {arm.name}: the plan that it was recorded under is unreadable", place)
        elif why := objection(history.plan, arm.source_plan):
            yield fail("wrong_lender", f"arm {arm.name} was lent by an archive that {why}", place)


def _expansion(history: History) -> Iterator[Finding]:
    """`resolved.json` holds what the plan expands to at this C."""
    resolved, plan = history.resolved, history.plan
    if plan.markers is not None:
        yield from _probes(history)
        return
    inputs = planned_inputs(plan, resolved.checkpoint_interval)
    lengths = [one.tokens for one in inputs if one.role == TARGET]
    if resolved.lengths != lengths:
        yield fail("wrong_lengths", f"resolved.json has lengths {resolved.lengths}, the plan gives {lengths}")
    if resolved.operations != operation_ids(plan, resolved.checkpoint_interval):
        yield fail("wrong_operations", "resolved.json has other operations than the plan gives")
    expected = {(one.case, one.role, one.tokens) for one in inputs}
    given = [(one.case, one.role, one.tokens) for one in resolved.inputs]
    if set(given) != expected or len(given) != len(expected):
        yield fail("wrong_inputs", f"resolved.json names {len(given)} inputs, other than the {len(expected)} planned")
    turns = {prompt.name for prompt in continuing(plan)}
    for one in resolved.inputs:
        if (one.sha256 is None) != (one.role == TARGET and one.case in turns):
            message = f"the {one.role} of {one.case} is {'not ' if one.sha256 is None else ''}fixed in resolved.json"
            yield fail("wrong_inputs", f"{message}: only what continues an answer is made later", Place(case=one.case))


def _probes(history: History) -> Iterator[Finding]:
    """Of a marker plan: a prompt for each probe, as long as it says, and ids of its markers and stops."""
    resolved = history.resolved
    names = [probe.name for probe in probes(history.plan)]
    if resolved.operations != names:
        yield fail("wrong_operations", "resolved.json has other operations than the plan has probes")
    if [(one.case, one.role) for one in resolved.inputs] != [(name, TARGET) for name in names]:
        yield fail("wrong_inputs", f"resolved.json names {len(resolved.inputs)} inputs, not one for each probe")
    if resolved.lengths != [one.tokens for one in resolved.inputs]:
        yield fail("wrong_lengths", "resolved.json has other lengths than its inputs")
    if resolved.markers is None:
        yield unknown("missing_markers", "resolved.json names no ids of markers and stops")
    elif not resolved.markers.start_ids or not resolved.markers.end_ids:
        yield fail("missing_markers", "resolved.json has a marker without an id")


def _inputs(history: History) -> Iterator[Finding]:
    for one in known_inputs(history):
        place = Place(case=one.case)
        ids = history.inputs.get(one.sha256 or "")
        if one.sha256 is None:
            message = f"{one.case} continues an answer of the control that is not recorded whole"
            yield unknown("missing_answer", message, place)
        elif ids is None:
            yield unknown("missing_input", f"inputs.json lacks the {one.role} of {one.case}", place)
        elif token_digest(ids) != one.sha256:
            yield fail("wrong_input", f"the {one.role} of {one.case} is not what its digest says", place)
        elif len(ids) != one.tokens:
            message = f"the {one.role} of {one.case} has {len(ids)} tokens, resolved.json says {one.tokens}"
            yield fail("wrong_input", message, place)


def _shared_checkpoints(history: History) -> Iterator[Finding]:
    """No two inputs agree over a whole checkpoint interval, or one could hit the other's state.

    The prompts of a scenario do, and exactly as it says.
    """
    c = history.resolved.checkpoint_interval
    if history.plan.markers is not None:
        return
    if history.plan.scenario:
        yield from _shared_as_planned(history, c)
        return
    owners: dict[tuple[int, ...], tuple[str, str]] = {}
    for one in history.resolved.inputs:
        ids = history.inputs.get(one.sha256 or "")
        if ids is None or len(ids) < c:
            continue
        owner = owners.setdefault(tuple(ids[:c]), (one.case, one.role))
        if owner != (one.case, one.role):
            message = f"{one.role} of {one.case} and {owner[1]} of {owner[0]} agree in their first {c} tokens"
            yield fail("shared_checkpoint", f"{message}: one can hit the other's state", Place(case=one.case))


def _shared_as_planned(history: History, c: int) -> Iterator[Finding]:
    shared = beginnings(history.plan, c)
    ids = {
        one.case: history.inputs[one.sha256]
        for one in known_inputs(history)
        if one.role != OWN and one.sha256 is not None and one.sha256 in history.inputs
    }
    for case, other in combinations(ids, 2):
        planned = _planned_beginning(shared, ids, case, other)
        alike = first_difference(ids[case], ids[other])
        actual = min(len(ids[case]), len(ids[other])) if alike is None else alike
        if actual < planned or actual // c != planned // c:
            message = f"{case} and {other} agree in their first {actual} tokens, planned {planned}"
            yield fail("shared_checkpoint", f"{message}: other states are shared than the plan says", Place(case=case))


def _planned_beginning(shared: dict[str, tuple[str, int]], ids: dict[str, list[int]], case: str, other: str) -> int:
    """How many tokens two prompts have in common by the plan: through the prompt that both begin as."""
    mine, theirs = _ancestors(shared, ids, case), _ancestors(shared, ids, other)
    return max((min(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()), default=0)


def _ancestors(shared: dict[str, tuple[str, int]], ids: dict[str, list[int]], case: str) -> dict[str, int]:
    """A prompt, and those that it begins as: how many tokens of each."""
    found, name, tokens = {case: len(ids[case])}, case, len(ids[case])
    while name in shared and shared[name][0] not in found:
        name, length = shared[name]
        tokens = min(tokens, length)
        found[name] = tokens
    return found


def _analyzer(history: History, running: Running) -> Iterator[Finding]:
    pin = history.plan.analyzer
    if pin.id != running.id:
        yield unknown("other_analyzer", f"the plan is decided by {pin.id}, not by {running.id}")
    elif pin.source_sha256 is None:
        yield unknown("not_frozen", "the plan was not frozen: it pins no analyzer source")
    elif pin.source_sha256 != running.source_sha256:
        message = (
            f"frozen under another analyzer source ({pin.source_sha256[:12]}, running {running.source_sha256[:12]})"
        )
        yield unknown("other_analyzer_source", message)


def _arms(history: History) -> Iterator[Finding]:
    """Engines ran at the resolved C; arms are live or imported as the attempt says."""
    attempt, c = history.attempt, history.resolved.checkpoint_interval
    imports = {CONTROL: attempt.control_seal_sha256, REFERENCE: attempt.reference_seal_sha256}
    expected = [*attempt.arms, *(name for name, seal in imports.items() if seal)]
    if len(set(expected)) < len(expected):
        message = f"the attempt names an arm twice, or as live and as imported: {', '.join(expected)}"
        yield fail("wrong_arms", message, evidence=[attempt.where])
    for planned in repeated_arms(history.plan):
        if planned.name not in expected:
            message = f"arm {planned.name} is planned, and the attempt does not name it"
            yield unknown("missing_arm", message, Place(arm=planned.name), [attempt.where])
    for name in dict.fromkeys(expected):
        if name not in history.arms:
            yield unknown("missing_arm", f"the attempt names arm {name}; it is not in the archive", Place(arm=name))
    planned_names = {REFERENCE, *(planned.name for planned in repeated_arms(history.plan))}
    for arm in history.arms.values():
        place = Place(arm=arm.name)
        if arm.name not in planned_names:
            yield fail("unplanned_arm", f"arm {arm.name} is in the archive and not in the plan", place)
        for seen in arm.engines:
            if seen.rec.checkpoint_interval != c:
                message = f"arm {arm.name} ran at C={seen.rec.checkpoint_interval}, resolved.json says {c}"
                yield fail("wrong_checkpoint_interval", message, place, [seen.where])
        if arm.name not in expected:
            yield fail("unplanned_arm", f"arm {arm.name} is in the archive and not in the attempt", place)
            continue
        seal = None if arm.name in attempt.arms else imports[arm.name]
        if seal and arm.imported_from is None:
            yield unknown("missing_source", f"arm {arm.name} is imported, and its source's seal is gone", place)
        elif arm.imported_from != seal:
            message = f"arm {arm.name} is {_source(arm.imported_from)}, the attempt says {_source(seal)}"
            yield fail("wrong_import", message, place, [attempt.where])


def _source(seal: str | None) -> str:
    return f"imported from seal {seal[:12]}" if seal else "live"
