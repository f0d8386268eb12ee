"""A device for tests of loads: streams whose work runs in any order that waits allow, chosen by the test."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_offload.base import TransferResult

from samestate.cache.cuda_lanes import Lane
from samestate.cache.cuda_staged import Staged


class Device:
    """Streams by name, each a queue. Its work runs when `run` is told to, not before."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[tuple[str, Any]]] = {"compute": deque()}
        self.current = "compute"
        self.passed: set[int] = set()
        self.log: list[str] = []
        self._tokens = 0

    def put(self, stream: str, work: Callable[[], object]) -> None:
        self.queues[stream].append(("work", work))

    def token(self, stream: str) -> int:
        """Passes when the stream gets there."""
        self._tokens += 1
        self.queues[stream].append(("pass", self._tokens))
        return self._tokens

    def wait(self, stream: str, token: int) -> None:
        self.queues[stream].append(("wait", token))

    def ready(self) -> list[str]:
        """Streams that can go on."""
        return [
            name
            for name, queue in self.queues.items()
            if queue and not (queue[0][0] == "wait" and queue[0][1] not in self.passed)
        ]

    def step(self, stream: str) -> None:
        kind, what = self.queues[stream].popleft()
        if kind == "work":
            what()
        elif kind == "pass":
            self.passed.add(what)

    def run(self, choose: Callable[[list[str]], str], until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left, or `until` says so; nothing may be stuck."""
        while not until() and (ready := self.ready()):
            self.step(choose(ready))
        assert until() or not any(self.queues.values()), "streams wait for each other"


class Point:
    """An event: what a stream held when it was recorded last."""

    def __init__(self, device: Device, kind: str, token: int | None) -> None:
        self.device, self.kind, self.token = device, kind, token

    def query(self) -> bool:
        return self.token in self.device.passed

    def synchronize(self) -> None:
        self.device.log.append("synchronize")
        self.device.run(lambda ready: ready[0], self.query)

    def elapsed_time(self, other: Point) -> float:
        assert self.query() and other.query()
        return 2.0


class SimulatedLane(Lane):
    """A lane that forgets the kinds of waits in `forgets`: current, copied, or what a lane of that name signals."""

    def __init__(self, device: Device, name: str, forgets: Collection[str] = ()) -> None:
        self.device, self.name, self.forgets = device, name, forgets
        device.queues[name] = deque()

    def follow_current(self) -> None:
        token = self.device.token(self.device.current)
        if "current" not in self.forgets:
            self.device.wait(self.name, token)

    def follow(self, mark: Any) -> None:
        if mark.token is not None and mark.kind not in self.forgets:
            self.device.wait(self.name, mark.token)

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.device.current = self.device.current, self.name
        yield
        self.device.current = before

    def mark(self) -> Point:
        return Point(self.device, "mark", self.device.token(self.name))

    def drain(self) -> None:
        self.device.log.append(f"drain {self.name}")
        token = self.device.token(self.name)
        self.device.run(lambda ready: ready[0], lambda: token in self.device.passed)

    def give_back(self, *marks: Any) -> None:
        pass

    def signal(self) -> Point:
        return Point(self.device, self.name, None)

    def record(self, signal: Any) -> None:
        signal.token = self.device.token(self.name)

    def table(self, numbers: int) -> torch.Tensor:
        return torch.full((numbers,), -1, dtype=torch.int64)


class SimulatedStaged(Staged):
    """Copies told at once, as the driver's batched call reads its lists; kernels read their tables when they run."""

    def _move(self, source: torch.Tensor, target: torch.Tensor, size: torch.Tensor) -> None:
        feed, _ = self.lanes
        device = feed.device
        assert device.current == feed.name
        device.log.append("move")
        told = list(zip(source.tolist(), target.tolist(), size.tolist(), strict=True))

        def move() -> None:
            for here, there, length in told:
                begin = self._ring.data_ptr()
                assert begin <= there and there + length <= begin + self._ring.numel(), "outside the ring"
                ctypes.memmove(there, here, length)

        device.put(feed.name, move)

    def _launch(self, table: int, count: int, apart: int) -> None:
        _, lane = self.lanes
        assert lane.device.current == lane.name
        lane.device.log.append("launch")

        def copy() -> None:
            columns = [(ctypes.c_int64 * count).from_address(table + 8 * column * apart) for column in range(3)]
            for source, target, length in zip(*columns, strict=True):
                ctypes.memmove(target, source, length * self.unit)

        lane.device.put(lane.name, copy)


class SimulatedCopy:
    """vLLM's handler: one stream behind the current one, pages copied one by one."""

    def __init__(self, device: Device, groups: Any, tier: Any, blocks: Any) -> None:
        self.device, self.groups, self.tier, self.blocks = device, groups, tier, blocks
        device.queues["vllm"] = deque()
        self._transfer_events: dict[int, Point] = {}
        self.closed = False

    def transfer_async(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.device.wait("vllm", self.device.token(self.device.current))
        sizes = dst_spec.group_sizes
        moves = list(zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        groups = [group for group, size in zip(self.groups, sizes, strict=True) for _ in range(size)]
        self.device.put("vllm", lambda: load(groups, moves, self.tier, self.blocks))
        self._transfer_events[job_id] = Point(self.device, "copied", self.device.token("vllm"))
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, point in self._transfer_events.items() if point.query()]
        for job in done:
            del self._transfer_events[job]
        return [TransferResult(job, True, 0, 0.0) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._transfer_events.keys():
            self._transfer_events[job].synchronize()

    def shutdown(self) -> None:
        self.closed = True


def load(groups: Any, moves: Any, tier: Any, blocks: Any) -> None:
    """What a load does, one page after the other: the group, and the row and block, of each."""
    for group, (row, block) in zip(groups, moves, strict=True):
        for ref in group:
            size = ref.page_size_bytes
            blocks[ref.tensor_idx][block, :size] = tier[ref.tensor_idx][row, :size]
