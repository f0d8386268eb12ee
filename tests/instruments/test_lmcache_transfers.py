"""The adapter names the pages that LMCache's server moves, and follows its futures without changing them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from samestate.engines.releases import ReleaseError, ensure
from samestate.evidence.records import (
    EngineGroup,
    EntryKind,
    LoadCompleted,
    LoadSubmitted,
    Record,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
)
from samestate.evidence.stream import Defect, StreamWriter, read_stream
from samestate.instruments import lmcache_transfers
from samestate.instruments.lmcache_pages import WHOLE_PAST, Group, PagePlan
from samestate.instruments.lmcache_transfers import LMCacheAdapter, is_lmcache
from samestate.instruments.page_audit import Run

C = 16
ATTENTION, STATE = Group(0, C, WHOLE_PAST, recurrent=False), Group(1, C, C, recurrent=True)


def op(start: int, end: int, blocks: list[list[int]], skip: int = 0) -> Any:
    """LMCache's `LoadStoreOp`."""
    return SimpleNamespace(start=start, end=end, block_ids=blocks, skip_first_n_tokens=skip)


def plan(separate: bool | None, *groups: Group, chunk: int = C) -> PagePlan:
    return PagePlan(list(groups or (ATTENTION, STATE)), chunk, separate)


# A prompt of three blocks, computed in one step: only the last slot of the recurrent table holds a state.
ONE_STEP = op(0, 3 * C, [[4, 5, 6], [0, 0, 9]])


@pytest.mark.parametrize(
    ("separate", "state"),
    [
        (True, [Run(1, 2, [9])]),
        (False, [Run(1, 0, [0, 0, 9])]),
        (None, [Run(1, 2, [9])]),
    ],
)
def test_a_null_block_is_stored_only_in_one_object_group(separate: bool | None, state: list[Run]) -> None:
    assert plan(separate).saved(ONE_STEP) == [Run(0, 0, [4, 5, 6]), *state]


@pytest.mark.parametrize("separate", [True, False, None])
def test_a_load_fills_all_attention_and_the_last_state(separate: bool | None) -> None:
    assert plan(separate).loaded(ONE_STEP) == [Run(0, 0, [4, 5, 6]), Run(1, 2, [9])]


def test_one_object_group_also_overwrites_earlier_states_that_the_table_has() -> None:
    both = op(0, 2 * C, [[4, 5], [8, 9]])
    assert plan(False).loaded(both)[1:] == [Run(1, 0, [8, 9])]
    assert plan(True).loaded(both)[1:] == [Run(1, 1, [9])]


def test_blocks_of_a_local_hit_are_skipped() -> None:
    mixed = op(0, 4 * C, [[4, 5, 6, 7], [0, 0, 0, 9]], skip=2 * C)
    assert plan(True).loaded(mixed) == [Run(0, 2, [6, 7]), Run(1, 3, [9])]


def test_a_later_store_starts_where_the_last_ended() -> None:
    assert plan(True).saved(op(2 * C, 4 * C, [[6, 7], [0, 9]])) == [Run(0, 2, [6, 7]), Run(1, 3, [9])]


def test_states_with_a_gap_between_them_are_two_runs() -> None:
    assert plan(True).saved(op(0, 3 * C, [[4, 5, 6], [7, 0, 9]]))[1:] == [Run(1, 0, [7]), Run(1, 2, [9])]


def test_a_chunk_of_two_blocks_moves_the_last_state_of_each() -> None:
    long = op(0, 4 * C, [[4, 5, 6, 7], [0, 8, 0, 9]])
    assert plan(True, chunk=2 * C).saved(long)[1:] == [Run(1, 1, [8]), Run(1, 3, [9])]
    assert plan(True, chunk=2 * C).loaded(long)[1:] == [Run(1, 3, [9])]


def test_a_chunk_that_is_null_everywhere_is_left_out() -> None:
    assert plan(False).saved(op(0, 2 * C, [[0, 5], [0, 9]])) == [Run(0, 1, [5]), Run(1, 1, [9])]


def test_a_single_group_may_come_flat() -> None:
    flat = op(0, 2 * C, [4, 5])  # type: ignore[arg-type, list-item]
    assert plan(True, ATTENTION).loaded(flat) == [Run(0, 0, [4, 5])]


# --- futures ----------------------------------------------------------------------------------------


