"""From a plan and a started engine to numbers and token ids, fixed before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samestate.evidence.canonical import canonical_json, token_digest
from samestate.lab.errors import RunError
from samestate.models.templates import TEMPLATES, own_text, render
from samestate.plans.latency import trials
from samestate.plans.load import PlanError, plan_sha256
from samestate.plans.model import InputIdentity, ModelIdentity, Plan, ResolvedPlan
from samestate.plans.operations import Case, PlannedInput, cases, operation_ids, planned_inputs, shared_lengths
from samestate.plans.turns import OWN, continuing

TARGET = "target"


class Resolution(NamedTuple):
    """What `resolved.json` and `inputs.json` hold."""

    resolved: ResolvedPlan
    json: bytes
    """The bytes of `resolved.json`."""
    inputs: dict[str, list[int]]
    """Token ids by their digest."""

    def prompt(self, case: str, role: str) -> InputIdentity:
        """The input of one role of one case."""
        return next(given for given in self.resolved.inputs if (given.case, given.role) == (case, role))


def planned_cases(plan: Plan, c: int, arm: str) -> list[Case]:
    """An arm's cases at C. Raises `RunError`."""
    try:
        return cases(plan, c, arm)
    except PlanError as error:
        raise RunError(str(error)) from None


def require_room(plan: Plan, c: int, max_model_len: int) -> None:
    """Raise `RunError` when a prompt and its output do not fit into the engine's context."""
    outputs = {
        case.id: max(step.output_tokens for step in case.operations)
        for arm in plan.arms[:1]
        for case in planned_cases(plan, c, arm.name)
    }
    targets = [prompt for prompt in _inputs(plan, c) if prompt.role == TARGET]
    for (field, said), prompt in zip(_said(plan), targets, strict=True):
        output_tokens = plan.output_tokens if plan.scenario else outputs[prompt.case]
        needed = prompt.tokens + output_tokens
        if needed > max_model_len:
            raise RunError(
                f"{field}: {said!r} is {prompt.tokens} tokens at C={c}, and with "
                f"{output_tokens} output tokens exceeds max_model_len={max_model_len}; "
                f"raise max_model_len to {needed} or more, or plan shorter lengths"
            )


def _said(plan: Plan) -> list[tuple[str, str]]:
    """Every length as the plan says it, and where."""
    if plan.latency is not None:
        return [(f"lengths[{trial.length}]", plan.lengths[trial.length]) for trial in trials(plan)]
    said = [(f"prompts[{index}]", prompt.tokens) for index, prompt in enumerate(plan.prompts)]
    said += [(f"lengths[{index}]", length) for index, length in enumerate(plan.lengths)]
    for index, series in enumerate(plan.series):
        said += [(f"series[{index}].lengths[{at}]", length) for at, length in enumerate(series.lengths)]
    return said


def resolve(plan: Plan, c: int, model: ModelIdentity, encode: Callable[[str], list[int]]) -> Resolution:
    """Lengths at C, and every prompt rendered with the engine's own tokenizer. Raises `RunError`."""
    planned = _inputs(plan, c)
    for name in dict.fromkeys(prompt.template for prompt in planned):
        if name not in TEMPLATES:
            raise RunError(f"template: no template {name!r}; known: {', '.join(sorted(TEMPLATES))}")
    rendered = _Rendered(plan, c, encode)
    identities: list[InputIdentity] = []
    inputs: dict[str, list[int]] = {}
    turns = {prompt.name for prompt in continuing(plan)}
    for prompt in planned:
        if prompt.role == TARGET and prompt.case in turns:
            identities.append(InputIdentity(case=prompt.case, role=prompt.role, tokens=prompt.tokens, sha256=None))
            continue
        try:
            ids = rendered.prompt(prompt)
        except ValueError as error:
            raise RunError(f"{prompt.case} at C={c}, template {prompt.template}: {error}") from None
        digest = token_digest(ids)
        identities.append(InputIdentity(case=prompt.case, role=prompt.role, tokens=prompt.tokens, sha256=digest))
        inputs[digest] = ids
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=plan_sha256(plan),
        checkpoint_interval=c,
        lengths=[prompt.tokens for prompt in planned if prompt.role == TARGET],
        model=model,
        inputs=identities,
        operations=operation_ids(plan, c),
    )
    return Resolution(resolved, canonical_json(resolved.model_dump(mode="json")), inputs)


class _Rendered:
    """Prompts as token ids, each rendered once, so that others can share its beginning."""

    def __init__(self, plan: Plan, c: int, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._shared = shared_lengths(plan, c)
        self._by_name: dict[str, list[int]] = {}

    def prompt(self, planned: PlannedInput) -> list[int]:
        """Raises ValueError when it cannot be made exactly as planned."""
        if planned.role == OWN:
            return own_text(planned.case, self._encode, planned.tokens)
        if planned.case in self._shared:
            source, shared = self._shared[planned.case]
            ids = self._branch(planned, self._by_name[source], shared)
        else:
            parts = TEMPLATES[planned.template].parts(f"{planned.case}-{planned.role}")
            ids = render(parts, self._encode, planned.tokens)
        self._by_name[planned.case] = ids
        return ids

    def _branch(self, planned: PlannedInput, source: list[int], shared: int) -> list[int]:
        rest = planned.tokens - shared
        own = own_text(planned.case, self._encode, rest)
        if own and shared < len(source) and own[0] == source[shared]:
            # A tokenizer gives no other first token for this text: begin one later.
            own = own_text(planned.case, self._encode, rest + 1)[1:]
            if own[0] == source[shared]:
                raise ValueError("its own part begins as the shared prompt goes on; share a token more or fewer")
        return source[:shared] + own


def _inputs(plan: Plan, c: int) -> list[PlannedInput]:
    try:
        shared_lengths(plan, c)
        return planned_inputs(plan, c)
    except PlanError as error:
        raise RunError(str(error)) from None
