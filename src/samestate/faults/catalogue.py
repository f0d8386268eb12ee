"""The catalogue of injectable faults: what each is, who reported it, which check must fire.

Data only, from ``catalogue.toml``. The code that acts lies in `samestate.instruments` (`live_faults`, `budget_faults`)
and in `samestate.engines.sim`.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from importlib.resources import files
from typing import Any, Literal, NamedTuple

EngineKind = Literal["sim", "vllm", "transformers", "budget-grid"]
"""``budget-grid``: in the engines of marker plans, by ``samestate run budget-grid --fault NAME``.
``transformers``: by ``samestate run boundary --engine transformers --fault NAME``."""


class Site(StrEnum):
    """Where a fault acts."""

    LOOKUP = "lookup"
    """The connector's answer to the scheduler."""
    BOUNDARY = "boundary"
    """Where states begin and end."""
    SAVE = "save"
    LOAD = "load"
    LAYOUT = "layout"
    """Which bytes of which page, in registrations and copies."""
    RANKS = "ranks"
    KEY = "key"
    TIER = "tier"
    EVICTION = "eviction"
    PREEMPTION = "preemption"
    RESET = "reset"
    SPECULATIVE = "speculative"
    METRICS = "metrics"
    BUDGET = "budget"
    """Reasoning budgets: which logits row is forced, and what is committed."""
    RECORDER = "recorder"
    """The evidence itself: what a recorder saw and did not write."""


class Named(StrEnum):
    """A part of a place that a finding fills."""

    REQUEST = "request"
    RANK = "rank"
    GROUP = "group"
    LAYER = "layer"
    BOUNDARY = "boundary"


class Fault(NamedTuple):
    """One kind of fault, as public systems have had it."""

    name: str
    summary: str
    site: Site
    reports: tuple[str, ...]
    """Public reports of this kind; a recorder's own may have none."""
    check: str
    """The check that must fire."""
    code: str
    """The finding that must name it."""
    names: frozenset[Named]
    """What the finding must name."""
    engines: frozenset[EngineKind]
    """Engines on which it can be armed."""


def faults_on(engine: EngineKind) -> dict[str, Fault]:
    """The faults that can be armed on an engine, by name."""
    return {name: fault for name, fault in FAULTS.items() if engine in fault.engines}


def _read() -> dict[str, Fault]:
    data = tomllib.loads(files("samestate.faults").joinpath("catalogue.toml").read_text(encoding="utf-8"))
    return {name: _fault(name, told) for name, told in data.items()}


def _fault(name: str, told: dict[str, Any]) -> Fault:
    return Fault(
        name=name,
        summary=told["summary"],
        site=Site(told["site"]),
        reports=tuple(told["reports"]),
        check=told["check"],
        code=told["code"],
        names=frozenset(map(Named, told["names"])),
        engines=frozenset(told["engines"]),
    )


FAULTS = _read()
