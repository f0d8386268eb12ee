"""Engine level of `reload.py`: one engine, whose connector is switched between requests.

Two engines of one kind differ by more than connectors do. So one engine carries all of them inside vLLM's
`MultiConnector`, of whose children all but one are taken out while a request runs; nothing is pending whenever that
changes. vLLM's own offloading is among them: on CUDA with vLLM's worker, on the CPU with vLLM's manager over our host
worker.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestate.engines.children.environment import DEFAULTS, FIXED

os.environ.update({**DEFAULTS, **os.environ, **FIXED, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.inputs import TokensPrompt
from vllm.v1.kv_offload.base import TransferResult

from samestate.cache.connector import SamestateConnector

NATIVE = "native"
THREADED = "memory, by the thread"
"""Our memory again; the host worker leaves every load to its thread."""
LOADED = {"memory, auto": "auto", "memory, gathered": "gather", "memory, staged": "staged"}
"""Our memory again, on CUDA, by what `cuda_loads` says."""
SETTLE_SECONDS = 60.0
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class Timed(NamedTuple):
    """One request."""

    ttft_s: float
    cached: int
    token: int
    moved_bytes: int
    """Loaded into the device's cache."""
    moved_s: float
    """By the worker's word."""


def children(places: dict[str, str | None], memory_bytes: int, device: str) -> list[dict[str, Any]]:
    """Connectors in the order of the places: vLLM's own first; a place's URL, or None for memory alone."""
    own: dict[str, Any] = {"cpu_bytes_to_use": memory_bytes}
    if device == "cpu":
        own |= {"spec_name": "HostOffloadingSpec", "spec_module_path": "samestate.cache.spec"}
    found = [_child("OffloadingConnector", own)]
    for name, url in places.items():
        scheme = (url or "").partition(":")[0]
        kind = {"file": "samestate-disk", "valkey": "samestate-valkey"}.get(scheme)
        tiers = [{"type": kind, "url": url}] if url else []
        options = {"cpu_bytes_to_use": memory_bytes, "secondary_tiers": tiers, "revision": "benchmark"}
        options |= {"cuda_loads": LOADED[name]} if name in LOADED else {}
        child = _child("SamestateConnector", options)
        found.append(child | {"kv_connector_module_path": "samestate.cache.connector"})
    return found


def _child(connector: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}


class SwitchedConnector(MultiConnector):
    """`MultiConnector`, each child with an engine's name of its own: shared memory is named after it."""

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[Any, Any]]:
        # vLLM's own passes the name twice where a child has one.
        whole = vllm_config.kv_transfer_config
        found = []
        for number, child in enumerate(whole.kv_connector_extra_config["connectors"]):
            config = copy.copy(vllm_config)
            config.kv_transfer_config = KVTransferConfig(**child, engine_id=f"{whole.engine_id}-{number}")
            found.append((KVConnectorFactory.get_connector_class(config.kv_transfer_config), config))
        return found


