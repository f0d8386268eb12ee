"""A folder with a budget where scans, writes and removals meet: each page is counted once, and if it is there."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cache.kept import SPACE, holds, key, page
from cache.test_disk_budget import STORED, room_for, there
from samestate.cache.base import StoreError, Write
from samestate.cache.stores import disk
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.stores.disk_budget import Budget

MOMENTS = ("before", "chosen", "removed", "published", "settled")
"""Of a write that makes room: its victims are chosen, unlinked; the page has its name; the budget knows so."""


class Meeting:
    """A place with room for three pages, three there, and a write of a fourth, in which things happen at moments."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.kept = room_for(3, tmp_path)
        self.place = self.kept.open()
        self.store = self.place.store(SPACE)
        for number in (1, 2, 3):
            self.store.write(key(number), page(number))
        self.at: dict[str, Callable[[], None]] = {}
        unlink, publish = disk.unlink, disk.publish

        def watched_unlink(path: str) -> bool:
            if not path.endswith(".page"):
                return unlink(path)
            self._reach("chosen")
            done = unlink(path)
            self._reach("removed")
            return done

        def watched_publish(tmp: str, path: str) -> Write:
            done = publish(tmp, path)
            self._reach("published")
            return done

        patch.setattr(disk, "unlink", watched_unlink)
        patch.setattr(disk, "publish", watched_publish)

    @property
    def budget(self) -> Budget:
        assert self.place.budget is not None
        return self.place.budget

    def write(self, number: int = 4) -> Write:
        self._reach("before")
        done = self.store.write(key(number), page(number))
        self._reach("settled")
        return done

    def _reach(self, moment: str) -> None:
        self.at.pop(moment, lambda: None)()

    @property
    def lying(self) -> int:
        return sum(info.stored_bytes for info in self.store.scan())


@contextmanager
def slow_scan(budget: Budget) -> Iterator[None]:
    """The folder is read at the beginning of the block; what was found counts only at its end."""
    listed, go_on = threading.Event(), threading.Event()
    read_folder = budget._read_folder

    def read_and_wait() -> Any:
        found = read_folder()
        listed.set()
        assert go_on.wait(10)
        return found

    budget._read_folder = read_and_wait
    scan = threading.Thread(target=budget.scan)
    scan.start()
    assert listed.wait(10)
    try:
        yield
    finally:
        go_on.set()
        scan.join()
        budget._read_folder = read_folder


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    return Meeting(tmp_path, monkeypatch)


@pytest.mark.regression
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_scan_at_any_moment_of_a_write_counts_each_page_once(meeting: Meeting, moment: str) -> None:
    meeting.at[moment] = meeting.budget.scan
    assert meeting.write() is Write.WRITTEN
    assert meeting.at == {}
    assert meeting.budget.held == meeting.lying == 3 * STORED
    assert there(meeting.store) == [2, 3, 4]


@pytest.mark.regression
@pytest.mark.parametrize(
    ("begin", "end"), [(begin, end) for i, begin in enumerate(MOMENTS) for end in MOMENTS[i + 1 :]]
)
def test_a_scan_that_a_write_overtakes_counts_each_page_once(meeting: Meeting, begin: str, end: str) -> None:
    scanning = slow_scan(meeting.budget)
    meeting.at[begin] = scanning.__enter__
    meeting.at[end] = lambda: scanning.__exit__(None, None, None)
    assert meeting.write() is Write.WRITTEN
    assert meeting.at == {}
    assert meeting.budget.held == meeting.lying == 3 * STORED
    assert meeting.write(5) is Write.WRITTEN
    assert there(meeting.store) == [3, 4, 5], "the oldest went, and nothing but it"


@pytest.mark.regression
def test_a_page_that_is_published_and_not_settled_leaves_room_for_another(meeting: Meeting) -> None:
    """Counted twice, it pushed out a page more than was needed."""
    meeting.store.delete([key(1), key(2)])

    def scan_and_write_another() -> None:
        meeting.budget.scan()
        assert meeting.store.write(key(5), page(5)) is Write.WRITTEN

    meeting.at["published"] = scan_and_write_another
    meeting.write()
    assert there(meeting.store) == [3, 4, 5]


@pytest.mark.regression
def test_one_page_written_twice_at_once_is_counted_once_and_its_victims_stay_gone(meeting: Meeting) -> None:
    """A job that was given up may still hang in a write when the page is saved again."""

    def scan_beside_another_writer() -> None:
        with slow_scan(meeting.budget):
            assert meeting.store.write(key(4), page(4)) is Write.WRITTEN

    meeting.at["chosen"] = scan_beside_another_writer
    assert meeting.write() is Write.PRESENT
    assert meeting.budget.held == meeting.lying
    assert not meeting.budget._promises


