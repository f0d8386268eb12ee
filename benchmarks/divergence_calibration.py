"""How often `samestate.checks.divergence` calls a correct server faulty, and which faults it misses.

    python benchmarks/divergence_calibration.py [--runs 5000] [--power 200] [--seed 20261130] [--out docs/results]

**Clean runs.** A small recurrent process with random weights stands for the model: `UNITS` units, `TOKENS` tokens,
state = tanh(A · state + input), logits = W · state. Some rows of W stand there twice, so that exact ties happen. A run
is one probe: `INPUTS` prompts, each with one cold answer, two cold answers in other steps and one reload, `LENGTH`
tokens each. Every logit of every step of every answer has noise of its own; a condition says which, and what is told.

**Faults of the model.** The same, with a wrong state in the reload.

**Faults of the zoo.** Every fault of the simulated engine on its exercise. Cold is the control's cold run; reloads are
all that the candidate answered. First as it is, where the engine is exact, then with noise laid over all answers: on
log-probabilities and margins, a token giving way to its runner-up where its margin is overcome.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from samestate.checks.divergence import Answer, Judgement, Mode, Pair, Policy, Ruling, judge
from samestate.checks.history import History
from samestate.checks.scenario import generations
from samestate.cli.plan import frozen
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.faults.catalogue import faults_on
from samestate.lab.exercises import C, Exercise, exercise_of, exercises
from samestate.lab.zoo import nameless_model, simulate
from samestate.plans.scenarios import CONTROL, cold_op

UNITS, TOKENS, TWINS = 32, 64, 6
"""Of the process; so many tokens have a twin with the same row of W."""
INPUTS, LENGTH, PROMPT = 12, 12, 48
FLOOR = 2
"""Floor pairs of an input."""
POOL = 2000
"""Prompts to draw from."""
BATCH = 20
SIGMAS = (1e-5, 1e-3, 0.01, 0.05, 0.2)
OVERLAID = (0.001, 0.01, 0.05, 0.2)
Noise = Callable[[np.random.Generator, tuple[int, ...]], Any]


class Process:
    """The random-weight model."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.a = rng.normal(0, 1.1 / math.sqrt(UNITS), (UNITS, UNITS))
        self.e = rng.normal(0, 1, (TOKENS, UNITS))
        self.w = rng.normal(0, 4 / math.sqrt(UNITS), (TOKENS, UNITS))
        self.w[TOKENS - TWINS :] = self.w[:TWINS]
        self.prompts = rng.integers(0, TOKENS, (POOL, PROMPT))
        self.states = self.read(self.prompts, np.zeros((POOL, UNITS)))

    def read(self, tokens: Any, state: Any) -> Any:
        """States after `tokens`, one row each."""
        for at in range(tokens.shape[1]):
            state = np.tanh(state @ self.a.T + self.e[tokens[:, at]])
        return state

    def answer(self, state: Any, noise: Callable[[tuple[int, ...]], Any]) -> tuple[Any, Any, Any]:
        """Greedy tokens, their log-probabilities and margins, (rows, LENGTH) each."""
        found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        rows = np.arange(len(state))
        for _ in range(LENGTH):
            logits = state @ self.w.T
            logits = logits + noise(logits.shape)
            order = np.argpartition(-logits, 1, axis=1)[:, :2]
            pair = np.take_along_axis(logits, order, axis=1)
            swap = pair[:, 1] > pair[:, 0]
            first = np.where(swap, order[:, 1], order[:, 0])
            top = logits[rows, first]
            found[0].append(first)
            found[1].append(top - (np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top))
            found[2].append(top - pair.min(axis=1))
            state = np.tanh(state @ self.a.T + self.e[first])
        return tuple(np.stack(one, axis=1) for one in found)  # type: ignore[return-value]


class Condition(NamedTuple):
    """How clean runs are disturbed, and what is told of them."""

    name: str
    noise: Noise
    reload_times: float = 1.0
    """The reloads' noise, in units of the floor's."""
    spread: float = 0.0
    """Standard deviation of the logarithm of each input's own scale."""
    often: float = 1.0
    """Share of answers that have any noise."""
    floor_noise: bool = True
    margins: bool = True
    logprobs: bool = True
    inputs: int = INPUTS
    floor: int = FLOOR
    """Floor pairs of an input."""
    policy: Policy = Policy()
    assumed: bool = True
    """False: the condition breaks an assumption that the rule states."""


