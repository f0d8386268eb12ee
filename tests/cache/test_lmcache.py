"""LMCache's releases on a real engine and a real server, page by page: what each does at a boundary.

C is 256. A case is a prompt, another one, and the first again after the local cache was reset. Four engines:
0.5.6, 0.5.6 with its default object group, 0.5.5, and 0.5.5 with the repaired lookup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

import released
from instruments.driven import Driver, prompt
from samestate.engines import shared_memory
from samestate.engines.lmcache_server import LMCacheServer
from samestate.engines.services import ServiceSpec
from samestate.evidence.records import (
    EntryKind,
    InterventionApplied,
    LoadCompleted,
    LoadSubmitted,
    OperationName,
    PageRow,
    PagesDigested,
    PageSide,
    RankRegistered,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    StateComputed,
)

C = 256
OUTPUT_TOKENS = 8
DELAY_MS = 150
LENGTHS = {"below": 2 * C - 1, "on": 2 * C, "above": 2 * C + 1}
LONG, SHORT = 2 * C + 5, C + 7
"""A prompt computed in one step, so that its first recurrent slot is the null block, and a beginning of it."""


class Arm(NamedTuple):
    """One engine's life beside one server."""

    records: list[tuple[int, Any]]
    """(t_ns, record) of scheduler and worker, in time order."""
    requests: dict[str, str]
    tokens: dict[str, list[int]]
    cached: dict[str, int | None]
    findings: set[tuple[str, str, str]]
    """(operation, check, code)."""

    def of(self, kind: type, op: str) -> list[Any]:
        return [one for _, one in self.records if isinstance(one, kind) and one.request == self.requests[op]]

    def rows(self, op: str, direction: str, side: PageSide, moment: str) -> dict[tuple[int, int], PageRow]:
        """By entry and block index."""
        return {
            (row.entry, row.block_index): row
            for one in self.of(PagesDigested, op)
            if (one.direction, one.side, one.moment) == (direction, side, moment)
            for row in one.rows
        }

    @property
    def registered(self) -> RankRegistered:
        return next(one for _, one in self.records if isinstance(one, RankRegistered))

    def states(self) -> set[int]:
        """Entries whose page is the state at one boundary."""
        return {e.entry for e in self.registered.entries if e.kind in (EntryKind.RECURRENT, EntryKind.CONV)}

    def content(self, op: str) -> set[int | None]:
        """B by content: boundaries that the scheduler's step ends filed with the bytes that the load brought."""
        held = {
            (one.request, group, block, one.boundary)
            for _, one in self.records
            if isinstance(one, StateComputed)
            for group, block in one.blocks
        }
        groups = {entry.entry: entry.engine_group for entry in self.registered.entries}
        filed = {
            (row.entry, row.digest): boundary
            for _, one in self.records
            if isinstance(one, PagesDigested) and (one.direction, one.moment) == ("save", "submitted")
            for row in one.rows
            for request, group, block, boundary in held
            if (request, group, block) == (one.request, groups[row.entry], row.block)
            and boundary == (row.block_index + 1) * C
        }
        arrived = self.rows(op, "load", PageSide.DESTINATION, "completed")
        return {filed.get((row.entry, row.digest)) for row in arrived.values() if row.entry in self.states()}


class Prompted(Driver):
    """Runs prompts that share with each other what a test needs."""

    def run(self, case: str, name: str, tag: str, tokens: int) -> None:
        self.ask([(f"{case}.{name}", case, prompt(tag, tokens))], OperationName.PROMPT)

    def boundaries(self) -> None:
        for case, tokens in LENGTHS.items():
            self.run(case, "cold", case, tokens)
            self.run(case, "other", f"{case}, other", tokens)
            self.run(case, "reload", case, tokens)

    def shared(self) -> None:
        self.run("shared", "long", "shared", LONG)
        self.run("shared", "other", "shared, other", LONG)
        self.run("shared", "short", "shared", SHORT)


@contextmanager
def served(
    root: Path, model: Path, version: str, *, separate: bool, repair: str | None = None, delay_ms: int = 0
) -> Iterator[tuple[Prompted, list[Arm]]]:
    """An engine beside a server of its own; after the block, what it left behind."""
    packages = released.lmcache(version)
    options = {"separate_object_groups": separate}
    server = LMCacheServer(ServiceSpec("candidate", "lmcache", packages, options, 1 << 28, root, root / "service.log"))
    driver = Prompted(
        root / "archive",
        model,
        {"block_size": C, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 24},
        output_tokens=OUTPUT_TOKENS,
        save_delay_ms=delay_ms,
        connector="lmcache",
        external_cache_bytes=0,
        connector_options=dict(server.connector_options),
        packages=packages,
        service=server.address,
        repair=repair,
    )
    found: list[Arm] = []
    try:
        server.start(C)
        assert driver.engine.start().checkpoint_interval == C
        assert shared_memory.segments({driver.engine.pid}), "the engine's cache is not where the server can see it"
        yield driver, found
    finally:
        pid = driver.engine.pid
        driver.close()
        server.stop()
    shared_memory.remove({pid})
    assert shared_memory.segments({pid}) == []
    seen = driver.seal()
    found.append(
        Arm(
            seen.lines,
            {answer.op: answer.request for answer in seen.answers},
            {answer.op: answer.token_ids for answer in seen.answers},
            {answer.op: answer.cached_tokens for answer in seen.answers},
            {(op, check, code) for op, findings in seen.findings.items() for check, code in findings},
        )
    )