class Future:
    """As LMCache's: done when the server has answered."""

    def __init__(self) -> None:
        self.answered = False
        self.result_: bool | None = None
        self.error: Exception | None = None

    def answer(self, result: bool) -> None:
        self.answered, self.result_ = True, result

    def query(self) -> bool:
        if self.error:
            raise self.error
        return self.answered

    def wait(self, timeout: float | None = None) -> bool:
        return self.answered

    def result(self, timeout: float | None = None) -> bool:
        if not self.wait(timeout):
            raise TimeoutError
        assert self.result_ is not None
        return self.result_


class Worker:
    """LMCache's worker side: the calls that the connector makes, and the futures that it keeps."""

    engine_group_infos = (
        SimpleNamespace(engine_group_id=0, tokens_per_block=C, sw_size_tokens=WHOLE_PAST, recurrent_state=False),
        SimpleNamespace(engine_group_id=1, tokens_per_block=C, sw_size_tokens=C, recurrent_state=True),
    )
    lmcache_tokens_per_chunk = C
    is_kv_writer = True

    def __init__(self) -> None:
        self.is_healthy = True
        self.drops = False
        self.store_futures: dict[str, Future] = {}
        self.retrieve_futures: dict[str, tuple[Future, list[int]]] = {}
        self.inflight: list[Future] = []

    def submit_store_request(self, request_id: str, op: Any, event: object, cache_salt: str = "") -> None:
        if not self.is_healthy or self.drops:
            return
        self.store_futures[request_id] = Future()
        self.inflight.append(self.store_futures[request_id])

    def submit_retrieve_request(self, request_id: str, op: Any, event: object, cache_salt: str = "") -> None:
        if self.is_healthy and not self.drops:
            self.retrieve_futures[request_id] = (Future(), [])

    def get_finished(self, finished: set[str]) -> tuple[set[str], set[str]]:
        if not self.is_healthy:
            gone = set(self.store_futures), set(self.retrieve_futures)
            self.store_futures.clear()
            self.retrieve_futures.clear()
            return gone
        stored = {name for name, future in self.store_futures.items() if future.query() and future.result(60) in (0, 1)}
        loaded = {name for name, (future, _) in self.retrieve_futures.items() if future.query()}
        for name in stored:
            del self.store_futures[name]
        for name in loaded:
            del self.retrieve_futures[name]
        return stored, loaded

    def get_finished_with_lazy_offload(self) -> None:
        raise AssertionError("not asked for")


class Watched:
    """A worker, its adapter and what it wrote."""

    def __init__(self, folder: Path, delay_ms: int = 0) -> None:
        self.worker = Worker()
        self.path = folder / "worker-0.jsonl"
        self.stream = StreamWriter(self.path, "candidate", "worker-0")
        transfer = SimpleNamespace(get_from_extra_config=lambda key, default: True)
        inner = SimpleNamespace(worker_adapter=self.worker, _vllm_config=SimpleNamespace(kv_transfer_config=transfer))
        self.adapter = LMCacheAdapter(inner, None, 0, self.stream, self.guard, delay_ms)
        self.adapter.watch()

    def guard(self, observation: Any) -> None:
        observation()

    def records(self) -> list[Record]:
        self.stream.flush()
        lines = list(read_stream(self.path))
        records = [line.rec for line in lines if not isinstance(line, Defect)]
        return records[1:]

    def of(self, *kinds: type) -> list[Any]:
        return [record for record in self.records() if isinstance(record, kinds)]


@pytest.fixture(autouse=True)
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        EngineGroup(
            group=index,
            entry_kind=kind,
            spec="",
            tokens_per_block=C,
            layers=layers,
            page_bytes=100,
            effective_bytes=effective,
        )
        for index, (kind, layers, effective) in enumerate(
            [(EntryKind.ATTENTION, ["a"], 100), (EntryKind.RECURRENT, ["b", "c"], 10)]
        )
    ]
    monkeypatch.setattr(lmcache_transfers, "engine_groups", lambda config: groups)


