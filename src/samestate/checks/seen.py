"""A record, where it stands and when it was written; and that one is missing."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from samestate.evidence.places import place
from samestate.evidence.records import Record

R = TypeVar("R", bound=Record)


class MissingEvidence(Exception):
    """A check needs something that the archive does not hold: the check is unknown."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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
        """``arms/candidate/client.jsonl:18``, for line 17 from 0."""
        return place(self.stream, self.n)
