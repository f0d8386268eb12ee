"""The study of requests to a live server: no archive, no schedule, no bytes; what its counters say, and nothing else.

It is no verdict. What is reused from outside has path ``external``: where it lay is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestate.checks.latency_paths import PathEvidence, Taken, classify
from samestate.checks.latency_sample import ON, Condition, Sample
from samestate.checks.latency_statistics import Event, decode_rate, time_to_first_token, total_latency
from samestate.checks.latency_study import Asked, Study, not_counted, summarized
from samestate.evidence.canonical import token_digest
from samestate.evidence.records import OperationName

COLD, REPEAT, RELOAD = (
    Condition(ON, name) for name in (OperationName.COLD, OperationName.REPEAT, OperationName.RELOAD)
)
ASKED = (Asked(COLD, RELOAD, saves=True), Asked(COLD, REPEAT, saves=True), Asked(RELOAD, REPEAT))


class LiveTimes(NamedTuple):
    """One answer of a live server."""

    trial: int
    """From 1; 0: a warm-up."""
    case: str
    tokens: int
    """N."""
    attempted: OperationName
    token_ids: Sequence[int]
    began_ns: int
    done_ns: int
    events: Sequence[Event]
    queried: int | None
    """Prompt tokens that the server's local cache was asked for meanwhile; more than N: somebody else was there."""
    local: int | None
    external: int | None
    """Tokens hit outside; None: the server has no such counter, so no connector that counts."""
    cached: int | None
    """The answer's own word for p; None: it has none."""


def live_study(answers: Sequence[LiveTimes], output_tokens: int, *, order: str, seed: int) -> Study:
    """What a live server took. A path that its counters do not name counts nowhere."""
    found = [_sample(one) for one in answers]
    refused = dict(not_counted(found, None, output_tokens))
    attempted = {one.attempted for one in answers}
    conditions = [one for one in (COLD, REPEAT, RELOAD) if one.attempted in attempted]
    asked = [one for one in ASKED if one.of in conditions and one.to in conditions]
    return summarized(found, refused, order=order, seed=seed, conditions=conditions, asked=asked)


def _sample(one: LiveTimes) -> Sample:
    credited = None if one.local is None else one.local + (one.external or 0)
    moved = None if one.external else 0
    return Sample(
        repetition=1,
        condition=Condition(ON, one.attempted),
        arm="server",
        case=one.case,
        trial=one.trial,
        op=f"{one.case}.{one.attempted.value}",
        request=None,
        tokens=one.tokens,
        credited=credited,
        boundaries={},
        moved=moved,
        taken=_taken(one, credited, moved),
        output=token_digest(list(one.token_ids)),
        generated=len(one.token_ids),
        first_token=time_to_first_token(one.began_ns, one.events),
        total=total_latency(one.began_ns, one.done_ns),
        decode_rate=decode_rate(one.events),
        held_up=False,
        timed=(),
        evidence=(),
    )


def _taken(one: LiveTimes, credited: int | None, moved: int | None) -> Taken:
    if one.queried is not None and one.queried % one.tokens:  # a lookup may be asked again, whole
        return Taken(None, f"{one.queried} tokens looked up for a prompt of {one.tokens}: another client was there")
    if one.cached is not None and credited is not None and one.cached != credited:
        return Taken(None, f"the answer says {one.cached} cached tokens, the counters {credited}")
    return classify(PathEvidence(one.tokens, credited, one.local, moved, None))
