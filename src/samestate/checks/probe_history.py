"""What a probe of somebody else's server recorded, answer by answer, as the checks of `probe-v1` read it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.base import Place
from samestate.checks.divergence import Answer
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.evidence.probe_records import ProbeAnswered
from samestate.evidence.records import (
    EXTERNAL_HITS,
    LOCAL_HITS,
    LOCAL_QUERIES,
    OperationName,
    OperationOutput,
    OperationStarted,
)
from samestate.plans.black_box import BESIDE, CACHED, CASE, PIECES, SERVER, SHARED_START, covers, reused


class Probed(NamedTuple):
    """One answer and what was recorded around it."""

    op: str
    case: str
    name: OperationName
    tokens: int
    """N of the prompt: what was sent or, of a text, what the server counted."""
    exact: bool
    """It was sent as token ids."""
    beside: int
    """Tokens of the prompt in the same request."""
    salt: str
    answer: Answer
    text: str
    usage_prompt: int | None
    """None, as `cached`, where the usage is of one prompt of two alone."""
    usage_answer: int | None
    """Tokens of all answers to the request."""
    cached: int | None
    """The usage's word for p."""
    odd_cached: str | None
    """The same where it is no count."""
    queried: int | None
    """By how much counters grew; None: not readable."""
    local: int | None
    external: int | None
    reused: int | None
    """See `samestate.plans.black_box.reused`."""
    where: list[str]

    @property
    def place(self) -> Place:
        return Place(arm=SERVER, case=self.case, op=self.op)

    @property
    def cold(self) -> bool | None:
        """It was computed whole, but for what all prompts may begin with; None: nobody tells."""
        if self.reused is None:
            return None
        return self.reused <= SHARED_START * (2 if self.beside else 1)

    @property
    def length(self) -> int:
        """Tokens of the answer: as they came, or fewer where the server counted fewer."""
        told = len(self.answer.tokens)
        return told if self.beside or self.usage_answer is None else min(told, self.usage_answer)

    @property
    def alone(self) -> bool:
        """The counters moved for this request and no other."""
        return self.queried == self.tokens + self.beside

    @property
    def counted(self) -> bool:
        """N is known, and no estimate."""
        return self.exact or self.usage_prompt is not None

    @property
    def compared(self) -> bool:
        """It answers one of the planned prompts, not the search for C."""
        return self.case.startswith(CASE) and self.name is not OperationName.INTERPOSER


def interval(history: History) -> int | None:
    """C, as it was found; None: not known. Raises MissingEvidence."""
    return history.resolved.checkpoint_interval or None


def probed(history: History) -> list[Probed]:
    """All answers, in order. Raises MissingEvidence."""
    return list(_probed(history.arm(SERVER)))


def by_case(answers: list[Probed]) -> dict[str, list[Probed]]:
    """The compared ones."""
    found: defaultdict[str, list[Probed]] = defaultdict(list)
    for one in answers:
        if one.compared:
            found[one.case].append(one)
    return dict(found)


def _probed(arm: ArmHistory) -> Iterator[Probed]:
    answered = {seen.rec.probe: seen for seen in arm.markers.answered}
    for started in arm.started:
        answer, output = answered.get(started.rec.op), arm.output(started.rec.op)
        if answer is not None and output is not None:
            yield _one(arm, started, answer, output)


def _one(
    arm: ArmHistory, started: Seen[OperationStarted], answered: Seen[ProbeAnswered], output: Seen[OperationOutput]
) -> Probed:
    op, rec = started.rec, answered.rec
    exact = op.prompt_sha256 is not None
    beside = rec.echo.get(BESIDE)
    beside = beside if isinstance(beside, int) else 0
    whole = covers(rec.usage.prompt, op.prompt_tokens, beside)
    tokens = op.prompt_tokens if exact or not whole or not rec.usage.prompt else rec.usage.prompt - beside
    grown = {
        name: int(value)
        for name in (LOCAL_QUERIES, LOCAL_HITS, EXTERNAL_HITS)
        if (value := arm.counter(op.op, name)) is not None
    }
    cached, odd = output.rec.cached_tokens if whole else None, rec.echo.get(CACHED)
    return Probed(
        op=op.op,
        case=op.case,
        name=op.name,
        tokens=tokens,
        exact=exact,
        beside=beside,
        salt=op.salt,
        answer=Answer(_tokens(rec, output.rec), output.rec.logprobs, output.rec.margins),
        text=rec.content or "",
        usage_prompt=rec.usage.prompt if whole else None,
        usage_answer=rec.usage.completion,
        cached=cached,
        odd_cached=str(odd) if odd is not None else None,
        queried=grown.get(LOCAL_QUERIES),
        local=grown.get(LOCAL_HITS),
        external=grown.get(EXTERNAL_HITS),
        reused=reused(tokens + beside, grown, cached),
        where=[started.where, output.where, *arm.evidence(op.op)],
    )


def _tokens(rec: ProbeAnswered, output: OperationOutput) -> list[int] | list[str]:
    """Ids, else pieces, else characters: what of an answer can be compared."""
    if output.token_ids:
        return list(output.token_ids)
    try:
        pieces = json.loads(str(rec.echo.get(PIECES, "null")))
    except ValueError:
        pieces = None
    if isinstance(pieces, list) and "".join(map(str, pieces)) == (rec.content or ""):
        return [str(piece) for piece in pieces]
    return list(rec.content or "")
