"""What an archive holds of each arm, counted: generations, resets, saves, loads. It judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import ArmHistory, History


class ArmContents(NamedTuple):
    """One arm."""

    arm: str
    generations: dict[str, int]
    """Operations that put out a token or more, by their name."""
    tokens: int
    """That they put out."""
    resets: int
    """Of the local cache, that were done."""
    saves: int
    """Completed well, over all ranks; as `loads`."""
    saves_submitted: int
    loads: int
    loads_submitted: int

    def said(self) -> str:
        """In one line."""
        kinds = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.generations.items())
        parts = [f"{sum(self.generations.values())} generations" + (f" ({kinds})" if kinds else "")]
        parts.append(f"{self.tokens:,} tokens put out")
        parts += [f"{self.resets} resets"] if self.resets else []
        for done, submitted, what in (
            (self.saves, self.saves_submitted, "saves"),
            (self.loads, self.loads_submitted, "loads"),
        ):
            parts.append(f"no {what}" if not submitted else f"{done} of {submitted} {what} completed")
        return f"{self.arm}: {', '.join(parts)}"


def contents(history: History) -> list[ArmContents]:
    """Of every arm, in the plan's order."""
    return [_of(arm) for arm in history.ordered]


def verdicts_said(results: Sequence[CheckResult], required: Sequence[str]) -> Iterator[str]:
    """A line for each verdict that a check came to; a check that the plan does not ask for is in parentheses."""
    for verdict in Verdict:
        named = [one.check if one.check in required else f"({one.check})" for one in results if one.verdict is verdict]
        if named:
            yield f"{verdict.value.replace('_', ' ')}: {', '.join(named)}"


def _of(arm: ArmHistory) -> ArmContents:
    names = {seen.rec.op: seen.rec.name.value for seen in arm.started}
    outputs = {op: some[0].rec.token_ids for op, some in arm.outputs.items() if some and some[0].rec.token_ids}
    loads = [load for some in arm.loads.values() for load in some]
    saves = arm.saves
    return ArmContents(
        arm=arm.name,
        generations=dict(Counter(names.get(op, "not started") for op in outputs)),
        tokens=sum(map(len, outputs.values())),
        resets=sum(seen.rec.local_reset for some in arm.resets.values() for seen in some),
        saves=saves.submitted - len(saves.open) - len(saves.failed),
        saves_submitted=saves.submitted,
        loads=sum(load.completed is not None and load.completed.rec.ok for load in loads),
        loads_submitted=len(loads),
    )
