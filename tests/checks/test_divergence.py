"""A divergence without records: state fault, numerical tie or unknown."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestate.checks.divergence import Answer, Judgement, Mode, Pair, Policy, Ruling, judge
from samestate.checks.divergence_statistics import Stratum, excess, permutation
from samestate.checks.history import History
from samestate.checks.scenario import generations
from samestate.checks.seen import Seen
from samestate.evidence.records import OperationOutput
from samestate.lab.exercises import C, exercises
from samestate.plans.model import Plan
from samestate.plans.scenarios import CONTROL, cold_op

from . import zoo

INPUTS, TOKENS, VOCABULARY = 12, 10, 40


@cache
def logits_of(input_: int, state: int, tokens: tuple[int, ...]) -> list[float]:
    rng = Random(f"{input_} {state} {tokens}")
    return [rng.gauss(0, 2) for _ in range(VOCABULARY)]


def answer(input_: int, noise: Callable[[], float], state: int = 0) -> Answer:
    """Greedy, of logits that depend on input, state and tokens so far; every one has noise."""
    tokens, logprobs, margins = list[int](), list[float](), list[float]()
    for _ in range(TOKENS):
        logits = [one + noise() for one in logits_of(input_, state, tuple(tokens))]
        first, second = sorted(range(VOCABULARY), key=lambda one: -logits[one])[:2]
        total = math.log(sum(math.exp(one) for one in logits))
        tokens.append(first)
        logprobs.append(logits[first] - total)
        margins.append(logits[first] - logits[second])
    return Answer(tokens, logprobs, margins)


def probe(
    sigma: float, wrong: int = 0, *, inputs: int = INPUTS, seed: int = 0, split: bool = True
) -> tuple[list[Pair], list[Pair]]:
    """Two floor pairs and a reload of each input; the first `wrong` reloads go on from another state."""
    rng = Random(seed)

    def noise() -> float:
        return rng.gauss(0, sigma)

    floor, reloads = list[Pair](), list[Pair]()
    for number in range(inputs):
        cold = answer(number, noise)
        floor += [Pair(str(number), cold, answer(number, noise), split) for _ in range(2)]
        reloads.append(Pair(str(number), cold, answer(number, noise, int(number < wrong))))
    return floor, reloads


def without(pairs: list[Pair], *fields: str) -> list[Pair]:
    gone = dict.fromkeys(fields)
    return [one._replace(cold=one.cold._replace(**gone), other=one.other._replace(**gone)) for one in pairs]


def rulings(judgement: Judgement) -> set[Ruling]:
    return {one.ruling for one in judgement.divergences}


@pytest.mark.parametrize("sigma", [0.0, 1e-5, 0.01])
def test_a_wrong_state_is_a_fault_and_a_right_one_is_none(sigma: float) -> None:
    clean, faulty = judge(*probe(sigma)), judge(*probe(sigma, INPUTS))
    assert clean.ruling in (Ruling.EQUAL, Ruling.NUMERICAL_TIE), clean.why
    assert faulty.ruling is Ruling.STATE_FAULT, faulty.why
    assert faulty.mode is (Mode.DISPLACEMENT if sigma else Mode.EXACT)


def test_a_noisy_answer_that_parts_within_the_floor_is_a_tie_and_shows_its_evidence() -> None:
    found = judge(*probe(0.1))
    assert found.ruling is Ruling.NUMERICAL_TIE, found.why
    parted = [one for one in found.divergences if one.position is not None]
    assert parted
    for one in parted:
        assert one.ruling is Ruling.NUMERICAL_TIE and one.complete
        assert one.cold_margin is not None and one.other_margin is not None and one.displacement is not None
        assert one.displacement >= (one.cold_margin + one.other_margin) / 2
    assert (found.floor.pairs, found.floor.splits, found.floor.exact) == (24, 24, False)
    assert found.floor.parted and found.floor.largest
    assert [(one.test, one.inputs, one.floor, one.reloads) for one in found.tests] == [
        ("permutation", 12, 24, 12),
        ("excess", 12, 24, 12),
    ]
    assert sum(one.alpha for one in found.tests) == found.policy.alpha


def test_two_wrong_inputs_are_named_and_the_others_are_not() -> None:
    found = judge(*probe(0.001, 2))
    assert found.ruling is Ruling.STATE_FAULT, found.why
    assert [one.input for one in found.divergences if one.ruling is Ruling.STATE_FAULT] == ["0", "1"]


def test_one_difference_on_an_exact_engine_is_asked_again_and_two_are_a_fault() -> None:
    once, twice = judge(*probe(0, 1)), judge(*probe(0, 2))
    assert (once.ruling, once.ask_again) == (Ruling.UNKNOWN, ["0"])
    assert "ask this input again" in once.divergences[0].why
    assert (twice.ruling, twice.mode, twice.ask_again) == (Ruling.STATE_FAULT, Mode.EXACT, [])
    floor, reloads = probe(0, 1)
    assert judge(floor, [*reloads, reloads[0]]).ruling is Ruling.STATE_FAULT


def test_the_same_tokens_with_other_log_probabilities_are_a_fault_of_an_exact_engine() -> None:
    floor, reloads = probe(0)
    moved = [
        pair._replace(other=pair.other._replace(logprobs=[(value or 0) - 0.01 for value in pair.other.logprobs or ()]))
        for pair in reloads
    ]
    assert judge(floor, moved).ruling is Ruling.STATE_FAULT
    tiny = [
        pair._replace(other=pair.other._replace(logprobs=[(value or 0) - 1e-6 for value in pair.other.logprobs or ()]))
        for pair in reloads
    ]
    assert judge(floor, tiny).ruling is Ruling.EQUAL


def test_a_floor_of_repetitions_alone_judges_nothing_unless_the_caller_knows_better() -> None:
    floor, reloads = probe(0, INPUTS, split=False)
    found = judge(floor, reloads)
    assert (found.ruling, found.mode) == (Ruling.UNKNOWN, Mode.NONE)
    assert "computed in other steps" in found.why
    assert judge(floor, reloads, Policy(splits_required=False)).ruling is Ruling.STATE_FAULT


@pytest.mark.parametrize("wrong", [0, INPUTS])
def test_few_samples_are_unknown(wrong: int) -> None:
    floor, reloads = probe(0.01, wrong, inputs=3)
    assert judge(floor, reloads).ruling is Ruling.UNKNOWN
    assert "needs 8" in judge(floor, reloads).why
    assert judge([], reloads).ruling is Ruling.UNKNOWN
    assert judge(*probe(0.01)[:1], []).ruling is Ruling.UNKNOWN


def test_an_input_without_a_floor_is_unknown() -> None:
    floor, reloads = probe(0.0)
    found = judge([one for one in floor if one.input != "3"], reloads)
    assert (found.ruling, found.ask_again) == (Ruling.UNKNOWN, ["3"])


def test_answers_that_do_not_depend_on_the_input_show_nothing() -> None:
    same = Answer([1, 2], [-1.0, -1.0], [0.5, 0.5])
    floor = [Pair(str(number), same, same, split=True) for number in range(10)]
    assert judge(floor, floor).ruling is Ruling.UNKNOWN
    assert "do not depend" in judge(floor, floor).why
    empty = Answer([], [], [])
    assert judge(floor[:1] * 9, [Pair("0", empty, empty)]).why == "an answer is empty"


def test_without_margins_a_tie_is_not_claimed() -> None:
    """Where an answer parts, nothing then says how far it moved."""
    floor, reloads = probe(0.1)
    parted = {one.input for one in judge(floor, reloads).divergences if one.position is not None}
    found = judge(floor, without(reloads, "margins"))
    assert parted and {one.input for one in found.divergences if one.ruling is Ruling.UNKNOWN} == parted


def test_pieces_of_text_alone_are_ranked_by_where_they_part() -> None:
    def text(pairs: list[Pair]) -> list[Pair]:
        return [
            pair._replace(cold=Answer([*map(str, pair.cold.tokens)]), other=Answer([*map(str, pair.other.tokens)]))
            for pair in pairs
        ]

    clean, faulty = (judge(*map(text, probe(0.01, wrong))) for wrong in (0, INPUTS))
    assert clean.mode is faulty.mode is Mode.POSITION
    assert clean.ruling in (Ruling.EQUAL, Ruling.UNKNOWN)
    assert faulty.ruling is Ruling.STATE_FAULT, faulty.why
    assert judge(*map(text, probe(0.01, 2))).ruling is Ruling.UNKNOWN


def test_an_answer_that_ends_early_parts_there() -> None:
    floor, reloads = probe(0)
    cut = [
        pair._replace(
            other=Answer(*(part[:4] for part in (pair.other.tokens, pair.other.logprobs, pair.other.margins) if part))
        )
        for pair in reloads
    ]
    found = judge(floor, cut)
    assert {one.position for one in found.divergences} == {4}
    assert found.ruling is Ruling.STATE_FAULT


# --- the simulated engine, which is exact ----------------------------------------------------------------


def in_chunks(tokens: int) -> Plan:
    """The scenario of shared prefixes in other steps."""
    plan = exercises()["shared prefixes"].plan
    settings_ = {**plan.engine.settings, "max_num_batched_tokens": tokens}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update={"settings": settings_})})


def answers(plan: Plan, folder: Path, fault: str | None = None) -> tuple[dict[str, Answer], list[tuple[str, Answer]]]:
    """The control's cold answers by prompt, and all that the candidate answered."""
    history = History.read(zoo.run(plan, folder / "run", fault).write(folder / "archive"))
    found = generations(history, history.candidates)
    cold = {one.prompt: history.arm(CONTROL).output(cold_op(one.prompt)) for one in found}
    return (
        {name: told(seen) for name, seen in cold.items()},
        [(one.prompt, told(one.output)) for one in found],
    )


