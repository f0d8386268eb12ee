"""``controls``: each switch on what is computed is recorded apart, with what it is made of, and is alike in all arms.

A tuner profile holds only where nothing else tunes (FlashInfer's own tuner is off) and where every rank read back that
it ran with the profile's choices (requirements 13, 53-56, 58). Not exercised where no arm records controls, as
before they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.controls import CONTROLS, REPAIR, TUNER_PROFILE
from samestate.evidence.records import Control

CHECK = "controls"
AUTOTUNE = "kernel_config.enable_flashinfer_autotune"
"""vLLM's own name, 0.32 and 0.33 (vllm/config/kernel.py): FlashInfer measures its kernels at warm-up."""


def controls(history: History) -> CheckResult:
    """Hold every arm's controls against the plan and against those of the first arm."""
    arms = history.ordered
    if not any(arm.engine.rec.controls is not None for arm in arms if arm.engines):
        return not_exercised(CHECK, "not_recorded", "no arm records controls", unit="controls")
    planned = {one.name: one.repair for one in history.plan.arms}
    first: tuple[ArmHistory, dict[str, Control]] | None = None
    findings: list[Finding] = []
    examined = 0
    for arm in arms:
        recorded = arm.engine.rec.controls
        place, where = Place(arm=arm.name), [arm.engine.where]
        if recorded is None:
            message = f"arm {arm.name}: its engine records no controls"
            findings.append(unknown("controls_not_recorded", message, place, where))
            continue
        mine = {one.name: one for one in recorded}
        examined += len(mine)
        findings += [*_whole(arm, recorded), *_repair(arm, mine, planned.get(arm.name)), *_profile(arm, mine)]
        if first is None:
            first = arm, mine
        else:
            findings += _alike(first, arm, mine, history.plan.differing_settings)
    return conclude(CHECK, findings, unit="controls", examined=examined, summary=_summary(arms))


def in_force(arm: ArmHistory) -> dict[str, str]:
    """The controls that are on in an arm's engine, with the first digits of their hashes."""
    recorded = (arm.engines[0].rec.controls or []) if arm.engines else []
    return {one.name: (one.sha256 or "no hash")[:12] for one in recorded if one.on}


def _summary(arms: list[ArmHistory]) -> str:
    on = sorted({f"{name} {sha256}" for arm in arms for name, sha256 in in_force(arm).items()})
    return f"{len(arms)} arms, in force: {', '.join(on) or 'none'}"


def _whole(arm: ArmHistory, recorded: list[Control]) -> Iterator[Finding]:
    place, where = Place(arm=arm.name), [arm.engine.where]
    names = [one.name for one in recorded]
    for name in CONTROLS:
        if name not in names:
            message = f"arm {arm.name}: whether {name} was on is not recorded"
            yield unknown("missing_control", message, place, where)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield fail("repeated_control", f"arm {arm.name}: {name} is recorded {names.count(name)} times", place, where)
    for one in recorded:
        if one.on and one.sha256 is None:
            message = f"arm {arm.name}: {one.name} is on, and nothing says what it is made of"
            yield unknown("control_without_hash", message, place, where)


def _repair(arm: ArmHistory, mine: dict[str, Control], planned: str | None) -> Iterator[Finding]:
    one = mine.get(REPAIR)
    if one is not None and one.on != (planned is not None):
        message = f"arm {arm.name}: {REPAIR} is {_word(one)}, planned {planned or 'none'}"
        yield fail("wrong_control", message, Place(arm=arm.name), [arm.engine.where])


def _alike(
    first: tuple[ArmHistory, dict[str, Control]], arm: ArmHistory, mine: dict[str, Control], declared: list[str]
) -> Iterator[Finding]:
    """Repairs are held to the plan, and `intervention` compares what they replaced."""
    other, theirs = first
    for name in sorted(theirs.keys() & mine.keys() - {REPAIR}):
        if "controls" in declared or f"controls.{name}" in declared:
            continue
        if (theirs[name].on, theirs[name].sha256) != (mine[name].on, mine[name].sha256):
            message = f"{name} is {_word(theirs[name])} in arm {other.name} and {_word(mine[name])} in arm {arm.name}"
            yield fail("control_differs", message, Place(arm=arm.name), [other.engine.where, arm.engine.where])


def _word(one: Control) -> str:
    return f"on ({(one.sha256 or 'no hash')[:12]})" if one.on else "off"


def _profile(arm: ArmHistory, mine: dict[str, Control]) -> Iterator[Finding]:
    one, engine = mine.get(TUNER_PROFILE), arm.engine
    if one is None or not one.on:
        return
    place = Place(arm=arm.name)
    tunes = engine.rec.settings.get(AUTOTUNE)
    if tunes is True:
        message = f"arm {arm.name}: a tuner profile is in force, and {AUTOTUNE} is on: set it to false"
        yield fail("autotune_in_force", message, place, [engine.where])
    elif tunes is not False:
        message = f"arm {arm.name}: a tuner profile is in force, and whether {AUTOTUNE} is on is not recorded"
        yield unknown("autotune_not_recorded", message, place, [engine.where])
    for rank in range(engine.rec.ranks):
        yield from _read_back(arm, rank, one.sha256)


def _read_back(arm: ArmHistory, rank: int, profile: str | None) -> Iterator[Finding]:
    place = Place(arm=arm.name, rank=rank)
    there = [seen for seen in arm.selected if seen.rec.rank == rank]
    if not there:
        message = f"arm {arm.name}: rank {rank} does not say which kernels it ran with under the profile"
        yield unknown("selection_not_recorded", message, place)
    for seen in there:
        rec = seen.rec
        if rec.mode != "pin" or rec.profile_sha256 != profile:
            said = f"mode {rec.mode}, profile {(rec.profile_sha256 or 'none')[:12]}"
            message = f"arm {arm.name}: rank {rank} ran with {said}, in force is {(profile or 'none')[:12]}"
            yield fail("other_profile", message, place, [seen.where])
        for line in rec.violations[:3]:
            yield fail("profile_violation", f"arm {arm.name}: rank {rank}: {line}", place, [seen.where])
        if rec.benchmarks:
            message = f"arm {arm.name}: rank {rank} measured kernels {rec.benchmarks} times under a profile"
            yield fail("tuned_anew", message, place, [seen.where])
        if not rec.selections:
            message = f"arm {arm.name}: no autotuned kernel ran on rank {rank}: the profile held nothing"
            yield unknown("vacuous_profile", message, place, [seen.where])
