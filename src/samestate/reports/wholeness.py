"""Whether an archive's records may speak at all: what is damaged or was never sealed shows nothing by what it lacks."""

from __future__ import annotations

from samestate.checks.history import History


def damage(history: History) -> str | None:
    """Why nothing that is read from this archive is evidence, in one line; None: it is sealed and undamaged."""
    if history.seal_sha256 is None:
        return "the archive has no readable seal: its run did not complete, or it was damaged"
    if not history.defects:
        return None
    first, *others = history.defects
    more = f" (and {len(others)} more)" if others else ""
    return f"the archive is damaged: {first.where}: {first.what}{more}"