@pytest.fixture(scope="module")
def newer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """0.5.6 with separate object groups, its saves held back."""
    root = tmp_path_factory.mktemp("lmcache-0.5.6")
    with served(root, tiny_model, "0.5.6", separate=True, delay_ms=DELAY_MS) as (driver, found):
        driver.boundaries()
        driver.shared()
    return found[0]


@pytest.fixture(scope="module")
def one_group(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """0.5.6 with its default: one object group for all layers."""
    with served(tmp_path_factory.mktemp("one-group"), tiny_model, "0.5.6", separate=False) as (driver, found):
        driver.shared()
    return found[0]


@pytest.fixture(scope="module")
def older(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """0.5.5 as it is."""
    with served(tmp_path_factory.mktemp("lmcache-0.5.5"), tiny_model, "0.5.5", separate=True) as (driver, found):
        driver.boundaries()
    return found[0]


@pytest.fixture(scope="module")
def repaired(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """0.5.5 with the repaired lookup."""
    root = tmp_path_factory.mktemp("repaired")
    with served(root, tiny_model, "0.5.5", separate=True, repair="strict-prefix") as (driver, found):
        driver.boundaries()
    return found[0]


def right(arm: Arm) -> None:
    """Every case continues as cold, from the strict prefix, and its bytes are those that were saved."""
    for case, tokens in LENGTHS.items():
        strict = C * ((tokens - 1) // C)
        reload = f"{case}.reload"
        assert arm.tokens[reload] == arm.tokens[f"{case}.cold"]
        assert arm.cached[reload] == strict
        (begun,) = arm.of(LoadSubmitted, reload)
        assert begun.boundary == strict
        assert arm.content(reload) == {strict}
        arrived = arm.rows(reload, "load", PageSide.DESTINATION, "completed")
        saved = arm.rows(f"{case}.cold", "save", PageSide.SOURCE, "submitted")
        assert arrived
        assert {page: row.digest for page, row in arrived.items()} == {page: saved[page].digest for page in arrived}
        assert {row.entry for row in arrived.values()} == {entry.entry for entry in arm.registered.entries}
        assert sum(row.sentinel for row in arrived.values()) == 0
        assert all(row.block for row in arrived.values())
    loads = {one.job: one for _, one in arm.records if isinstance(one, LoadSubmitted)}
    done = {one.job: one for _, one in arm.records if isinstance(one, LoadCompleted)}
    assert loads.keys() == done.keys()
    assert all(one.ok and one.bytes == sum(p.bytes for p in loads[job].parts) > 0 for job, one in done.items())
    saves = [one.job for _, one in arm.records if isinstance(one, SaveSubmitted)]
    assert sorted(saves) == sorted(one.job for _, one in arm.records if isinstance(one, SaveCompleted) and one.ok)


live = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.lmcache]


class TestNewer:
    pytestmark = live

    def test_it_is_right_at_every_boundary(self, newer: Arm) -> None:
        right(newer)
        assert newer.findings == set()

    def test_no_state_is_stored_for_a_boundary_where_no_step_ended(self, newer: Arm) -> None:
        saved = newer.rows("shared.long", "save", PageSide.SOURCE, "submitted")
        assert {index for entry, index in saved if entry in newer.states()} == {1}
        assert newer.of(LoadSubmitted, "shared.short") == []
        assert newer.cached["shared.short"] == 0

    def test_saves_are_held_back(self, newer: Arm) -> None:
        delays = {one.job: (t, one.delay_ms) for t, one in newer.records if isinstance(one, SaveDelayed)}
        ends = {one.job: t for t, one in newer.records if isinstance(one, SaveCompleted)}
        assert ends
        assert delays.keys() == ends.keys()
        assert all(ends[job] - t >= delay * 1_000_000 == DELAY_MS * 1_000_000 for job, (t, delay) in delays.items())


class TestOneGroup:
    pytestmark = live

    def test_a_null_block_is_stored_and_comes_back_as_a_state(self, one_group: Arm, newer: Arm) -> None:
        saved = one_group.rows("shared.long", "save", PageSide.SOURCE, "submitted")
        assert all(saved[entry, 0].block == 0 for entry in one_group.states())
        (begun,) = one_group.of(LoadSubmitted, "shared.short")
        assert begun.boundary == C
        assert one_group.content("shared.short") == {None}, "the bytes are of no boundary that was computed"
        arrived = one_group.rows("shared.short", "load", PageSide.DESTINATION, "completed")
        assert all(arrived[entry, 0].digest == saved[entry, 0].digest for entry in one_group.states())
        assert one_group.tokens["shared.short"] != newer.tokens["shared.short"]
        assert one_group.tokens["shared.long"] == newer.tokens["shared.long"]
        assert ("shared.long", "prefix-identity", "null_block_saved") in one_group.findings


class TestOlder:
    pytestmark = live

    def test_it_applies_the_last_token_twice_on_a_boundary(self, older: Arm) -> None:
        assert {case for case in LENGTHS if older.tokens[f"{case}.reload"] != older.tokens[f"{case}.cold"]} == {"on"}
        (begun,) = older.of(LoadSubmitted, "on.reload")
        assert (begun.boundary, older.cached["on.reload"]) == (2 * C, 2 * C - 1)
        assert older.content("on.reload") == {2 * C}
        assert {(op, check) for op, check, _ in older.findings} == {("on.reload", "prefix-identity")}

    def test_the_repair_cures_it_and_says_what_it_replaced(self, repaired: Arm) -> None:
        right(repaired)
        assert repaired.findings == set()
        (applied,) = [one for _, one in repaired.records if isinstance(one, InterventionApplied)]
        assert applied.name == "strict-prefix"
        assert [function.qualname for function in applied.functions] == [
            "LMCacheMPConnector.get_num_new_matched_tokens",
            "LMCacheMPConnector.on_new_request",
        ]


# --- without an engine --------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a stand-in for LMCache."""
    pytest.importorskip("vllm")
    names = ("lmcache.integration.vllm.lmcache_mp_connector", "lmcache.v1.platform.devices.cpu")
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[names[0]].LMCacheMPConnector = type("LMCacheMPConnector", (), {})  # type: ignore[attr-defined]
    sys.modules[names[1]].shm = SimpleNamespace(CpuShmTensorWrapper=Handle)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "samestate.cache.lmcache", raising=False)
    from samestate.cache import lmcache

    yield lmcache
    sys.modules.pop("samestate.cache.lmcache", None)


class Handle:
    """LMCache's description of a tensor in shared memory."""

    def __init__(self, tensor: Any, shm_name: str, segment_nbytes: int) -> None:
        self.shm_name, self.nbytes, self.storage_offset = shm_name, segment_nbytes, tensor.storage_offset()


@pytest.mark.sanity
def test_all_views_of_a_storage_move_together(host: ModuleType) -> None:
    import torch

    whole = torch.arange(64, dtype=torch.float32)
    early, late = whole[8:16], whole[32:40]
    handles = [host.share(late), host.share(early)]
    assert len({handle.shm_name for handle in handles}) == 1
    early.fill_(7.0)
    assert whole[8:16].eq(7).all(), "a view was left behind"
    assert late.tolist() == [float(n) for n in range(32, 40)]
    raw = (Path(host.SHARED_MEMORY) / handles[0].shm_name.removeprefix("/")).read_bytes()
    assert len(raw) == handles[0].nbytes
    for handle, view in zip(handles, (late, early), strict=True):
        begin = handle.storage_offset * 4
        assert torch.frombuffer(bytearray(raw[begin : begin + 32]), dtype=torch.float32).equal(view)


def test_a_cache_that_does_not_fit_is_one_line(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(host.os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=100))
    with pytest.raises(host.SharedMemoryError, match=r"^/dev/shm: 100 bytes are free, the engine's cache has 256: "):
        host.share(torch.zeros(64))


def test_pages_that_do_not_lie_side_by_side_are_refused(host: ModuleType) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), page_size_padded=64)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    config = SimpleNamespace(kv_cache_groups=[group])
    rows = torch.zeros(10, 16).as_strided((10, 1, 1, 4), (16, 4, 4, 1))
    page = host.whole_pages(config, {"a": rows})["a"]
    assert (page.shape, page.data_ptr()) == ((10, 1, 1, 16), rows.data_ptr())
    apart = torch.zeros(10, 32).as_strided((10, 1, 1, 4), (32, 4, 4, 1))
    with pytest.raises(host.SharedMemoryError, match=r"^a: its blocks are 32 elements apart, its page has 16"):
        host.whole_pages(config, {"a": apart})


def test_without_lmcache_the_line_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setitem(sys.modules, "lmcache", None)
    monkeypatch.delitem(sys.modules, "samestate.cache.lmcache", raising=False)
    with pytest.raises(ImportError, match=r"^LMCache is not importable \(.*\): name a release with --lmcache-version"):
        __import__("samestate.cache.lmcache")


def test_segments_belong_to_the_process_that_made_them(tmp_path: Path) -> None:
    names = ("torch_12_345_0", "torch_123_45_0", "lmcache_kv_12_0", "other_12_1")
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in shared_memory.segments({12}, tmp_path)] == ["lmcache_kv_12_0", "torch_12_345_0"]
    assert shared_memory.remove({12}, tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"torch_123_45_0", "other_12_1"}
    assert shared_memory.remove({12}, tmp_path / "absent") == 0