def told(seen: Seen[OperationOutput] | None) -> Answer:
    assert seen is not None
    return Answer(seen.rec.token_ids, seen.rec.logprobs, seen.rec.margins)


@pytest.mark.parametrize(
    ("fault", "ruling"),
    [
        (None, Ruling.EQUAL),
        ("second-reload", Ruling.STATE_FAULT),
        ("failed-put-visible", Ruling.STATE_FAULT),
        ("joint-truncation", Ruling.STATE_FAULT),
        ("attach-changes-lookup", Ruling.UNKNOWN),
    ],
)
def test_faults_of_the_zoo(fault: str | None, ruling: Ruling, tmp_path: Path) -> None:
    """The last one changes a single answer: it is asked again."""
    cold, _ = answers(in_chunks(4 * C), tmp_path / "a")
    others, _ = answers(in_chunks(2 * C), tmp_path / "b")
    floor = [Pair(name, cold[name], others[name], split=True) for name in cold for _ in range(2)]
    _, later = answers(in_chunks(4 * C), tmp_path / "c", fault)
    found = judge(floor, [Pair(name, cold[name], one) for name, one in later])
    assert (found.ruling, found.mode) == (ruling, Mode.EXACT), found.why


# --- properties ---------------------------------------------------------------------------------------

VALUES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
ANSWERS = st.builds(
    Answer,
    st.lists(st.integers(0, 3) | st.sampled_from(["a", "b"]), max_size=5),
    st.none() | st.lists(VALUES, max_size=6),
    st.none() | st.lists(VALUES, max_size=6),
)
PAIRS = st.lists(st.builds(Pair, st.sampled_from("abcd"), ANSWERS, ANSWERS, st.booleans()), max_size=14)


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.lists(st.tuples(st.sampled_from("abcd"), ANSWERS), max_size=8))
def test_identical_answers_are_never_a_fault(floor: list[Pair], same: list[tuple[str, Answer]]) -> None:
    found = judge(floor, [Pair(name, one, one) for name, one in same])
    assert found.ruling in (Ruling.EQUAL, Ruling.UNKNOWN)
    assert not rulings(found) & {Ruling.STATE_FAULT, Ruling.NUMERICAL_TIE}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0, 0.01, 0.2]), st.integers(0, INPUTS), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_of_inputs_does_not_matter(sigma: float, wrong: int, seed: int, random: Random) -> None:
    floor, reloads = probe(sigma, wrong, seed=seed)
    one = judge(floor, reloads)
    random.shuffle(floor)
    random.shuffle(reloads)
    other = judge(floor, reloads)
    assert (one.ruling, one.why, one.mode, one.floor, one.tests) == (
        other.ruling,
        other.why,
        other.mode,
        other.floor,
        other.tests,
    )
    assert sorted(one.divergences, key=lambda row: row.input) == sorted(other.divergences, key=lambda row: row.input)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 0.01, 0.2]),
    st.integers(0, INPUTS),
    st.sets(st.sampled_from(["logprobs", "margins"])),
    st.booleans(),
    st.booleans(),
    st.integers(0, 8),
)
def test_missing_evidence_never_passes(
    sigma: float, wrong: int, gone: set[str], of_floor: bool, of_reloads: bool, left: int
) -> None:
    """A wrong or noisy answer that parts is equal or a tie only where all was told, of both sides."""
    floor, reloads = probe(sigma, wrong)
    floor = without(floor, *gone) if of_floor else floor
    reloads = without(reloads, *gone) if of_reloads else reloads
    found = judge(floor, reloads)
    for row in found.divergences:
        if row.position is not None:
            assert row.ruling is not Ruling.EQUAL
            assert row.ruling is not Ruling.NUMERICAL_TIE or (row.complete and found.floor.largest is not None)
    short = judge(floor[: min(left, 7)], reloads)
    assert rulings(short) == {Ruling.UNKNOWN} and short.ruling is Ruling.UNKNOWN


