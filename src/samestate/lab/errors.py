"""Why a run could not be done."""

from __future__ import annotations


class RunError(Exception):
    """A run that cannot start or go on. ``str(error)`` is one line, remedy included.

    ``log_tail`` holds the end of the engine's log when the engine is the cause, else nothing.
    """

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.log_tail = log_tail