class Engine:
    """One engine with several connectors.

    Args:
        model: Checkpoint.
        settings: Of `vllm.LLM`.
        places: See `children`.
        memory_bytes: Of every memory tier.

    """

    def __init__(
        self, model: str, settings: dict[str, Any], places: dict[str, str | None], memory_bytes: int, device: str
    ) -> None:
        connectors = children(places, memory_bytes, device)
        transfer = {
            "kv_connector": "SwitchedConnector",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        }
        self.names = [NATIVE, *places]
        self.llm = LLM(model=model, kv_transfer_config=transfer, disable_log_stats=True, **settings)
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._sides = (self._core.scheduler.connector, get_kv_transfer_group())
        schedulers, workers = ([*side._connectors] for side in self._sides)
        self._inner: list[tuple[OffloadingConnector, OffloadingConnector]] = list(zip(schedulers, workers, strict=True))
        self._results: list[TransferResult] = []
        self._number = 0
        step = self._core.step_fn

        def yielding() -> Any:
            """As a served core's loop does (v1/engine/core.py): threads that move pages want the interpreter's lock."""
            outputs, executed = step()
            if not executed and self._core.scheduler.has_requests():
                time.sleep(0.001)
            return outputs, executed

        self._core.step_fn = yielding
        for name, (scheduler, worker) in zip(self.names, self._inner, strict=True):
            self._watch(scheduler, worker)
            if name == THREADED:
                _leave_to_thread(worker)

    def _watch(self, scheduler: OffloadingConnector, worker: OffloadingConnector) -> None:
        if isinstance(scheduler, SamestateConnector):
            # The word of the first of ours was handed on to all of them: their workers registered the same.
            assert all(tier.wait_opened(SETTLE_SECONDS) for tier in scheduler.tiers.values())
        assert worker.connector_worker is not None
        moves = worker.connector_worker.worker
        finished = moves.get_finished

        def watched() -> list[TransferResult]:
            results = finished()
            self._results += results
            return results

        moves.get_finished = watched  # type: ignore[method-assign]

    def loaders(self) -> dict[str, str]:
        """On CUDA: the class that handles each place's loads."""
        workers = [connector.connector_worker for _, connector in self._inner]
        handlers = [type(one.worker._load_handler).__name__ for one in workers if one is not None]
        return dict(zip(self.names, handlers, strict=True))

    def choose(self, name: str) -> None:
        """From now on this connector alone is there."""
        self._settle()
        index = self.names.index(name)
        for side, connector in zip(self._sides, self._inner[index], strict=True):
            side._connectors = [connector]

    def ask(self, prompt: list[int]) -> Timed:
        """Time to first token, from the request's arrival; then wait until all that it saves is saved."""
        engine = self.llm.llm_engine
        self._number += 1
        self._results.clear()
        began = time.perf_counter()
        engine.add_request(str(self._number), TokensPrompt(prompt_token_ids=prompt), PARAMS)
        while not (outputs := engine.step()):
            pass
        seconds = time.perf_counter() - began
        (output,) = outputs
        # What is reported by then is the load: saves are submitted a step later.
        moved = sum(one.transfer_size or 0 for one in self._results)
        took = sum(one.transfer_time or 0.0 for one in self._results)
        self._settle()
        (token,) = output.outputs[0].token_ids
        return Timed(seconds, output.num_cached_tokens or 0, token, moved, took)

    def forget(self, name: str) -> None:
        """Empty the local cache, and the memory tier too where pages lie behind it."""
        assert self.llm.reset_prefix_cache()
        scheduler, _ = self._inner[self.names.index(name)]
        if isinstance(scheduler, SamestateConnector) and scheduler.tiers:
            assert scheduler.connector_scheduler is not None
            scheduler.connector_scheduler.reset_cache()

    def clear(self, name: str) -> None:
        """Empty the memory tier: every round finds it as the first did."""
        assert self.llm.reset_prefix_cache()
        scheduler, _ = self._inner[self.names.index(name)]
        assert scheduler.connector_scheduler is not None
        scheduler.connector_scheduler.reset_cache()

    def _settle(self) -> None:
        connector = self._core.scheduler.connector
        until = time.monotonic() + SETTLE_SECONDS
        while connector.has_pending_push_work() or self._jobs():
            assert time.monotonic() < until, "saves do not come to an end"
            self._core.step_fn()

    def _jobs(self) -> bool:
        """Whether a store still has a page of some memory tier on its way."""
        managers = [scheduler.connector_scheduler.manager for scheduler, _ in self._inner if scheduler]
        return any(getattr(manager, "_jobs", None) for manager in managers)

    def close(self) -> None:
        for side, index in zip(self._sides, (0, 1), strict=True):
            side._connectors = [pair[index] for pair in self._inner]
        self._core.shutdown()


def _leave_to_thread(connector: OffloadingConnector) -> None:
    from samestate.cache.host_worker import HostWorker

    assert connector.connector_worker is not None
    worker = connector.connector_worker.worker
    assert isinstance(worker, HostWorker), "on CUDA vLLM's own worker copies"
    worker.inline_bytes = 0


def one_round(engine: Engine, order: list[str], draw: random.Random, tokens: int) -> Iterator[tuple[str, Timed, Timed]]:
    """Cold and reload through every connector, each on a prompt of its own."""
    for name in order:
        prompt = [draw.randrange(5, 250) for _ in range(tokens)]
        engine.choose(name)
        cold = engine.ask(prompt)
        engine.forget(name)
        reload = engine.ask(prompt)
        engine.clear(name)
        yield name, cold, reload


PLACES = ("memory", "disk", "auto", "gathered", "staged", "valkey")
"""Words for ours. vLLM's own is always there."""
DEFAULT = {"cpu": ("memory", "disk", "valkey"), "cuda": ("memory", "disk", "auto", "valkey")}


def scratch(folder: Path, server: str | None, threaded: bool, words: Sequence[str]) -> dict[str, str | None]:
    """Our places, by their names in tables. Without a server, `valkey` is left out."""
    if threaded:
        return {"memory": None, THREADED: None}
    urls = {"disk": (folder / "pages").as_uri(), "valkey": server}
    names = {word: f"memory, {word}" if f"memory, {word}" in LOADED else word for word in words}
    return {name: urls.get(word) for word, name in names.items() if word != "valkey" or server}


def plain_rate(bytes_: int, times: int = 5) -> float | None:
    """GB/s (10⁹) of one copy of so many bytes from pinned memory to a CUDA device, the median; None: no room there."""
    source = torch.ones(bytes_, dtype=torch.int8).pin_memory()
    try:
        target = torch.zeros(bytes_, dtype=torch.int8, device="cuda")
    except torch.OutOfMemoryError:
        return None
    seconds = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return bytes_ / statistics.median(seconds[1:]) / 1e9
