"""What was before a swap against what is after it: the incumbent, field by field, and its router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.custody_compare import compare, listed, named
from samestate.checks.custody_history import CustodyHistory, Noted, nothing, values
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence import custody_records as c
from samestate.evidence.marker_records import BUDGET_FAULT, REPAIRS, SAMPLING_GUARD, TRACE_ARM, TRACE_FOLDER

RESTORED, ROUTER, ROUTER_BYTES = "custody-restored", "custody-router", "custody-router-bytes"
UNPATCHED, REQUIRED = "custody-unpatched", "custody-required"
BYTES = "router.config."
DIAGNOSTIC = (TRACE_FOLDER, TRACE_ARM, SAMPLING_GUARD, REPAIRS, BUDGET_FAULT)
"""Variables that put something of ours onto vLLM."""
MANDATORY = (
    *("pid", "process_start", "executable", "argv", "cwd", "environment", "user", "umask", "limits"),
    *("affinity", "nice", "oom_score_adj", "mount_namespace", "cgroup", "ports", "gpus", "boot_id"),
)
"""Fields that every snapshot has. Without one of them, or with one ignored, no restoration is exact."""
CONFIG = "config"
"""Its own name where it could not be read, else the first part of its fields'; at least one is mandatory too."""
IDENTITY = ("model.files", "template", "sources")
"""What only a spec can name. A family that no snapshot has goes by no comparison, and no restoration is exact."""
_OF_A_BOOT = ("boot_id", "cgroup", "mount_namespace", "mount.*")
"""Inodes and device numbers among them are given anew at every start of the kernel."""

_SHOWN = 8
"""Names in one line."""


def restored(history: CustodyHistory) -> CheckResult:
    """The incumbent after is the incumbent before, field by field; what is ignored is named and never counted."""
    before, after = history.first(c.SnapshotTaken, "before"), history.last(c.SnapshotTaken, "after")
    if history.started is None or before is None or after is None:
        return _lacking(RESTORED, history, before, "snapshot of the incumbent")
    policy = _Policy(history)
    names = {one.name for noted in (before, after) for one in noted.rec.fields}
    findings = [_across(history, one) for one in compare(before, after, policy.changes, policy.ignored)]
    findings += _unheld(names, policy.ignored)
    findings += _unnamed(names, [*IDENTITY, *history.started.identity])
    changed, ignored = _apart(names, policy)
    held = names.difference(changed, ignored)
    if not held:
        findings.append(unknown("nothing_compared", "no field was held to be as before"))
    equal = len(held - named(findings))
    summary = f"{equal}/{len(held)} fields as before"
    if changed:
        summary += f", {len(changed)} meant to change"
    if ignored:
        summary += f", {len(ignored)} ignored ({_some(ignored)})"
    return conclude(RESTORED, findings, unit="fields", examined=len(held), summary=summary)


def reservation(history: CustodyHistory) -> str:
    """What the claim of exact restoration leaves out, to be put behind it; empty where that is only what it must."""
    before, after = history.first(c.SnapshotTaken, "before"), history.last(c.SnapshotTaken, "after")
    if history.started is None or before is None or after is None:
        return ""
    names = {one.name for noted in (before, after) for one in noted.rec.fields}
    changed, ignored = _apart(names, _Policy(history))
    beyond = [name for name in changed if name not in ("pid", "process_start")]
    parts = [f"{words} {_some(lot)}" for words, lot in (("meant to change:", beyond), ("ignored:", ignored)) if lot]
    return f", but for fields {'; '.join(parts)}" if parts else ""


def _unheld(names: Iterable[str], ignored: Sequence[str]) -> Iterator[Finding]:
    """Findings on mandatory fields that nothing held."""
    families = {name.partition(".")[0] if name.startswith(f"{CONFIG}.") else name for name in names}
    counted = {name for name in names if not listed(name, ignored)}
    for name in (*MANDATORY, CONFIG):
        if name not in families:
            yield unknown("missing_before", f"{name}: no record from before, and none from after")
        elif not any(one == name or (name == CONFIG and one.startswith(f"{CONFIG}.")) for one in counted):
            yield unknown("ignored", f"{name}: the policy ignores it, and no restoration is exact without it")


def _unnamed(names: Iterable[str], wanted: Iterable[str]) -> Iterator[Finding]:
    """Findings on fields, or families, that neither side has."""
    there = list(names)
    for name in dict.fromkeys(wanted):
        if name != CONFIG and not any(one == name or one.startswith(f"{name}.") for one in there):
            message = f"{name}: no record from before, and none from after; [identity] says where it lies"
            yield unknown("missing_both", message)


def _across(history: CustodyHistory, finding: Finding) -> Finding:
    """A machine that was started again gives out new numbers, and may give out an old one."""
    of_a_boot = finding.code == "unchanged" or any(listed(name, _OF_A_BOOT) for name in named([finding]))
    if finding.verdict is not Verdict.FAIL or not history.rebooted or not of_a_boot:
        return finding
    return unknown("boot", f"{finding.message}; the machine was started again", None, finding.evidence)


