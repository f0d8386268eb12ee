"""The catalogue of injectable faults: what each is, who reported it, which check must fire.

Data only. The code that acts lies in `samestate.instruments.faults` and in the simulated engine.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Site(StrEnum):
    """Where a fault acts."""

    LOOKUP = "lookup"


class Fault(NamedTuple):
    """One kind of fault, as public systems have had it."""

    name: str
    summary: str
    site: Site
    reports: tuple[str, ...]
    """Public reports of this kind."""
    check: str
    """The check that must fire."""
    code: str
    """The finding that must name it."""


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            name="full-lookup",
            summary="looks up the whole prompt and credits N-1: at N = k*C the last token is applied twice",
            site=Site.LOOKUP,
            reports=("LMCache/LMCache#5151", "LMCache/LMCache#5249", "vllm-project/vllm#51094"),
            check="boundary",
            code="retained_lookup_boundary",
        ),
    )
}
