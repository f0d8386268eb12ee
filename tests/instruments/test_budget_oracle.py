"""`upstream-count-v1` against vLLM's own two implementations, run for real; and what separates these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("triton")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestate.checks import budget_oracle
from samestate.checks.budget_oracle import Markers, Runner, decide, decide_rows, stored_rows, v1_leaves

START, END, OTHER_END, WORD = 1, 2, 3, 5
PLAIN = Markers((START,), (END,))
OF_SEVERAL = [
    PLAIN,
    Markers((START,), (END, OTHER_END)),
    Markers((START, 4), (END,)),
    Markers((START, START), (END, END)),
    Markers((START,), (WORD, END, OTHER_END), (END, OTHER_END)),
    Markers((START, 4, START), (END, START, END), (END,)),
]
"""The last but one says a word before its natural end; the last overlap themselves and each other."""


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Request(NamedTuple):
    """A request with a budget, alone or in a batch, at most K drafts a step."""

    markers: Markers
    budget: int
    prompt: list[int]
    k: int = 0
    slot: int = 0
    slots: int = 1


class Step(NamedTuple):
    """What a step proposes and, where nothing is forced, what its rows sample."""

    drafts: list[int]
    samples: list[int]
    """Row k samples ``samples[k]``; where that is its draft, the next row counts too."""
    beside: int = 0
    """Drafts of every other request of the batch."""


class Sampling:
    """vLLM's code in its child process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, runner: Runner, request: Request) -> None:
        asked: dict[str, Any] = request._asdict() | request.markers._asdict()
        self._tell(do="start", runner=runner, **{key: value for key, value in asked.items() if key != "markers"})

    def step(self, drafts: Sequence[int], beside: int = 0) -> dict[int, int]:
        self._tell(do="step", drafts=list(drafts), beside=beside)
        assert self._process.stdout is not None
        return {int(row): token for row, token in json.loads(self._process.stdout.readline()).items()}

    def commit(self, tokens: Sequence[int]) -> None:
        self._tell(do="commit", tokens=list(tokens))

    def _tell(self, **asked: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Sampling]:
    """Triton decides at its import whether it interprets: a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("budget_sampling.py"))],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": str(Path(budget_oracle.__file__).parents[2]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout), "the child died at its start"
    yield Sampling(process)
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def taken(stores: dict[int, int], step: Step) -> list[int]:
    """The tokens that a sampler commits: a stored row gives its id, any other its sample, as far as drafts hold."""
    tokens = []
    for row, sample in enumerate(step.samples[: len(step.drafts) + 1]):
        tokens.append(stores.get(row, sample))
        if row < len(step.drafts) and tokens[-1] != step.drafts[row]:
            break
    return tokens


def in_order(tokens: list[int], samples: list[int]) -> list[int]:
    """The samples without start markers inside reasoning, nor end markers outside."""
    kept: list[int] = []
    for sample in samples:
        inside = decide([*tokens, *kept], PLAIN, 0).count is not None
        kept.append(WORD if sample == (START if inside else END) else sample)
    return kept


def disagreements(
    vllm: Sampling, runner: Runner, request: Request, steps: Sequence[Step], orderly: bool = False
) -> list[tuple[Any, Any]]:
    """(vLLM's stores, the oracle's) of every step in which they differ; the request goes on as vLLM has it.

    Runner v1 is followed as far as `v1_leaves` says, or, if `orderly`, whatever comes, markers in order.
    """
    vllm.start(runner, request)
    tokens, found = list(request.prompt), []
    for step in steps:
        if runner == "v1" and not orderly:
            output = tokens[len(request.prompt) :]
            if v1_leaves(request.prompt, output, request.markers) is not None:
                break
        stores = vllm.step(step.drafts, step.beside)
        said = stored_rows(decide_rows(tokens, step.drafts, request.markers, request.budget, runner))
        if stores != said:
            found.append((stores, said))
        new = taken(stores, step._replace(samples=in_order(tokens, step.samples)) if orderly else step)
        vllm.commit(new)
        tokens += new
    return found


ids = st.sampled_from([START, END, OTHER_END, 4, WORD, 6])
quiet_ids = st.sampled_from([WORD, 6, 7])


@st.composite
def steps(draw: st.DrawFn, k: int, drafted: st.SearchStrategy[int], sampled: st.SearchStrategy[int]) -> Step:
    drafts = draw(st.lists(drafted, max_size=k))
    samples = [draft if draw(st.booleans()) else draw(sampled) for draft in drafts]
    return Step(drafts, [*samples, draw(sampled)], draw(st.integers(0, k)))


@st.composite
def any_request(draw: st.DrawFn) -> tuple[Request, list[Step]]:
    markers, k = draw(st.sampled_from(OF_SEVERAL)), draw(st.integers(0, 4))
    opened = draw(st.sampled_from([(), markers.start, (*markers.start, *markers.end[:1])]))
    prompt = [*draw(st.lists(ids, min_size=1, max_size=6)), *opened, *draw(st.lists(ids, max_size=3))]
    slots = draw(st.integers(1, 3))
    request = Request(markers, draw(st.integers(0, 7)), prompt, k, draw(st.integers(0, slots - 1)), slots)
    return request, draw(st.lists(steps(k, ids, ids), min_size=1, max_size=6))


@examples(60)
@given(any_request())
def test_the_newer_runner_is_the_policy(vllm: Sampling, case: tuple[Request, list[Step]]) -> None:
    """Its kernels: markers of several ids, budget 0, re-entered reasoning, a budget on any draft, company."""
    assert disagreements(vllm, "v2", *case) == []


@st.composite
def plain_request(draw: st.DrawFn, deepest: int) -> tuple[Request, list[Step]]:
    """No draft is a marker, and no step drafts before the first token was sampled: vLLM has nothing to draft from."""
    k = draw(st.integers(min(1, deepest), deepest))
    opened = [*draw(st.lists(ids, max_size=4)), START, *draw(st.lists(quiet_ids, max_size=3))]
    request = Request(PLAIN, draw(st.integers(0, 9)), draw(st.sampled_from([[WORD], opened])), k)
    sampled = st.one_of(quiet_ids, ids)
    return request, [Step([], [draw(sampled)]), *draw(st.lists(steps(k, quiet_ids, sampled), min_size=1, max_size=12))]


@examples(300)
@given(plain_request(4))
def test_the_older_runner_stores_where_its_variant_says(vllm: Sampling, case: tuple[Request, list[Step]]) -> None:
    """A store in the first row that the budget falls on, and only there, as far as the variant claims it."""
    assert disagreements(vllm, "v1", *case) == []


@examples(300)
@given(plain_request(0))
def test_without_speculation_the_older_runner_enters_again(vllm: Sampling, case: tuple[Request, list[Step]]) -> None:
    """Sections that follow one another, each opened once and closed once, are counted as the policy says."""
    assert disagreements(vllm, "v1", *case, orderly=True) == []


class Difference(NamedTuple):
    """A request up to a step at which vLLM's two implementations do not do the same."""

    request: Request
    history: list[tuple[list[int], list[int]]]
    """Drafts and committed tokens of the steps before."""
    drafts: list[int]
    older: dict[int, int]
    newer: dict[int, int]
    beside: int = 0


