"""The two verifiers side by side: what `samestate check` says of an archive, and what `verify.py` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from samestate.checks import analyzers
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.evidence import verify
from samestate.evidence.archive import Archive


def disagreements(judgement: verify.Judgement, results: Iterable[CheckResult]) -> list[str]:
    """Every check on which the two differ, whatever the plan requires. Of a newer format only integrity is judged."""
    ours = {result.check: result for result in results}
    found = []
    for theirs in judgement.results:
        known = ours.get(theirs.check)
        if known is not None and known.verdict.value != theirs.verdict:
            told = [finding.message for finding in known.findings[:3]], theirs.findings[:3]
            found.append(f"{theirs.check}: check {known.verdict.value}, verify.py {theirs.verdict}: {told}")
    covered = [ours[theirs.check].verdict for theirs in judgement.results if theirs.check in ours]
    if judgement.verdict == verify.PASS and any(verdict is Verdict.FAIL for verdict in covered):
        found.append("verify.py passes what samestate check fails")
    return found


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

    def concluding(required: Iterable[str], results: list[CheckResult]) -> Verdict:
        found = disagreements(verify.judge(str(compared[-1])), results)
        assert not found, found
        return conclude(required, results)

    with patch.object(History, "read", reading), patch.object(analyzers, "run_verdict", concluding):
        yield compared
