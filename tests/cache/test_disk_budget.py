"""A folder with a budget: what goes, when, and what several engines know of each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from cache.kept import OTHER, SPACE, OnDisk, holds, key, page
from samestate.cache.base import PageInfo, PageStore, StoreError, Write
from samestate.cache.envelope import HEADER_BYTES
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.stores.place import Manners, Victims

STORED = HEADER_BYTES + 5000


def room_for(pages: int, tmp_path: Path) -> OnDisk:
    return OnDisk(tmp_path / "pages", budget_bytes=pages * STORED)


def there(store: PageStore, numbers: Iterable[int] = range(20)) -> list[int]:
    numbers = list(numbers)
    return [n for n, found in zip(numbers, store.contains([key(n) for n in numbers]), strict=True) if found]


def test_the_least_recently_used_page_goes(tmp_path: Path) -> None:
    store = room_for(3, tmp_path).store()
    for number in (1, 2, 3):
        assert store.write(key(number), page(number)) is Write.WRITTEN
    assert holds(store, 1)
    assert store.write(key(4), page(4)) is Write.WRITTEN
    assert there(store) == [1, 3, 4]


def test_children_go_before_their_parents(tmp_path: Path) -> None:
    kept = room_for(5, tmp_path)
    store = kept.store()
    store.write(key(9), page(9))
    for number in (1, 2, 3):
        store.write(key(number), page(number))
        store.touch([key(n) for n in range(1, number + 1)])
    store.write(key(8), page(8))
    assert all(holds(store, number) for number in (1, 2, 3))
    store.touch([key(number) for number in (1, 2, 3, 4)])
    gone: list[int] = []
    for number in range(20, 24):
        before = there(store, range(30))
        store.write(key(number), page(number))
        gone += [n for n in before if n not in there(store, range(30))]
    assert gone == [9, 8, 3, 2]


def test_touching_is_seen_in_the_folder(tmp_path: Path) -> None:
    kept = room_for(5, tmp_path)
    store = kept.store()
    for number in (1, 2, 3):
        store.write(key(number), page(number))
        past = time.time() - 1000 + number
        os.utime(kept.path(key(number)), (past, past))
    store.touch([key(2), key(3), key(4)])
    store.touch([])
    times = {info.key: info.last_used or 0.0 for info in store.scan()}
    assert times[key(2)] > times[key(3)] > times[key(1)] + 500
    again = kept.store()
    for number in (5, 6, 7):
        again.write(key(number), page(number))
    assert there(again) == [2, 3, 5, 6, 7]
    again.write(key(8), page(8))
    assert there(again) == [2, 5, 6, 7, 8]


def test_nothing_goes_while_there_is_room(tmp_path: Path) -> None:
    store = room_for(3, tmp_path).store()
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    assert store.write(key(1), page(1)) is Write.PRESENT
    assert there(store) == [1, 2, 3]
    store.delete([key(2)])
    store.write(key(4), page(4))
    assert there(store) == [1, 3, 4]


def test_a_page_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    store = room_for(3, tmp_path).store()
    for number in (1, 2):
        store.write(key(number), page(number))
    assert store.write(key(9), page(9, 3 * STORED)) is Write.NO_ROOM
    assert there(store) == [1, 2]


def test_large_pages_push_out_several(tmp_path: Path) -> None:
    store = room_for(4, tmp_path).store()
    for number in (1, 2, 3, 4):
        store.write(key(number), page(number))
    assert store.write(key(9), page(9, 2 * STORED - HEADER_BYTES)) is Write.WRITTEN
    assert there(store) == [3, 4, 9]


def test_the_budget_is_of_all_namespaces(tmp_path: Path) -> None:
    place = room_for(3, tmp_path).open()
    ours, theirs = place.store(SPACE), place.store(OTHER)
    theirs.write(key(1), page(1))
    for number in (2, 3, 4):
        ours.write(key(number), page(number))
    assert there(theirs) == [] and there(ours) == [2, 3, 4]


def test_the_folder_is_read_at_the_start(tmp_path: Path) -> None:
    kept = room_for(3, tmp_path)
    first = kept.store()
    for number in (1, 2, 3):
        first.write(key(number), page(number))
        past = time.time() - 1000 + number
        os.utime(kept.path(key(number)), (past, past))
    os.utime(kept.path(key(1)))
    second = kept.store()
    second.write(key(4), page(4))
    assert there(second) == [1, 3, 4]


def test_a_folder_that_is_over_its_budget_shrinks(tmp_path: Path) -> None:
    unbounded = OnDisk(tmp_path / "pages").store()
    for number in range(10):
        unbounded.write(key(number), page(number))
    store = room_for(3, tmp_path).store()
    store.write(key(11), page(11))
    assert len(there(store)) == 3


def test_what_others_write_is_seen_before_long(tmp_path: Path) -> None:
    kept = room_for(32, tmp_path)
    ours, theirs = kept.store(), kept.store()
    for number in range(100):
        ours.write(key(2 * number), page(number))
        theirs.write(key(2 * number + 1), page(number))
    most = 32 + 2 * (32 // 16)
    assert 16 <= len(there(ours, range(200))) <= most


def test_a_page_that_another_engine_evicted_is_a_miss_and_frees_its_bytes(tmp_path: Path) -> None:
    kept = room_for(2, tmp_path)
    place = kept.open()
    store = place.store(SPACE)
    for number in (1, 2):
        store.write(key(number), page(number))
    kept.path(key(1)).unlink()
    assert not holds(store, 1)
    assert place.budget and place.budget.held == STORED
    store.write(key(3), page(3))
    assert there(store) == [2, 3]


def choosing(*numbers: int) -> Victims:
    return lambda pages, missing: [info for info in pages if info.key in {key(n) for n in numbers}]


def test_a_policy_says_what_goes(tmp_path: Path) -> None:
    place = room_for(3, tmp_path).open(Manners(victims=choosing(2, 3)))
    store = place.store(SPACE)
    for number in (1, 2, 3, 4):
        store.write(key(number), page(number))
    assert there(store) == [1, 3, 4]


def test_a_policy_that_gives_nothing_leaves_no_room(tmp_path: Path) -> None:
    place = room_for(2, tmp_path).open(Manners(victims=lambda pages, missing: []))
    store = place.store(SPACE)
    for number in (1, 2):
        assert store.write(key(number), page(number)) is Write.WRITTEN
    assert store.write(key(3), page(3)) is Write.NO_ROOM
    assert there(store) == [1, 2]


def test_a_policy_that_names_too_little_evicts_nothing(tmp_path: Path) -> None:
    place = room_for(3, tmp_path).open(Manners(victims=choosing(1)))
    store = place.store(SPACE)
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    assert store.write(key(4), page(4, 2 * STORED - HEADER_BYTES)) is Write.NO_ROOM
    assert there(store) == [1, 2, 3]


def test_a_policy_may_name_pages_that_are_not_there_or_twice(tmp_path: Path) -> None:
    def victims(pages: Iterable[PageInfo], missing: int) -> list[PageInfo]:
        known = [PageInfo(SPACE.name, key(number), 0, None) for number in (7, 1, 1, 2)]
        return known

    store = room_for(3, tmp_path).open(Manners(victims=victims)).store(SPACE)
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    assert store.write(key(4), page(4, 2 * STORED - HEADER_BYTES)) is Write.WRITTEN
    assert there(store) == [3, 4]


def test_a_policy_is_told_what_is_there_oldest_first(tmp_path: Path) -> None:
    told: list[tuple[list[PageInfo], int]] = []

    def victims(pages: Iterable[PageInfo], missing: int) -> list[PageInfo]:
        told.append((list(pages), missing))
        return told[-1][0]

    store = room_for(2, tmp_path).open(Manners(victims=victims)).store(SPACE)
    for number in (1, 2):
        store.write(key(number), page(number))
    assert holds(store, 1)
    store.write(key(3), page(3))
    ((infos, missing),) = told
    assert [(info.namespace, info.key, info.stored_bytes) for info in infos] == [
        (SPACE.name, key(2), STORED),
        (SPACE.name, key(1), STORED),
    ]
    assert missing == STORED


def test_an_eviction_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = room_for(2, tmp_path).store()
    for number in (1, 2):
        store.write(key(number), page(number))

    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(StoreError, match="Operation not permitted"):
            store.write(key(3), page(3))
    assert there(store) == [1, 2]
    assert store.write(key(3), page(3)) is Write.WRITTEN


def test_threads_together_keep_the_budget(tmp_path: Path) -> None:
    place: DiskPlace = room_for(8, tmp_path).open()
    store, failures = place.store(SPACE), list[BaseException]()

    def work(first: int) -> None:
        try:
            for number in range(first, first + 40):
                store.write(key(number), page(number))
                assert there(store, range(400)) != []
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    infos = list(store.scan())
    assert sum(info.stored_bytes for info in infos) <= 8 * STORED
    assert place.budget and place.budget.held == sum(info.stored_bytes for info in infos)
