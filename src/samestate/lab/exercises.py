"""What the faults of the zoo are run on: shipped plans made small, each such that a kind of fault must show.

A simulated run takes a fraction of a second at C = 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestate.evidence.records import Scalar
from samestate.plans.load import load
from samestate.plans.model import ArmPlan, Plan, PromptPlan, ReusePath, StepPlan

C = 256
DELAY_MS = 25
"""How long saves are held back where that matters."""
OUTPUT_TOKENS = 12
SECOND_ARM = "candidate-2"


class Exercise(NamedTuple):
    """A plan, and what it is for."""

    name: str
    plan: Plan
    """Not frozen."""


def exercise_of(fault: str) -> str:
    """The exercise on which a fault must show."""
    return _SHOWN_ON.get(fault, "boundaries")


def exercises() -> dict[str, Exercise]:
    """All of them, by name."""
    made = {
        "boundaries": _boundaries(),
        "boundaries, saves held back": _boundaries(delay_ms=DELAY_MS),
        "boundaries, drafts": _boundaries(num_speculative_tokens=3),
        "shared prefixes": _shared(),
        "shared prefixes in chunks": _chunked(),
        "a second engine": _restarted(follows=True),
        "a second engine, nothing kept": _restarted(follows=False),
        "few blocks": _pressure(),
        "preemption": _preemption(),
        "a small tier": _eviction(),
    }
    return {name: Exercise(name, plan) for name, plan in made.items()}


def varied(exercise: Exercise, number: int) -> Exercise:
    """The same exercise with other prompts and another number of ranks; `number` 0 is the exercise itself."""
    templates = ("password-retrieval-zh", "ledger-en")
    engine = exercise.plan.engine
    ranks = engine.settings.get("tensor_parallel_size", 1)
    changed = engine.model_copy(
        update={"settings": {**engine.settings, "tensor_parallel_size": 1 + number // 2 % 2 if number else ranks}}
    )
    update = {
        "engine": changed,
        "template": templates[number % 2],
        "output_tokens": exercise.plan.output_tokens + number % 5,
    }
    return Exercise(exercise.name, exercise.plan.model_copy(update=update))


_SHOWN_ON = {
    "early-complete": "boundaries, saves held back",
    "accepted-rows-permuted": "boundaries, drafts",
    "fed-twice": "shared prefixes in chunks",
    "restart-corrupt": "a second engine",
    "reset-keeps-external": "a second engine, nothing kept",
    "overwritten-before-read": "few blocks",
    "preempted-stale": "preemption",
    "fragment-eviction": "a small tier",
    **dict.fromkeys(
        (
            "attach-changes-lookup",
            "boundary-dip",
            "crossed-requests",
            "failed-put-visible",
            "hits-overcounted",
            "hits-silent",
            "joint-truncation",
            "orphan-attention",
            "past-shared-prefix",
            "queries-doubled",
            "rank-names-differ",
            "reset-keeps-local",
            "salt-ignored",
            "scratch-saved",
            "second-reload",
            "short-hash",
            "silent-rank",
            "silent-recompute",
            "stored-never-served",
            "swallowed-load-failure",
            "third-sighting",
            "wrong-grid",
        ),
        "shared prefixes",
    ),
}


# --- matrices ---------------------------------------------------------------------------------------


def _boundaries(delay_ms: int = 0, **settings: Scalar) -> Plan:
    """Six lengths around two boundaries, on two ranks, in chunks of at most 2C."""
    plan = load("boundary-instrumented")
    update = {
        "lengths": ["2C-1", "2C", "2C+1"] if delay_ms else ["2C-1", "2C", "2C+1", "3C-1", "3C", "3C+1"],
        "output_tokens": OUTPUT_TOKENS,
        "expected_layout": None,
        "instruments": plan.instruments.model_copy(update={"save_delay_ms": delay_ms}),
    }
    return _small(plan, max_num_batched_tokens=2 * C, tensor_parallel_size=2, **settings).model_copy(update=update)


# --- scenarios --------------------------------------------------------------------------------------

RESET = StepPlan(reset=True)


def _shared() -> Plan:
    """One long prompt stored in one step, shorter ones that share it, batches, a salt; all four paths."""
    prompts = [
        PromptPlan(name="trunk", tokens="4C+7"),
        PromptPlan(name="two", tokens="2C+9", shares="trunk", shared="2C+5"),
        PromptPlan(name="one", tokens="C+9", shares="trunk", shared="C+5"),
        PromptPlan(name="exact", tokens="2C", shares="trunk", shared="2C"),
        PromptPlan(name="other", tokens="3C+20"),
        PromptPlan(name="left", tokens="2C+30"),
        PromptPlan(name="right", tokens="2C+50"),
    ]
    steps = [
        _step("trunk", path="cold"),
        RESET,
        _step("trunk", path="external"),
        _step("trunk", path="local"),
        _step("two"),
        RESET,
        _step("two", path="external"),
        RESET,
        _step("one"),
        RESET,
        _step("exact", path="external"),
        _step("trunk", path="mixed"),
        _step("other", path="cold"),
        RESET,
        _step("trunk", "other", path="external"),
        _step("left", "right", path="cold"),
        RESET,
        _step("right", path="external"),
        _step("left", path="external"),
        RESET,
        _step("trunk", salt="another", path="cold"),
        RESET,
        _step("trunk", salt="another", path="external"),
        # The same tokens as in the batch, alone: equal pages show that company does not change what is computed.
        RESET,
        _step("left", salt="alone", path="cold"),
    ]
    return _scenario(prompts, steps, tensor_parallel_size=2)


def _chunked() -> Plan:
    prompts = [PromptPlan(name="trunk", tokens="4C+7"), PromptPlan(name="other", tokens="3C-1")]
    steps = [_step("trunk"), _step("other"), RESET, _step("trunk", path="external"), RESET, _step("other")]
    return _scenario(prompts, steps, max_num_batched_tokens=C)


def _restarted(*, follows: bool) -> Plan:
    """A second engine, which finds the first one's cache or must not."""
    prompts = [PromptPlan(name="trunk", tokens="3C+7"), PromptPlan(name="other", tokens="2C+20")]
    again: ReusePath = "external" if follows else "cold"
    steps = [
        _step("trunk", path="cold"),
        _step("other", path="cold"),
        RESET,
        _step("trunk", path="external"),
        _step("trunk", path=again, arm=SECOND_ARM),
        StepPlan(reset=True, arm=SECOND_ARM),
        _step("other", path=again, arm=SECOND_ARM),
        StepPlan(reset=True, arm=SECOND_ARM),
        _step("other", path="external", arm=SECOND_ARM),
    ]
    plan = _scenario(prompts, steps)
    second = ArmPlan(name=SECOND_ARM, connector="native", follows="candidate" if follows else None)
    return plan.model_copy(update={"arms": [*plan.arms, second]})


