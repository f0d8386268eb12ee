"""Scheduled batches, as seen from two places: the scheduler itself and the connector.

Both read the same `SchedulerOutput` (vllm/v1/core/sched/output.py) at different points, so a
connector that is shown something else than what runs is found by comparing the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from samestate.evidence.records import (
    BatchRow,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    SchedulerConfigured,
    StateComputed,
)
from samestate.evidence.stream import StreamWriter
from samestate.instruments.layout import engine_groups

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


def assigned_blocks(output: SchedulerOutput, step: int) -> Iterator[BlocksAssigned]:
    """Blocks that requests get in this step. A resumed request gets its whole table anew."""
    for new in output.scheduled_new_reqs:
        yield BlocksAssigned(step=step, request=new.req_id, blocks=[list(group) for group in new.block_ids])
    cached = output.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            yield BlocksAssigned(step=step, request=request, blocks=[list(group) for group in blocks])


def states_at(end: int, tables: Sequence[Sequence[int]], recurrent: Mapping[int, int]) -> list[tuple[int, int]]:
    """(group, block) of every recurrent state that a step ending at `end` leaves on a block boundary.

    In align mode slot k of a recurrent group holds state only when a step ends at (k+1) blocks.
    `recurrent` is `recurrent_blocks` of the engine's cache groups.
    """
    return [(group, int(tables[group][end // size - 1])) for group, size in recurrent.items() if end % size == 0]


def computed_states(
    output: SchedulerOutput, record: BatchScheduled, recurrent: Mapping[int, int]
) -> Iterator[StateComputed]:
    """States that the recorded step leaves on a block boundary, from its own step ends and vLLM's block tables."""
    state = output.kv_connector_block_state
    for row in record.rows if state else ():
        end = row.start + row.scheduled
        tables = state.get_block_ids(row.request)
        if row.drafted or tables is None:
            continue
        if blocks := [list(place) for place in states_at(end, tables, recurrent)]:
            yield StateComputed(step=record.step, request=row.request, boundary=end, blocks=blocks)


def record_schedule(scheduler: Scheduler, stream: StreamWriter) -> None:
    """Record every batch that `scheduler` makes from now on, and before the first one how it is configured.

    The wrapper only reads the scheduler's output, after the fact.
    """
    schedule = scheduler.schedule
    step = 0

    def recorded(*args: object, **kwargs: object) -> SchedulerOutput:
        nonlocal step
        if step == 0:
            stream.append(_configured(scheduler))
        output = schedule(*args, **kwargs)
        record = batch(output, step, BatchSource.SCHEDULER)
        step += 1
        if record:
            stream.append(record)
        return output

    scheduler.schedule = recorded


def _configured(scheduler: Scheduler) -> SchedulerConfigured:
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    return SchedulerConfigured(
        block_size=scheduler.cache_config.block_size,
        saves_within_steps=any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs),
        engine_groups=engine_groups(scheduler.kv_cache_config),
    )