def gaussian(sigma: float) -> Noise:
    return lambda rng, shape: rng.normal(0, sigma, shape)


def laplace(sigma: float) -> Noise:
    return lambda rng, shape: rng.laplace(0, sigma / math.sqrt(2), shape)


def student(degrees: int, scale: float) -> Noise:
    return lambda rng, shape: scale * rng.standard_t(degrees, shape)


CONDITIONS = [
    *(Condition(f"Gaussian, σ = {sigma:g}", gaussian(sigma)) for sigma in SIGMAS),
    Condition("Laplace, σ = 0.01", laplace(0.01)),
    Condition("Student t, 4 degrees, scale 0.01", student(4, 0.01)),
    Condition("Student t, 3 degrees, scale 0.01", student(3, 0.01), assumed=False),
    Condition("reloads' σ twice the floor's, 0.01", gaussian(0.01), reload_times=2),
    Condition("reloads' σ three times the floor's, 0.01", gaussian(0.01), reload_times=3),
    Condition("each input its own σ, 0.01 · e^N(0, 1)", gaussian(0.01), spread=1.0),
    Condition("24 inputs, σ = 0.01", gaussian(0.01), inputs=24),
    Condition("6 inputs, σ = 0.01", gaussian(0.01), inputs=6),
    Condition("1 floor pair for each input, σ = 0.01", gaussian(0.01), floor=1),
    Condition("no margins, σ = 0.05", gaussian(0.05), margins=False),
    Condition("tokens alone, σ = 0.05", gaussian(0.05), margins=False, logprobs=False),
    Condition("tokens alone, reloads' σ twice the floor's, 0.05", gaussian(0.05), 2, margins=False, logprobs=False),
    Condition("floor exact, reloads' σ = 1e-6", gaussian(1e-6), floor_noise=False),
    Condition("1 answer in 20 disturbed, σ = 0.05", gaussian(0.05), often=0.05, assumed=False),
    Condition("floor exact, reloads' σ = 0.01", gaussian(0.01), floor_noise=False, assumed=False),
    Condition(
        "floor exact, reloads' σ = 0.01, negligible 0.1",
        gaussian(0.01),
        floor_noise=False,
        policy=Policy(negligible=0.1),
    ),
]


def disturbed(rng: np.random.Generator, condition: Condition, runs: int) -> Callable[[tuple[int, ...]], Any]:
    """Noise for `runs` probes; rows by run, input and answer, the reload last."""
    answers = condition.floor + 2
    times = np.ones((runs, condition.inputs, answers))
    times *= np.exp(rng.normal(0, condition.spread, (runs, condition.inputs, 1))) if condition.spread else 1.0
    times[:, :, -1] *= condition.reload_times
    times *= rng.random(times.shape) < condition.often
    if not condition.floor_noise:
        times[:, :, :-1] = 0
    scale = times.reshape(-1, 1)
    return lambda shape: scale * condition.noise(rng, shape)


def probes(
    process: Process, rng: np.random.Generator, condition: Condition, runs: int, fault: Fault | None = None
) -> Iterator[Judgement]:
    """Judgements of `runs` probes."""
    for start in range(0, runs, BATCH):
        count = min(BATCH, runs - start)
        chosen = np.stack([rng.choice(POOL, condition.inputs, replace=False) for _ in range(count)])
        states = np.repeat(process.states[chosen][:, :, None, :], condition.floor + 2, axis=2)
        if fault is not None:
            hit = condition.inputs if fault.inputs is None else fault.inputs
            states[:, :hit, -1] = fault.wrong(process, chosen[:, :hit].reshape(-1)).reshape(count, hit, UNITS)
        tokens, logprobs, margins = process.answer(states.reshape(-1, UNITS), disturbed(rng, condition, count))
        shape = (count, condition.inputs, condition.floor + 2, LENGTH)
        rows = tokens.reshape(shape).tolist(), logprobs.reshape(shape).tolist(), margins.reshape(shape).tolist()
        for run in range(count):
            yield _judged([part[run] for part in rows], condition)


