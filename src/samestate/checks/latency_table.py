"""The table of a latency study's run: one row a reload, held against its prompt computed cold on the other engine.

Times are not in it: they are in the study (`latency_study`), where their conditions are.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestate.checks.base import CheckResult
from samestate.checks.boundary import Reload, reloads
from samestate.checks.history import History
from samestate.checks.table import CaseRow, reload_row
from samestate.evidence.records import OperationName
from samestate.plans.scenarios import CANDIDATE, CONTROL


def latency_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """A row for every planned reload; raises MissingEvidence where not even the cases are known."""
    return [_row(history, reload, results, required) for reload in reloads(history)]


def _row(history: History, reload: Reload, results: Sequence[CheckResult], required: Sequence[str]) -> CaseRow:
    cold = history.arm(CONTROL).output(f"{reload.case}.{OperationName.COLD.value}")
    reloaded = history.arm(CANDIDATE).output(reload.op)
    return reload_row(reload, cold, reloaded, None, results, required)
