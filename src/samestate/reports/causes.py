"""The causes that make two outputs differ, each asked for by itself: schedule, kernel, storage, state.

A cause differs, is the same, or was not recorded; what was not recorded is never called the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.geometry import missing_steps
from samestate.checks.history import ArmHistory, History
from samestate.reports.cause import Cause, Side, Step
from samestate.reports.cause_grounds import kernel, storage
from samestate.reports.schedules import company, company_parts, shapes_part

STATE_CHECKS = ("boundary", "provenance", "prefix-identity", "page-bytes", "poison", "transfers", "ranks", "local-hits")
"""Whose findings about an operation say what was wrong with the state that it reused."""
_SHOWN = 3


def first_difference(ours: Sequence[int], theirs: Sequence[int], asked: int = 0) -> int | None:
    """Index of the first token that differs. An output that ends before `asked` tokens while the other goes on, too."""
    shorter = min(len(ours), len(theirs))
    cut = shorter if shorter < asked and len(ours) != len(theirs) else None
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), cut)


def causes(
    history: History, results: Sequence[CheckResult], a: Side, b: Side, outputs: tuple[list[int], list[int]]
) -> Iterator[Step]:
    """Each cause in order, up to the first that differs; `a` is the reference."""
    steps: list[Step] = []
    asked: list[Callable[[], Step]] = [
        lambda: _schedule(history, a, b, outputs),
        lambda: kernel(a[0], b[0]),
        lambda: storage(a[0], b[0]),
    ]
    for ask in asked:
        steps.append(ask())
        yield steps[-1]
        if steps[-1].differs:
            return
    ruled_out = all(step.differs is False for step in steps)
    yield _state(history, results, a, b, ruled_out=ruled_out)


def _schedule(history: History, a: Side, b: Side, outputs: tuple[list[int], list[int]]) -> Step:
    (one, op), (other, again) = a, b
    ours, theirs = one.schedule(op), other.schedule(again)
    if not ours or not theirs:
        return Step(Cause.SCHEDULE, None, "the steps of one side are not recorded", [])
    start, interval = theirs[0].start, other.engine.rec.checkpoint_interval if other.engines else 1
    if start % interval and history.whole(other.name):
        said = f"it starts at {start}, where no checkpoint ends (C={interval}): no other steps would make that right"
        return Step(Cause.SCHEDULE, False, said, [theirs[0].where])
    for (arm, name), schedule, output in ((a, ours, outputs[0]), (b, theirs, outputs[1])):
        if gap := missing_steps(schedule, _computed(arm, name, output)):
            return Step(Cause.SCHEDULE, None, f"arm {arm.name}: {name}: {gap}", [])
    parted = shapes_part(ours, theirs)
    if parted is not None:
        return Step(Cause.SCHEDULE, True, f"{parted.message} ({one.name} against {other.name})", parted.evidence)
    beside = [_others(arm, name) for arm, name in (a, b)]
    if bool(beside[0]) != bool(beside[1]):
        with_others = one if beside[0] else other
        names = ", ".join(sorted(beside[0] or beside[1])[:_SHOWN])
        said = f"arm {with_others.name} ran it in company of {names}, the other side alone"
        return Step(Cause.SCHEDULE, True, said, [])
    met = company_parts(a, b, company(one), company(other)) if beside[0] else None
    if met is not None:
        return Step(Cause.SCHEDULE, True, f"{met.message} ({one.name} against {other.name})", met.evidence)
    return Step(Cause.SCHEDULE, False, "the same steps, over what both computed", [])


def _computed(arm: ArmHistory, op: str, output: list[int]) -> int:
    """Tokens that were computed when the last one was chosen."""
    prompt = next((seen.rec.prompt_tokens for seen in arm.started if seen.rec.op == op), 0)
    return prompt + len(output) - 1


def _others(arm: ArmHistory, op: str) -> set[str]:
    """Operations that were handed in with this one."""
    word = next((seen.rec.together for seen in arm.started if seen.rec.op == op), None)
    return {seen.rec.op for seen in arm.started if word and seen.rec.together == word and seen.rec.op != op}


def _state(history: History, results: Sequence[CheckResult], a: Side, b: Side, *, ruled_out: bool) -> Step:
    """Reused state is to blame where the subject reused some, and both sides' cold runs agree.

    `ruled_out`: every other cause was recorded and is the same, which speaks for it where no cold run can.
    """
    arm, op = b
    schedule = arm.schedule(op)
    findings = [one for result in results if result.check in STATE_CHECKS for one in _about(result, arm.name, op)]
    wrong = next((one for one in findings if one.verdict is Verdict.FAIL), None)
    if not schedule and wrong is None:
        return Step(Cause.STATE, None, f"whether {arm.name} {op} reused anything is not recorded", [])
    start = schedule[0].start if schedule else None
    if not start and wrong is None:
        return Step(Cause.STATE, False, f"{arm.name} {op} reused nothing: it computed from token 0", [])
    prompt = next((seen.rec.prompt_sha256 for seen in arm.started if seen.rec.op == op), None)
    sides = dict.fromkeys((a[0].name, arm.name))
    cold = [_cold_outputs(history.arm(name), prompt) for name in sides]
    if _part([output for outputs in cold for output in outputs]):
        which = "do not repeat themselves" if any(map(_part, cold)) else "differ between the arms"
        said = f"the cold runs of this prompt {which} too: the difference is there without reuse"
        return Step(Cause.STATE, False, said, [])
    reused = f"tokens [0, {start})" if start else "state"
    said = f"{arm.name} {op} reused {reused}, and what it computed on them differs"
    if wrong is not None:
        return Step(Cause.STATE, True, f"{said}: {wrong.message}", list(dict.fromkeys(wrong.evidence))[:_SHOWN])
    if all(cold):
        return Step(Cause.STATE, True, said, [])
    if ruled_out:
        said += "; one side has no cold run of this prompt, so only the order of causes speaks for it"
        return Step(Cause.STATE, True, said, [])
    said = f"{arm.name} {op} reused {reused}, but one side has no cold run of this prompt: no cause can be told"
    return Step(Cause.STATE, None, said, [])


def _about(result: CheckResult, arm: str, op: str) -> Iterator[Finding]:
    for one in result.findings:
        if one.place.op == op and one.place.arm in (None, arm):
            yield one


def _part(outputs: list[list[int]]) -> bool:
    """Whether any of them differs from the first, over what both have."""
    return any(first_difference(outputs[0], other) is not None for other in outputs[1:])


def _cold_outputs(arm: ArmHistory, prompt: str | None) -> list[list[int]]:
    """Outputs of the same prompt that the arm computed from token 0."""
    found = []
    for started in arm.started:
        schedule, output = arm.schedule(started.rec.op), arm.output(started.rec.op)
        if started.rec.prompt_sha256 == prompt and schedule and schedule[0].start == 0 and output:
            found.append(output.rec.token_ids)
    return found
