"""The budget recorder in vLLM's scheduler: what a step brought, what was kept of it, what was dropped.

Workers commit every accepted token; the scheduler looks for a stop and trims what lies behind it
(``del new_token_ids[num_new:]``, ``v1/core/sched/scheduler.py``). Under asynchronous scheduling a
step that ran ahead of a stop arrives when its request is over; its tokens are dropped as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.scheduler import Scheduler

from samestate.evidence.marker_records import RunAheadDropped, TokensDelivered
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.budget_recorder import Remembered, open_ring, unseen
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.budget_sources import BOTH, Sources, require, wrap

WRAPPED: Sources = {
    (Scheduler, "add_request"): {"fa2b51cd04a909775622d085b0f9ff4059cdf0c2e0d411f0aad2ff3c36e74acc": BOTH},
    (Scheduler, "update_from_output"): {
        "85b29db96051135c2e8efcb26637eb46d30b8b7707e947ccf4f86f6fdc613c49": "0.32.0",
        "8067d98a98b620cb6893785d596616d6b3be6c849b9d1d7b6494a7082289c17d": "0.33.0",
    },
    (Scheduler, "_update_request_with_output"): {
        "ff6e3f664c996a8f17eefa1808b392ae97ff3c57ee996a6d21d17b26d298f062": "0.32.0",
        "093836bff060770835e0c529e38ab90dcee7affa1e912b2f89de41147d5826d6": "0.33.0",
    },
}


class Observer:
    """Watches one scheduler."""

    def __init__(self, ring: BudgetRing) -> None:
        self.ring = ring
        self._with_budget = Remembered()

    def add(self, request: Any) -> None:
        """A request came."""
        if _has_budget(request):
            self._with_budget.add(request.request_id)

    def drop(self, scheduler: Any, scheduled: Any, output: Any) -> None:
        """A step arrived: record its tokens for requests that are over, which vLLM is about to skip."""
        for request_id in scheduled.num_scheduled_tokens:
            request = scheduler.requests.get(request_id)
            if request_id not in self._with_budget or not (request is None or request.is_finished()):
                continue
            tokens = output.sampled_token_ids
            if tokens and (own := tokens[output.req_id_to_index[request_id]]):
                self.ring.put(RunAheadDropped(request=request_id, tokens=list(own)))

    def deliver(self, request: Any, position: int, before: list[int], after: int, stopped: bool) -> None:
        """The stop check went over a step's tokens."""
        reason = request.get_finished_reason() if stopped else None
        self.ring.put(
            TokensDelivered(
                request=request.request_id,
                position=position,
                before=before,
                after=after,
                finish_reason=None if reason is None else str(reason),
                stop_reason=request.stop_reason if stopped else None,
            )
        )


_observers: WeakKeyDictionary[Any, Observer | None] = WeakKeyDictionary()


def install() -> list[PatchedFunction]:
    """Wrap the scheduler's functions. Raises `BudgetRecorderError`."""
    functions = require(WRAPPED)

    def observer(scheduler: Any) -> Observer | None:
        if scheduler not in _observers:
            ring = open_ring(scheduler.vllm_config, functions, None)
            _observers[scheduler] = Observer(ring) if ring is not None else None
        return _observers[scheduler]

    wrap(Scheduler, "add_request", lambda original: _added(original, observer))
    wrap(Scheduler, "update_from_output", lambda original: _updated(original, observer))
    wrap(Scheduler, "_update_request_with_output", lambda original: _delivered(original, observer))
    return functions


Find = Callable[[Any], Observer | None]


def _added(original: Callable[..., Any], observer: Find) -> Callable[..., Any]:
    @wraps(original)
    def add_request(scheduler: Any, request: Any) -> Any:
        if (watching := observer(scheduler)) is not None:
            with unseen(watching.ring):
                watching.add(request)
        return original(scheduler, request)

    return add_request


def _updated(original: Callable[..., Any], observer: Find) -> Callable[..., Any]:
    @wraps(original)
    def update_from_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        watching = observer(scheduler)
        if watching is None:
            return original(scheduler, scheduler_output, model_runner_output)
        with unseen(watching.ring):
            watching.drop(scheduler, scheduler_output, model_runner_output)
        try:
            return original(scheduler, scheduler_output, model_runner_output)
        finally:
            watching.ring.drain()

    return update_from_output


def _delivered(original: Callable[..., Any], observer: Find) -> Callable[..., Any]:
    @wraps(original)
    def update_request(scheduler: Any, request: Any, new_token_ids: list[int], *args: Any, **options: Any) -> Any:
        watching = observer(scheduler) if _has_budget(request) else None
        if watching is None:
            return original(scheduler, request, new_token_ids, *args, **options)
        # Copied first: vLLM trims the list itself.
        before, position = list(new_token_ids), request.num_output_tokens
        kept, stopped = original(scheduler, request, new_token_ids, *args, **options)
        with unseen(watching.ring):
            watching.deliver(request, position, before, len(kept), stopped)
        return kept, stopped

    return update_request


def _has_budget(request: Any) -> bool:
    params = request.sampling_params
    return params is not None and params.thinking_token_budget is not None
