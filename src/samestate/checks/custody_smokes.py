"""Functional smokes before and after: what failed on both sides shows nothing, and is not a pass."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.custody_history import CustodyHistory, Noted
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

SMOKES = "custody-smokes"


def smokes(history: CustodyHistory) -> CheckResult:
    """Each smoke answered before and after, raw bytes kept, sent once on each side."""
    names = history.started.smokes if history.started else []
    if not names:
        return not_exercised(SMOKES, "no_smokes", "no functional smoke was asked for", unit="smokes")
    findings = [finding for name in names for finding in _smoke(history, name)]
    good = len(names) - len({finding.message.partition(":")[0] for finding in findings})
    return conclude(
        SMOKES, findings, unit="smokes", examined=len(names), summary=f"{good}/{len(names)} answered before and after"
    )


def _smoke(history: CustodyHistory, name: str) -> Iterator[Finding]:
    befores, afters = history.smokes(name, "before"), history.smokes(name, "after")
    if len(befores) > 1 or (len(afters) > 1 and not history.resumptions):
        yield unknown("retried", f"{name}: was sent again", None, [one.where for one in [*befores, *afters]])
    for side, lot in (("before", befores), ("after", afters)):
        if not lot:
            yield unknown(f"missing_{side}", f"{name}: no record from {side}, so no regression is claimed")
    if not befores or not afters:
        return
    before = next((one for one in befores if not one.rec.ok), befores[0])
    # A failed answer of the restored incumbent counts, however often it was asked again.
    after = next((one for one in afters if not one.rec.ok), afters[-1])
    where = [before.where, after.where]
    for one in (*befores, *afters):
        if not history.raw_is(one.rec):
            side = one.rec.when
            message = f"{name}: the raw response from {side} is missing or is another, so no regression is claimed"
            yield unknown(f"raw_missing_{side}", message, None, [one.where])
    if len({one.rec.request_sha256 for one in (*befores, *afters)}) > 1:
        yield unknown("other_request", f"{name}: other bytes were sent after than before", None, where)
    yield from _outcome(name, before, after, where)


def _outcome(name: str, before: Noted, after: Noted, where: list[str]) -> Iterator[Finding]:
    if before.rec.ok and after.rec.ok:
        return
    if before.rec.ok:
        yield fail("regressed", f"{name}: answered before, and after: {after.rec.error}", None, where)
    elif after.rec.ok:
        yield unknown("no_baseline", f"{name}: failed before ({before.rec.error}), answered after", None, where)
    elif before.rec.error == after.rec.error:
        message = f"{name}: failed before and after alike ({after.rec.error}); incomplete, no regression is claimed"
        yield unknown("same_failure", message, None, where)
    else:
        message = f"{name}: failed before ({before.rec.error}) and after ({after.rec.error}); no regression is claimed"
        yield unknown("both_failed", message, None, where)