def _judged(rows: Sequence[Any], condition: Condition) -> Judgement:
    floor, reloads = list[Pair](), list[Pair]()
    for number in range(condition.inputs):
        cold, *others = (
            Answer(
                rows[0][number][one],
                rows[1][number][one] if condition.logprobs else None,
                rows[2][number][one] if condition.margins else None,
            )
            for one in range(condition.floor + 2)
        )
        floor += [Pair(str(number), cold, one, split=True) for one in others[:-1]]
        reloads.append(Pair(str(number), cold, others[-1]))
    return judge(floor, reloads, condition.policy)


class Fault(NamedTuple):
    """A wrong state of the model."""

    name: str
    wrong: Callable[[Process, Any], Any]
    """The state after the prompts of these numbers, wrong."""
    inputs: int | None = None
    """So many of a probe's inputs have it; None: all."""


def _part(units: int) -> Callable[[Process, Any], Any]:
    def wrong(process: Process, chosen: Any) -> Any:
        state = process.states[chosen].copy()
        state[:, :units] = 0
        return state

    return wrong


def _behind(tokens: int) -> Callable[[Process, Any], Any]:
    """The state of another prompt up to `tokens` before the end; the rest is read as it should be."""

    def wrong(process: Process, chosen: Any) -> Any:
        return process.read(process.prompts[chosen][:, PROMPT - tokens :], process.states[(chosen + 1) % POOL])

    return wrong


def _fed_twice(process: Process, chosen: Any) -> Any:
    return process.read(process.prompts[chosen][:, -1:], process.states[chosen])


def _dropped(process: Process, chosen: Any) -> Any:
    return process.read(process.prompts[chosen][:, :-1], np.zeros((len(chosen), UNITS)))


def _another(process: Process, chosen: Any) -> Any:
    return process.states[(chosen + 1) % POOL]


MODEL_FAULTS = [
    Fault("last token fed twice", _fed_twice),
    Fault("last token dropped", _dropped),
    Fault("another prompt's state", _another),
    Fault("fresh state", lambda process, chosen: np.zeros((len(chosen), UNITS))),
    Fault("another prompt's state, then 4 right tokens", _behind(4)),
    Fault("another prompt's state, then 8 right tokens", _behind(8)),
    Fault("1 of 32 units zero", _part(1)),
    Fault("last token fed twice, 4 of 12 inputs", _fed_twice, 4),
    Fault("last token fed twice, 2 of 12 inputs", _fed_twice, 2),
    Fault("last token fed twice, 1 of 12 inputs", _fed_twice, 1),
]


# --- the zoo ------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """What an exercise came to: by prompt its cold answers, and what candidates answered."""

    cold: dict[str, list[Answer]]
    """The control's, then those of clean engines in other chunks."""
    later: list[tuple[str, Answer]]


def exercised(exercise: Exercise, fault: str | None, folder: Path, clean: dict[str, list[Answer]] | None) -> Answers:
    """Run it, under a fault or not; `clean`: the cold answers, where they are known."""
    model = nameless_model(folder / "no-model")
    history = History.read(Archive.open(simulate(frozen(exercise.plan), fault, model, folder / "run")))
    cold = _cold(history) if clean is None else clean
    for tokens in (C, 2 * C, 3 * C, 4 * C) if clean is None else ():
        settings = {**exercise.plan.engine.settings, "max_num_batched_tokens": tokens}
        engine = exercise.plan.engine.model_copy(update={"settings": settings})
        plan = frozen(exercise.plan.model_copy(update={"engine": engine}))
        other = History.read(Archive.open(simulate(plan, None, model, folder / f"chunks-{tokens}")))
        for name, answers in _cold(other).items():
            cold[name] += answers
    return Answers(cold, list(_later(history)))


def _cold(history: History) -> dict[str, list[Answer]]:
    control = history.arm(CONTROL)
    if history.plan.scenario:
        named = {one.prompt: cold_op(one.prompt) for one in generations(history, history.candidates)}
    else:
        named = {case.id: op.op for case, op in history.generations() if op.op.endswith(".cold")}
    return {name: [answer] for name, op in named.items() if (answer := _answer(control.output(op))) is not None}


