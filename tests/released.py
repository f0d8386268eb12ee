"""Releases of LMCache for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samestate.engines.releases import ReleaseError, ensure


def lmcache(version: str) -> Path:
    """The folder of a release; without it the test is skipped, or fails where releases are required."""
    try:
        return ensure("lmcache", version)
    except ReleaseError as error:
        if os.environ.get("SAMESTATE_REQUIRE_RELEASES"):
            pytest.fail(f"SAMESTATE_REQUIRE_RELEASES is set, and {error}")
        pytest.skip(f"the release cannot be had: {error}")
