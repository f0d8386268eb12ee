"""Where samestate keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``SAMESTATE_CACHE``, or ``samestate`` in the user's cache folder; may not exist yet."""
    if own := os.environ.get("SAMESTATE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestate"
