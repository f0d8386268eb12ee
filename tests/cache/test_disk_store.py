"""A folder that is full, read-only, gone, of something else, or shared with engines that crash."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.kept import MIB, OTHER, SPACE, OnDisk, holds, key, page, read
from samestate.cache.base import PageStore, Read, StoreError, Write
from samestate.cache.envelope import Namespace
from samestate.cache.stores import disk_files
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.stores.disk_folder import MARKER, NAME_FILE
from samestate.cache.stores.place import Address, Manners


@pytest.fixture
def kept(tmp_path: Path) -> OnDisk:
    return OnDisk(tmp_path / "pages")


@pytest.fixture
def store(kept: OnDisk) -> PageStore:
    return kept.store()


def failing(number: int) -> Callable[..., Any]:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def leftovers(kept: OnDisk) -> list[Path]:
    return list((kept.root / "v1/tmp").iterdir())


# --- the folder -----------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="is a folder of something else"):
        DiskPlace(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_must_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no pages .*check the path"):
        DiskPlace(tmp_path / "pages", manners=Manners(create=False))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="Not a directory"):
        DiskPlace(tmp_path / "file" / "pages")


def test_the_root_of_a_disk_will_do(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert DiskPlace(tmp_path).store(SPACE).write(key(1), page(1)) is Write.WRITTEN


def test_a_folder_is_named_whole() -> None:
    for url, words in (
        ("file:relative", "name the whole path"),
        ("file://host/path", "name the whole path"),
        ("file:///pages?budget=much", "'much' is no size"),
        ("file:///pages?quota=3", "no option quota; use budget=100GiB"),
    ):
        with pytest.raises(ValueError, match=words):
            DiskPlace.at(Address(url), Manners())


def test_files_of_others_are_never_touched(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    foreign = [kept.path(key(1)).with_name(name) for name in ("notes.page", "ABCD.page", ".page", "ab.txt")]
    foreign.append(kept.root / "v1" / "README")
    for path in foreign:
        path.write_text("x")
    assert [info.key for info in store.scan()] == [key(1)]
    assert kept.open().namespaces() == [SPACE]
    assert all(path.exists() for path in foreign)


def test_a_lost_name_costs_the_name_alone(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    (kept.root / "v1" / SPACE.digest.hex() / NAME_FILE).unlink()
    (found,) = kept.open().namespaces()
    assert found == Namespace.unnamed(SPACE.digest)
    assert holds(kept.store(found), 1)


@pytest.mark.tamper
def test_a_name_that_is_not_this_namespace_s_is_not_believed(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    (kept.root / "v1" / SPACE.digest.hex() / NAME_FILE).write_text(OTHER.name)
    assert kept.open().namespaces() == [Namespace.unnamed(SPACE.digest)]


# --- gone -----------------------------------------------------------------------------------------


def every_call(store: PageStore) -> Iterator[Callable[[], object]]:
    yield lambda: store.contains([key(1)])
    yield lambda: read(store, key(1))
    yield lambda: store.write(key(3), page(3))
    yield lambda: store.delete([key(1)])
    yield lambda: list(store.scan())


def test_a_vanished_folder_is_an_error_and_is_not_made_anew(kept: OnDisk, store: PageStore, tmp_path: Path) -> None:
    store.write(key(1), page(1))
    kept.root.rename(tmp_path / "elsewhere")
    for call in every_call(store):
        with pytest.raises(StoreError, match="was the folder removed, or its disk unmounted"):
            call()
    assert not kept.root.exists()
    (tmp_path / "elsewhere").rename(kept.root)
    assert holds(store, 1)


def mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this machine lets nobody mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    (tmp_path / "disk").mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "disk")
    yield tmp_path / "disk"
    subprocess.run(["umount", tmp_path / "disk"], check=False, capture_output=True)


def test_an_unmounted_disk_is_an_error_and_nothing_is_written_below_it(small_disk: Path) -> None:
    store = OnDisk(small_disk).store()
    store.write(key(1), page(1))
    subprocess.run(["umount", small_disk], check=True)
    for call in every_call(store):
        with pytest.raises(StoreError, match="its disk unmounted"):
            call()
    assert list(small_disk.iterdir()) == []


# --- no space, no permission ----------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(small_disk: Path) -> None:
    kept = OnDisk(small_disk)
    store = kept.store()
    assert store.write(key(1), page(1, 700_000)) is Write.WRITTEN
    with pytest.raises(StoreError, match="No space left on device"):
        store.write(key(2), page(2, 700_000))
    assert leftovers(kept) == []
    assert store.contains([key(2)]) == [False]
    assert holds(store, 1, 700_000)
    store.delete([key(1)])
    assert store.write(key(2), page(2, 700_000)) is Write.WRITTEN


def test_a_full_disk_gives_its_promise_back(small_disk: Path) -> None:
    store = OnDisk(small_disk, budget_bytes=2_000_000).store()
    store.write(key(1), page(1, 700_000))
    for _ in range(5):
        with pytest.raises(StoreError):
            store.write(key(2), page(2, 700_000))
    assert holds(store, 1, 700_000)  # nothing was evicted for pages that never came


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_the_system_refuses(
    kept: OnDisk, store: PageStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The refusal is pretended: `os.writev` raises it."""
    store.write(key(1), page(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing(number))
        with pytest.raises(StoreError, match=os.strerror(number)):
            store.write(key(2), page(2))
    assert leftovers(kept) == []
    assert store.write(key(2), page(2)) is Write.WRITTEN


def test_a_page_larger_than_files_may_be(kept: OnDisk) -> None:
    code = f"""
import resource
from pathlib import Path
from samestate.cache.base import PageKey, StoreError
from samestate.cache.envelope import Namespace
from samestate.cache.stores.disk import DiskPlace
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
store = DiskPlace(Path({str(kept.root)!r})).store(Namespace.named({SPACE.name!r}))
store.write(PageKey(b"small"), memoryview(bytes(50_000)))
try:
    store.write(PageKey(b"large"), memoryview(bytes(200_000)))
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert leftovers(kept) == []
    assert [info.key for info in kept.store().scan()] == [b"small"]


def test_a_read_only_folder_serves_and_takes_nothing(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    kept.put(key(2), b"no page")
    mount("--bind", kept.root, kept.root)
    try:
        mount("-o", "remount,ro,bind", kept.root)
        for one in (store, kept.store()):
            assert holds(one, 1)
            with pytest.raises(StoreError, match="Read-only file system"):
                one.write(key(3), page(3))
            with pytest.raises(StoreError, match="Read-only file system"):
                one.delete([key(1)])
            assert read(one, key(2))[0] is Read.DAMAGED
            assert read(one, key(2))[0] is Read.DAMAGED
    finally:
        subprocess.run(["umount", kept.root], check=True)
    assert store.write(key(3), page(3)) is Write.WRITTEN


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_page_that_cannot_be_opened_is_no_miss(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The refusal is pretended: `os.open` raises it. Tests may run as root, whom no permission stops."""
    store.write(key(1), page(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(number))
        with pytest.raises(StoreError, match=os.strerror(number)):
            read(store, key(1))
        with pytest.raises(StoreError, match=os.strerror(number)):
            store.write(key(2), page(2))
    assert holds(store, 1)


def test_a_bad_sector_costs_its_page(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pretended: `os.preadv` raises EIO."""
    store.write(key(1), page(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(StoreError, match="Input/output error"):
            read(store, key(1))
    assert read(store, key(1))[0] is Read.MISS


def test_what_is_no_file_is_damage(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    kept.path(key(1)).unlink()
    os.mkfifo(kept.path(key(1)))
    assert read(store, key(1))[0] is Read.DAMAGED
    assert read(store, key(1))[0] is Read.MISS


def test_short_reads_and_writes_are_continued(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move less than it was asked for: here never more than 1,000 bytes."""
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda file, buffers: writev(file, [buffers[0][:1000]]))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:1000]], at))
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert holds(store, 1)


