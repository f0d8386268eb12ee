"""``ranks``: what one rank loads, every rank loads, and whoever writes also reads.

A rank that finds nothing under its own names leaves its shard as it was, while the others' loads are credited.
Only arms with several ranks are asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import by_rank
from samestate.checks.history import ArmHistory, History
from samestate.checks.prefixes import Prefixes
from samestate.checks.transfers import rank_bytes
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

CHECK = "ranks"


def ranks(history: History) -> CheckResult:
    """Hold the ranks of every candidate against each other, request by request and over the arm."""
    findings: list[Finding] = []
    examined = 0
    several = [arm for arm in history.candidates if len(arm.ranks) > 1]
    for arm in several:
        prefixes, make = Prefixes(history, arm), fail if history.whole(arm.name) else unknown
        for request, loads in arm.loads.items():
            examined += 1
            of_rank = by_rank(loads)
            for rank in sorted(arm.ranks.keys() - of_rank.keys()):
                message = (
                    f"{prefixes.name(request)}: rank {rank} loaded nothing, and ranks "
                    f"{', '.join(map(str, sorted(of_rank)))} did"
                )
                place = prefixes.place(request).model_copy(update={"rank": rank})
                findings.append(make("rank_silent", message, place, [load.submitted.where for load in loads]))
        findings += _reads_nothing(history, arm)
    if not several:
        message = "no arm with a connector has more than one rank"
        return not_exercised(CHECK, "one_rank", message, unit="loading requests")
    summary = f"{examined} requests loaded, {'every one on every rank' if not findings else 'not alike on all ranks'}"
    return conclude(CHECK, findings, unit="loading requests", examined=examined, summary=summary)


def _reads_nothing(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """Bytes written, and over the whole arm none read, where others read some."""
    every = by_rank([load for loads in arm.loads.values() for load in loads])
    read = rank_bytes(every)
    reported = {
        rank
        for rank, loads in every.items()
        if all(load.completed is not None and load.completed.rec.bytes is not None for load in loads)
    }
    written = dict.fromkeys(arm.ranks, 0)
    for (rank, _), saves in arm.saves.done.items():
        written[rank] = written.get(rank, 0) + sum(saved.part.bytes for saved in saves)
    for rank in sorted(arm.ranks):
        silent = rank not in every or (rank in reported and not read[rank])
        if silent and written[rank] and any(read.values()):
            message = f"arm {arm.name}: rank {rank} wrote {written[rank]} bytes and read none; others read {read}"
            make = fail if history.whole(arm.name) else unknown
            yield make("rank_reads_nothing", message, Place(arm=arm.name, rank=rank), [])
