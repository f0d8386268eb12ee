"""Prompts that continue an answer: an earlier prompt, what is kept of the answer to it, and tokens of their own.

The answer is the control's own, so such a prompt is known when the control has answered; its own tokens and all lengths
are fixed before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from samestate.plans.errors import PlanError
from samestate.plans.model import Plan, PromptPlan

OWN = "own"
"""Role of an input: what a prompt has of its own after the answer that it continues."""


def continuing(plan: Plan) -> list[PromptPlan]:
    """The prompts of a scenario that continue an answer, in order."""
    return [prompt for prompt in plan.prompts if prompt.continues is not None]


def kept(prompt: PromptPlan, answer: Sequence[int]) -> list[int]:
    """What `prompt` takes over of the answer that it continues."""
    return list(answer[prompt.thinking or 0 :])


def made(prompt: PromptPlan, before: Sequence[int], answer: Sequence[int], own: Sequence[int]) -> list[int]:
    """The token ids of `prompt`: of the prompt that it continues, of the answer to it, and its own."""
    return [*before, *kept(prompt, answer), *own]


def own_lengths(plan: Plan, lengths: Mapping[str, int]) -> dict[str, int]:
    """Of every prompt that continues an answer: how many tokens are its own, at least one. Raises `PlanError`.

    `lengths`: N of every prompt.
    """
    found = {}
    for index, prompt in enumerate(plan.prompts):
        if prompt.continues is None:
            continue
        begun = _begun(plan, prompt, lengths)
        if lengths[prompt.name] <= begun:
            raise PlanError(
                f"prompts[{index}].tokens: {prompt.tokens!r} is {lengths[prompt.name]} tokens, and "
                f"{prompt.continues!r} with its answer takes {begun}; make it longer"
            )
        found[prompt.name] = lengths[prompt.name] - begun
    return found


def begun_lengths(plan: Plan, lengths: Mapping[str, int]) -> dict[str, tuple[str, int]]:
    """Which beginning each has in common with others: name -> the name of what it begins as, and how many tokens.

    Turns are names too, so that two prompts that continue one answer have it in common.
    """
    found: dict[str, tuple[str, int]] = {}
    for prompt in continuing(plan):
        assert prompt.continues is not None
        turn = f"{prompt.continues} and its answer from token {prompt.thinking or 0} on"
        found[prompt.name] = turn, _begun(plan, prompt, lengths)
        found[turn] = prompt.continues, lengths[prompt.continues]
    return found


def check_turns(plan: Plan) -> None:
    """Raise `PlanError` for prompts that continue nothing or not clearly."""
    known: list[str] = []
    turns = {prompt.name for prompt in continuing(plan)}
    for index, prompt in enumerate(plan.prompts):
        where = f"prompts[{index}]"
        if prompt.continues is None:
            if prompt.answer is not None or prompt.thinking is not None:
                raise PlanError(f"{where}: 'answer' and 'thinking' belong to 'continues'; add that or remove them")
            if prompt.shares in turns:
                raise PlanError(
                    f"{where}.shares: {prompt.shares!r} is made of an answer; share another, or continue it"
                )
        else:
            _check_turn(plan, prompt, where, known)
        known.append(prompt.name)


def _check_turn(plan: Plan, prompt: PromptPlan, where: str, known: Sequence[str]) -> None:
    if prompt.continues not in known:
        raise PlanError(f"{where}.continues: no prompt {prompt.continues!r} before this one; name an earlier one")
    if prompt.shares is not None:
        raise PlanError(f"{where}: 'continues' and 'shares' both say how it begins; remove one")
    if prompt.answer is None:
        raise PlanError(f"{where}.answer: is missing; write 'kept' or 'stripped'")
    if (prompt.answer == "stripped") != (prompt.thinking is not None):
        raise PlanError(f"{where}.thinking: comes with answer 'stripped', and only with it; add or remove it")
    if (prompt.thinking or 0) >= plan.output_tokens:
        raise PlanError(f"{where}.thinking: the answer has {plan.output_tokens} tokens; leave out fewer")
    if not plan.ignore_eos:
        raise PlanError("ignore_eos: is false, so how long an answer is would not be known; make it true")


def _begun(plan: Plan, prompt: PromptPlan, lengths: Mapping[str, int]) -> int:
    """Tokens of `prompt` before its own."""
    assert prompt.continues is not None
    return lengths[prompt.continues] + plan.output_tokens - (prompt.thinking or 0)
