"""Batches are recorded as they were scheduled, by both sources alike."""

from __future__ import annotations

from types import SimpleNamespace

from samestate.evidence.records import BatchScheduled, BatchSource, Record, SchedulerConfigured
from samestate.instruments.schedule import batch, record_schedule


def output(**changes: object) -> SimpleNamespace:
    """As much of vLLM's `SchedulerOutput` as a batch record needs."""
    plain = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=1792)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[64]),
        num_scheduled_tokens={"a": 1792, "b": 4},
        scheduled_spec_decode_tokens={"b": [7, 8, 9]},
        preempted_req_ids=None,
    )
    vars(plain).update(changes)
    return plain


def test_new_and_running_requests_with_drafts() -> None:
    record = batch(output(), 5, BatchSource.CONNECTOR)
    assert record is not None
    assert [(r.request, r.start, r.scheduled, r.drafted) for r in record.rows] == [
        ("a", 1792, 1792, 0),
        ("b", 64, 4, 3),
    ]
    assert (record.step, record.source, record.preempted) == (5, BatchSource.CONNECTOR, [])


def test_an_empty_step_is_no_batch_but_a_preemption_is() -> None:
    nothing = {"scheduled_new_reqs": [], "num_scheduled_tokens": {}}
    assert batch(output(**nothing), 0, BatchSource.SCHEDULER) is None
    record = batch(output(**nothing, preempted_req_ids={"c"}), 0, BatchSource.SCHEDULER)
    assert record is not None
    assert record.preempted == ["c"]


def test_the_scheduler_is_only_read() -> None:
    made = [output(), output(scheduled_new_reqs=[], num_scheduled_tokens={})]
    scheduler = SimpleNamespace(
        schedule=iter(made).__next__,
        cache_config=SimpleNamespace(block_size=128),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
    )
    appended: list[Record] = []
    record_schedule(scheduler, SimpleNamespace(append=appended.append))
    assert [scheduler.schedule(), scheduler.schedule()] == made
    configured, only = appended
    assert isinstance(configured, SchedulerConfigured) and configured.block_size == 128
    assert isinstance(only, BatchScheduled) and only.step == 0
