"""Any order of calls, damage and removals behind a store's back, against a dictionary: nothing wrong is ever served."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cache.kept import SPACE, InObjects, Kept, OnDisk, key, page, read
from cache.servers import InServer, Server
from samestate.cache.base import Read, Write
from samestate.cache.envelope import HEADER_BYTES

SIZE = 600
KEYS = st.integers(0, 5)
HANDLES = st.integers(0, 1)
BUDGET = 3 * (HEADER_BYTES + SIZE)


class Model(RuleBasedStateMachine):
    """Two engines on one place. Where the place evicts by itself, a page of the model may be missing."""

    def __init__(self, kept: Kept, evicts: bool) -> None:
        super().__init__()
        self.kept = kept
        self.evicts = evicts
        self.written: dict[int, int] = {}
        """Number of the key -> number of the page that the first writer wrote."""
        self.damaged: set[int] = set()

    @initialize()
    def open(self) -> None:
        self.stores = [self.kept.open().store(SPACE, alone=True) for _ in range(2)]
        self.stores[0].delete([info.key for info in self.stores[0].scan()])

    @rule(handle=HANDLES, number=KEYS, content=st.integers(0, 1000))
    def write(self, handle: int, number: int, content: int) -> None:
        done = self.stores[handle].write(key(number), page(content, SIZE))
        if done is Write.WRITTEN:
            assert self.evicts or number not in self.written
            self.written[number] = content
            self.damaged.discard(number)
        else:
            assert done is Write.PRESENT and number in self.written

    @rule(handle=HANDLES, number=KEYS)
    def read(self, handle: int, number: int) -> None:
        seen, got = read(self.stores[handle], key(number), SIZE)
        if seen is Read.HIT:
            assert number not in self.damaged and got == page(self.written[number], SIZE)
        elif seen is Read.DAMAGED:
            assert number in self.damaged
        else:
            assert self.evicts or number not in self.written
        if seen is not Read.HIT:
            self.written.pop(number, None)
            self.damaged.discard(number)

    @rule(handle=HANDLES, number=KEYS)
    def delete(self, handle: int, number: int) -> None:
        removed = self.stores[handle].delete([key(number)])
        assert removed <= (number in self.written)
        assert self.evicts or removed == (number in self.written)
        self.written.pop(number, None)
        self.damaged.discard(number)

    @rule(number=KEYS, at=st.integers(0, HEADER_BYTES + SIZE - 1), bit=st.integers(0, 7), cut=st.booleans())
    def damage(self, number: int, at: int, bit: int, cut: bool) -> None:
        stored = self.kept.get(key(number))
        if stored is None or number in self.damaged:
            return
        changed = stored[:at] if cut else stored[:at] + bytes([stored[at] ^ 1 << bit]) + stored[at + 1 :]
        self.kept.put(key(number), changed)
        self.damaged.add(number)

    @rule(number=KEYS)
    def another_page_in_its_place(self, number: int) -> None:
        other = self.kept.get(key(number + 1))
        if other is None or self.kept.get(key(number)) is None:
            return
        self.kept.put(key(number), other)
        self.damaged.add(number)

    @invariant()
    def what_is_there_was_written(self) -> None:
        numbers = list(range(6))
        for store in getattr(self, "stores", []):
            there = {n for n, found in zip(numbers, store.contains([key(n) for n in numbers]), strict=True) if found}
            assert there <= set(self.written)
            assert self.evicts or there == set(self.written)

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close()


@pytest.fixture(params=["disk", "disk-budget", "valkey", "memory-objects"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    match request.param:
        case "disk":
            return OnDisk(tmp_path / "pages")
        case "disk-budget":
            return OnDisk(tmp_path / "pages", budget_bytes=BUDGET)
        case "valkey":
            server: Server = request.getfixturevalue("server")
            return InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20&connections=1")
        case _:
            return InObjects(f"object+memory://{tmp_path.name}/pages")


@pytest.mark.tamper
def test_nothing_wrong_is_ever_served(kept: Kept) -> None:
    evicts = isinstance(kept, OnDisk) and kept.has_budget
    run_state_machine_as_test(
        lambda: Model(kept, evicts), settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )
