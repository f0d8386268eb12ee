"""Pages beyond the memory tier: a secondary tier of vLLM's over any store.

vLLM's tiering (vllm/v1/kv_offload/tiering) asks, page by page, what this tier has, and orders pages moved between it
and the rows of the memory tier. What vLLM's scheduler calls here returns at once; stores are called by threads.
A store that is slow, full, gone or damaged costs hits and never answers:

* A look-up that is not answered within `time_limit_s` is a miss; so is one while reading is paused (`Breaker`).
* Reading and writing are paused apart: a full disk is read from, and one that cannot be read may be written to.
* A page is read into memory of its own, verified, and only then copied into its row, under a lock. A job that stands
  still for `time_limit_s` is given up: it is reported as failed, and whatever arrives later goes nowhere.
* A damaged or vanished page takes its family with it: the other pages of the boundary are not served either, and the
  engine computes them again.

Requests with an adapter are left out: vLLM's keys name an adapter by name and path, and a path may hold another
adapter after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from samestate.cache import tier_metrics as metric
from samestate.cache.base import PageStore, StoreError
from samestate.cache.breaker import Breaker
from samestate.cache.layout import Span
from samestate.cache.tier_jobs import Job, OpenJobs, prefix_of
from samestate.cache.tier_lookups import Lookups
from samestate.cache.tier_metrics import Counts
from samestate.cache.tier_opening import OpenedStore, OpenStore
from samestate.cache.tier_pages import RowPages, page_key
from samestate.cache.tier_refill import Refill, refills
from samestate.cache.tier_use import Use

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import ParentManager

logger = init_logger(__name__)

TIME_LIMIT_S = 5.0
NO_JOB = -1


class StoreTier(SecondaryTierManager):
    """A secondary tier over a `PageStore`. Constructed by vLLM; opened by the connector once it knows the layout.

    Args:
        url: Of the place, for messages; a store itself is opened through `open`.
        read_threads: Threads that load.
        write_threads: Threads that save.
        time_limit_s: The longest that a look-up may take, and that a load or a save may stand still.

    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        url: str,
        read_threads: int = 4,
        write_threads: int = 2,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.url = url
        self.counts = Counts()
        self._opened = OpenedStore(url)
        self.use = Use(url, self._opened, self.counts)
        self._pages = RowPages(primary_kv_view, self.counts)
        self._lookups = Lookups(tier_type, self._opened, self.use, time_limit_s)
        self._pool = DualQueueThreadPool(read_threads, write_threads, thread_name_prefix=f"samestate_{tier_type}")
        self._jobs = OpenJobs(time_limit_s, self._stood_still)
        self.refill = Refill(self._jobs.saving)
        self._refilling = NO_JOB
        """The last job that wrote again what the store had lost."""

    def open(self, open_store: OpenStore, spans: Mapping[int, Sequence[Span]], label: str, adapted: set[str]) -> None:
        """Begin to open the store, and return at once.

        Args:
            spans: By group, the bytes of a row that are a page's.
            label: The tier's, in metrics.
            adapted: Requests with an adapter: the caller adds them, the tier removes those that are over.

        """
        self.counts.tier = label
        self._pages.spans = spans
        self.use.adapted = adapted
        self._opened.open(open_store)

    def wait_opened(self, seconds: float) -> bool:
        """Wait until the store is open or refused; whether it is open. For tests and tools."""
        return self._opened.wait(seconds)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._lookups.answer(key, req_context)

    # --- jobs -----------------------------------------------------------------------------------

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata, load=True)
        if tasks := self._tasks(job, self._pages.load):
            self._pool.enqueue_load(job.id, len(tasks), tasks)

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata, load=False)
        if tasks := self._tasks(job, self._pages.save):
            self._pool.enqueue_store(job.id, len(tasks), tasks)

    def _begin(self, ordered: TransferJob, *, load: bool) -> Job:
        prefix = () if load else prefix_of(ordered.req_context)
        rows = [int(row) for row in ordered.chunk_ids]
        job = Job(ordered.job_id, list(ordered.keys), rows, load=load, prefix=prefix)
        self._jobs.add(job)
        reason = self.use.out_of_use(ordered.req_context, self._breaker(job)) or (
            "unopened" if self._opened.store is None else None
        )
        if reason is not None or not job.keys:
            job.give_up(reason or "")
        return job

    def _breaker(self, job: Job) -> Breaker:
        return self.use.reading if job.load else self.use.writing

    def _tasks(self, job: Job, move: Callable[[PageStore, Job, int], str | None]) -> list[Callable[[], None]]:
        return [] if job.over else [self._task(job, index, move) for index in range(len(job.keys))]

    def _task(self, job: Job, index: int, move: Callable[[PageStore, Job, int], str | None]) -> Callable[[], None]:
        """Move one page of a job and say that it is done, whatever happens."""

        breaker = self._breaker(job)

        def task() -> None:
            problem: str | None = "failed"
            try:
                store = self._opened.store
                if store is None or job.over:
                    problem = "unopened"
                elif breaker.paused:
                    problem = "paused"
                else:
                    problem = move(store, job, index)
                    breaker.succeeded()
            except StoreError as error:
                self.use.failed(breaker, str(error))
            except Exception:
                logger.exception("%s: a page could not be moved", self.url)
            finally:
                self._jobs.done(job, index, problem)

        return task

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._pool.get_finished()  # `Job` says when one is over.
        return [self._loaded(job) if job.load else self._saved(job) for job in self._jobs.take_over()]

    def _stood_still(self, job: Job) -> None:
        self.use.failed(self._breaker(job), "a job stood still")

    def _loaded(self, job: Job) -> JobResult:
        problems = job.problems()
        for problem in problems.values():
            self.counts.add(metric.MISSES, 1, problem)
        broken = {get_offload_block_hash(key) for key in problems}
        missed = [key for key in job.keys if get_offload_block_hash(key) in broken]
        self._lookups.mark_miss(missed)
        good = tuple(key for key in job.keys if get_offload_block_hash(key) not in broken)
        return JobResult(
            job.id,
            success=not problems,
            successful_keys=good or None,
            transfer_time=job.seconds,
            transfer_bytes=job.moved,
        )

    def _saved(self, job: Job) -> JobResult:
        problems = job.problems()
        for problem in problems.values():
            self.counts.add(metric.UNSTORED_PAGES, 1, problem)
        self._lookups.mark_present(key for key in job.keys if key not in problems)
        return JobResult(job.id, success=not problems, transfer_time=job.seconds, transfer_bytes=job.moved)

    @override
    def drain_jobs(self) -> None:
        self._jobs.drain()

    # --- the engine's life ----------------------------------------------------------------------

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._touch(req_context)
        self.use.adapted.discard(req_context.req_id)

    def _touch(self, req_context: ReqContext) -> None:
        """Tell the store, in a thread, that the request's prefix was used, however much of it came from elsewhere.

        What it lacks of it is written again, where memory has it.
        """
        prefix = prefix_of(req_context)
        keys = [page_key(key) for key in prefix]
        store = self._opened.store
        if not keys or store is None or refills(req_context) or self.use.out_of_use(req_context, self.use.writing):
            return

        def touch() -> None:
            try:
                store.touch(keys)
                if store.cheap_to_ask:
                    self.refill.lacks(prefix, store.contains(keys))
            except StoreError as error:
                self.use.failed(self.use.writing, str(error))

        self._pool.enqueue_store(NO_JOB, 1, [touch])

    @override
    def serve_external_requests(self, parent: ParentManager) -> None:
        if self._refilling in self._jobs or self._opened.store is None or self.use.writing.paused:
            return
        job = self.refill.order(parent)
        if job is not None:
            self._refilling = job.job_id
            self.submit_store(job)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def forget(self, seconds: float) -> bool:
        """Remove every page of this engine's namespace, whoever wrote it; whether that was done in time.

        Jobs are over by now, but a write of one that was given up may still hang, and its page come later.
        """
        store = self._opened.store
        if store is None:
            return self._opened.refused
        self.refill.clear()
        done = threading.Event()

        def remove() -> None:
            if self._pages.writing.wait(seconds):
                store.delete([page.key for page in store.scan()])
                done.set()

        self._pool.enqueue_store(NO_JOB, 1, [remove])
        return done.wait(seconds)

    @override
    def shutdown(self) -> None:
        self.drain_jobs()
        self._lookups.shutdown()
        self._pool.shutdown(wait=False)
        self._pages.let_go()
        self._opened.close()

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, object]) -> dict[str, OffloadingMetricMetadata]:
        return metric.definitions()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        self.counts.gauge(metric.PAUSED, float(self.use.reading.paused), metric.READS)
        self.counts.gauge(metric.PAUSED, float(self.use.writing.paused), metric.WRITES)
        return self.counts.take()
