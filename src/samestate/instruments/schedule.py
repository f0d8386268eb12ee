"""Scheduled batches, as seen from two places: the scheduler itself and the connector.

Both read the same `SchedulerOutput` (vllm/v1/core/sched/output.py) at different points, so a
connector that is shown something else than what runs is found by comparing the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestate.evidence.records import BatchRow, BatchScheduled, BatchSource
from samestate.evidence.stream import StreamWriter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


def batch(output: SchedulerOutput, step: int, source: BatchSource) -> BatchScheduled | None:
    """The record of one step, or None for a step that schedules and preempts nothing."""
    starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = output.scheduled_spec_decode_tokens
    rows = [
        BatchRow(request=request, start=starts[request], scheduled=scheduled, drafted=len(drafts.get(request, ())))
        for request, scheduled in output.num_scheduled_tokens.items()
    ]
    preempted = sorted(output.preempted_req_ids or ())
    if not rows and not preempted:
        return None
    return BatchScheduled(step=step, source=source, rows=rows, preempted=preempted)


def record_schedule(scheduler: Scheduler, stream: StreamWriter) -> None:
    """Record every batch that `scheduler` makes from now on, with or without a connector.

    The wrapper only reads the scheduler's output, after the fact.
    """
    schedule = scheduler.schedule
    step = 0

    def recorded(*args: object, **kwargs: object) -> SchedulerOutput:
        nonlocal step
        output = schedule(*args, **kwargs)
        record = batch(output, step, BatchSource.SCHEDULER)
        step += 1
        if record:
            stream.append(record)
        return output

    scheduler.schedule = recorded
