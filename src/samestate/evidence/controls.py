"""Controls: switches on what an engine computes or in which steps, each by itself (requirements 13).

Who starts an engine sets them by environment variables, which its processes read; what was in force is recorded in
`EngineStarted.controls`, each with the hash of what it is made of. A result holds for the full set.
"""

from __future__ import annotations

import hashlib

TUNER_PROFILE = "tuner-profile"
"""Triton's autotuned kernels are held to recorded choices. Hash: of the profile file."""
MATCHED_SCHEDULE = "matched-schedule"
"""Prefill steps end at every multiple of C, or at B, with and without a connector. Hash: of the switch, its mode and
what it wraps."""
REPAIR = "repair"
"""A release's functions are replaced (`InterventionApplied` names them). Hash: of the repairs' source."""
STRICT_PREFIX = "strict-prefix"
"""LMCache's lookups leave the last known token out (`samestate.instruments.repairs`)."""
STABLE_TOPK = "stable-topk"
"""A repair of vLLM: pool ids of GLM-5-Next's sparse indexer are sorted before attention sums in their order."""
ENGINE_REPAIRS = (STABLE_TOPK,)
"""Repairs of the engine itself, not of a connector: in every process of every arm's engine."""
CONTROLS = (TUNER_PROFILE, MATCHED_SCHEDULE, REPAIR)

PROFILE_VARIABLE = "SAMESTATE_TUNER_PROFILE"
"""Path of the profile that every process of an engine is held to; unset: no profile is in force."""
RECORD_VARIABLE = "SAMESTATE_TUNER_RECORD"
"""Folder into which every process of an engine writes what its tuners chose, with or without a profile."""
RELEASE_VARIABLE = "SAMESTATE_TUNER_RELEASE"
"""The one kernel that is not held to the profile; its tuner measures as it would without."""
OTHER_VARIABLE = "SAMESTATE_TUNER_OTHER"
"""Kernels, with commas between or ``*``, that are held to another of their configurations than the recorded one."""
SCHEDULE_VARIABLE = "SAMESTATE_MATCHED_SCHEDULE"
"""`EVERY_MULTIPLE` or `COLD_SPLIT`: the matched schedule is on, in this mode; unset or ``0``: it is off."""
EVERY_MULTIPLE = "1"
"""Every prefill step ends at the next multiple of C."""
COLD_SPLIT = "cold-split"
"""A prefill is split at B = C·⌊(N−1)/C⌋ and nowhere else: the least that rounds a bf16 state as a reload does."""

STORAGES_VARIABLE = "SAMESTATE_STORAGES"
"""``1``: every rank digests its named parameters and buffers, at the start and at the end. It changes nothing."""

CAPTURE_VARIABLE = "SAMESTATE_CAPTURE"
"""Modules whose calls are captured, with commas between: full names, or unique ends of them. `EVERY_MODULE`: outputs of
all modules of the decoder layers. It changes nothing."""
EVERY_MODULE = "*"
CAPTURE_LIMIT_VARIABLE = "SAMESTATE_CAPTURE_LIMIT"
"""Calls of each that are kept; unset: `CAPTURE_LIMIT`."""
CAPTURE_LIMIT = 10_000
TRACE_LIMIT = 160
"""Of `EVERY_MODULE`: steps of an engine that are kept, where the limit above is unset."""
TRACE_STEPS = 4
"""Of `EVERY_MODULE`: the first steps of each operation, in which a prompt is computed."""


def sources_sha256(sources: dict[str, str]) -> str:
    """SHA-256 over named sources: of the sorted lines ``<sha256 of the source>  <name>``."""
    lines = (f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sources.items())
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