@settings(deadline=None, max_examples=60)
@given(PAIRS, PAIRS)
def test_whatever_is_told_it_is_judged(floor: list[Pair], reloads: list[Pair]) -> None:
    found = judge(floor, reloads)
    assert len(found.divergences) == len(reloads)
    assert all(0 <= one.p <= 1 for one in found.tests)
    if found.ruling in (Ruling.EQUAL, Ruling.NUMERICAL_TIE):
        assert reloads and rulings(found) <= {Ruling.EQUAL, Ruling.NUMERICAL_TIE}


# --- the tests themselves -----------------------------------------------------------------------------

SMALL = st.lists(st.integers(0, 4).map(float), min_size=1, max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.builds(Stratum, SMALL, SMALL), min_size=1, max_size=3))
def test_the_permutation_test_counts_every_relabelling(strata: list[Stratum]) -> None:
    pooled = sorted(value for one in strata for value in (*one.floor, *one.reload))

    def rank(value: float) -> float:
        return pooled.index(value) + (pooled.count(value) + 1) / 2

    observed = sum(rank(value) for one in strata for value in one.reload)
    ways = [combinations([*one.floor, *one.reload], len(one.reload)) for one in strata]
    sums = [sum(rank(value) for chosen in pick for value in chosen) for pick in product(*ways)]
    assert permutation(strata) == pytest.approx(sum(one >= observed - 1e-9 for one in sums) / len(sums))