def test_a_load_is_recorded_with_its_own_end_and_its_parts(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_retrieve_request("r", ONE_STEP, None, cache_salt="")
    assert seen.worker.get_finished(set()) == (set(), set())
    assert seen.of(LoadCompleted) == []
    seen.worker.retrieve_futures["r"][0].answer(True)
    assert seen.worker.get_finished(set()) == (set(), {"r"})
    (begun, done) = seen.of(LoadSubmitted, LoadCompleted)
    assert (begun.job, begun.request, begun.boundary) == (0, "r", 3 * C)
    assert [(p.group, p.first_block, p.pages, p.bytes, p.boundary) for p in begun.parts] == [
        (0, 0, 3, 300, 3 * C),
        (1, 2, 2, 20, 3 * C),
    ]
    assert (done.job, done.ok, done.bytes) == (0, True, 320)


def test_a_load_that_the_server_refuses_moved_nothing(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_retrieve_request("r", ONE_STEP, None)
    seen.worker.retrieve_futures["r"][0].answer(False)
    seen.worker.get_finished(set())
    assert [(done.ok, done.bytes) for done in seen.of(LoadCompleted)] == [(False, None)]


def test_two_stores_of_one_request_are_two_jobs_that_both_end(tmp_path: Path) -> None:
    """The worker keeps one future a request: the second takes the place of the first."""
    seen = Watched(tmp_path)
    for start in (0, C):
        seen.worker.submit_store_request("r", op(start, start + C, [[4], [9]]), None)
    first, second = seen.worker.inflight
    assert seen.worker.store_futures == {"r": second}
    second.answer(True)
    assert seen.worker.get_finished(set())[0] == {"r"}
    first.answer(True)
    seen.worker.get_finished(set())
    assert [s.job for s in seen.of(SaveSubmitted)] == [0, 1]
    assert [(s.job, s.ok, s.bytes) for s in seen.of(SaveCompleted)] == [(1, True, None), (0, True, None)]


def test_a_delayed_save_is_open_until_its_time_and_a_wait_lasts_as_long(tmp_path: Path) -> None:
    seen = Watched(tmp_path, delay_ms=200)
    begun = time.monotonic()
    seen.worker.submit_store_request("r", ONE_STEP, None)
    (future,) = seen.worker.inflight
    future.answer(True)
    assert seen.worker.get_finished(set()) == (set(), set()), "the server is done, the delay is not over"
    assert future.wait(timeout=60)
    assert time.monotonic() - begun >= 0.2
    assert seen.worker.get_finished(set())[0] == {"r"}
    kinds = [type(record) for record in seen.records()]
    assert kinds == [SaveSubmitted, SaveDelayed, SaveWaited, SaveCompleted]
    (waited,) = seen.of(SaveWaited)
    assert (waited.jobs, waited.timed_out) == ([0], False)
    assert waited.waited_ns > 0


def test_a_wait_that_gives_up_says_so(tmp_path: Path) -> None:
    seen = Watched(tmp_path, delay_ms=60_000)
    seen.worker.submit_store_request("r", ONE_STEP, None)
    (future,) = seen.worker.inflight
    assert not future.wait(timeout=0.01), "the server has not answered"
    future.answer(True)
    assert not future.wait(timeout=0.01), "the delay is not over"
    assert [waited.timed_out for waited in seen.of(SaveWaited)] == [True, True]
    assert seen.of(SaveCompleted) == []


def test_asking_for_a_result_that_is_there_is_no_wait(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_store_request("r", ONE_STEP, None)
    (future,) = seen.worker.inflight
    future.answer(True)
    seen.worker.get_finished(set())
    assert seen.of(SaveWaited) == []
    assert seen.of(SaveCompleted)[0].ok


def test_a_server_that_is_gone_completes_nothing(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_store_request("r", ONE_STEP, None)
    seen.worker.submit_retrieve_request("q", ONE_STEP, None)
    seen.worker.is_healthy = False
    assert seen.worker.get_finished(set()) == ({"r"}, {"q"}), "as without the audit"
    seen.worker.submit_store_request("later", ONE_STEP, None)
    assert [(type(one), one.ok) for one in seen.of(SaveCompleted, LoadCompleted)] == [
        (SaveCompleted, False),
        (LoadCompleted, False),
    ]
    assert len(seen.of(SaveSubmitted)) == 1, "what is dropped before it is handed over is no save"


def test_a_load_that_is_dropped_while_it_is_handed_over_failed(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.drops = True
    seen.worker.submit_retrieve_request("r", ONE_STEP, None)
    assert [done.ok for done in seen.of(LoadCompleted)] == [False]


def test_a_dropped_store_is_not_taken_for_the_one_before_it(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_store_request("r", op(0, C, [[4], [9]]), None)
    seen.worker.drops = True
    seen.worker.submit_store_request("r", op(C, 2 * C, [[5], [8]]), None)
    seen.worker.inflight[0].answer(True)
    seen.worker.get_finished(set())
    assert [(done.job, done.ok) for done in seen.of(SaveCompleted)] == [(1, False), (0, True)]


def test_an_error_of_the_server_reaches_the_worker_and_the_record(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.worker.submit_store_request("r", ONE_STEP, None)
    seen.worker.inflight[0].error = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="gone"):
        seen.worker.get_finished(set())
    assert [done.ok for done in seen.of(SaveCompleted)] == [False]


def test_only_lmcaches_own_connector_is_taken_for_it() -> None:
    ours = type("LMCacheMPConnector", (), {"__module__": lmcache_transfers.CONNECTOR[0]})
    in_tree = type("LMCacheMPConnector", (), {"__module__": "vllm.distributed"})
    assert is_lmcache(type("Host", (ours,), {})())
    assert not is_lmcache(in_tree())


# --- the futures of each release ----------------------------------------------------------------------

PROGRAM = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace

import torch
from lmcache.v1.multiprocess.futures import DeviceMessagingFuture, MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LMCacheDrivenTransferContext

from samestate.evidence.records import EngineGroup, EntryKind
from samestate.evidence.stream import StreamWriter
from samestate.instruments import lmcache_transfers

older = sys.argv[2] == "0.5.5"


class Server:
    def __init__(self):
        self.stores = []

    def register_kv_cache(self, *args):
        done = MessagingFuture()
        done.set_result(None)
        return done

    def store(self, *args):
        self.stores.append(MessagingFuture())
        return self.stores[-1]


server, caches = Server(), {"a": torch.zeros(4, 8)}
context = LMCacheDrivenTransferContext(*(() if older else (1, server)))
context.register(*((1,) if older else ()), caches, "model", 1, 1, *((server,) if older else ()), 0.5)


class Worker:
    engine_group_infos = (SimpleNamespace(engine_group_id=0, tokens_per_block=16, sw_size_tokens=-1),)
    lmcache_tokens_per_chunk, is_healthy, is_kv_writer = 16, True, True

    def __init__(self):
        self.store_futures, self.retrieve_futures = {}, {}

    def submit_store_request(self, request, op, event):
        instance = (1,) if older else ()
        self.store_futures[request] = context.submit_store(request, "key", *instance, caches, op.block_ids, event, 1)

    def submit_retrieve_request(self):
        pass

    def get_finished(self, finished):
        for request, future in list(self.store_futures.items()):
            if future.query():
                assert future.result(timeout=60) is True
                del self.store_futures[request]

    def get_finished_with_lazy_offload(self):
        pass


group = EngineGroup(group=0, entry_kind=EntryKind.ATTENTION, spec="", tokens_per_block=16, layers=["a"], page_bytes=8,
    effective_bytes=8)
lmcache_transfers.engine_groups = lambda config: [group]
worker, stream = Worker(), StreamWriter(Path(sys.argv[1]), "candidate", "worker-0")
transfer = SimpleNamespace(get_from_extra_config=lambda key, default: True)
inner = SimpleNamespace(worker_adapter=worker, _vllm_config=SimpleNamespace(kv_transfer_config=transfer))
lmcache_transfers.LMCacheAdapter(inner, None, 0, stream, lambda observation: observation(), 0).watch()
op = SimpleNamespace(start=0, end=16, block_ids=[[1]], skip_first_n_tokens=0)

worker.submit_store_request("answered", op, context.create_recorded_event())
assert isinstance(worker.store_futures["answered"], DeviceMessagingFuture)
answer = threading.Timer(0.05, lambda: server.stores[0].set_result((b"", True)))
answer.start()
context.flush_inflight_stores()
answer.join()
worker.get_finished(set())
assert not worker.store_futures
worker.submit_store_request("never answered", op, context.create_recorded_event())
context.flush_inflight_stores()
stream.close()
"""


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.parametrize(("version", "waits"), [("0.5.5", []), ("0.5.6", [([0], False), ([1], True)])])
def test_before_a_preemption_only_the_newer_release_waits_and_goes_on_when_it_times_out(
    version: str, waits: list[tuple[list[int], bool]], tmp_path: Path
) -> None:
    """With the release's own futures and transfer context; the server is a stand-in."""
    try:
        packages = ensure("lmcache", version)
    except ReleaseError as error:
        pytest.skip(str(error))
    path = tmp_path / "worker-0.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), version],
        env=os.environ | {"PYTHONPATH": str(packages), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records = [line.rec for line in read_stream(path) if not isinstance(line, Defect)]
    assert [one.job for one in records if isinstance(one, SaveSubmitted)] == [0, 1]
    assert [(one.jobs, one.timed_out) for one in records if isinstance(one, SaveWaited)] == waits
    assert [(one.job, one.ok) for one in records if isinstance(one, SaveCompleted)] == [(0, True)]
