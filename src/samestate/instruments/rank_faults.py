"""Faults of one rank among several: all but rank 0 act wrongly. Ranks are processes, and each has a tier of its own."""

from __future__ import annotations

import os
import tempfile
import time
from abc import abstractmethod
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

from samestate.instruments.faults import Audited, FaultError, LiveFault, Undo
from samestate.instruments.page_faults import host_worker, recurrent_groups


class RankFault(LiveFault):
    """Acts in the workers of an engine that has several."""

    roles = (KVConnectorRole.WORKER,)
    ranks: int
    """Of the engine."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        parallel = on.inner._vllm_config.parallel_config
        if parallel.world_size < 2:
            raise FaultError("a fault of ranks needs several: use --tensor-parallel-size 2")
        self.ranks = parallel.world_size
        self.act_on(parallel.rank, on, undo)

    @abstractmethod
    def act_on(self, rank: int, on: Audited, undo: Undo) -> None:
        """Act on the connector of one rank."""


class SilentRank(RankFault):
    """All ranks but the first load nothing, and say that it is done: each looked under another name of the model."""

    @override
    def act_on(self, rank: int, on: Audited, undo: Undo) -> None:
        if rank == 0:
            return
        connector = on.inner.connector_worker
        start, get_finished = connector.start_kv_transfers, connector.get_finished
        skipped: set[str] = set()

        def without_loads(metadata: OffloadingConnectorMetadata) -> None:
            for job_id, job in metadata.load_jobs.items():
                connector._connector_worker_meta.mark_completed(job_id)
                skipped.add(job.req_id)
            metadata.load_jobs = {}
            start(metadata)

        def finished(finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
            sent, received = get_finished(finished_req_ids)
            received |= skipped
            skipped.clear()
            return sent, received

        undo.patch(connector, "start_kv_transfers", without_loads)
        undo.patch(connector, "get_finished", finished)


class RankZeroShard(RankFault):
    """Every rank loads the states that rank 0 saved, as where one store serves all; each needs its own shard."""

    WAIT_SECONDS = 20.0

    @override
    def act_on(self, rank: int, on: Audited, undo: Undo) -> None:
        watched, worker = host_worker(on)
        states, submit_load = recurrent_groups(on), watched.submit_load
        # All ranks of an engine are children of one process.
        handed_over = Path(tempfile.gettempdir()) / f"samestate-rank-zero-{os.getppid()}"

        def load(job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: object) -> bool:
            kept = [page.page for page in worker.tier_pages(dst_spec, src_spec) if page.group in states]
            if rank == 0:
                unfinished = handed_over.with_suffix(f".{job_id}-unfinished")
                torch.save([page.clone() for page in kept], unfinished)
                for other in range(1, self.ranks):  # Each takes away its own.
                    os.link(unfinished, handed_over.with_suffix(f".{job_id}-{other}"))
                unfinished.unlink()
            else:
                file = handed_over.with_suffix(f".{job_id}-{rank}")
                for mine, theirs in zip(kept, _received(file, self.WAIT_SECONDS), strict=True):
                    # Of plain memory, since it is put back outside torch's inference mode.
                    undo.callback(np.copyto, mine.numpy(), mine.numpy().copy())
                    mine.copy_(theirs)
            return submit_load(job_id, src_spec, dst_spec, **options)

        undo.patch(watched, "submit_load", load)


def _received(file: Path, seconds: float) -> list[torch.Tensor]:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise FaultError(f"fault 'rank-zero-shard': rank 0 handed nothing over in {seconds:.0f} s")
        time.sleep(0.001)
    pages: list[torch.Tensor] = torch.load(file, weights_only=True)
    file.unlink()
    return pages
