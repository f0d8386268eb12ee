"""``queries``: the engine's query counters count every token that was asked for, once.

A hit rate is hits over queries, so a query that is counted twice halves it. vLLM asks its local cache for all N tokens
of a request, and the connector for those that are not local, counted when the request is admitted
(v1/core/sched/scheduler.py). Requests that were preempted ask again and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import History
from samestate.checks.scenario import Generation, generations
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EXTERNAL_QUERIES, LOCAL_QUERIES

CHECK = "queries"


def queries(history: History) -> CheckResult:
    """The counters around every operation of every candidate, or around its batch."""
    checked = generations(history, history.candidates)
    findings: list[Finding] = []
    examined = 0
    for _, unit in groupby(checked, key=lambda one: (one.arm.name, one.op.together or one.op.op)):
        together = list(unit)
        if any(one.request in one.arm.preempted for one in together):
            continue
        examined += len(together)
        findings += _counted(history, together)
    summary = f"queries of {examined} generations counted {'once' if not findings else 'otherwise than asked'}"
    return conclude(CHECK, findings, unit="generations", examined=examined, summary=summary)


def _counted(history: History, together: list[Generation]) -> Iterator[Finding]:
    first = together[0]
    arm, ops = first.arm, ", ".join(one.op.op for one in together)
    lookups = [one.lookup for one in together if one.lookup is not None]
    asked = sum(one.tokens for one in together)
    outside = asked - sum(seen.rec.local_tokens for seen in lookups) if len(lookups) == len(together) else None
    for counter, tokens in ((LOCAL_QUERIES, asked), (EXTERNAL_QUERIES, outside)):
        counted, evidence = arm.counter(first.op.op, counter), arm.evidence(first.op.op)
        if counted is None:
            message = f"arm {arm.name}: {ops}: {counter} cannot be read"
            yield unknown("counter_unreadable", message, first.place, evidence)
        elif tokens is not None and counted != tokens:
            message = f"arm {arm.name}: {ops}: {counter} counts {counted:.0f} tokens, asked were {tokens}"
            make = fail if history.whole(arm.name) else unknown
            yield make("queries_disagree", message, first.place, evidence)
