"""What a gate on sampling code found: the receipt that an archive keeps, and what stands around it."""

from __future__ import annotations

from typing import Literal

import msgspec

from samestate.evidence.probe_records import GateReceipt
from samestate.evidence.record_base import NonNegative, PatchedFunction


class GateGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one temperature and one top-p."""

    temperature: float
    top_p: float
    forced_rows: NonNegative
    forced_right: NonNegative
    forced_empty: NonNegative
    """Forced rows that kept no token at all."""
    ordinary_rows: NonNegative
    ordinary_same: NonNegative


class GateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="report"):
    """One run of a gate."""

    receipt: GateReceipt
    verdict: Literal["pass", "fail", "unknown"]
    device: str
    """``NVIDIA H200``, or the machine's processor where kernels were interpreted."""
    versions: dict[str, str]
    """Of samestate, Python, vLLM, torch and Triton, as far as they are there."""
    compared: str
    """What the ordinary rows were run with and without."""
    vocabulary: NonNegative
    """Logits of a row."""
    groups: list[GateGroup]
    patched: list[PatchedFunction]
    """What the guard replaced, with the hash of the source that ran; empty: nothing, or no guard."""


class GateRefused(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refused"):
    """The gate cannot run here; a line with its remedy."""

    message: str
