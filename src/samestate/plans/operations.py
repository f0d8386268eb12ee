"""From a plan and C to the operations that every arm performs, in order."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from samestate.evidence.records import OperationName
from samestate.plans.errors import PlanError
from samestate.plans.latency import conditions, trial_tokens
from samestate.plans.lengths import evaluate
from samestate.plans.model import MarkerPlan, Plan, PromptPlan, ReusePath
from samestate.plans.scenarios import scenario_steps
from samestate.plans.turns import OWN, begun_lengths, own_lengths

_MAX_INTERPOSERS = 2
_ANY_C = 2**20


class PlannedOperation(NamedTuple):
    """One step of a case."""

    op: str
    """Unique within an arm: ``N3584.cold``, ``N3584.interposer-1``, ``N3584.repeat-1``; in a scenario ``trunk.1``."""
    name: OperationName
    role: str | None
    """Whose tokens are the prompt: ``target``, ``interposer-1``, ``interposer-2``; None for a reset."""
    salt: str | None = None
    together: str | None = None
    """Operations with the same word are handed to the engine at once."""
    path: ReusePath = "any"
    output_tokens: int = 0
    """0 for a reset."""


class Case(NamedTuple):
    """One prompt length and what is done with it; of a scenario, one step, so that a prompt may come again."""

    id: str
    """``N3584``; in a scenario the prompt's name."""
    tokens: int
    """N; 0 for a reset of a scenario."""
    operations: list[PlannedOperation]


class PlannedInput(NamedTuple):
    """One prompt that a plan needs, or a part of one."""

    case: str
    role: str
    tokens: int
    template: str


class Workload(NamedTuple):
    """How much a plan asks for. In a matrix everything but the starts is for one arm, else for all.

    Repetitions have the same inputs, and each of their arms does as much again.
    """

    engine_starts: int
    """In all repetitions."""
    operations: int
    generations: int
    resets: int
    output_tokens: int
    distinct_inputs: int
    repetitions: int


def workload(plan: Plan) -> Workload:
    """Count what a plan asks for, which no C changes."""
    if plan.markers is not None:
        return _marker_workload(plan, plan.markers)
    # One C is as good as another here, but for lengths that would meet.
    arms = [arm.name for arm in plan.arms] if plan.scenario or plan.latency else [plan.arms[0].name]
    steps = [step for arm in arms for case in cases(plan, _ANY_C, arm) for step in case.operations]
    resets = sum(step.name is OperationName.RESET for step in steps)
    return Workload(
        engine_starts=len(plan.arms) * len(plan.repetitions),
        operations=len(steps),
        generations=len(steps) - resets,
        resets=resets,
        output_tokens=sum(step.output_tokens for step in steps),
        distinct_inputs=len(plan.prompts) or len(planned_inputs(plan, _ANY_C)),
        repetitions=len(plan.repetitions),
    )


def _marker_workload(plan: Plan, markers: MarkerPlan) -> Workload:
    generations = len(markers.probes) * len(plan.arms)
    return Workload(
        engine_starts=len(plan.arms),
        operations=generations,
        generations=generations,
        resets=0,
        output_tokens=sum(probe.max_tokens for probe in markers.probes) * len(plan.arms),
        distinct_inputs=len({probe.text for probe in markers.probes}),
        repetitions=1,
    )