def _later(history: History) -> Iterator[tuple[str, Answer]]:
    for arm in history.candidates:
        for case, op in history.generations(arm=arm.name):
            if history.plan.scenario or op.op.endswith((".cold", ".reload")):
                answer = _answer(arm.output(op.op))
                if answer is not None:
                    yield case.id, answer


def _answer(seen: Any) -> Answer | None:
    return Answer(seen.rec.token_ids, seen.rec.logprobs, seen.rec.margins) if seen else None


def ruled(answers: Answers, overlay: Callable[[str, Answer], Answer]) -> Judgement:
    """A probe's judgement of an exercise, noise laid over every answer."""
    floor, reloads = list[Pair](), list[Pair]()
    first = {name: overlay(name, given[0]) for name, given in answers.cold.items()}
    for name, given in answers.cold.items():
        floor += [Pair(name, first[name], overlay(name, other), split=True) for other in given[1:]]
    for name, answer in answers.later:
        cold = first[name]._replace(
            **{
                field: values and values[: len(answer.tokens)]
                for field, values in zip(Answer._fields, first[name], strict=True)
            }
        )
        reloads.append(Pair(name, cold, overlay(name, answer)))
    return judge(floor, reloads)


def overlaid(sigma: float, rng: Random) -> Callable[[str, Answer], Answer]:
    """Noise on each logit that is seen: the chosen token's and the runner-up's."""

    def overlay(name: str, answer: Answer) -> Answer:
        tokens, logprobs, margins = list(answer.tokens), list(answer.logprobs or ()), list(answer.margins or ())
        for at, (token, margin) in enumerate(zip(tokens, margins, strict=True)):
            chosen, other = rng.gauss(0, sigma), rng.gauss(0, sigma)
            assert margin is not None and logprobs[at] is not None
            moved = margin + chosen - other
            logprobs[at], margins[at] = (logprobs[at] or 0.0) + chosen, abs(moved)
            if moved >= 0:
                continue
            on = Random(f"{name} {at} {token}")  # what follows the runner-up is one and the same each time
            tokens[at:] = [on.randrange(10**6) for _ in tokens[at:]]
            logprobs[at + 1 :] = [on.uniform(-1, 0) + rng.gauss(0, sigma) for _ in tokens[at + 1 :]]
            margins[at + 1 :] = [1 + (value or 0.0) for value in logprobs[at + 1 :]]
            break
        return Answer(tokens, logprobs, margins)

    return overlay


def zoo(seed: int, power: int, folder: Path) -> list[dict[str, Any]]:
    """Every fault of the simulated engine, and a clean run of every exercise."""
    ready, clean, rows = exercises(), dict[str, Answers](), list[dict[str, Any]]()
    for number, (name, exercise) in enumerate(ready.items()):
        clean[name] = exercised(exercise, None, folder / f"clean-{number}", None)
        rows.append(_zoo_row("(none)", name, clean[name], seed, power))
    for fault in faults_on("sim"):
        if fault not in SimEngine.conducts:
            continue
        name = exercise_of(fault)
        answers = exercised(ready[name], fault, folder / fault, clean[name].cold)
        rows.append(_zoo_row(fault, name, answers, seed, power))
    return rows


def _zoo_row(fault: str, exercise: str, answers: Answers, seed: int, power: int) -> dict[str, Any]:
    exact = ruled(answers, lambda name, answer: answer)
    differing = sum(one.position is not None or (one.displacement or 0) > 0 for one in exact.divergences)
    noisy = {}
    for sigma in OVERLAID:
        rng = Random(f"{seed} {fault} {exercise} {sigma}")
        noisy[f"{sigma:g}"] = _shares([ruled(answers, overlaid(sigma, rng)) for _ in range(power)])
    return {
        "fault": fault,
        "exercise": exercise,
        "answers": len(exact.divergences),
        "differing": differing,
        "mode": exact.mode.value,
        "exact": exact.ruling.value,
        "noisy": noisy,
    }


# --- figures ------------------------------------------------------------------------------------------


