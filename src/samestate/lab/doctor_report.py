"""What `samestate doctor` found, as one value; nothing here prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from samestate.engines.inquiry import Answer
from samestate.engines.releases import KnownFault
from samestate.evidence.records import Scalar
from samestate.lab.serving import Serving
from samestate.models.cache_shape import Pages

State = Literal["ok", "wrong", "unknown", "note"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    id: str
    state: State
    says: str
    remedy: str = ""
    sources: list[str] = msgspec.field(default_factory=list)


class Tier(msgspec.Struct, frozen=True):
    """What an external tier of a given size can hold. At most: bookkeeping is not counted."""

    bytes: int
    prefix_bytes: int
    """Of one prefix of C tokens with its state, over all ranks, in whole pages."""
    moved_bytes: int
    """The same without padding: what a connector that knows the pages moves."""
    prefixes: int
    """Of C tokens each, in whole pages."""
    longest_prefix: int | None
    """Tokens of the longest single prefix, in whole pages, with one state; None: states alone are kept."""


class Fit(msgspec.Struct, frozen=True):
    """Whether a connector can carry this model there."""

    connector: str
    can: Literal["yes", "no", "unknown"]
    why: str


class Report(msgspec.Struct, frozen=True):
    """All that is known before anything is served."""

    model: str
    config_source: str
    model_type: str
    architecture: str | None
    platform: str
    tensor_parallel: int
    engine: str | None
    """The installed vLLM; None: there is none."""
    values: Literal["vllm", "calculated", "unknown"]
    """Where C and the pages come from."""
    interval: int | None
    """C."""
    hit_step: int | None
    """The engine's own hits end at multiples of it; external ones at multiples of C."""
    smallest_prompt: int | None
    """Prompts with fewer tokens can never hit."""
    max_model_len: int | None
    state_dtype: str | None
    pages: list[Pages]
    tier: Tier | None
    connectors: list[Fit]
    findings: list[Finding]
    assumed: list[str]

    @property
    def exit_code(self) -> int:
        """1: something is known to be wrong; else 3: something is unknown; else 0."""
        states = {finding.state for finding in self.findings}
        return 1 if "wrong" in states else 3 if "unknown" in states else 0


class Case(NamedTuple):
    """What the rules look at."""

    model_type: str
    platform: str
    ranks: int
    serving: Serving
    interval: int | None
    hit_step: int | None
    drops_block: bool
    max_model_len: int | None
    state_dtype: str | None
    pages: list[Pages]
    chunk_tokens: int | None
    prefix_caching: bool
    answer: Answer | None
    """vLLM's own; None where the values are calculated."""
    connector: str | None
    """The one that is asked about."""
    options: Mapping[str, Scalar]
    """Of that connector, ``_`` in their names."""
    external_cache_bytes: int
    faults: list[tuple[str, KnownFault]]
    """Of the releases that would serve, with the release's name."""

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state."""
        return any(pages.kind == "recurrent" for pages in self.pages)

    @property
    def smallest_prompt(self) -> int | None:
        """One token beyond the first step that a hit can end at; two steps where hits give their last one back.

        Where there is state, two steps exactly: its checkpoint is placed before the last whole block
        (`get_mamba_prefill_checkpoint_position`, vllm/v1/kv_cache_interface.py).
        """
        if self.hit_step is None:
            return None
        if self.drops_block:
            return 2 * self.hit_step + (0 if self.recurrent else 1)
        return self.hit_step + 1
