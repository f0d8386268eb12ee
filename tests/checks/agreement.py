"""The two verifiers side by side: what `samestate check` says of an archive, and what `verify.py` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from samestate.checks import analyzers
from samestate.checks.analyzers import ANALYZERS, Judgement
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.checks.plan_identity import CHECK as PLAN_IDENTITY
from samestate.checks.verdicts import conclude, run_verdict
from samestate.evidence import verify
from samestate.evidence.archive import Archive

PINNED = {"other_analyzer", "other_analyzer_source"}
"""Which analyzer runs, only the one that runs can compare (docs/archive-format.md)."""
CODES = {Verdict.PASS: 0, Verdict.FAIL: 1}


def disagreements(judgement: verify.Judgement, results: Sequence[CheckResult], required: Iterable[str]) -> list[str]:
    """Every check on which the two differ, whatever the plan requires, and what they conclude from the checks."""
    comparable = _comparable(judgement.analyzer, [result.check for result in results])
    ours = {result.check: _recomputable(result) for result in results if result.check in comparable}
    found = []
    for theirs in judgement.results:
        known = ours.get(theirs.check)
        if known is not None and known.verdict.value != theirs.verdict:
            told = [finding.message for finding in known.findings[:3]], theirs.findings[:3]
            found.append(f"{theirs.check}: check {known.verdict.value}, verify.py {theirs.verdict}: {told}")
    if ours.keys() != {result.check for result in results} or judgement.analyzer not in verify.ANALYZERS:
        return found
    return found + list(_conclusion(judgement, ours, list(required)))


def _conclusion(judgement: verify.Judgement, ours: dict[str, CheckResult], required: list[str]) -> Iterator[str]:
    """The verdict over what `verify.py` recomputes; a check that it does not makes a pass unknown."""
    if not judgement.required:
        return  # a newer format, or a scenario
    if set(judgement.required) != set(required):
        yield f"required: check {sorted(required)}, verify.py {sorted(judgement.required)}"
    done = {result.check for result in judgement.results}
    if set(judgement.not_recomputed) != set(required) - done:
        yield f"not recomputed: {judgement.not_recomputed}"
    expected = run_verdict(required, [result for check, result in ours.items() if check in done])
    if verify.EXIT_CODES.get(judgement.verdict, 3) != CODES.get(expected, 3):
        yield f"verdict: check {expected.value}, verify.py {judgement.verdict}"


def _comparable(analyzer: str | None, checks: list[str]) -> set[str]:
    """Of the checks that were run, those that the plan's analyzer has too: another one may have run."""
    known = ANALYZERS.get(analyzer or "")
    if known is None or set(known.checks) == set(checks):
        return set(checks)
    ran, *_ = [one for one in ANALYZERS.values() if set(one.checks) == set(checks)]
    same = {check for check in checks if known.checks.get(check) is ran.checks[check]}
    return same | ({PLAN_IDENTITY} & known.checks.keys())


def _recomputable(result: CheckResult) -> CheckResult:
    """The same without what `verify.py` says that it does not compare."""
    if result.check != PLAN_IDENTITY or not any(finding.code in PINNED for finding in result.findings):
        return result
    kept = [finding for finding in result.findings if finding.code not in PINNED]
    return conclude(result.check, kept, unit=result.unit, examined=result.examined, summary=result.summary)


@contextmanager
def compared() -> Iterator[list[Path]]:
    """While it is open, every archive that is judged is judged by `verify.py` too; AssertionError where they differ.

    Yields the archives compared so far.
    """
    compared: list[Path] = []
    read, conclude = History.read, analyzers.run_verdict

    def reading(archive: Archive) -> History:
        compared.append(archive.root)
        return read(archive)

    def concluding(required: Sequence[str], results: list[CheckResult]) -> Verdict:
        found = disagreements(verify.judge(str(compared[-1])), results, required)
        assert not found, found
        return conclude(required, results)

    with patch.object(History, "read", reading), patch.object(analyzers, "run_verdict", concluding):
        yield compared


def told(second: verify.Judgement, check: Judgement) -> list[str]:
    """`disagreements` over a judgement that is there."""
    return disagreements(second, check.results, check.required)