def upper(alarms: int, runs: int, level: float = 0.95) -> float:
    """Clopper–Pearson, one-sided: a larger rate would show so few alarms with probability below 1 - level."""
    if alarms == runs:
        return 1.0
    ways = [math.lgamma(runs + 1) - math.lgamma(k + 1) - math.lgamma(runs - k + 1) for k in range(alarms + 1)]
    low, high = alarms / runs, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        logs = [way + k * math.log(rate) + (runs - k) * math.log1p(-rate) for k, way in enumerate(ways)]
        low, high = (rate, high) if sum(map(math.exp, logs)) > 1 - level else (low, rate)
    return high


def _shares(judgements: Sequence[Judgement]) -> dict[str, float]:
    times = Counter(one.ruling for one in judgements)
    return {ruling.value: times[ruling] / len(judgements) for ruling in Ruling}


def clean_rows(process: Process, seed: int, runs: int, only: str = "") -> list[dict[str, Any]]:
    """A row for each condition whose name has `only` in it; each has random numbers of its own."""
    rows = []
    for number, condition in enumerate(CONDITIONS):
        if only not in condition.name:
            continue
        judgements = list(probes(process, np.random.default_rng([seed, 1, number]), condition, runs))
        alarms = sum(one.ruling is Ruling.STATE_FAULT for one in judgements)
        modes = Counter(one.mode for one in judgements)
        row = {
            "condition": condition.name,
            "assumed": condition.assumed,
            "inputs": condition.inputs,
            "runs": runs,
            "alarms": alarms,
            "upper_95": upper(alarms, runs),
            "parted": sum(any(d.position is not None for d in one.divergences) for one in judgements) / runs,
            "modes": {mode.value: modes[mode] for mode in Mode if modes[mode]},
            "rulings": _shares(judgements),
        }
        print(row["condition"], alarms, "of", runs, row["rulings"], flush=True)
        rows.append(row)
    return rows


def fault_rows(process: Process, seed: int, power: int) -> list[dict[str, Any]]:
    rows = []
    for number, fault in enumerate(MODEL_FAULTS):
        found = {}
        for place, sigma in enumerate((0.0, *SIGMAS)):
            condition = Condition("", gaussian(sigma))
            rng = np.random.default_rng([seed, 2, number, place])
            found[f"{sigma:g}"] = _shares(list(probes(process, rng, condition, power, fault)))
        print(fault.name, {sigma: shares[Ruling.STATE_FAULT.value] for sigma, shares in found.items()}, flush=True)
        rows.append({"fault": fault.name, "noise": found})
    return rows


