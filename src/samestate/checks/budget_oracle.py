"""``upstream-count-v1``: what a reasoning budget forces, as vLLM counts it; a pure function of token ids.

The count is that of the tokens since the last complete start marker, those of the prompt included. Once it reaches the
budget, and no natural end follows that start, the end marker is forced, id by id. A committed close ends the count:
nothing is forced after it until the start marker appears again.

vLLM has it twice. The newer runner (``v1/worker/gpu/sample/thinking_budget.py``, "v2") decides every logits row from
the tokens before it, accepted or only drafted: this is the policy. The older one
(``v1/sample/thinking_budget_state.py``, "v1") looks for markers in committed tokens alone, and stores into one row of
a step, the first that the budget falls on. Where no draft is a marker the committed tokens are the same. Beyond the
first section of an output v1 has faults (docs/findings.md) that are not modelled: `v1_leaves` says where it gets there.

Nothing here says which token a row samples: a store is not a commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

POLICY = "upstream-count-v1"

Runner = Literal["v1", "v2"]
"""As in `samestate.evidence.marker_records.RecorderStarted`."""
Why = Literal["outside", "closed", "within", "spent", "closing"]
"""No start marker yet; a natural end followed the last one; tokens left; the budget is spent and the end marker begins
here; spent, and the tokens before are the beginning of the end marker, which goes on."""

_NO_TOKEN = -1
"""Stands for a prompt token that is not known; equals no id."""


class Markers(NamedTuple):
    """Token ids of the reasoning markers; each may be several tokens."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    """That the budget forces."""
    natural_end: tuple[int, ...] = ()
    """That ends reasoning by itself, where it is not `end` (which may say something before it). Empty: `end`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy says of one row."""

    why: Why
    count: int | None
    """Tokens since the last start marker; None outside reasoning."""
    forced: int | None
    """The id that is stored; None: the row is sampled."""


def resident_prompt(resident: int | None, markers: Markers) -> tuple[int, ...]:
    """A stand-in for a prompt of which only `resident` is known, its tokens after the last start marker.

    None: it ends outside reasoning. The stand-in never ends with a part of the end marker, which a prompt can.
    """
    if resident is None:
        return ()
    return (*markers.start, *[_NO_TOKEN] * resident)


def decide(tokens: Sequence[int], markers: Markers, budget: int) -> Decision:
    """What is forced after `tokens`, prompt and output together. Raises ValueError: empty marker, negative budget."""
    return decide_outputs(tokens, (), markers, budget)[0]


def decide_outputs(prompt: Sequence[int], output: Sequence[int], markers: Markers, budget: int) -> list[Decision]:
    """One decision for each output position, and one more for the position after the last.

    Entry i rests on the prompt and ``output[:i]``, whatever then was sampled. Raises ValueError: see `decide`.
    """
    _refuse(markers, budget)
    tokens = (*prompt, *output)
    starts = _last_places(tokens, markers.start)
    ends = _last_places(tokens, markers.natural_end or markers.end)
    return [
        _decision(
            tokens[max(0, length - len(markers.end)) : length], length, starts[length], ends[length], markers, budget
        )
        for length in range(len(prompt), len(tokens) + 1)
    ]


def decide_rows(
    prefix: Sequence[int], drafts: Sequence[int], markers: Markers, budget: int, runner: Runner = "v2"
) -> list[Decision]:
    """The local rows 0…K of one step, K = ``len(drafts)``: row k stands after `prefix` and the first k drafts.

    `prefix` is prompt and committed output. For "v1" the one row that holds the store carries `forced`, and the natural
    end is the forced one. An end marker of several ids together with drafts is not modelled there: v1 then counts on
    drafts that are not committed. Raises ValueError: that, and see `decide`.
    """
    if runner == "v2":
        return decide_outputs(prefix, drafts, markers, budget)
    _refuse(markers, budget)
    _refuse_v1(markers, drafts)
    markers = markers._replace(natural_end=())
    return _rows_of_v1(decide(prefix, markers, budget), len(drafts), markers, budget)


class Course:
    """An output as it was committed, read once: the rows of each of its steps, as `decide_rows` has them."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], markers: Markers, budget: int) -> None:
        """Raises ValueError: see `decide`."""
        _refuse(markers, budget)
        self._markers, self._budget, self._prompt = markers, budget, len(prompt)
        self._tokens = (*prompt, *output)
        self._starts = _last_places(self._tokens, markers.start)
        self._ends = _last_places(self._tokens, markers.natural_end or markers.end)

    def rows(self, position: int, drafts: Sequence[int], runner: Runner) -> list[Decision]:
        """Of the step that begins at an output position. Raises ValueError: see `decide_rows`."""
        if self._markers.natural_end:
            prefix = self._tokens[: self._prompt + position]
            return decide_rows(prefix, drafts, self._markers, self._budget, runner)
        if runner == "v2":
            return self._decisions(position, drafts)
        _refuse_v1(self._markers, drafts)
        (first,) = self._decisions(position, ())
        return _rows_of_v1(first, len(drafts), self._markers, self._budget)

    def _decisions(self, position: int, drafts: Sequence[int]) -> list[Decision]:
        """Only the last tokens and the drafts are looked at; where markers before them begin is known."""
        markers, length = self._markers, self._prompt + position
        base = max(0, length - max(len(markers.start), len(markers.end)))
        tokens = (*self._tokens[base:length], *drafts)
        start, end = self._starts[length], self._ends[length]
        found = []
        for at in range(length - base, len(tokens) + 1):
            if at > length - base:
                start = base + at - len(markers.start) if _ends_with(tokens[:at], markers.start) else start
                end = base + at - len(markers.end) if _ends_with(tokens[:at], markers.end) else end
            found.append(_decision(tokens[:at], base + at, start, end, markers, self._budget))
        return found


