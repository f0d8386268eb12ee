"""The window of a swap: its journal, the idle engine, the route, the host's memory and its OOM kills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from samestate.checks.base import CheckResult, Finding
from samestate.checks.custody_history import CustodyHistory, Noted, nothing, values
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence import custody_records as c

JOURNAL, IDLE, ROUTE = "custody-journal", "custody-idle", "custody-route"
MEMORY, OOM = "custody-memory", "custody-oom"
_INODE = re.compile(r"\(inode (\d+)\)$")


def journal(history: CustodyHistory) -> CheckResult:
    """The journal is whole: numbered, chained, readable to its end."""
    findings = [unknown("damaged", f"{one.where}: {one.what}", None, [one.where]) for one in history.defects]
    count = len(history.noted)
    return conclude(
        JOURNAL, findings, unit="records", examined=count, summary=f"{count} records, {len(findings)} defects"
    )


def idle(history: CustodyHistory) -> CheckResult:
    """The restored engine: nothing running, nothing waiting, so many readings in a row."""
    seen = [one for one in history.all(c.IdleSeen) if one.rec.when == "after"]
    count = history.started.stable_samples if history.started else 1
    last = seen[-count:]
    if len(last) < count:
        return nothing(IDLE, "missing_after", f"{len(last)} of {count} readings of the restored engine", "readings")
    findings = []
    for one in last:
        if one.rec.missing is not None:
            findings.append(unknown("missing_after", f"the engine's counters: {one.rec.missing}", None, [one.where]))
        elif (one.rec.running, one.rec.waiting) != (0, 0):
            message = f"the restored engine has {one.rec.running} running and {one.rec.waiting} waiting"
            findings.append(unknown("not_idle", message, None, [one.where]))
    summary = f"0 running, 0 waiting, {count} readings in a row" if not findings else "not seen idle"
    return conclude(IDLE, findings, unit="readings", examined=len(last), summary=summary)


def route(history: CustodyHistory) -> CheckResult:
    """The route admitted before and admits again; requests that failed in its backend meanwhile are told."""
    before, after = history.first(c.RouterSeen, "before"), history.last(c.RouterSeen, "after")
    if before is None or (after is None and c.Step.DRAIN in history.began):
        side = "before" if before is None else "after"
        return nothing(ROUTE, f"missing_{side}", f"no reading of the route from {side}", "readings")
    if after is None:
        after = history.last(c.RouterSeen, "restored") or before
    findings = []
    if not before.rec.admitting:
        findings.append(unknown("closed_before", "the route was closed before", None, [before.where]))
    if not after.rec.admitting:
        findings.append(fail("not_admitting", "the route does not admit the incumbent", None, [after.where]))
    restored = history.last(c.RouterSeen, "restored")
    if restored is not None and history.stopped and restored.rec.sessions:
        message = f"{restored.rec.sessions} sessions open before the route was opened"
        findings.append(fail("active", message, None, [restored.where]))
    if None in (before.rec.failed, after.rec.failed):
        message = "the router does not count the requests that failed in its backend"
        findings.append(unknown("uncounted", message, None, [before.where, after.where]))
        told = "failed requests not counted"
        return conclude(ROUTE, findings, unit="readings", examined=2, summary=f"{_admits(after)}, {told}")
    failed = after.rec.failed - before.rec.failed
    if failed > 0:
        message = f"{failed} requests failed in the router's backend within the window"
        findings.append(fail("failed_requests", message, None, [before.where, after.where]))
    elif failed < 0:
        findings.append(unknown("counter_reset", "the router's counters were set back", None, [after.where]))
    told = f"{failed if failed >= 0 else 'unknown'} failed requests"
    return conclude(ROUTE, findings, unit="readings", examined=2, summary=f"{_admits(after)}, {told}")


def _admits(seen: Noted) -> str:
    return "ready and admitting" if seen.rec.admitting else "closed"


def memory(history: CustodyHistory) -> CheckResult:
    """Available host memory, observed through the whole window without a gap longer than the period."""
    seen = history.all(c.HostSeen)
    if len(seen) < 2 or history.started is None:
        return nothing(MEMORY, "missing", f"{len(seen)} observations of the host", "observations")
    findings = list(_gaps(history, seen, history.started.period_ms))
    for one in seen:
        if one.rec.memory_available is None:
            findings.append(unknown("missing", "MemAvailable could not be read", None, [one.where]))
    known = [one.rec.memory_available for one in seen if one.rec.memory_available is not None]
    least = f"at least {min(known):,} bytes available" if known else "never read"
    return conclude(
        MEMORY, findings, unit="observations", examined=len(seen), summary=f"{least}, {len(seen)} observations"
    )


def _gaps(history: CustodyHistory, seen: list[Noted], period_ms: int) -> Iterator[Finding]:
    for one, other in pairwise(seen):
        gap = other.t_ns - one.t_ns
        between = any(int(one.where.rpartition(":")[2]) < _line(again) < _line(other) for again in history.resumptions)
        if between or gap > period_ms * 1_000_000:
            words = "while nobody watched" if between else f"of {gap / 1e9:.1f} s, the period is {period_ms / 1e3:g} s"
            yield unknown("gap", f"a gap {words}", None, [one.where, other.where])
    touched = [one for one in history.all(c.StepBegan) if one.rec.step is not c.Step.SNAPSHOT]
    if touched and _line(seen[0]) > _line(touched[0]):
        yield unknown("late", "the first observation came after the first change", None, [seen[0].where])
    ends = [one for one in history.all(c.StepEnded) if one.rec.step is c.Step.READMIT]
    if ends and _line(seen[-1]) < _line(ends[-1]):
        yield unknown("early", "the last observation came before the readmission", None, [seen[-1].where])


def _line(one: Noted) -> int:
    return int(one.where.rpartition(":")[2])


def oom(history: CustodyHistory) -> CheckResult:
    """No OOM kill, of the host or in the cgroups of incumbent and candidate, each by its inode, over the window."""
    seen = history.all(c.HostSeen)
    if len(seen) < 2:
        return nothing(OOM, "missing", f"{len(seen)} observations of the host", "counters")
    first, last = seen[0], seen[-1]
    findings = []
    if None in (first.rec.oom_kills, last.rec.oom_kills):
        findings.append(unknown("missing", "the host's OOM kills were not read", None, [first.where, last.where]))
    else:
        findings += _grown("the host", first.rec.oom_kills, last.rec.oom_kills, [first.where, last.where])
    kept: dict[int, list[tuple[int | None, str]]] = {}
    for one in seen:
        for group in one.rec.cgroups:
            kept.setdefault(group.inode, []).append((group.kills, one.where))
    if not kept:
        findings.append(unknown("missing", "no memory cgroup of the incumbent was read"))
    for inode, counts in kept.items():
        where = [counts[0][1], counts[-1][1]]
        if any(kills is None for kills, _ in counts):
            findings.append(unknown("missing", f"cgroup {inode}: the kernel does not say its kills", None, where))
        elif counts[-1][1] != last.where:
            findings.append(unknown("missing", f"cgroup {inode}: was gone before the end", None, where))
        else:
            findings += _grown(f"cgroup {inode}", counts[0][0] or 0, counts[-1][0] or 0, where)
    findings += _unwatched(history, set(kept))
    if history.rebooted:
        findings.append(unknown("boot", "the machine was started again, and its counters with it"))
    summary = f"no kill on the host, none in {len(kept)} cgroups" if not findings else f"{len(findings)} findings"
    return conclude(OOM, findings, unit="counters", examined=1 + len(kept), summary=summary)


def _unwatched(history: CustodyHistory, inodes: set[int]) -> Iterator[Finding]:
    """Processes of whose own cgroup nothing was read: another's counter says nothing of them."""
    for one in history.all(c.SnapshotTaken):
        who = "candidate" if one.rec.when == "candidate" else "incumbent"
        seen = values(one.rec.fields).get("cgroup")
        found = _INODE.search(seen.value) if seen is not None and seen.value is not None else None
        if found is None:
            message = f"the {who}'s memory cgroup is not known ({one.rec.when})"
        elif int(found[1]) not in inodes:
            message = f"cgroup {found[1]}, the {who}'s ({one.rec.when}): was not observed"
        else:
            continue
        yield unknown("missing", message, None, [one.where])


def _grown(who: str, first: int, last: int, where: list[str]) -> Iterator[Finding]:
    if last > first:
        yield fail("oom", f"{who}: {last - first} processes were killed for want of memory", None, where)
    elif last < first:
        yield unknown("counter_reset", f"{who}: the counter was set back", None, where)
