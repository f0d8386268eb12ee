"""A served probe and its trace, brought together: attribution only within one arm, by the request's own id.

A trace of one run is never used for a request of another (requirement 149): both stand in the same arm's streams, and
the engine's request id is the API's, or begins with it and a hyphen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.base import Place
from samestate.checks.budget_oracle import Markers
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.marker_history import RankTrace, rank_traces
from samestate.checks.seen import Seen
from samestate.evidence.marker_records import RunAheadDropped, TokensDelivered
from samestate.evidence.probe_records import ProbeAnswered, ProbeSent


class Probe(NamedTuple):
    """One probe of an arm, with what every rank and the scheduler recorded of its request."""

    arm: ArmHistory
    name: str
    sent: Seen[ProbeSent]
    """The first time; `attempts` judges whether there are more."""
    answered: Seen[ProbeAnswered] | None
    traces: dict[int, RankTrace]
    """By rank."""
    delivered: list[Seen[TokensDelivered]]
    dropped: list[Seen[RunAheadDropped]]
    requests: list[str]
    """Traced requests that go by the answer's id; more than one is ambiguous, and none is then attributed."""

    @property
    def title(self) -> str:
        """As findings call it: ``draft-3 never-b8``, arm and probe."""
        return f"{self.arm.name} {self.name}"

    @property
    def place(self) -> Place:
        """Where findings about it point."""
        request = self.answered.rec.request if self.answered else None
        return Place(arm=self.arm.name, case=self.name, op=self.name, request=request)

    @property
    def tokens(self) -> list[int]:
        """Token ids that the API delivered; none without an answer."""
        return self.answered.rec.token_ids if self.answered else []

    @property
    def budget(self) -> int | None:
        """That was asked for."""
        return self.sent.rec.budget

    @property
    def where(self) -> list[str]:
        """Its client records."""
        return [seen.where for seen in (self.sent, self.answered) if seen]

    def at_rank(self, rank: int) -> Place:
        """Its place on a rank."""
        return self.place.model_copy(update={"rank": rank})


def probes_of(arm: ArmHistory) -> list[Probe]:
    """The probes of an arm in the order in which they were sent, each once."""
    markers = arm.markers
    traces, scheduler = rank_traces(markers), markers.scheduler
    known = set(traces)
    if scheduler is not None:
        known |= {seen.rec.request for seen in scheduler.delivered}
        known |= {seen.rec.request for seen in scheduler.dropped}
    found: dict[str, Probe] = {}
    for sent in markers.sent:
        if sent.rec.probe in found:
            continue
        answered = next((one for one in markers.answered if one.rec.probe == sent.rec.probe), None)
        requests = _requests(answered.rec.request, known) if answered else []
        mine = requests[0] if len(requests) == 1 else None
        found[sent.rec.probe] = Probe(
            arm,
            sent.rec.probe,
            sent,
            answered,
            traces.get(mine, {}) if mine else {},
            [one for one in scheduler.delivered if one.rec.request == mine] if scheduler and mine else [],
            [one for one in scheduler.dropped if one.rec.request == mine] if scheduler and mine else [],
            requests,
        )
    return list(found.values())


def all_probes(history: History) -> list[Probe]:
    """Those of every arm; raises MissingEvidence where none was sent."""
    found = [probe for arm in probing_arms(history) for probe in probes_of(arm)]
    if not found:
        raise MissingEvidence("missing_probe", "no probe_sent record in any arm")
    return found


def budgeted(history: History) -> list[Probe]:
    """Probes that asked for a budget; raises MissingEvidence where none did."""
    found = [probe for probe in all_probes(history) if probe.budget is not None]
    if not found:
        raise MissingEvidence("missing_budget", "no probe asked for a reasoning budget")
    return found


def probing_arms(history: History) -> list[ArmHistory]:
    """Arms with anything of probes or of the recorder; raises MissingEvidence where no arm has."""
    found = [arm for arm in history.arms.values() if arm.markers.any]
    if not found:
        raise MissingEvidence("missing_trace", "no arm has a record of a probe or of the budget recorder")
    return found


def is_of(answer: str, request: str) -> bool:
    """Whether the engine's request id goes by the API's."""
    return bool(answer) and (request == answer or request.startswith(f"{answer}-"))


def _requests(answer: str, known: set[str]) -> list[str]:
    """Traced requests that go by an answer's id: that id itself, or all that begin with it."""
    return [answer] if answer in known else sorted(one for one in known if is_of(answer, one))


def unasked(arm: ArmHistory) -> Iterator[tuple[str, list[str]]]:
    """Traced requests that no answer of the arm goes by, and where each is recorded first."""
    answers = [seen.rec.request for seen in arm.markers.answered]
    for request, ranks in rank_traces(arm.markers).items():
        if not any(is_of(answer, request) for answer in answers):
            yield request, [where for trace in ranks.values() for where in _first(trace)]


def _first(trace: RankTrace) -> list[str]:
    return trace.evidence or [where for step in trace.steps[:1] for where in step.evidence]


def markers_of(arm: ArmHistory) -> Markers:
    """The reasoning markers that the arm's recorder read from the engine; raises MissingEvidence."""
    recorder = arm.markers.recorder
    if recorder is None:
        raise MissingEvidence("missing_recorder", f"arm {arm.name}: no rank's recorder_started: which ids are markers?")
    if not recorder.rec.start_ids or not recorder.rec.end_ids:
        raise MissingEvidence("missing_markers", f"arm {arm.name}: the engine has no reasoning markers")
    return Markers(tuple(recorder.rec.start_ids), tuple(recorder.rec.end_ids))


def resident(prompt: list[int], markers: Markers) -> int | None:
    """Prompt tokens after the prompt's last start marker; None: it ends outside reasoning, or after a close."""
    start, end = _last(prompt, markers.start), _last(prompt, markers.end)
    return len(prompt) - start - len(markers.start) if start > end else None


def _last(tokens: list[int], marker: tuple[int, ...]) -> int:
    places = range(len(tokens) - len(marker), -1, -1)
    return next((at for at in places if tuple(tokens[at : at + len(marker)]) == marker), -1)