def test_a_disk_without_hard_links(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pretended: `os.link` raises EPERM, as on FAT."""
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert disk_files.publish("/nonexistent", __file__) is Write.PRESENT
    assert holds(store, 1)


# --- several engines ------------------------------------------------------------------------------


def test_what_a_crash_left_is_removed_once_it_is_old(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    old, fresh = kept.root / "v1/tmp/crashed", kept.root / "v1/tmp/another-engine"
    for path in (old, fresh):
        path.write_bytes(b"half a page")
    os.utime(old, (time.time() - 3600,) * 2)
    assert holds(kept.store(), 1)
    assert leftovers(kept) == [fresh]


def test_a_page_that_is_being_written_is_not_seen(
    kept: OnDisk, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    link = os.link

    def look(tmp: str, path: str) -> None:
        seen.append((store.contains([key(1)]), list(store.scan()), os.path.getsize(tmp)))
        link(tmp, path)

    monkeypatch.setattr(os, "link", look)
    store.write(key(1), page(1))
    assert seen == [([False], [], 5256)]


def test_folders_that_vanish_under_a_writer_are_made_again(kept: OnDisk, store: PageStore) -> None:
    import shutil

    store.write(key(1), page(1))
    shutil.rmtree(kept.root / "v1")
    assert store.contains([key(1)]) == [False]
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert kept.open().namespaces() == [SPACE]


def test_use_is_seen_in_the_folder(kept: OnDisk, store: PageStore) -> None:
    store.write(key(1), page(1))
    before = time.time() - 3600
    os.utime(kept.path(key(1)), (before, before))
    assert [info.last_used for info in store.scan()] == [pytest.approx(before)]
    assert holds(store, 1)
    (info,) = store.scan()
    assert info.last_used is not None and info.last_used > before + 3000


def test_the_marker_says_what_the_folder_is(kept: OnDisk, store: PageStore) -> None:
    assert "pages kept by samestate" in (kept.root / MARKER).read_text()
    assert store.write(key(1), page(1, 2 * MIB)) is Write.WRITTEN
