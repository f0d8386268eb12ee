"""The result card of a swap: two axes, the times, the observations; plain text that a terminal only shows."""

from __future__ import annotations

from samestate.checks.base import Verdict
from samestate.checks.custody_analyzer import CustodyJudgement
from samestate.checks.custody_history import CustodyHistory, spans
from samestate.evidence.custody_records import HostSeen, Resumed, Step
from samestate.evidence.text import printable

_FINDINGS = 4
"""Shown of a check; the index holds all."""


def functional_word(judgement: CustodyJudgement) -> str:
    """An acceptance that could not be made is incomplete."""
    return "incomplete" if judgement.functional is Verdict.UNKNOWN else judgement.functional.value


def card(judgement: CustodyJudgement, history: CustodyHistory) -> str:
    """Lines of text, each ended."""
    lines = [
        f"swap {judgement.swap or 'unknown'}",
        f"  operational   {judgement.operational}",
        f"  functional    {functional_word(judgement)}",
        f"  verdict       {judgement.verdict}, disposition {judgement.disposition}",
        f"  incumbent     {judgement.incumbent}{_again(judgement)}",
        f"  probe         {_probe(judgement)}",
        f"  window        {_window(history)}, {len(history.all(HostSeen))} transition observations",
        f"  steps         {_times(history)}",
        "",
    ]
    width = max(len(one.check) for one in judgement.results)
    for one in judgement.results:
        lines.append(f"  {one.check:<{width}}  {one.verdict:<13}  {one.summary}")
        # A question that did not come up says so in its summary.
        told = [] if one.verdict is Verdict.NOT_EXERCISED else one.findings
        lines += [f"      - {finding.message}" for finding in told[:_FINDINGS]]
        if len(told) > _FINDINGS:
            lines.append(f"      - {len(told) - _FINDINGS} more")
    if judgement.suppressed:
        lines += ["", "  not claimed: " + "; ".join(judgement.suppressed)]
    lines += ["", *(f"  not shown: {line}" for line in judgement.not_shown)]
    return "".join(f"{printable(line)}\n" for line in lines)


def _again(judgement: CustodyJudgement) -> str:
    return f", by a tool that resumed ({judgement.resumed})" if judgement.resumed else ""


def _probe(judgement: CustodyJudgement) -> str:
    probe = judgement.probe
    if probe is None:
        return "none"
    return f"{probe.plan}: " + (
        f"{probe.verdict}, by its own analyzer" if probe.verdict else f"no verdict, {probe.error}"
    )


def _window(history: CustodyHistory) -> str:
    """From the first change to the last, or that nobody can tell across a resumption."""
    times = list(spans(history))
    begins = [began for step, began, _ in times if step is Step.DRAIN]
    ends = [ended for step, _, ended in times if step is Step.READMIT and ended is not None]
    if history.all(Resumed) or not begins or not ends:
        return "not timed: it was cut" if begins else "nothing was touched"
    return f"{(ends[-1] - begins[0]) / 1e9:.2f} s from drain to readmission"


def _times(history: CustodyHistory) -> str:
    return " · ".join(
        f"{step} {(ended - began) / 1e9:.2f} s" if ended is not None else f"{step} cut"
        for step, began, ended in spans(history)
    )
