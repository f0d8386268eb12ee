"""The checks of a marker plan, under either rule, and what a verdict over them says that it cannot show."""

from __future__ import annotations

from collections.abc import Mapping

from samestate.checks import (
    coverage,
    marker_budget,
    marker_close,
    marker_ranks,
    marker_reconcile,
    marker_rows,
    marker_sent,
    marker_server,
    marker_table,
    marker_whole,
)
from samestate.checks.base import Check
from samestate.checks.marker_reconcile import Rule

WHERE_IT_COMES_UP = (
    marker_sent.GATES,
    marker_sent.ANSWER,
    marker_server.USAGE,
    marker_ranks.CHECK,
    marker_table.SPECULATION,
)
"""Of gates, a server, several ranks, drafts and known answers, which not every marker plan has."""
LIMITATIONS = (
    "Stores and committed rows show the path that was taken, not what would have come without them.",
    "Ranks that agree are not therefore right.",
)
REPORTED = (marker_rows.CHECK, marker_close.SECOND, marker_server.ANOMALIES)
"""Told, and decide nothing unless a plan requires them."""


def marker_checks(rule: Rule, foundations: Mapping[str, Check]) -> dict[str, Check]:
    """By id, in the order in which they are shown; probes take the place of operations in `foundations`."""
    return {
        **{check: run for check, run in foundations.items() if check != coverage.CHECK},
        marker_sent.PROBES: marker_sent.probes,
        marker_sent.ATTEMPTS: marker_sent.attempts,
        marker_sent.GATES: marker_sent.gates,
        marker_server.IDENTITY: marker_server.identity,
        marker_server.ECHO: marker_server.echo,
        marker_whole.CHECK: lambda history: marker_whole.trace_whole(history, rule),
        marker_ranks.CHECK: marker_ranks.trace_ranks,
        marker_reconcile.CHECK: lambda history: marker_reconcile.trace_reconciled(history, rule),
        marker_budget.CHECK: lambda history: marker_budget.budget_close(history, rule),
        marker_rows.CHECK: lambda history: marker_rows.budget_rows(history, rule),
        marker_close.CLASS: lambda history: marker_close.marker_class(history, rule),
        marker_close.SECOND: lambda history: marker_close.second_close(history, rule),
        marker_table.SPECULATION: marker_table.speculation,
        marker_server.USAGE: marker_server.usage,
        marker_sent.ANSWER: marker_sent.answer,
        marker_server.ANOMALIES: marker_server.anomalies,
    }
