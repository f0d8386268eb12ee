"""Faults of the budget recorder: it loses what it saw. `budget_armoury` arms them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from typing_extensions import override

from samestate.instruments.budget_faults import BudgetFault, Side
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.faults import Undo

_RECORDERS = ("samestate.instruments.budget_v1", "samestate.instruments.budget_v2")


class RingOverflow(BudgetFault):
    """The ring holds one record: what a step brings beyond it is dropped, and counted."""

    @override
    def act(self, undo: Undo) -> None:
        put = BudgetRing.put

        def put_one(ring: BudgetRing, record: Any) -> None:
            capacity, ring._capacity = ring._capacity, 1
            try:
                put(ring, record)
            finally:
                ring._capacity = capacity

        undo.patch(BudgetRing, "put", put_one)


class LostStep(BudgetFault):
    """The second step of every request leaves no record, and nobody counts it."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        """By request, how many it had."""
        self._observers: list[type] = []

    @override
    def act(self, undo: Undo) -> None:
        for observer in [sys.modules[name].Observer for name in _RECORDERS if name in sys.modules]:
            if observer not in self._observers:
                self._observers.append(observer)
                undo.patch(observer, "end", self._all_but_second(observer.end))

    def _all_but_second(self, end: Callable[..., None]) -> Callable[..., None]:
        def end_but_one(observer: Any, step: Any, *sampled: Any) -> None:
            for request in step.watched:
                self._steps[request.request] = self._steps.get(request.request, 0) + 1
            step.watched = [request for request in step.watched if self._steps[request.request] != 2]
            end(observer, step, *sampled)

        return end_but_one


class TrimNotRecorded(BudgetFault):
    """Of what a step brought the scheduler's record holds what was kept, and not what was trimmed."""

    side: ClassVar[Side] = "scheduler"

    @override
    def act(self, undo: Undo) -> None:
        from samestate.instruments.budget_scheduler import Observer

        deliver = Observer.deliver

        def deliver_kept(
            observer: Observer, request: Any, position: int, before: list[int], after: int, stopped: bool
        ) -> None:
            deliver(observer, request, position, before[:after], after, stopped)

        undo.patch(Observer, "deliver", deliver_kept)
