"""What a gate's counts mean: pass, fail or unknown, and the line that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from samestate.evidence.gate_report import GateGroup

FORCED_ROWS, ORDINARY_ROWS, BATCHES = 8, 272, 8
"""Of the sampling gate, exactly; every batch runs twice."""

Said = tuple[Literal["pass", "fail", "unknown"], str | None]


def sampling_verdict(groups: Sequence[GateGroup], *, split_calls: int, first_other: int | None, compared: str) -> Said:
    """Of the sampling gate. Fewer or more rows than it has, or another path of vLLM's, show nothing."""
    forced, right = sum(group.forced_rows for group in groups), sum(group.forced_right for group in groups)
    ordinary, same = sum(group.ordinary_rows for group in groups), sum(group.ordinary_same for group in groups)
    empty = sum(group.forced_empty for group in groups)
    if (forced, ordinary) != (FORCED_ROWS, ORDINARY_ROWS):
        return (
            "unknown",
            f"{forced} forced and {ordinary} ordinary rows were run, not {FORCED_ROWS} and {ORDINARY_ROWS}",
        )
    if split_calls != 2 * BATCHES:
        return "unknown", f"vLLM took its split-row path {split_calls} times, not {2 * BATCHES}"
    said = []
    if empty:
        said.append(
            f"{right}/{forced} forced rows choose the end id, {empty} keep no token: the split-row cut-off "
            "log(pivot)+log(Z)+max rounds to the maximum beside a logit of 1e9, and the strict > masks the whole row; "
            "run with --guard, or use vLLM 0.33"
        )
    elif right != forced:
        said.append(f"{right}/{forced} forced rows choose the end id")
    if same != ordinary:
        said.append(
            f"{same}/{ordinary} ordinary rows are bitwise the same with and without {compared}; "
            f"the first that is not: row {first_other}"
        )
    return ("fail", "; ".join(said)) if said else ("pass", None)


def selftest_verdict(groups: Sequence[GateGroup], *, hint: str) -> Said:
    """Of the self-test; `hint` is added to what failed."""
    if not groups or not all(group.forced_rows and group.ordinary_rows for group in groups):
        return "unknown", "the self-test ran no rows"
    wrong = [
        f"at temperature {group.temperature:g} and top-p {group.top_p:g} {group.forced_right}/{group.forced_rows} "
        f"forced rows and {group.ordinary_same}/{group.ordinary_rows} others are right"
        for group in groups
        if (group.forced_right, group.ordinary_same) != (group.forced_rows, group.ordinary_rows)
    ]
    return ("fail", "; ".join([*wrong, hint] if hint else wrong)) if wrong else ("pass", None)
