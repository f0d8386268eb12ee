"""A load on engines of our own, on the simulated one behind a lock: phases, records, paths by records, no seal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, cast

import pytest
from typing_extensions import override

from samestate.checks.analyzers import source_sha256
from samestate.checks.history import History
from samestate.checks.latency_load import load_study
from samestate.engines.base import Ask, EngineSpec, Generation, ResetResult, Timing
from samestate.engines.served import ServedVllm, StreamingClient
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.latency_records import LoadPhase
from samestate.evidence.records import OperationStarted
from samestate.evidence.seal import SEAL_NAME
from samestate.lab import load_engines
from samestate.lab.errors import RunError
from samestate.lab.load_driver import Level
from samestate.lab.load_engines import LoadRequest, run_load
from samestate.lab.services import no_service
from samestate.plans.load import freeze, load

from .conftest import QuietProgress


class Served(SimEngine):
    """The simulated engine as a served one looks: an address, and streamed answers."""

    running: ClassVar[dict[str, Served]] = {}
    resets = True

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.url, self._lock = f"http://{spec.arm}", Lock()
        Served.running[self.url] = self

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        began = time.monotonic_ns()
        with self._lock:
            (answer,) = super().generate(asks, output_tokens, seed, ignore_eos)
        events = [(time.monotonic_ns(), 1) for _ in answer.token_ids]
        return [answer._replace(timing=Timing("127.0.0.1:1", 1, 1, began, time.monotonic_ns(), events))]

    @override
    def reset_local_cache(self) -> ResetResult:
        return super().reset_local_cache()._replace(local_reset=self.resets)


class Client:
    def __init__(self, url: str) -> None:
        self.generate = Served.running[url].generate

    def close(self) -> None:
        pass


@pytest.fixture
def request_(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> LoadRequest:
    monkeypatch.setattr(load_engines, "connected", lambda url: cast(StreamingClient, Client(url)))
    plan = load("latency")
    engine = plan.engine.model_copy(update={"settings": {"block_size": 16, "max_model_len": 2048}})
    plan = plan.model_copy(update={"engine": engine, "lengths": ["60C-1", "60C"], "output_tokens": 4})
    return LoadRequest(
        plan=freeze(plan, source_sha256(plan.analyzer.id)),
        model=model,
        out=tmp_path / "load",
        levels=[Level(1, None), Level(3, None), Level(None, 200.0)],
        requests=4,
        seed=11,
        packages=None,
        make_service=no_service,
        make_engine=cast(Any, Served),
    )


def phases(archive: Archive, arm: str) -> list[LoadPhase]:
    return [line.rec for line in archive.records(arm, "client") if isinstance(line.rec, LoadPhase)]


def test_every_level_is_cold_and_then_reused_on_every_engine(request_: LoadRequest) -> None:
    run_load(request_, QuietProgress())
    archive = Archive.open(request_.out)
    cells = load_study(History.read(archive)).cells
    assert [(one.engine, one.level, one.attempted) for one in cells] == [
        (engine, level, attempted)
        for engine, reused in (("none", "repeat"), ("native", "reload"))
        for level in ("c1", "c3", "r200")
        for attempted in ("cold", reused)
    ]
    assert all(one.answered == one.requests == 4 for one in cells)
    by_attempt = {(one.engine, one.attempted): one.paths for one in cells}
    assert by_attempt["none", "cold"] == by_attempt["native", "cold"] == {"recompute": 4}
    assert by_attempt["none", "repeat"] == {"local": 4}
    assert by_attempt["native", "reload"] == {"external-memory": 4}
    assert {one.level: one.most_open for one in cells}["c1"] == 1
    assert all(one.unlike == 0 for one in cells)


def test_orders_and_times_are_recorded_with_their_seed(request_: LoadRequest) -> None:
    run_load(request_, QuietProgress())
    archive = Archive.open(request_.out)
    off, on = (phases(archive, arm) for arm in ("control", "candidate"))
    assert [one.seed for one in off] == [one.seed for one in on] == [11, 12, 13, 14, 15, 16]
    assert [one.ops for one in off if one.attempted == "cold"] == [one.ops for one in on if one.attempted == "cold"]
    assert [len(one.due_ns) for one in off] == [0, 0, 0, 0, 4, 4]
    cold, again = (on[0].ops, on[1].ops)
    assert sorted(op.removesuffix(".reload") for op in again) == sorted(op.removesuffix(".cold") for op in cold)
    assert len({op for one in on for op in one.ops}) == 24, "no level asks for another one's prompts"


def test_nothing_of_it_is_sealed_or_an_operation_of_a_plan(request_: LoadRequest) -> None:
    run_load(request_, QuietProgress())
    assert not (request_.out / SEAL_NAME).exists()
    archive = Archive.open(request_.out)
    assert not [line for line in archive.records("candidate", "client") if isinstance(line.rec, OperationStarted)]


def test_without_a_local_reset_nothing_is_called_a_reload(
    request_: LoadRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "resets", False)
    with pytest.raises(RunError, match="c1: the server did not reset its local cache"):
        run_load(request_, QuietProgress())


def test_a_folder_with_something_in_it_is_refused(request_: LoadRequest) -> None:
    request_.out.mkdir()
    (request_.out / "there").touch()
    with pytest.raises(RunError):
        run_load(request_, QuietProgress())


def test_an_engine_of_our_own_is_a_served_one() -> None:
    assert LoadRequest._field_defaults["make_engine"] is ServedVllm