def boundary(n: int, c: int, *, drops_last: bool = False) -> int:
    """B under the strict prefix: the last checkpoint before the last token of `n`.

    C·⌊(N−1)/C⌋, so 0 ≤ B ≤ N−1 and N−B ≥ 1. Whether that checkpoint exists is another
    question. With `drops_last` the engine computes the last whole block again, for drafts that come
    from its hidden states (EAGLE, MTP): C·max(0, ⌊N/C⌋−1) (`get_mamba_prefill_checkpoint_position`,
    vllm/v1/kv_cache_interface.py). Raises ValueError unless n ≥ 1 and c ≥ 1.
    """
    if n < 1 or c < 1:
        raise ValueError(f"N and C must be at least 1, got N={n}, C={c}")
    if drops_last:
        return c * max(n // c - 1, 0)
    return c * ((n - 1) // c)


def cases(plan: Plan, c: int, arm: str) -> list[Case]:
    """The cases of an arm, in the plan's order. Raises `PlanError` when two lengths meet at this C.

    In a matrix all arms have the same ones; in a latency plan the same prompts. A marker plan has probes, and no cases.
    """
    if plan.markers is not None:
        return []
    if plan.scenario:
        return _scenario_cases(plan, c, arm)
    if plan.latency is not None:
        return _latency_cases(plan, c, arm)
    planned = _matrix_cases("", "", plan.lengths, c, plan.operations, plan.output_tokens)
    for index, series in enumerate(plan.series):
        where = f"series[{index}]."
        planned += _matrix_cases(where, f"{series.name}-", series.lengths, c, plan.operations, series.output_tokens)
    return planned


def operation_ids(plan: Plan, c: int) -> list[str]:
    """The ids of an arm's operations, in order; in a scenario those of all arms, arm after arm. Raises `PlanError`.

    Those of a marker plan are its probes' names; those of a latency plan's arms are the same where both have them.
    """
    if plan.markers is not None:
        return [probe.name for probe in plan.markers.probes]
    if plan.latency is not None:
        found = [step.op for arm in plan.arms for case in cases(plan, c, arm.name) for step in case.operations]
        return list(dict.fromkeys(found))
    arms = [arm.name for arm in plan.arms] if plan.scenario else [plan.arms[0].name]
    return [step.op for arm in arms for case in cases(plan, c, arm) for step in case.operations]


def planned_inputs(plan: Plan, c: int) -> list[PlannedInput]:
    """Every prompt once, those of a scenario in the plan's order; one that continues an answer, and its own part.

    None of a marker plan, whose prompts only a tokenizer can measure. Raises `PlanError`.
    """
    if plan.markers is not None:
        return []
    if plan.scenario:
        lengths = {prompt.name: n for prompt, n in _prompt_lengths(plan, c)}
        targets = [PlannedInput(name, "target", n, plan.template) for name, n in lengths.items()]
        owned = own_lengths(plan, lengths).items()
        return [*targets, *(PlannedInput(name, OWN, n, plan.template) for name, n in owned)]
    if plan.latency is not None:
        trials = trial_tokens(plan, c)
        return [PlannedInput(trial.case(n), "target", n, plan.template) for trial, n in trials]
    planned = cases(plan, c, plan.arms[0].name)
    templates = [plan.template] * len(plan.lengths)
    templates += [series.template for series in plan.series for _ in series.lengths]
    return [
        PlannedInput(case.id, role, case.tokens, template)
        for case, template in zip(planned, templates, strict=True)
        for role in dict.fromkeys(step.role for step in case.operations if step.role is not None)
    ]


def shared_lengths(plan: Plan, c: int) -> dict[str, tuple[str, int]]:
    """Of a scenario: prompt -> the prompt whose beginning it shares, and how many tokens of it. Raises `PlanError`."""
    lengths = {prompt.name: n for prompt, n in _prompt_lengths(plan, c)}
    found: dict[str, tuple[str, int]] = {}
    for index, prompt in enumerate(plan.prompts):
        if prompt.shares is None or prompt.shared is None:
            continue
        try:
            shared = evaluate(prompt.shared, c)
        except PlanError as error:
            raise error.within(f"prompts[{index}].shared") from None
        most = min(lengths[prompt.name], lengths[prompt.shares])
        if shared > most:
            raise PlanError(
                f"prompts[{index}].shared: {prompt.shared!r} is {shared} tokens at C={c}, and the two prompts "
                f"have at most {most} to share; make it smaller"
            )
        found[prompt.name] = (prompt.shares, shared)
        twin = _twin(found, lengths, prompt.name)
        if twin is not None:
            raise PlanError(
                f"prompts[{index}].shared: at C={c} {prompt.name!r} is {twin!r} token for token; "
                "let the scenario ask for that one again, or share less"
            )
    return found


def beginnings(plan: Plan, c: int) -> dict[str, tuple[str, int]]:
    """`shared_lengths`, and what prompts that continue an answer begin as; turns are names too. Raises `PlanError`."""
    lengths = {prompt.name: n for prompt, n in _prompt_lengths(plan, c)}
    return shared_lengths(plan, c) | begun_lengths(plan, lengths)


def _twin(found: dict[str, tuple[str, int]], lengths: dict[str, int], prompt: str) -> str | None:
    """An earlier prompt that is wholly the same as this one, if there is one; all of a prompt may be in another's."""
    mine = _wholly_in(found, lengths, prompt)
    for other, tokens in lengths.items():
        if other == prompt:
            return None
        if tokens == lengths[prompt] and _wholly_in(found, lengths, other) & mine:
            return other
    return None


def _wholly_in(found: dict[str, tuple[str, int]], lengths: dict[str, int], prompt: str) -> set[str]:
    """Prompts that begin with all of this one, itself included."""
    names, name = {prompt}, prompt
    while name in found and found[name][1] >= lengths[prompt]:
        name = found[name][0]
        names.add(name)
    return names


def check_operations(operations: list[OperationName]) -> None:
    """Raise `PlanError` unless a case is cold first and then reuses: a reload after a reset, or repeats without one."""
    counts = Counter(operations)
    if OperationName.PROMPT in counts:
        raise PlanError("operations: 'prompt' belongs to a scenario; remove it")
    if not operations or operations[0] is not OperationName.COLD:
        raise PlanError("operations[0]: a case begins with 'cold'; put it first")
    for name in (OperationName.COLD, OperationName.RESET, OperationName.RELOAD):
        if counts[name] > 1:
            raise PlanError(f"operations: {name.value!r} comes {counts[name]} times; a case has at most one")
    if counts[OperationName.INTERPOSER] > _MAX_INTERPOSERS:
        raise PlanError(f"operations: more than {_MAX_INTERPOSERS} interposers; remove some")
    if OperationName.REPEAT in counts:
        for name in (OperationName.RESET, OperationName.RELOAD):
            if name in counts:
                raise PlanError(f"operations: {name.value!r} beside 'repeat', which keeps the local cache; remove one")
        return
    if OperationName.RELOAD not in counts:
        raise PlanError(
            "operations: no 'reload' and no 'repeat', so nothing is reused; add 'reset' and 'reload', or 'repeat'"
        )
    reload = operations.index(OperationName.RELOAD)
    if OperationName.RESET not in operations[:reload]:
        raise PlanError(
            f"operations[{reload}]: 'reload' without 'reset' before it is a local hit; put 'reset' before it"
        )


def _scenario_cases(plan: Plan, c: int, arm: str) -> list[Case]:
    lengths = {prompt.name: n for prompt, n in _prompt_lengths(plan, c)}
    return [
        Case(
            step.case,
            lengths[step.prompt] if step.prompt else 0,
            [
                PlannedOperation(
                    step.op,
                    step.name,
                    "target" if step.prompt else None,
                    step.salt,
                    step.together,
                    step.path,
                    step.output_tokens,
                )
            ],
        )
        for step in scenario_steps(plan, arm)
    ]


def _latency_cases(plan: Plan, c: int, arm: str) -> list[Case]:
    names = list(conditions(plan, arm))
    made = ((trial.case(n), n) for trial, n in trial_tokens(plan, c))
    return [Case(case, n, _case_operations(case, names, plan.output_tokens)) for case, n in made]


def _prompt_lengths(plan: Plan, c: int) -> list[tuple[PromptPlan, int]]:
    found = []
    for index, prompt in enumerate(plan.prompts):
        try:
            found.append((prompt, evaluate(prompt.tokens, c)))
        except PlanError as error:
            raise error.within(f"prompts[{index}].tokens") from None
    return found


def _matrix_cases(
    where: str, prefix: str, lengths: list[str], c: int, operations: list[OperationName], output_tokens: int
) -> list[Case]:
    planned: dict[int, Case] = {}
    for index, length in enumerate(lengths):
        try:
            n = evaluate(length, c)
        except PlanError as error:
            raise error.within(f"{where}lengths[{index}]") from None
        if n in planned:
            raise PlanError(
                f"{where}lengths[{index}]: {length!r} is {n} tokens at C={c}, as another length is; remove one"
            )
        case = f"{prefix}N{n}"
        planned[n] = Case(case, n, _case_operations(case, operations, output_tokens))
    return list(planned.values())


def _case_operations(case: str, operations: list[OperationName], output_tokens: int) -> list[PlannedOperation]:
    planned: list[PlannedOperation] = []
    interposers = repeats = 0
    for name in operations:
        match name:
            case OperationName.INTERPOSER:
                interposers += 1
                role = f"interposer-{interposers}"
                step = PlannedOperation(f"{case}.{role}", name, role)
            case OperationName.REPEAT:
                repeats += 1
                step = PlannedOperation(f"{case}.{name}-{repeats}", name, "target")
            case OperationName.RESET:
                step = PlannedOperation(f"{case}.{name}", name, None)
            case _:
                step = PlannedOperation(f"{case}.{name}", name, "target")
        planned.append(step if step.role is None else step._replace(output_tokens=output_tokens))
    return planned
