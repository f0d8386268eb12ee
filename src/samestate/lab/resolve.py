"""From a plan and a started engine to numbers and token ids, fixed before the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samestate.evidence.canonical import canonical_json, token_digest
from samestate.lab.errors import RunError
from samestate.models.templates import TEMPLATES, render
from samestate.plans.load import PlanError, plan_sha256
from samestate.plans.model import InputIdentity, ModelIdentity, Plan, ResolvedPlan
from samestate.plans.operations import Case, cases


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


def planned_cases(plan: Plan, c: int) -> list[Case]:
    """The plan's cases at C. Raises `RunError`."""
    try:
        return cases(plan, c)
    except PlanError as error:
        raise RunError(str(error)) from None


def require_room(plan: Plan, c: int, max_model_len: int) -> None:
    """Raise `RunError` when a prompt and its output do not fit into the engine's context."""
    for index, case in enumerate(planned_cases(plan, c)):
        needed = case.tokens + plan.output_tokens
        if needed > max_model_len:
            raise RunError(
                f"lengths[{index}]: {plan.lengths[index]!r} is {case.tokens} tokens at C={c}, and with "
                f"{plan.output_tokens} output tokens exceeds max_model_len={max_model_len}; "
                f"raise max_model_len to {needed} or more, or plan shorter lengths"
            )


def resolve(plan: Plan, c: int, model: ModelIdentity, encode: Callable[[str], list[int]]) -> Resolution:
    """Lengths at C, and every prompt rendered with the engine's own tokenizer. Raises `RunError`."""
    if plan.template not in TEMPLATES:
        raise RunError(f"template: no template {plan.template!r}; known: {', '.join(sorted(TEMPLATES))}")
    template = TEMPLATES[plan.template]
    planned = planned_cases(plan, c)
    identities: list[InputIdentity] = []
    inputs: dict[str, list[int]] = {}
    for case in planned:
        for role in dict.fromkeys(step.role for step in case.operations if step.role is not None):
            try:
                ids = render(template.parts(f"{case.id}-{role}"), encode, case.tokens)
            except ValueError as error:
                raise RunError(f"{case.id} at C={c}, template {plan.template}: {error}") from None
            digest = token_digest(ids)
            identities.append(InputIdentity(case=case.id, role=role, tokens=case.tokens, sha256=digest))
            inputs[digest] = ids
    resolved = ResolvedPlan(
        format=1,
        plan_sha256=plan_sha256(plan),
        checkpoint_interval=c,
        lengths=[case.tokens for case in planned],
        model=model,
        inputs=identities,
        operations=[step.op for case in planned for step in case.operations],
    )
    return Resolution(resolved, canonical_json(resolved.model_dump(mode="json")), inputs)
