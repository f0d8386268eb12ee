"""The token prefixes of requests: what a page is the state of, from inputs and outputs, never from a connector.

A cache salt is part of what a prefix is: under another one nothing may be shared.
"""

from __future__ import annotations

from array import array
from contextlib import suppress

from samestate.checks.base import Place
from samestate.checks.history import ArmHistory, History
from samestate.evidence.inputs import packed_digest

_NONE = array("i")


class Prefixes:
    """Prefixes of an arm's requests by digest, which are comparable between arms."""

    def __init__(self, history: History, arm: ArmHistory) -> None:
        self._arm = arm.name
        self._ops: dict[str, tuple[str, str]] = {}
        self._tokens: dict[str, tuple[array[int], array[int]]] = {}
        """Prompt and output."""
        self._salts: dict[str, str] = {}
        self._digests: dict[tuple[str, int], str] = {}
        started = {seen.rec.op: seen.rec for seen in arm.started}
        for op, outputs in arm.outputs.items():
            for seen in outputs:
                prompt = started[op].prompt_sha256 if op in started else None
                if prompt is not None and prompt in history.inputs:
                    self._ops[seen.rec.request] = op, started[op].case
                    self._salts[seen.rec.request] = started[op].salt
                    self._tokens[seen.rec.request] = history.inputs.packed(prompt), _packed(seen.rec.token_ids)

    def digest(self, request: str, end: int) -> str | None:
        """Digest of the request's first `end` tokens under its salt; None when they are not all known."""
        plain = self.unsalted(request, end)
        return plain + self._salts[request] if plain else None

    def unsalted(self, request: str, end: int) -> str | None:
        """Digest of the tokens alone."""
        known = self._digests.get((request, end))
        if known is not None:
            return known
        prompt, output = self._tokens.get(request, (_NONE, _NONE))
        if not 0 < end <= len(prompt) + len(output):
            return None
        tokens = prompt[:end] + output[: max(end - len(prompt), 0)]
        self._digests[request, end] = packed_digest(tokens)
        return self._digests[request, end]

    def shared(self, request: str, other: str, end: int) -> bool:
        """Whether two requests are known to agree in their first `end` tokens, and in their salt."""
        digest = self.digest(request, end)
        return digest is not None and digest == self.digest(other, end)

    def place(self, request: str) -> Place:
        """Where findings about a request point."""
        op, case = self._ops.get(request, (None, None))
        return Place(arm=self._arm, case=case, op=op, request=request or None)

    def name(self, request: str) -> str:
        """The operation of a request, or the request."""
        return self._ops[request][0] if request in self._ops else f"request {request or 'unknown'}"


def _packed(ids: list[int]) -> array[int]:
    """The ids up to the first that is no int32: what follows it has no digest."""
    packed = array("i")
    with suppress(OverflowError):
        packed.extend(ids)
    return packed
