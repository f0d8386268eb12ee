"""The catalogue of injectable faults: what each is, who reported it, which check must fire.

Data only. The code that acts lies in `samestate.instruments` (`faults`, `page_faults`) and in the simulated engine.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Site(StrEnum):
    """Where a fault acts."""

    LOOKUP = "lookup"
    """The connector's answer to the scheduler."""
    ORDER = "order"
    """What the connector tells the worker to move."""
    COPY = "copy"
    """What the worker's copies do."""
    COMPLETION = "completion"
    """When the worker says that it is done."""


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
        Fault(
            name="stale-page",
            summary="a load brings the recurrent state that was saved last for other tokens",
            site=Site.ORDER,
            reports=("LMCache/LMCache#4984", "vllm-project/vllm#52360"),
            check="page-bytes",
            code="stale_page",
        ),
        Fault(
            name="zero-page",
            summary="one recurrent group's state arrives as zeros, which is a legal fresh state",
            site=Site.COPY,
            reports=("vllm-project/vllm#43090", "vllm-project/vllm#47491"),
            check="page-coverage",
            code="zero_page",
        ),
        Fault(
            name="swapped-layers",
            summary="a load exchanges the states of two layers",
            site=Site.COPY,
            reports=("LMCache/LMCache#2494", "LMCache/LMCache#2495"),
            check="page-bytes",
            code="destination_differs",
        ),
        Fault(
            name="short-copy",
            summary="a load copies half of one layer's page",
            site=Site.COPY,
            reports=("LMCache/LMCache#4991",),
            check="poison",
            code="sentinel_left",
        ),
        Fault(
            name="neighbour-write",
            summary="a load also writes the block beside its own",
            site=Site.COPY,
            reports=("LMCache/LMCache#2494", "local-inference-lab/vllm#463"),
            check="poison",
            code="guard_changed",
        ),
        Fault(
            name="early-complete",
            summary="a save is reported as done when it was submitted, before it is copied",
            site=Site.COMPLETION,
            reports=("vllm-project/vllm#45704", "vllm-project/vllm#52360"),
            check="save-completion",
            code="early_complete",
        ),
        Fault(
            name="missing-group",
            summary="a load leaves one recurrent group out",
            site=Site.ORDER,
            reports=("LMCache/LMCache#2845", "LMCache/LMCache#2863", "sgl-project/sglang#39692"),
            check="page-bytes",
            code="missing_group",
        ),
        Fault(
            name="null-block-saved",
            summary="a save reads the null block instead of the block that holds the state",
            site=Site.ORDER,
            reports=("vllm-project/vllm#53084", "vllm-project/vllm#51358"),
            check="prefix-identity",
            code="null_block_saved",
        ),
        Fault(
            name="sync-load",
            summary="a hit is loaded within the step that uses it, after vLLM copied the state to the running block",
            site=Site.LOOKUP,
            reports=("vllm-project/vllm#43935",),
            check="prefix-identity",
            code="state_read_before_load",
        ),
    )
}
