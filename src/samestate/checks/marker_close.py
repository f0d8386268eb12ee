"""``marker-class`` and ``second-close``: was a close marker forced by the budget, or sampled?

An observation is not an attribution: where trace and API do not reconcile, or ranks disagree, what the rows show is
said, and the class is unknown (requirements 142, 143, 148).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.budget_oracle import decide_outputs
from samestate.checks.history import History
from samestate.checks.marker_budget import mistrusted
from samestate.checks.marker_classes import Marker, TokenClass, class_of_marker, classify, closes, counted
from samestate.checks.marker_history import RankTrace
from samestate.checks.marker_probes import Probe, budgeted, markers_of
from samestate.checks.marker_reconcile import Rule
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

CLASS, SECOND = "marker-class", "second-close"


class Close(NamedTuple):
    """A close marker that the API delivered."""

    probe: Probe
    marker: Marker
    number: int
    """From 1, in its answer."""
    observed: TokenClass
    """By the rows, alike on every rank; unknown where they differ or are not recorded."""
    why_unknown: str
    """Why what was observed is not attributed; empty: it is."""

    @property
    def attributed(self) -> TokenClass:
        """The class that the evidence bears out."""
        return TokenClass.UNKNOWN if self.why_unknown else self.observed


def marker_class(history: History, rule: Rule) -> CheckResult:
    """The class of every close marker delivered, and how the tokens of all traces divide."""
    found = all_closes(history, rule)
    findings = [_unattributed(close) for close in found if close.attributed is TokenClass.UNKNOWN]
    said = [f"{close.attributed.value} at {close.marker.position} ({close.probe.title})" for close in found]
    reasons = why_not(history, rule)
    classes = [
        one
        for probe in budgeted(history)
        for one in first_rank_classes(probe, trusted=(probe.arm.name, probe.name) not in reasons)
    ]
    summary = (
        f"{'; '.join(said[:4])}{f'; {len(said) - 4} more' if len(said) > 4 else ''}" if said else "no close marker"
    )
    return conclude(
        CLASS, findings, unit="markers", examined=len(found), summary=f"{summary}; tokens: {counted(classes)}"
    )


def second_close(history: History, rule: Rule) -> CheckResult:
    """Whether a second close was forced or sampled; the question comes up only where one was delivered."""
    found = [close for close in all_closes(history, rule) if close.number > 1]
    if not found:
        said = "no second close marker was delivered: whether one would be forced or sampled was not asked"
        return not_exercised(SECOND, "no_second_close", said, unit="markers")
    findings = [finding for close in found if (finding := _second(close)) is not None]
    said = ", ".join(f"{close.attributed.value} at {close.marker.position} ({close.probe.title})" for close in found)
    return conclude(SECOND, findings, unit="markers", examined=len(found), summary=said)


def _second(close: Close) -> Finding | None:
    if close.attributed is TokenClass.UNKNOWN:
        return _unattributed(close)
    if close.attributed in (TokenClass.FORCED, TokenClass.NATURAL_COINCIDENT) and not _due(close):
        message = f"{_named(close)}: forced, and reasoning had not begun again"
        return fail("second_close_forced", message, close.probe.place, close.probe.where)
    return None


def _due(close: Close) -> bool:
    """Whether the policy forces here: the start marker appeared again and the budget was spent again."""
    probe = close.probe
    prompt = probe.answered.rec.prompt_token_ids if probe.answered else []
    before = probe.tokens[: close.marker.position]
    decision = decide_outputs(prompt, before, markers_of(probe.arm), probe.budget or 0)[-1]
    return decision.forced == close.marker.ids[0]


def _unattributed(close: Close) -> Finding:
    observed = "its rows differ or are not recorded"
    if close.observed is not TokenClass.UNKNOWN:
        observed = f"{close.observed.value} by its rows on {len(close.probe.traces)} rank(s), an observation only"
    why = f": {close.why_unknown}" if close.why_unknown else ""
    return unknown("not_attributed", f"{_named(close)}: {observed}{why}", close.probe.place, close.probe.where)


def _named(close: Close) -> str:
    ids = ", ".join(map(str, close.marker.ids))
    return f"{close.probe.title}: close {close.number} ({ids}) at {close.marker.position}"


# --- closes of a probe ------------------------------------------------------------------------


def all_closes(history: History, rule: Rule) -> list[Close]:
    """Every close marker that the API delivered for a probe with a budget. Raises MissingEvidence."""
    reasons = why_not(history, rule)
    found: list[Close] = []
    for probe in budgeted(history):
        found += closes_of(probe, reasons.get((probe.arm.name, probe.name), ""))
    return found


def why_not(history: History, rule: Rule) -> dict[tuple[str, str], str]:
    """Probes whose rows prove nothing, by (arm, probe), with the reason. Raises MissingEvidence."""
    arms = {probe.arm.name: probe.arm for probe in budgeted(history)}
    return {key: why for arm in arms.values() for key, why in mistrusted(arm, rule).items()}


def closes_of(probe: Probe, why_unknown: str) -> list[Close]:
    """Those of one probe, in order. Raises MissingEvidence where the markers are not known."""
    markers = closes(probe.tokens, markers_of(probe.arm))
    return [
        Close(probe, marker, number, _observed(probe, marker), why_unknown) for number, marker in enumerate(markers, 1)
    ]


def _observed(probe: Probe, marker: Marker) -> TokenClass:
    """What the rows say, alike on every rank."""
    classes = {_on(trace, marker) for trace in probe.traces.values()}
    return classes.pop() if len(classes) == 1 else TokenClass.UNKNOWN


def _on(trace: RankTrace, marker: Marker) -> TokenClass:
    there = [one for one in trace.committed if marker.position <= one.position < marker.position + len(marker.ids)]
    if tuple(one.token for one in there) != marker.ids:
        return TokenClass.UNKNOWN
    return class_of_marker(classify(there, len(there), tail_known=False))


def first_rank_classes(probe: Probe, *, trusted: bool) -> Sequence[TokenClass]:
    """Classes of the tokens that the first rank committed; the tail is post-stop only where it is accounted for."""
    trace = next(iter(probe.traces.values()), None)
    if trace is None:
        return []
    alike = trace.tokens[: len(probe.tokens)] == probe.tokens
    return classify(trace.committed, len(probe.tokens) if alike else 0, tail_known=trusted and alike)