def page(facts: dict[str, Any]) -> str:
    """docs/results/divergence.md."""
    fault = Ruling.STATE_FAULT.value
    total = sum(row["runs"] for row in facts["clean"] if row["assumed"])
    alarms = sum(row["alarms"] for row in facts["clean"] if row["assumed"])
    lines = [
        "# How a divergence is judged: false alarms and misses",
        "",
        f"`python benchmarks/divergence_calibration.py --runs {facts['runs']} --power {facts['power']} --seed "
        f"{facts['seed']}`{facts.get('only', '')}, {facts['date']}, {facts['machine']}, {facts['seconds']:.0f} s. "
        "All figures: [divergence.json](divergence.json). How it is done stands at the head of the script; the rule in "
        "`samestate.checks.divergence`, used with its defaults: "
        + ", ".join(f"{name} {value}" for name, value in facts["policy"].items())
        + ".",
        "",
        f"Within the assumptions: **{alarms} false alarms in {total} clean probes**; with 95 % confidence no more than "
        f"{upper(alarms, total):.2g} of them. The goal is 0.001.",
        "",
        "## Clean probes",
        "",
        f"A probe is {INPUTS} inputs unless said otherwise, each with {FLOOR} floor pairs and one reload, {LENGTH} "
        "tokens. `parted`: probes in which some reload's tokens differ from its cold run's, though nothing is wrong.",
        "",
        "| noise on every logit | probes | parted | false alarms | rate at most (95 %) | unknown |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['condition']}{'' if row['assumed'] else ' (outside the assumptions)'} | {row['runs']} "
            f"| {row['parted']:.0%} | {row['alarms']} | {row['upper_95']:.2g} "
            f"| {row['rulings'][Ruling.UNKNOWN.value]:.1%} |"
            for row in facts["clean"]
        ),
        "",
        "Outside the assumptions, and what to do about it: a tail heavier than the fourth power; an engine that is "
        "exact most of the time and differs now and then, which looks exact on a short floor (lengthen the floor, with "
        "the server as busy as it is when it reloads); and a floor whose other steps were not other enough: exact, "
        "where a reload's steps move logits (a split pair must divide the prompt otherwise, not just have company; or "
        "say by `negligible` what the engine's precision may do, at the price of faults as small as that).",
        "",
        "## Faults of the model",
        "",
        f"Share of {facts['power']} probes in which the fault is called `{fault}`, by σ of the noise. What is missing "
        "from 100 % is missed: `unknown`, or, where noise covers the fault, `numerical tie`.",
        "",
        "| wrong state | " + " | ".join(f"σ = {sigma}" for sigma in facts["model"][0]["noise"]) + " |",
        "|---|" + "---|" * len(facts["model"][0]["noise"]),
        *(
            f"| {row['fault']} | " + " | ".join(f"{one[fault]:.0%}" for one in row["noise"].values()) + " |"
            for row in facts["model"]
        ),
        "",
        "## Faults of the zoo",
        "",
        "The simulated engine, whose log-probabilities lie between −1 and 0 and margins between 0 and 1; then the same "
        f"answers with noise, {facts['power']} times. `differing`: answers that are not the cold run's. A fault that "
        "changes no answer cannot be found by answers; `samestate run` finds it in records ([faults](../faults.md)).",
        "",
        "| fault | exercise | differing | exact | "
        + " | ".join(f"σ = {sigma}" for sigma in facts["zoo"][0]["noisy"])
        + " |",
        "|---|---|---|---|" + "---|" * len(facts["zoo"][0]["noisy"]),
        *(
            f"| {row['fault']} | {row['exercise']} | {row['differing']}/{row['answers']} | {row['exact']} | "
            + " | ".join(f"{one[fault]:.0%}" for one in row["noisy"].values())
            + " |"
            for row in facts["zoo"]
        ),
        "",
        "Missed although answers differ, on the exact engine: " + _listed(facts["zoo"], differing=True) + ". ",
        "Not to be seen in answers: " + _listed(facts["zoo"], differing=False) + ".",
        "",
    ]
    return "\n".join(line if line.startswith(("|", "#")) else fill(line, 150, break_on_hyphens=False) for line in lines)


def _listed(rows: Sequence[dict[str, Any]], *, differing: bool) -> str:
    names = [
        f"`{row['fault']}` ({row['differing']}/{row['answers']})" if differing else f"`{row['fault']}`"
        for row in rows
        if row["fault"] != "(none)" and bool(row["differing"]) is differing and row["exact"] != Ruling.STATE_FAULT.value
    ]
    return ", ".join(names) or "none"


def machine() -> str:
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} shared cores, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000, help="clean probes of each condition")
    parser.add_argument("--power", type=int, default=200, help="probes of each fault and noise")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument(
        "--only", metavar="TEXT", help="measure only the clean conditions so named; keep the other rows"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    began = time.monotonic()
    process = Process(np.random.default_rng([given.seed, 0]))
    if given.only:
        facts = json.loads((given.out / "divergence.json").read_text(encoding="utf-8"))
        if (facts["seed"], facts["runs"]) != (given.seed, given.runs):
            parser.error("--only: what lies in --out has another seed or number of runs")
        rows = {
            row["condition"]: row for row in [*facts["clean"], *clean_rows(process, given.seed, given.runs, given.only)]
        }
        facts["clean"] = [rows[one.name] for one in CONDITIONS if one.name in rows]
        facts["only"] = f'{facts.get("only", "")}, then `--only "{given.only}"`'
        began -= facts["seconds"]
    else:
        with TemporaryDirectory() as scratch:
            found = zoo(given.seed, given.power, Path(scratch))
        facts = {
            "seed": given.seed,
            "runs": given.runs,
            "power": given.power,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": machine(),
            "policy": Policy()._asdict(),
            "zoo": found,
            "model": fault_rows(process, given.seed, given.power),
            "clean": clean_rows(process, given.seed, given.runs),
        }
    facts["seconds"] = time.monotonic() - began
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "divergence.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (given.out / "divergence.md").write_text(page(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