@pytest.mark.regression
def test_a_victim_that_is_written_again_before_it_is_removed_is_not_counted(meeting: Meeting) -> None:
    def write_it_again() -> None:
        meeting.store.delete([key(1)])
        assert meeting.store.write(key(1), page(1)) is Write.WRITTEN

    meeting.at["chosen"] = write_it_again
    meeting.write()
    assert there(meeting.store) == [3, 4]
    assert meeting.budget.held == meeting.lying == 2 * STORED


@pytest.mark.regression
def test_a_page_written_while_a_reader_misses_it_is_counted(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting.store.delete([key(1)])
    require_there = meeting.place.folder.require_there

    def written_meanwhile() -> None:
        require_there()
        assert meeting.write() is Write.WRITTEN

    with monkeypatch.context() as patch:
        patch.setattr(meeting.place.folder, "require_there", written_meanwhile)
        assert not holds(meeting.store, 4)
    assert meeting.budget.held == meeting.lying == 3 * STORED


@pytest.mark.regression
def test_a_page_deleted_before_it_is_settled_is_not_counted(meeting: Meeting) -> None:
    meeting.at["published"] = lambda: meeting.kept.path(key(4)).unlink()
    meeting.write()
    assert meeting.budget.held == meeting.lying == 2 * STORED


@pytest.mark.regression
def test_a_page_used_during_a_scan_that_another_engine_removed_is_not_held_again(meeting: Meeting) -> None:
    meeting.kept.path(key(2)).unlink()
    with slow_scan(meeting.budget):
        meeting.store.touch([key(3), key(2)])
    assert meeting.budget.held == meeting.lying == 2 * STORED
    assert meeting.write() is Write.WRITTEN
    assert meeting.write(5) is Write.WRITTEN
    assert there(meeting.store) == [3, 4, 5], "what was used during the scan is not the oldest"


@pytest.mark.regression
def test_victims_that_cannot_be_removed_are_still_counted(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(StoreError, match="Operation not permitted"):
            meeting.write()
    assert meeting.budget.held == meeting.lying == 3 * STORED
    meeting.write()
    assert meeting.budget.held == meeting.lying == 3 * STORED


@pytest.mark.regression
def test_a_scan_that_fails_waits_for_what_is_being_changed(meeting: Meeting) -> None:
    """A change asks whether a scan is running, then leaves it a note: the scan must not end in between."""
    listed, fail, ended = threading.Event(), threading.Event(), threading.Event()

    def refuse() -> Any:
        listed.set()
        assert fail.wait(10)
        raise StoreError("gone")

    def scan() -> None:
        with pytest.raises(StoreError, match="gone"):
            meeting.budget.scan()
        ended.set()

    meeting.budget._read_folder = refuse
    scanning = threading.Thread(target=scan)
    scanning.start()
    assert listed.wait(10)
    with meeting.budget._lock:
        fail.set()
        assert not ended.wait(0.2)
    assert ended.wait(10)
    scanning.join()
    assert meeting.write() is Write.WRITTEN
    assert meeting.budget.held == meeting.lying


def test_what_is_being_read_while_it_is_evicted_is_read_whole(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_page = disk.read_page

    def evicted_meanwhile(file: int, *rest: Any) -> str | None:
        assert meeting.write() is Write.WRITTEN
        assert not meeting.kept.path(key(1)).exists()
        return read_page(file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_page", evicted_meanwhile)
        assert holds(meeting.store, 1)
    assert there(meeting.store) == [2, 3, 4]
    assert meeting.budget.held == meeting.lying == 3 * STORED


def test_threads_that_write_read_delete_and_scan_together_lose_count_of_nothing(tmp_path: Path) -> None:
    """Of few pages, so that they meet."""
    place: DiskPlace = room_for(6, tmp_path).open()
    store, failures = place.store(SPACE), list[BaseException]()
    assert place.budget is not None
    budget = place.budget

    def meet(what: int, number: int) -> None:
        if what == 0:
            budget.scan()
        elif what == 1:
            holds(store, number)
        elif what == 2:
            store.delete([key(number)])
        elif what == 3:
            store.touch([key(number)])
        else:
            store.write(key(number), page(number))

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(300):
                meet(chance.randrange(5), chance.randrange(10))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    lying = sum(info.stored_bytes for info in store.scan())
    assert budget.held == lying <= 6 * STORED
    assert not budget._promises
