"""Faults that are armed and disarmed in a running engine, so that a dozen cost one start.

The audit connector offers itself here when it is made; a fault then acts on the connector, or on the worker
behind it, through public hooks, and takes its action back when it is disarmed.
"""

from __future__ import annotations


def arm(name: str | None) -> None:
    """Arm fault `name`, and only it; None disarms all."""
    raise NotImplementedError(name)
