"""The simulated engine: right when it behaves, visibly wrong when it does not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestate.engines.base import Ask, EngineError, EngineSpec, Generation
from samestate.engines.sim import EOS, Conduct, SimEngine, chunk_end
from samestate.evidence import records as r
from samestate.evidence.stream import Defect, read_stream

C = 16


class DropsRankLoad(Conduct):
    """Rank 1 reports its loads as done and moves nothing."""

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return None if rank == 1 else page


class LosesAttention(Conduct):
    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return None if group == 0 else page


class SwapsShard(Conduct):
    """Rank 1 gets the state of rank 0."""

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        if group == 1 and rank == 0:
            self.first = page
        return self.first if group == 1 else page


class FaultyEngine(SimEngine):
    conducts: ClassVar = {
        **SimEngine.conducts,
        "drop-rank-load": DropsRankLoad,
        "lose-attention": LosesAttention,
        "swap-shard": SwapsShard,
    }


def spec_of(folder: Path, *, fault: str | None = None, connector: str = "native", **overrides: Any) -> EngineSpec:
    folder.mkdir(parents=True, exist_ok=True)
    spec = EngineSpec(
        arm="candidate",
        model=folder,
        settings={"block_size": C, "max_model_len": 512, "dtype": "bfloat16", **overrides},
        serve_args=[],
        connector=connector,
        external_cache_bytes=1 << 20,
        audit_level="off" if connector == "none" else "metadata",
        save_delay_ms=0,
        fault=fault,
        stream_dir=folder,
        log_path=folder / "engine.log",
    )
    return spec


@contextmanager
def running(spec: EngineSpec) -> Iterator[FaultyEngine]:
    engine = FaultyEngine(spec)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(3, 512) for i in range(n)]


def generate(engine: SimEngine, tokens: list[int], name: str = "r", output: int = 8) -> Generation:
    return engine.generate_one(name, tokens, output, 42, True)


def cold_and_reload(engine: SimEngine, n: int) -> tuple[Generation, Generation]:
    cold = generate(engine, prompt(n), "cold")
    generate(engine, prompt(n, seed=1), "other")
    engine.reset_local_cache()
    return cold, generate(engine, prompt(n), "reload")


def read(folder: Path, process: str) -> list[r.AnyRecord]:
    lines = list(read_stream(folder / f"{process}.jsonl"))
    assert not [line for line in lines if isinstance(line, Defect)]
    return [line.rec for line in lines if not isinstance(line, Defect)]


def of_request(records: list[r.AnyRecord], request: str) -> list[r.AnyRecord]:
    return [
        record
        for record in records
        if getattr(record, "request", None) == request
        or (isinstance(record, r.BatchScheduled) and record.rows[0].request == request)
    ]


@pytest.mark.parametrize("n", [2 * C - 1, 2 * C, 2 * C + 1, 2 * C + 3, 3 * C - 1, 3 * C, 3 * C + 1])
def test_strict_reload_equals_cold_and_loads_the_last_checkpoint_before_the_last_token(tmp_path: Path, n: int) -> None:
    with running(spec_of(tmp_path)) as engine:
        cold, reload = cold_and_reload(engine, n)
    assert reload.token_ids == cold.token_ids
    assert reload.logprobs == cold.logprobs
    assert (cold.cached_tokens, reload.cached_tokens) == (0, (n - 1) // C * C)


@pytest.mark.parametrize("n", [2 * C - 1, 2 * C + 1, 3 * C - 1, 3 * C + 1])
def test_full_lookup_does_no_harm_beside_a_boundary(tmp_path: Path, n: int) -> None:
    with running(spec_of(tmp_path, fault="full-lookup")) as engine:
        cold, reload = cold_and_reload(engine, n)
    assert reload.token_ids == cold.token_ids


@pytest.mark.parametrize("n", [2 * C, 3 * C])
def test_full_lookup_on_a_boundary_applies_the_last_token_twice(tmp_path: Path, n: int) -> None:
    with running(spec_of(tmp_path, fault="full-lookup")) as engine:
        cold, reload = cold_and_reload(engine, n)
    assert reload.token_ids[0] != cold.token_ids[0]
    seen = of_request(read(tmp_path, "scheduler"), reload.request)
    lookup, allocated = seen[:2]
    assert isinstance(lookup, r.Lookup) and lookup.matched_tokens == n
    assert isinstance(allocated, r.Allocated) and allocated.external_tokens == n
    first = next(record for record in seen if isinstance(record, r.BatchScheduled)).rows[0]
    assert (first.start, first.scheduled) == (n - 1, 1)
    (load,) = [record for record in read(tmp_path, "worker-0") if isinstance(record, r.LoadSubmitted)]
    assert load.boundary == n


@pytest.mark.parametrize("fault", ["drop-rank-load", "lose-attention", "swap-shard"])
def test_a_page_that_is_missing_or_another_ranks_changes_the_output(tmp_path: Path, fault: str) -> None:
    with running(spec_of(tmp_path, fault=fault, tensor_parallel_size=2)) as engine:
        cold, reload = cold_and_reload(engine, 2 * C + 1)
    assert reload.token_ids != cold.token_ids


def test_records_of_a_reload_come_in_the_order_of_an_asynchronous_load(tmp_path: Path) -> None:
    n = 2 * C + 3
    with running(spec_of(tmp_path, tensor_parallel_size=2)) as engine:
        _, reload = cold_and_reload(engine, n)
    seen = of_request(read(tmp_path, "scheduler"), reload.request)
    assert [type(record) for record in seen[:4]] == [r.Lookup, r.Allocated, r.BatchScheduled, r.BatchScheduled]
    assert isinstance(seen[-1], r.RequestFinished)
    lines = [line for line in read_stream(tmp_path / "scheduler.jsonl") if not isinstance(line, Defect)]
    first_batch = next(line.t_ns for line in lines if of_request([line.rec], reload.request)[:1] == [seen[2]])
    for rank in range(2):
        worker = [line for line in read_stream(tmp_path / f"worker-{rank}.jsonl") if not isinstance(line, Defect)]
        (submitted,) = [line for line in worker if isinstance(line.rec, r.LoadSubmitted)]
        (completed,) = [line for line in worker if isinstance(line.rec, r.LoadCompleted)]
        assert submitted.n < completed.n and completed.t_ns < first_batch
        load, done = submitted.rec, completed.rec
        assert isinstance(load, r.LoadSubmitted) and isinstance(done, r.LoadCompleted)
        assert (load.rank, load.request, load.boundary, done.ok) == (rank, reload.request, 2 * C, True)
        assert done.bytes == sum(part.bytes for part in load.parts) == 2 * C * 2 + 2 * 16
        assert {part.boundary for part in load.parts} == {2 * C}


def test_both_sources_see_the_same_batches_and_a_control_has_only_the_schedule(tmp_path: Path) -> None:
    with running(spec_of(tmp_path / "native")) as engine:
        native = generate(engine, prompt(3 * C + 1))
    with running(spec_of(tmp_path / "none", connector="none")) as engine:
        control = generate(engine, prompt(3 * C + 1))
    assert control.token_ids == native.token_ids
    batches = [rec for rec in read(tmp_path / "native", "scheduler") if isinstance(rec, r.BatchScheduled)]
    by_source = {source: [b.rows for b in batches if b.source is source] for source in r.BatchSource}
    assert by_source[r.BatchSource.CONNECTOR] == by_source[r.BatchSource.SCHEDULER]
    alone = [rec for rec in read(tmp_path / "none", "scheduler") if isinstance(rec, r.BatchScheduled)]
    assert [b.rows for b in alone] == by_source[r.BatchSource.SCHEDULER]
    assert {type(rec) for rec in read(tmp_path / "none", "scheduler")} == {
        r.StreamOpened,
        r.EngineStarted,
        r.SchedulerConfigured,
        r.BatchScheduled,
        r.EngineStopped,
        r.StreamClosed,
    }
    assert not (tmp_path / "none" / "worker-0.jsonl").exists()


def test_every_save_completes_and_states_are_saved_only_where_a_chunk_ended(tmp_path: Path) -> None:
    with running(spec_of(tmp_path)) as engine:
        generate(engine, prompt(3 * C), output=1)
    worker = read(tmp_path, "worker-0")
    saves = [rec for rec in worker if isinstance(rec, r.SaveSubmitted)]
    assert [rec.job for rec in saves] == [rec.job for rec in worker if isinstance(rec, r.SaveCompleted)]
    states = [part.boundary for rec in saves for part in rec.parts if part.group == 1]
    assert states == [2 * C, 3 * C]  # [0, 2C) ran as one chunk, so no state at C exists
    attention = [(part.first_block, part.pages) for rec in saves for part in rec.parts if part.group == 0]
    assert attention == [(0, 2), (2, 1)]


def test_the_local_cache_hits_without_a_reset_and_counters_tell_the_two_caches_apart(tmp_path: Path) -> None:
    n = 2 * C + 1
    with running(spec_of(tmp_path)) as engine:
        cold = generate(engine, prompt(n))
        local = generate(engine, prompt(n))
        before = engine.counters().values
        engine.reset_local_cache()
        external = generate(engine, prompt(n))
        after = engine.counters()
    assert cold.token_ids == local.token_ids == external.token_ids
    assert (local.cached_tokens, external.cached_tokens) == (2 * C, 2 * C)
    assert before[r.LOCAL_HITS] == 2 * C and before[r.EXTERNAL_HITS] == 0
    assert after.values[r.LOCAL_HITS] == 2 * C and after.values[r.EXTERNAL_HITS] == 2 * C
    assert after.values[r.PREEMPTIONS] == 0 and after.missing == []
    assert set(after.values) == set(r.COUNTERS)


def test_an_external_tier_that_is_too_small_misses_and_stays_right(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)._replace(external_cache_bytes=2 * C)
    with running(spec) as engine:
        cold, reload = cold_and_reload(engine, 2 * C + 1)
    assert reload == cold._replace(request=reload.request)


def test_a_batch_shares_steps_and_answers_as_each_does_alone(tmp_path: Path) -> None:
    prompts = [prompt(2 * C + 1), prompt(C + 3, seed=1), prompt(3 * C, seed=2)]
    with running(spec_of(tmp_path / "alone")) as engine:
        alone = [generate(engine, ids).token_ids for ids in prompts]
    with running(spec_of(tmp_path / "batch", max_num_batched_tokens=4 * C)) as engine:
        together = engine.generate([Ask(f"r{index}", ids) for index, ids in enumerate(prompts)], 8, 42, True)
    assert [answer.token_ids for answer in together] == alone
    batches = [rec for rec in read(tmp_path / "batch", "scheduler") if isinstance(rec, r.BatchScheduled)]
    assert max(len(batch.rows) for batch in batches) == 3
    assert all(sum(row.scheduled for row in batch.rows) <= 4 * C for batch in batches)


def test_who_has_no_room_is_preempted_and_computed_again(tmp_path: Path) -> None:
    prompts = [prompt(2 * C - 2), prompt(2 * C - 2, seed=1)]
    with running(spec_of(tmp_path / "alone")) as engine:
        alone = [generate(engine, ids).token_ids for ids in prompts]
    with running(spec_of(tmp_path / "batch", num_gpu_blocks_override=14)) as engine:
        together = engine.generate([Ask(f"r{index}", ids) for index, ids in enumerate(prompts)], 8, 42, True)
        preemptions = engine.counters().values[r.PREEMPTIONS]
    assert [answer.token_ids for answer in together] == alone
    batches = [rec for rec in read(tmp_path / "batch", "scheduler") if isinstance(rec, r.BatchScheduled)]
    assert {name for batch in batches for name in batch.preempted} == {together[1].request}
    assert preemptions == 1


def test_drafts_change_the_steps_and_not_the_answer(tmp_path: Path) -> None:
    with running(spec_of(tmp_path / "plain")) as engine:
        plain = generate(engine, prompt(2 * C + 1), output=20)
    with running(spec_of(tmp_path / "drafts", num_speculative_tokens=3)) as engine:
        drafted = generate(engine, prompt(2 * C + 1), output=20)
    assert drafted.token_ids == plain.token_ids
    rows = [
        rec.rows[0]
        for rec in read(tmp_path / "drafts", "scheduler")
        if isinstance(rec, r.BatchScheduled) and rec.source is r.BatchSource.SCHEDULER
    ]
    advances = {after.start - row.start for row, after in pairwise(rows) if row.drafted == 3}
    assert len(advances) > 1, "some drafts are accepted and some are not"
    assert 1 <= min(advances) < max(advances) <= 4


def test_a_fault_acts_while_it_is_armed_and_not_after(tmp_path: Path) -> None:
    with running(spec_of(tmp_path)) as engine:
        cold = generate(engine, prompt(2 * C + 1)).token_ids
        answers = []
        for fault in ("lose-attention", None):
            engine.reset_local_cache()
            engine.arm_fault(fault)
            answers.append(generate(engine, prompt(2 * C + 1)).token_ids)
        with pytest.raises(EngineError, match="has only"):
            engine.arm_fault("no-such")
    assert answers[0] != cold and answers[1] == cold
    armed = [rec.fault for rec in read(tmp_path, "scheduler") if isinstance(rec, r.FaultArmed)]
    assert armed == ["lose-attention"]


def test_early_tokens_are_remembered(tmp_path: Path) -> None:
    tokens = prompt(3 * C)
    with running(spec_of(tmp_path, connector="none")) as engine:
        before = generate(engine, tokens)
        after = generate(engine, [tokens[0] ^ 1, *tokens[1:]])
    assert before.token_ids != after.token_ids


def test_output_has_no_special_ids_and_eos_stops_only_when_it_is_forced(tmp_path: Path) -> None:
    class ForcesEos(SimEngine):
        def sample(self, tables: tuple[list[int], ...], computed: int) -> tuple[int, float]:
            return (EOS, 0.0) if computed == C + 2 else super().sample(tables, computed)

    with running(spec_of(tmp_path / "free", connector="none")) as engine:
        assert min(generate(engine, prompt(C), output=64).token_ids) > EOS
    engine = ForcesEos(spec_of(tmp_path / "forced", connector="none"))
    engine.start()
    stopped = engine.generate_one("a", prompt(C), 8, 42, False)
    ignored = engine.generate_one("b", prompt(C), 8, 42, True)
    engine.close()
    assert (stopped.finish_reason, len(stopped.token_ids), stopped.token_ids[-1]) == ("stop", 3, EOS)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 8)


def test_streams_close_in_order_and_closing_twice_is_safe(tmp_path: Path) -> None:
    engine = SimEngine(spec_of(tmp_path))
    engine.close()
    started = engine.start()
    engine.close()
    engine.close()
    assert [type(rec) for rec in read(tmp_path, "scheduler")] == [
        r.StreamOpened,
        r.EngineStarted,
        r.SchedulerConfigured,
        r.EngineStopped,
        r.StreamClosed,
    ]
    assert [type(rec) for rec in read(tmp_path, "worker-0")] == [r.StreamOpened, r.RankRegistered, r.StreamClosed]
    assert (started.engine, started.checkpoint_interval, started.tensor_parallel) == ("sim", C, 1)
    with pytest.raises(EngineError, match="not running"):
        generate(engine, prompt(C))


def test_serve_arguments_win(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)._replace(serve_args=["--block-size", "32", "--tensor-parallel-size=2", "--enforce-eager"])
    with running(spec) as engine:
        assert engine.encode("é") == [3 + byte for byte in "é".encode()]
    started = next(rec for rec in read(tmp_path, "scheduler") if isinstance(rec, r.EngineStarted))
    assert (started.checkpoint_interval, started.tensor_parallel) == (32, 2)


@pytest.mark.parametrize(
    ("fault", "connector", "overrides", "message"),
    [
        ("no-such", "native", {}, "has only .*full-lookup"),
        ("full-lookup", "none", {}, "acts in the connector"),
        (None, "native", {"block_size": 0}, "block_size"),
        (None, "native", {"block_size": True}, "block_size"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, fault: str | None, connector: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        SimEngine(spec_of(tmp_path, fault=fault, connector=connector, **overrides)).start()


def test_a_prompt_without_room_and_a_full_pool_are_refused(tmp_path: Path) -> None:
    with running(spec_of(tmp_path / "room")) as engine, pytest.raises(EngineError, match="max_model_len"):
        generate(engine, prompt(510))
    with (
        running(spec_of(tmp_path / "pool", num_gpu_blocks_override=4)) as engine,
        pytest.raises(EngineError, match="num_gpu_blocks_override"),
    ):
        generate(engine, prompt(4 * C))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    block=st.integers(1, 24),
    n=st.integers(1, 120),
    limit=st.integers(1, 130),
    ranks=st.integers(1, 2),
    output=st.integers(1, 30),
)
def test_strict_reload_equals_cold_for_any_interval_length_and_chunk_limit(
    tmp_path_factory: pytest.TempPathFactory, block: int, n: int, limit: int, ranks: int, output: int
) -> None:
    spec = spec_of(
        tmp_path_factory.mktemp("sim"), block_size=block, max_num_batched_tokens=limit, tensor_parallel_size=ranks
    )
    with running(spec) as engine:
        cold = generate(engine, prompt(n), output=output)
        generate(engine, prompt(n, seed=1), output=output)
        engine.reset_local_cache()
        reload = generate(engine, prompt(n), output=output)
        local = generate(engine, prompt(n), output=output)
    assert reload.token_ids == cold.token_ids == local.token_ids
    assert reload.cached_tokens == local.cached_tokens == (n - 1) // block * block


def test_chunks_of_the_boundary_lengths_are_those_of_vllm() -> None:
    def chunks(n: int) -> list[int]:
        ends = [0]
        while ends[-1] < n:
            ends.append(chunk_end(ends[-1], n, 1792, 8192))
        return ends[1:]

    assert {n: chunks(n) for n in (3583, 3584, 3585, 5375, 5376, 5377)} == {
        3583: [1792, 3583],
        3584: [1792, 3584],
        3585: [3584, 3585],
        5375: [3584, 5375],
        5376: [3584, 5376],
        5377: [5376, 5377],
    }


@pytest.mark.deep
@pytest.mark.vllm
def test_chunks_are_those_of_vllm() -> None:
    scheduler = pytest.importorskip("vllm.v1.core.sched.scheduler").Scheduler
    rng = random.Random(0)
    for _ in range(2000):
        block, limit, prompt_tokens = rng.randint(1, 40), rng.randint(1, 100), rng.randint(1, 200)
        start, drops = rng.randrange(prompt_tokens), rng.random() < 0.5
        theirs = scheduler._mamba_block_aligned_split(
            SimpleNamespace(
                cache_config=SimpleNamespace(block_size=block),
                block_size=block,
                hash_block_size=block,
                mamba_partial_cache_hit=False,
                mamba_shared_prefix_checkpoint=False,
                mamba_has_prefill_checkpoint_blocks=False,
                mamba_prefill_checkpoint_alignment=None,
                use_eagle_block_drop=drops,
                num_hash_lookahead_tokens=0,
                max_num_scheduled_tokens=limit,
                scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            ),
            SimpleNamespace(
                num_computed_tokens=start,
                num_tokens=prompt_tokens,
                num_prompt_tokens=prompt_tokens,
                shared_prefix_boundary=0,
            ),
            min(prompt_tokens - start, limit),
        )
        case = (start, prompt_tokens, block, limit)
        assert chunk_end(*case, drops_last=drops) == start + theirs, (case, drops)