def test_the_permutation_test_by_hand() -> None:
    assert permutation([Stratum([0.0], [1.0])] * 10) == 2**-10
    assert permutation([Stratum([1.0], [0.0])] * 10) == 1
    assert permutation([Stratum([0.0, 0.0], [1.0])] * 7) == 3**-7
    assert permutation([Stratum([], [1.0]), Stratum([0.0], [])]) == 1


def test_excess_by_hand() -> None:
    """Of R = 3 reloads the first lies 10 limits away, of n = 9: 2 · 3/10 · 10^-4."""
    assert excess(9, 1.0, [10.0, 0.5, 0.1], 4) == (pytest.approx(2 * 0.3 * 1e-4), 1)
    assert excess(9, 1.0, [1.0, 0.5], 4) == (1.0, 0)
    p, largest = excess(9, 1.0, [5.0, 5.0, 0.1], 4)
    assert (p, largest) == (pytest.approx(4 * 3 / 55 * 5.0**-8), 2)
    assert excess(1, 1e-4, [1e300] * 500, 4).p == 0


@pytest.mark.parametrize("seed", range(3))
def test_excess_bounds_what_a_heavy_tail_does(seed: int) -> None:
    """Pareto of the assumed power, so the bound is nearly met: it must hold at every level."""
    rng, runs = Random(seed), 4000
    found = []
    for _ in range(runs):
        floor = [rng.paretovariate(4) for _ in range(12)]
        found.append(excess(12, max(floor), [rng.paretovariate(4) for _ in range(6)], 4).p)
    for level in (0.01, 0.05, 0.2):
        assert sum(p <= level for p in found) / runs <= level + 3 * math.sqrt(level / runs)
