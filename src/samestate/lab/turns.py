"""The prompts of an attempt: those that are known before the first request, and those that continue an answer."""

from __future__ import annotations

from collections.abc import Sequence

from samestate.engines.base import EngineError
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import token_digest
from samestate.evidence.records import OperationOutput
from samestate.lab.resolve import TARGET, Resolution
from samestate.plans.model import InputIdentity, Plan
from samestate.plans.scenarios import CONTROL, cold_op
from samestate.plans.turns import OWN, continuing, made


class Turns:
    """Makes a prompt that continues an answer as soon as the control has given that."""

    def __init__(self, plan: Plan, resolution: Resolution) -> None:
        self._resolution = resolution
        self._waiting = continuing(plan)
        self._operation = {cold_op(prompt.name): prompt.name for prompt in plan.prompts}
        self._made: dict[str, InputIdentity] = {}
        self.inputs = dict(resolution.inputs)
        """Token ids by their digest, as far as they are known."""

    @property
    def complete(self) -> bool:
        """Whether every prompt is known."""
        return not self._waiting

    def prompt(self, case: str, role: str) -> InputIdentity:
        """The input of one role of one case. Raises `EngineError` where the answer that it continues is not there."""
        known = self._made[case] if role == TARGET and case in self._made else self._resolution.prompt(case, role)
        if known.sha256 is None:
            raise EngineError(f"prompt {case}: continues an answer that the control has not given")
        return known

    def ids(self, prompt: InputIdentity) -> list[int]:
        """The token ids of a prompt that is known."""
        return self.inputs[prompt.sha256 or ""]

    def answered(self, op: str, answer: Sequence[int]) -> None:
        """The control's cold runs are what later prompts continue; other operations are not looked at.

        Raises `EngineError` when what is made then has not the planned length.
        """
        case = self._operation.get(op)
        if case is None:
            return
        for prompt in [one for one in self._waiting if one.continues == case]:
            own = self.ids(self.prompt(prompt.name, OWN))
            ids = made(prompt, self.ids(self.prompt(case, TARGET)), answer, own)
            planned = self._resolution.prompt(prompt.name, TARGET)
            if len(ids) != planned.tokens:
                raise EngineError(
                    f"prompt {prompt.name}: has {len(ids)} tokens after an answer of {len(answer)}, "
                    f"planned {planned.tokens}; nothing may end an answer early"
                )
            digest = token_digest(ids)
            self._made[prompt.name] = planned.model_copy(update={"sha256": digest})
            self.inputs[digest] = ids
            self._waiting.remove(prompt)

    def recorded(self, archive: Archive) -> None:
        """The answers of a control that ran before, from its records. Raises `EngineError`."""
        if self.complete:
            return
        for line in archive.records(CONTROL, "client"):
            if isinstance(line.rec, OperationOutput):
                self.answered(line.rec.op, line.rec.token_ids)