def _apart(names: Iterable[str], policy: _Policy) -> tuple[list[str], list[str]]:
    """Of fields, those that are meant to change, and those that do not count."""
    ignored = sorted(name for name in names if listed(name, policy.ignored))
    return sorted(name for name in names if listed(name, policy.changes) and name not in ignored), ignored


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def required(history: CustodyHistory) -> CheckResult:
    """What the probe's plan needs from before the swap was recorded then."""
    names = history.started.required_before if history.started else []
    if not names:
        return not_exercised(REQUIRED, "none_required", "nothing was required from before", unit="artefacts")
    lots = (history.first(c.SnapshotTaken, "before"), history.first(c.RouterSeen, "before"))
    there = {one.name for lot in lots if lot is not None for one in lot.rec.fields if one.value is not None}
    findings = []
    for name in names:
        smoke = name.removeprefix("smoke.")
        kept = (
            any(history.raw_is(one.rec) for one in history.smokes(smoke, "before")) if smoke != name else name in there
        )
        if not kept:
            findings.append(unknown("missing_before", f"{name}: required from before, and not there"))
    summary = f"{len(names) - len(findings)}/{len(names)} artefacts from before"
    return conclude(REQUIRED, findings, unit="artefacts", examined=len(names), summary=summary)


def router(history: CustodyHistory) -> CheckResult:
    """The router is the same process, with the same place for the incumbent; its bytes are a check of their own."""
    before, after = _router(history)
    if before is None or after is None:
        return _lacking(ROUTER, history, before, "reading of the router")
    findings = [one for one in compare(before, after, [], [f"{BYTES}*"])]
    count = sum(not one.name.startswith(BYTES) for one in before.rec.fields)
    if not any(one.name == "router.process" for one in before.rec.fields):
        findings.append(unknown("missing_before", "router.process: no record from before", None, [before.where]))
    return conclude(
        ROUTER, findings, unit="fields", examined=count, summary=f"{count - len(findings)}/{count} fields as before"
    )


def router_bytes(history: CustodyHistory) -> CheckResult:
    """The router's configuration, byte for byte. Without a record from before, parity is not claimed."""
    before, after = _router(history)
    if before is None or after is None:
        return _lacking(ROUTER_BYTES, history, before, "reading of the router")
    configs = [one for one in before.rec.fields if one.name.startswith(BYTES)]
    lost = [one for one in after.rec.fields if one.name.startswith(BYTES) and one.name not in values(configs)]
    if not configs and not lost:
        message = "its bytes were not captured before, so no parity of bytes is claimed"
        return not_exercised(ROUTER_BYTES, "not_captured", message, unit="files")
    findings = [one for one in compare(before, after, [], []) if one.message.startswith(BYTES)]
    summary = f"{len(configs) - len(findings)}/{len(configs)} files byte for byte"
    return conclude(ROUTER_BYTES, findings, unit="files", examined=len(configs), summary=summary)


def unpatched(history: CustodyHistory) -> CheckResult:
    """No diagnostic of ours is left in the restored incumbent: no variable asks for one, the sources are the same."""
    after = history.last(c.SnapshotTaken, "after")
    if after is None:
        return nothing(UNPATCHED, "missing_after", "no snapshot of the restored incumbent", "variables")
    fields, findings = values(after.rec.fields), []
    if "environment" not in fields or fields["environment"].value is None:
        findings.append(unknown("missing_after", "environment: was not read after", None, [after.where]))
    before = history.first(c.SnapshotTaken, "before")
    there = values(before.rec.fields) if before else {}
    for name in DIAGNOSTIC:
        left, was = fields.get(f"environment.{name}"), there.get(f"environment.{name}")
        if left is not None and (was is None or was.value != left.value):
            message = f"environment.{name}: is set in the restored incumbent, and was not before"
            findings.append(fail("patch_left", message, None, [after.where]))
    sources = sorted(name for name in fields.keys() | there.keys() if name.startswith("sources."))
    if not sources:
        findings.append(unknown("missing_both", "sources: no record from before, and none from after"))
    for name in sources:
        was, now = there.get(name), fields.get(name)
        if was is None or now is None or was.value is None or now.value is None:
            side = "before" if was is None or was.value is None else "after"
            findings.append(unknown(f"missing_{side}", f"{name}: was not read {side}", None, [after.where]))
        elif was.value != now.value:
            findings.append(fail("source_changed", f"{name}: other source than before", None, [after.where]))
    kept = sum(f"environment.{name}" in fields for name in DIAGNOSTIC)
    summary = (
        f"{len(DIAGNOSTIC) - kept} variables unset, {kept} as before, {len(sources)} packages as before"
        if not findings
        else "something is left"
    )
    return conclude(UNPATCHED, findings, unit="variables", examined=len(DIAGNOSTIC), summary=summary)


class _Policy:
    """Of a history: what a stop and a start must change, and what does not count."""

    def __init__(self, history: CustodyHistory) -> None:
        started = history.started
        assert started is not None
        # An incumbent that was never stopped is the same process still.
        self.changes = started.expected_change if history.stopped else []
        self.ignored = started.ignore


def _router(history: CustodyHistory) -> tuple[Noted | None, Noted | None]:
    after = history.last(c.RouterSeen, "after") or history.last(c.RouterSeen, "restored")
    return history.first(c.RouterSeen, "before"), after


def _lacking(check: str, history: CustodyHistory, before: Noted | None, what: str) -> CheckResult:
    side = "before" if before is None else "after"
    if history.started is None:
        return nothing(check, "missing_start", "nothing says what the swap is held to", "fields")
    return nothing(check, f"missing_{side}", f"no {what} from {side}, so nothing is claimed", "fields")
