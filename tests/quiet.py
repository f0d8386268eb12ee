"""A progress that nobody watches."""

from __future__ import annotations


class Silent:
    """Takes what it is told."""

    def stage(self, name: str) -> None:
        pass

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        pass