def stored_rows(decisions: Sequence[Decision]) -> dict[int, int]:
    """Row or output position -> stored id, of those that hold a store."""
    return {place: decision.forced for place, decision in enumerate(decisions) if decision.forced is not None}


def v1_leaves(prompt: Sequence[int], output: Sequence[int], markers: Markers) -> int | None:
    """The output position from which `decide_rows` claims nothing for runner "v1"; None: it holds for all of them.

    That is after the first start marker in the output, unless the prompt ends outside reasoning and no marker came
    before in the output. Of several ids, v1 also miscounts a start marker in the prompt: 0 then. Raises ValueError: an
    empty marker.
    """
    _refuse(markers, 0)
    if len(markers.start) > 1 and decide(prompt, markers, 0).count is not None:
        return 0
    starts, ends = _last_places(tuple(output), markers.start), _last_places(tuple(output), markers.end)
    met = decide(prompt, markers, 0).count is not None
    for length in range(1, len(output) + 1):
        if starts[length] > starts[length - 1]:
            if met:
                return length
            met = True
        met = met or ends[length] >= 0
    return None


def _rows_of_v1(first: Decision, drafted: int, markers: Markers, budget: int) -> list[Decision]:
    """Drafts are counted and not looked at; the first row on which the budget falls holds the store."""
    if first.count is None:
        return [first] * (drafted + 1)
    rows, stored = [first], first.forced is not None
    for row in range(1, drafted + 1):
        count = first.count + row
        spent = count >= budget
        rows.append(Decision("spent" if spent else "within", count, markers.end[0] if spent and not stored else None))
        stored = stored or spent
    return rows


def _decision(tail: tuple[int, ...], length: int, start: int, end: int, markers: Markers, budget: int) -> Decision:
    """Of the row after `length` tokens, the last being `tail`; `start` and `end`: where their last markers begin."""
    if start < 0:
        return Decision("outside", None, None)
    if start <= end:
        return Decision("closed", None, None)
    count = length - start - len(markers.start)
    if count < budget:
        return Decision("within", count, None)
    begun = _begun(tail, markers.end)
    return Decision("closing" if begun else "spent", count, markers.end[begun])


def _begun(tail: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """How many ids of `marker` the tail ends with, at most all but the last; the longest such beginning."""
    lengths = range(min(len(marker) - 1, len(tail)), 0, -1)
    return next((length for length in lengths if tail[-length:] == marker[:length]), 0)


def _last_places(tokens: tuple[int, ...], marker: tuple[int, ...]) -> list[int]:
    """Entry n: where the last `marker` within the first n tokens begins; -1: nowhere."""
    places, last = [-1], -1
    for length in range(1, len(tokens) + 1):
        begin = length - len(marker)
        if begin >= 0 and tokens[begin:length] == marker:
            last = begin
        places.append(last)
    return places


def _ends_with(tokens: tuple[int, ...], marker: tuple[int, ...]) -> bool:
    return tokens[-len(marker) :] == marker


def _refuse_v1(markers: Markers, drafts: Sequence[int]) -> None:
    if drafts and len(markers.end) > 1:
        raise ValueError("end: an end marker of several ids with drafts is not modelled for runner v1; use one id")


def _refuse(markers: Markers, budget: int) -> None:
    if not markers.start or not markers.end:
        raise ValueError("markers: start and end need at least one id each; without them vLLM has no budget")
    if budget < 0:
        raise ValueError(f"budget: {budget} is negative; leave it out where there is no budget")
