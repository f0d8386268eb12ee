"""What this process put onto vLLM, by name: told by whoever did it, and taken down in the process's own trace.

A patch and the trace come in either order, and a forked process begins with what its parent has patched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from samestate.evidence.record_base import PatchedFunction
from samestate.evidence.records import InterventionApplied

Watcher = Callable[[InterventionApplied], None]

_applied: list[InterventionApplied] = []
_watchers: list[Watcher] = []


def applied(name: str, functions: Sequence[PatchedFunction]) -> None:
    """`name` is in force in this process; `functions` as they were before. None: it looked, and they need nothing."""
    record = InterventionApplied(name=name, functions=list(functions))
    _applied.append(record)
    for watcher in list(_watchers):
        watcher(record)


def watch(watcher: Watcher) -> None:
    """Tell `watcher` of everything that is in force, and of whatever comes later. It must not raise."""
    for record in _applied:
        watcher(record)
    _watchers.append(watcher)


os.register_at_fork(after_in_child=_watchers.clear)