OPEN = [WORD, START]
WORDS = [WORD] * 3
DIFFERENCES = {
    "a natural close among the drafts: the older forces another": Difference(
        Request(PLAIN, 6, OPEN, 3), [([], [WORD]), (WORDS, WORDS)], [WORD, END, WORD], {2: END}, {}
    ),
    "a start among the drafts: the older does not count from it": Difference(
        Request(PLAIN, 1, [WORD], 3), [([], [WORD])], [START, WORD, WORD], {}, {2: END, 3: END}
    ),
    "a start inside an open section: the older counts from the first": Difference(
        Request(PLAIN, 3, OPEN), [([], [WORD]), ([], [START]), ([], [WORD])], [], {0: END}, {}
    ),
    "an end outside reasoning: the older misses the next natural close": Difference(
        Request(PLAIN, 3, [WORD]),
        [([], [END]), ([], [START]), ([], [WORD]), ([], [END]), ([], [WORD])],
        [],
        {0: END},
        {},
    ),
    "a close that the bonus row forced: the older skips the next one for a step": Difference(
        Request(PLAIN, 2, OPEN, 1),
        [([], [WORD]), ([WORD], [WORD, END]), ([], [START]), ([], [WORD])],
        [WORD],
        {},
        {1: END},
    ),
    "closed and entered again in one step: the older never counts the section": Difference(
        Request(PLAIN, 2, OPEN, 2), [([], [WORD]), ([END, START], [END, START, WORD]), ([], [WORD])], [], {}, {0: END}
    ),
    "no drafts in the batch: the older stores into another request's row": Difference(
        Request(PLAIN, 1, OPEN, 3, slot=1, slots=2), [([], [WORD])], [], {-1: END}, {0: END}
    ),
    "a start of two ids in the prompt: the older is one token late": Difference(
        Request(OF_SEVERAL[2], 2, [WORD, START, 4]), [([], [WORD]), ([], [WORD])], [], {}, {0: END}
    ),
    "a natural end that is not the forced one: the older does not see it": Difference(
        Request(OF_SEVERAL[4], 3, OPEN), [([], [6]), ([], [END]), ([], [OTHER_END])], [], {0: WORD}, {}
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_where_the_two_differ(vllm: Sampling, name: str) -> None:
    """docs/findings.md tells these; a release that mends one shows here."""
    case = DIFFERENCES[name]
    runners: dict[Runner, dict[int, int]] = {"v1": case.older, "v2": case.newer}
    for runner, expected in runners.items():
        vllm.start(runner, case.request)
        tokens = list(case.request.prompt)
        for drafts, committed in case.history:
            vllm.step(drafts, len(drafts))
            vllm.commit(committed)
            tokens += committed
        assert vllm.step(case.drafts, case.beside) == expected, runner
    assert stored_rows(decide_rows(tokens, case.drafts, case.request.markers, case.request.budget)) == case.newer


def test_budget_64_with_three_drafts(vllm: Sampling) -> None:
    """Study B's numbers: 62 tokens of reasoning are there, rows 2 and 3 hold the end (the older runner's: row 2)."""
    runners: dict[Runner, dict[int, int]] = {"v1": {2: END}, "v2": {2: END, 3: END}}
    for runner, expected in runners.items():
        vllm.start(runner, Request(PLAIN, 64, OPEN, 3))
        for drafts, committed in [([], [WORD]), *[(WORDS, [*WORDS, WORD])] * 15, ([], [WORD])]:
            vllm.step(drafts)
            vllm.commit(committed)
        assert vllm.step(WORDS) == expected
        assert stored_rows(decide_rows([*OPEN, *[WORD] * 62], WORDS, PLAIN, 64, runner)) == expected


@pytest.mark.parametrize(
    ("markers", "budget"),
    [(PLAIN, 5), (PLAIN, 3), (PLAIN._replace(start=(WORD,)), 4), (PLAIN._replace(end=(OTHER_END,)), 4)],
    ids=["late", "early", "start", "end"],
)
def test_a_policy_that_is_off_does_not_agree(vllm: Sampling, markers: Markers, budget: int) -> None:
    runners: tuple[Runner, Runner] = ("v1", "v2")
    for runner in runners:
        vllm.start(runner, Request(PLAIN, 4, OPEN, 3))
        vllm.commit([WORD])
        stores = vllm.step(WORDS)
        assert stores == stored_rows(decide_rows([*OPEN, WORD], WORDS, PLAIN, 4, runner))
        assert stores != stored_rows(decide_rows([*OPEN, WORD], WORDS, markers, budget, runner))
