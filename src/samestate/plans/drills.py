"""Drills: what to drive while a fault is armed in a running engine, for every fault that can be armed there.

Many drills are one scenario on one engine: each has prompts of its own, begins and ends with nothing armed, and after
its fault shows that a new prompt is computed and reloaded rightly. Faults are named as strings; what each is, and which
finding must name it, says the catalogue (`samestate.faults`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from samestate.plans.load import load
from samestate.plans.model import InstrumentPlan, Plan, PromptPlan, ReusePath, StepPlan
from samestate.plans.scenarios import CANDIDATE, scenario_steps

TOKENS = "2C+1"
"""N where a drill says nothing else: a reload restores [0, 2C) and computes one token."""
CLEAN = "clean"

Shared = tuple[str, str, str]
"""N, the letter of the prompt whose beginning a prompt shares, and how many tokens of it."""


class Act(NamedTuple):
    """One step of a drill."""

    plan: StepPlan
    armed: bool
    """Whether the fault is armed then."""


class Drill(NamedTuple):
    """What to drive for one fault."""

    prompts: tuple[PromptPlan, ...]
    acts: tuple[Act, ...]


class DrillPlan(NamedTuple):
    """Drills as one plan, not frozen."""

    plan: Plan
    armed: dict[str, str | None]
    """By operation of the candidate: the fault that must be armed when it begins; None: none."""
    owners: dict[str, str]
    """Prompt -> the fault whose drill it belongs to."""


def drill_plan(drills: Iterable[str]) -> DrillPlan:
    """The drills of these faults, one after another, as one scenario; on two ranks where a drill needs them.

    Raises KeyError for an unknown fault.
    """
    known = DRILLS | RANK_DRILLS
    prompts: list[PromptPlan] = []
    steps: list[StepPlan] = []
    armed_at: list[str | None] = []
    owners: dict[str, str] = {}
    for fault in drills:
        drill = known[fault]
        prompts += drill.prompts
        owners.update((prompt.name, fault) for prompt in drill.prompts)
        for act in drill.acts:
            steps.append(act.plan)
            armed_at += [fault if act.armed else None] * max(1, len(act.plan.prompts))
    plan = _base(ranks=2 if RANK_DRILLS.keys() & set(owners.values()) else 1)
    plan = plan.model_copy(update={"prompts": prompts, "scenario": steps})
    ops = [step.op for step in scenario_steps(plan, CANDIDATE)]
    return DrillPlan(plan, dict(zip(ops, armed_at, strict=True)), owners)


def _base(ranks: int) -> Plan:
    """The plan of shared prefixes, on a small engine in which every page is watched and blocks are soon used again."""
    plan = load("shared-prefix")
    settings = plan.engine.settings | {
        "block_size": 256,
        "max_model_len": 1024,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 32,
    }
    serve_args = ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    engine = {"settings": settings, "external_cache_bytes": 1 << 28, "serve_args": serve_args}
    update = {
        "name": "fault-drill",
        "title": "Faults armed one after another in a running engine",
        "question": "Is every fault found while it is armed, and nothing while none is?",
        "engine": plan.engine.model_copy(update=engine),
        "template": "ledger-en",
        "output_tokens": 8,
        "instruments": InstrumentPlan(audit_level="poison", save_delay_ms=150),
        "not_shown": [
            "Faults were injected: this is no normal run, and a pass of it would show that they were missed."
        ],
    }
    return plan.model_copy(update=update)


# --- one drill ------------------------------------------------------------------------------------


def _drill(fault: str, *acts: str, prompts: Mapping[str, str | Shared] | None = None) -> Drill:
    """A drill from acts such as ``"!ab cold salt=one"``: prompts `a` and `b` at once, the fault armed, planned as cold.

    Without ``!`` it is not armed; without a path that is up to the engine; ``outputs=1`` asks for fewer tokens. Before
    every act the local cache is reset, but before those with a ``+``. A clean prompt follows, cold and reloaded.
    """
    parsed = [*_acts(fault, acts), *_acts(fault, (f"{CLEAN} cold", f"{CLEAN} external"))]
    names = dict.fromkeys(name for act in parsed for name in act.plan.prompts)
    lengths = {f"{fault}-{letter}": length for letter, length in (prompts or {}).items()}
    return Drill(tuple(_prompt(fault, name, lengths.get(name, TOKENS)) for name in names), tuple(parsed))


def _prompt(fault: str, name: str, length: str | Shared) -> PromptPlan:
    if isinstance(length, str):
        return PromptPlan(name=name, tokens=length)
    tokens, shares, shared = length
    return PromptPlan(name=name, tokens=tokens, shares=f"{fault}-{shares}", shared=shared)


def _acts(fault: str, said: Sequence[str]) -> Iterator[Act]:
    """With their resets. A fault that is armed for two acts in a row stays armed between them."""
    stays_armed = False
    for act in said:
        who, *how = act.split()
        letters = who.lstrip("+!")
        armed = "!" in who
        if "+" not in who:
            yield Act(StepPlan(reset=True), armed and stays_armed)
        named = dict(part.split("=") for part in how if "=" in part)
        path = cast("ReusePath", next((part for part in how if "=" not in part), "any"))
        outputs = int(named["outputs"]) if "outputs" in named else None
        names = [letters] if letters == CLEAN else list(letters)
        asked = [f"{fault}-{name}" for name in names]
        yield Act(StepPlan(prompts=asked, path=path, salt=named.get("salt"), output_tokens=outputs), armed)
        stays_armed = armed


def _loads(fault: str, tokens: str = TOKENS) -> Drill:
    """Two prompts are stored, the first is reloaded under the fault, and once more without it."""
    acts = ("!a cold", "!b cold", "!a external", "a external")
    return _drill(fault, *acts, prompts={"a": tokens, "b": tokens})


def _saves(fault: str) -> Drill:
    """A prompt is stored under the fault, and reloaded without it."""
    return _drill(fault, "!a cold", "a external")


def _again(fault: str, path: str, tokens: str = TOKENS) -> Drill:
    """A prompt is stored, asked for under the fault, and reloaded without it."""
    return _drill(fault, "a cold", f"!a {path}", "a external", prompts={"a": tokens})


_LOADS = (
    "stale-page",
    "zero-page",
    "missing-group",
    "attention-only",
    "missing-entry",
    "early-load-complete",
    "swallowed-load-failure",
    "swapped-layers",
    "halves-swapped",
    "short-copy",
    "neighbour-write",
    "wide-column",
    "read-during-eviction",
    "sync-load",
    "fresh-state",
)
_SAVES = ("null-block-saved", "scratch-saved", "trimmed-key", "early-complete", "unsaved-group", "failed-put-visible")
_LONGER_SHARED: Mapping[str, str | Shared] = {"a": "2C+9", "b": ("3C+7", "a", "2C+9"), "c": ("2C+20", "b", "2C+12")}
"""A short prompt, a longer one that goes on from it, and one that leaves the longer one after [0, 2C)."""

DRILLS: dict[str, Drill] = {
    "full-lookup": _loads("full-lookup", "2C"),
    "unaligned-credit": _again("unaligned-credit", "external", "2C+40"),
    "boundary-dip": _again("boundary-dip", "any", "2C"),
    "block-round-up": _again("block-round-up", "external", "2C+40"),
    "past-shared-prefix": _drill(
        "past-shared-prefix", "!a cold", "!b external", "!c external", "c external", prompts=_LONGER_SHARED
    ),
    # The long prompt is stored in one step: the boundary where the short one leaves it has no state.
    "joint-truncation": _drill(
        "joint-truncation", "a cold", "!b external", "b", prompts={"a": "3C+7", "b": ("2C+9", "a", "2C+5")}
    ),
    "attach-changes-lookup": _drill(
        "attach-changes-lookup", "a cold", "+!b local", "b", prompts={"a": "3C+7", "b": ("2C+9", "a", "2C+5")}
    ),
    "stored-never-served": _again("stored-never-served", "any"),
    "third-sighting": _drill("third-sighting", "!a cold", "!a", "!a external", "a external"),
    "wrong-grid": _drill("wrong-grid", "!ab cold", "!b external", "a external", "a cold salt=alone"),
    # One prompt is over at once, and three want its blocks while they are still to be saved.
    "overwritten-before-read": _drill("overwritten-before-read", "!a cold outputs=1", "+!bcd cold outputs=1"),
    "duplicate-keeps-damage": _drill("duplicate-keeps-damage", "!a cold", "!a cold", "a external"),
    "second-reload": _drill("second-reload", "!a cold", "!b cold", "!a external", "!a external"),
    "crossed-requests": _drill("crossed-requests", "ab cold", "!ab external", "ab external"),
    "salt-ignored": _drill(
        "salt-ignored", "!a cold salt=one", "!a external salt=another", "a cold salt=third", "a external salt=third"
    ),
    "short-hash": _drill("short-hash", "!a cold", "!b external", "b cold", "b external"),
    "orphan-attention": _again("orphan-attention", "any"),
    "reset-keeps-local": _drill("reset-keeps-local", "!a cold", "!a", "a external"),
    "hits-silent": _again("hits-silent", "external"),
    "hits-overcounted": _again("hits-overcounted", "external"),
    "queries-doubled": _again("queries-doubled", "external"),
    **{fault: _loads(fault) for fault in _LOADS},
    **{fault: _saves(fault) for fault in _SAVES},
}
"""By fault: those that one rank shows."""
RANK_DRILLS: dict[str, Drill] = {fault: _loads(fault) for fault in ("rank-zero-shard", "silent-rank")}
"""Those that need two ranks."""
