"""A record, where it stands and when it was written."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from samestate.evidence.records import Record

R = TypeVar("R", bound=Record)


class Seen(NamedTuple, Generic[R]):
    """A record and where it stands."""

    rec: R
    stream: str
    """``arms/candidate/client.jsonl``."""
    n: int
    """Line number, from 0."""
    t_ns: int
    """The host's monotonic clock, comparable between streams of one host."""

    @property
    def where(self) -> str:
        """``arms/candidate/client.jsonl:17``."""
        return f"{self.stream}:{self.n}"