def _pressure() -> Plan:
    """More prompts at once than the pool holds, each over in the step that ends its prompt, saves held back."""
    names = ("a", "b", "c", "d", "e")
    prompts = [PromptPlan(name=name, tokens=f"3C-{index + 1}") for index, name in enumerate(names)]
    steps = [_step(*names, output_tokens=1), *_reloads(names)]
    return _scenario(prompts, steps, delay_ms=DELAY_MS, max_num_seqs=2, num_gpu_blocks_override=16)


def _preemption() -> Plan:
    """Two prompts that fit together until their outputs need another block."""
    names = ("a", "b")
    prompts = [PromptPlan(name="a", tokens="2C-4"), PromptPlan(name="b", tokens="2C-5")]
    return _scenario(prompts, [_step(*names), *_reloads(names)], delay_ms=DELAY_MS, num_gpu_blocks_override=14)


def _eviction() -> Plan:
    """More is stored than the tier holds; the prompt that was stored last must be there."""
    names = ("a", "b", "c", "d", "e", "f")
    prompts = [PromptPlan(name=name, tokens=f"3C+{5 + index}") for index, name in enumerate(names)]
    steps = [*(_step(name, path="cold") for name in names), RESET, _step("f", path="external")]
    plan = _scenario(prompts, steps)
    engine = plan.engine.model_copy(update={"external_cache_bytes": 20 * C + 200})
    return plan.model_copy(update={"engine": engine})


def _reloads(names: Sequence[str]) -> list[StepPlan]:
    return [step for name in names for step in (RESET, _step(name, path="external"))]


def _step(
    *prompts: str,
    path: ReusePath = "any",
    salt: str | None = None,
    arm: str = "candidate",
    output_tokens: int | None = None,
) -> StepPlan:
    return StepPlan(prompts=list(prompts), path=path, salt=salt, arm=arm, output_tokens=output_tokens)


def _scenario(prompts: list[PromptPlan], steps: list[StepPlan], delay_ms: int = 0, **settings: Scalar) -> Plan:
    plan = load("shared-prefix")
    instruments = plan.instruments.model_copy(update={"audit_level": "poison", "save_delay_ms": delay_ms})
    update = {"prompts": prompts, "scenario": steps, "output_tokens": OUTPUT_TOKENS, "instruments": instruments}
    return _small(plan, **settings).model_copy(update=update)


def _small(plan: Plan, **settings: Scalar) -> Plan:
    kept = {name: value for name, value in plan.engine.settings.items() if name != "num_gpu_blocks_override"}
    engine = plan.engine.model_copy(update={"settings": {**kept, "block_size": C, "max_model_len": 8 * C, **settings}})
    return plan.model_copy(update={"engine": engine})
