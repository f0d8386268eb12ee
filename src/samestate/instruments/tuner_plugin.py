"""vLLM's way in: every process of an engine loads it (entry point ``vllm.general_plugins``). Off unless asked."""

from __future__ import annotations

import os

from samestate.evidence.controls import PROFILE_VARIABLE, RECORD_VARIABLE


def register() -> None:
    """Hold this process's autotuned kernels to a profile, or record them, where the environment says so."""
    if os.environ.get(PROFILE_VARIABLE) or os.environ.get(RECORD_VARIABLE):
        from samestate.instruments.tuner_profile import install_from_environment

        install_from_environment()
