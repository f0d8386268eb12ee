"""What every store must do, whatever it keeps pages in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.kept import MIB, NAME, OTHER, SPACE, InObjects, Kept, OnDisk, holds, key, page, read
from cache.servers import QUOTED, InServer
from samestate.cache.base import PageKey, Read, Write
from samestate.cache.envelope import HEADER_BYTES, MAX_KEY_BYTES, Namespace, make_header
from samestate.cache.stores.place import Manners

SHARED = ["disk", "disk-budget", "valkey", "valkey-tls", "file-objects"]
"""By processes."""
KINDS = [*SHARED, "memory-objects"]


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    match request.param:
        case "disk":
            return OnDisk(tmp_path / "pages")
        case "disk-budget":
            return OnDisk(tmp_path / "pages", budget_bytes=1 << 30)
        case "valkey":
            server = request.getfixturevalue("server")
            return InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20")
        case "valkey-tls":
            secure, ca = request.getfixturevalue("secure_server"), request.getfixturevalue("certificates").ca
            return InServer(secure, f"rediss://:{QUOTED}@127.0.0.1:{secure.port}?timeout=20&ca={ca}")
        case "memory-objects":
            return InObjects(f"object+memory://{tmp_path.name}/pages")
        case "file-objects":
            return InObjects(f"object+file://{tmp_path}/pages")
        case _:
            raise AssertionError(request.param)


# --- what goes in comes out ---------------------------------------------------------------------


def test_a_page_is_read_as_it_was_written(kept: Kept) -> None:
    store = kept.store()
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert read(store, key(1)) == (Read.HIT, bytes(page(1)))


def test_a_page_survives_who_wrote_it(kept: Kept) -> None:
    first = kept.open()
    first.store(SPACE).write(key(1), page(1))
    first.close()
    first.close()
    assert holds(kept.store(), 1)


def test_what_is_not_there_is_a_miss(kept: Kept) -> None:
    store = kept.store()
    assert read(store, key(1))[0] is Read.MISS
    store.write(key(1), page(1))
    assert read(store, key(1, group=1))[0] is Read.MISS


@pytest.mark.parametrize("size", [0, 1, 255, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 17])
def test_pages_of_any_size(kept: Kept, size: int) -> None:
    store = kept.store()
    assert store.write(key(1), page(1, size)) is Write.WRITTEN
    assert read(store, key(1), size) == (Read.HIT, bytes(page(1, size)))
    assert len(kept.get(key(1)) or b"") == HEADER_BYTES + size


def test_buffers_of_other_shapes_are_their_bytes(kept: Kept) -> None:
    store = kept.store()
    store.write(key(1), memoryview(bytearray(page(1, 4096))).cast("I", (32, 32)))
    into = bytearray(4096)
    assert store.read(key(1), memoryview(into).cast("d")) is Read.HIT
    assert into == page(1, 4096)


def test_a_buffer_with_gaps_is_refused(kept: Kept) -> None:
    store = kept.store()
    with pytest.raises(ValueError, match="do not lie in one piece"):
        store.write(key(1), page(1)[::2])
    assert store.contains([key(1)]) == [False]


@pytest.mark.parametrize("bad", [b"", b"k" * (MAX_KEY_BYTES + 1)])
def test_keys_that_no_envelope_holds_are_refused(kept: Kept, bad: bytes) -> None:
    with pytest.raises(ValueError, match="a page's key has 1 to 96"):
        kept.store().write(PageKey(bad), page(1))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.dictionaries(st.binary(min_size=1, max_size=MAX_KEY_BYTES), st.binary(max_size=300), max_size=8))
def test_any_keys_and_pages(kept: Kept, pages: dict[bytes, bytes]) -> None:
    place = kept.open()
    store = place.store(SPACE)
    store.delete([info.key for info in store.scan()])
    for name, content in pages.items():
        assert store.write(PageKey(name), memoryview(content)) is Write.WRITTEN
    for name, content in pages.items():
        assert read(store, PageKey(name), len(content)) == (Read.HIT, content)
    assert {info.key: info.stored_bytes for info in store.scan()} == {
        name: HEADER_BYTES + len(content) for name, content in pages.items()
    }
    place.close()


# --- one writer wins ------------------------------------------------------------------------------


def test_the_first_writer_wins(kept: Kept) -> None:
    store, other = kept.store(), kept.store()
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert other.write(key(1), page(2)) is Write.PRESENT
    assert store.write(key(1), page(3)) is Write.PRESENT
    assert read(other, key(1)) == (Read.HIT, bytes(page(1)))


def test_threads_of_one_store_do_not_disturb_each_other(kept: Kept) -> None:
    store, failures = kept.store(), list[str]()
    written: list[Write] = []

    def work(number: int) -> None:
        try:
            written.append(store.write(key(0), page(0, 300_000)))
            store.write(key(number), page(number, 300_000))
            assert holds(store, 0, 300_000) and holds(store, number, 300_000)
        except BaseException as error:
            failures.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert written.count(Write.WRITTEN) == 1 and len(written) == 8
    assert all(holds(kept.store(), number, 300_000) for number in range(9))


WRITER = """
import sys
from samestate.cache.base import PageKey
from samestate.cache.stores.urls import open_store
url, name, mine = sys.argv[1], sys.argv[2], sys.argv[3].encode()
store = open_store(url, name)
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    print(store.write(PageKey(f"key {number}".encode()), memoryview(mine * 400_000)).value, flush=True)
"""


@pytest.mark.parametrize("kept", SHARED, indirect=True)
def test_of_several_processes_one_writes_each_page(kept: Kept) -> None:
    kept.open().close()
    command = [sys.executable, "-c", WRITER, kept.url, NAME]
    writers = [
        subprocess.Popen([*command, letter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for letter in "abc"
    ]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    told = [writer.communicate()[0].splitlines() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    store = kept.store()
    for number, words in enumerate(zip(*told, strict=True)):
        assert sorted(words) == ["present"] * 2 + ["written"]
        winner = "abc"[words.index("written")]
        assert read(store, PageKey(f"key {number}".encode()), 400_000) == (Read.HIT, winner.encode() * 400_000)
    assert len(list(store.scan())) == 40


ENDLESS_WRITER = """
import itertools, os, sys
from samestate.cache.base import PageKey
from samestate.cache.stores.urls import open_store
store = open_store(sys.argv[1], sys.argv[2])
for number in itertools.count():
    store.write(PageKey(f"key {number}".encode()), memoryview(bytes([number % 251]) * 3_000_000))
    print(number, flush=True)
"""


@pytest.mark.parametrize("kept", SHARED, indirect=True)
@pytest.mark.parametrize("pages", [3, 4, 5])
def test_a_writer_killed_at_any_moment_leaves_whole_pages(kept: Kept, pages: int) -> None:
    kept.open().close()
    command = [sys.executable, "-c", ENDLESS_WRITER, kept.url, NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for _ in range(pages):
            assert writer.stdout.readline()
        time.sleep(0.001 * pages)  # somewhere in the next page
        writer.kill()
    store = kept.store()
    infos = list(store.scan())
    assert len(infos) >= pages
    for info in infos:
        content = bytes([int(info.key.decode().split()[1]) % 251]) * 3_000_000
        assert read(store, info.key, 3_000_000) == (Read.HIT, content)
    left = PageKey(f"key {len(infos)}".encode())
    assert store.write(left, page(1)) is Write.WRITTEN


# --- looking and removing -------------------------------------------------------------------------


def test_presence_in_the_order_asked(kept: Kept) -> None:
    store = kept.store()
    for number in (1, 3):
        store.write(key(number), page(number))
    assert store.contains([key(3), key(2), key(1), key(2)]) == [True, False, True, False]
    assert store.contains([]) == []


def test_presence_of_many(kept: Kept) -> None:
    store = kept.store()
    for number in range(0, 40, 2):
        store.write(key(number), page(number, 100))
    asked = [key(number) for number in range(3000)]
    assert [number for number, there in enumerate(store.contains(asked)) if there] == list(range(0, 40, 2))


def test_touching_changes_no_page(kept: Kept) -> None:
    store = kept.store()
    for number in (1, 2):
        store.write(key(number), page(number))
    store.touch([key(1), key(2), key(3)])
    store.touch([])
    assert holds(store, 1) and holds(store, 2) and not holds(store, 3)


def test_removal_is_counted(kept: Kept) -> None:
    store = kept.store()
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    assert store.delete([key(1), key(3), key(4)]) == 2
    assert store.delete([]) == 0
    assert store.contains([key(1), key(2), key(3)]) == [False, True, False]
    assert store.write(key(1), page(1)) is Write.WRITTEN


def test_a_scan_shows_every_page_once(kept: Kept) -> None:
    store = kept.store()
    assert list(store.scan()) == []
    for number in range(20):
        store.write(key(number), page(number, 100 + number))
    infos = list(store.scan())
    assert {info.key: info.stored_bytes for info in infos} == {key(n): HEADER_BYTES + 100 + n for n in range(20)}
    assert len(infos) == 20 and {info.namespace for info in infos} == {NAME}


# --- namespaces -----------------------------------------------------------------------------------


def test_namespaces_never_mix(kept: Kept) -> None:
    place = kept.open()
    ours, theirs = place.store(SPACE), place.store(OTHER)
    ours.write(key(1), page(1))
    assert theirs.contains([key(1)]) == [False]
    assert read(theirs, key(1))[0] is Read.MISS
    assert theirs.write(key(1), page(2)) is Write.WRITTEN
    assert theirs.delete([key(1)]) == 1
    assert holds(ours, 1)
    assert list(theirs.scan()) == []


def test_namespaces_are_listed_by_name(kept: Kept) -> None:
    place = kept.open()
    assert place.namespaces() == []
    for space in (SPACE, OTHER):
        place.store(space).write(key(1), page(1))
    assert sorted(place.namespaces()) == sorted([SPACE, OTHER])
    assert sorted(kept.open().namespaces()) == sorted([SPACE, OTHER])


def test_a_namespace_has_a_name() -> None:
    with pytest.raises(ValueError, match="namespace: it is empty"):
        Namespace.named("")


# --- damage ---------------------------------------------------------------------------------------

REGIONS = {
    "magic": 0,
    "version": 8,
    "bytes of the key": 10,
    "bytes of the header": 12,
    "bytes of the page": 16,
    "namespace": 30,
    "key": 60,
    "padding of the key": 120,
    "checksum of the page": 160,
    "checksum of the header": 170,
    "zeros": 200,
    "first byte": HEADER_BYTES,
    "middle": HEADER_BYTES + 2500,
    "last byte": HEADER_BYTES + 4999,
}


def flipped(stored: bytes, at: int) -> bytes:
    return stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]


@pytest.mark.tamper
@pytest.mark.parametrize("at", REGIONS.values(), ids=list(REGIONS))
def test_a_flipped_bit_is_damage_and_goes(kept: Kept, at: int) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    kept.put(key(1), flipped(kept.get(key(1)) or b"", at))
    assert store.contains([key(1)]) == [True]
    assert read(store, key(1))[0] is Read.DAMAGED
    assert kept.get(key(1)) is None
    assert read(store, key(1))[0] is Read.MISS
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert holds(store, 1)


@pytest.mark.tamper
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(0, 8 * (HEADER_BYTES + 700) - 1))
def test_any_flipped_bit_is_found(kept: Kept, bit: int) -> None:
    place = kept.open()
    store = place.store(SPACE)
    store.write(key(1), page(1, 700))
    stored = bytearray(kept.get(key(1)) or b"")
    stored[bit // 8] ^= 1 << bit % 8
    kept.put(key(1), bytes(stored))
    assert read(store, key(1), 700)[0] is Read.DAMAGED
    place.close()


@pytest.mark.tamper
@pytest.mark.parametrize("length", [0, 1, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 4999])
def test_a_page_cut_short_is_damage(kept: Kept, length: int) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    kept.put(key(1), (kept.get(key(1)) or b"")[:length])
    assert read(store, key(1))[0] is Read.DAMAGED
    assert store.contains([key(1)]) == [False]


@pytest.mark.tamper
@pytest.mark.parametrize("more", [1, HEADER_BYTES, 2 * MIB])
def test_a_page_that_is_too_long_is_damage(kept: Kept, more: int) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    kept.put(key(1), (kept.get(key(1)) or b"") + b"\0" * more)
    assert read(store, key(1))[0] is Read.DAMAGED
    assert store.contains([key(1)]) == [False]


@pytest.mark.tamper
def test_zeros_are_damage(kept: Kept) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    kept.put(key(1), bytes(HEADER_BYTES + 5000))
    assert read(store, key(1))[0] is Read.DAMAGED


@pytest.mark.tamper
def test_swapped_pages_are_damage(kept: Kept) -> None:
    store = kept.store()
    for number in (1, 2):
        store.write(key(number), page(number))
    first, second = kept.get(key(1)) or b"", kept.get(key(2)) or b""
    kept.put(key(1), second)
    kept.put(key(2), first)
    assert [read(store, key(number))[0] for number in (1, 2)] == [Read.DAMAGED, Read.DAMAGED]


@pytest.mark.tamper
def test_a_page_of_another_namespace_is_damage(kept: Kept) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    mine = kept.get(key(1)) or b""
    theirs = kept.open().store(OTHER)
    theirs.write(key(2), page(2))
    stored = bytearray(mine)
    # Whole in itself: the header of the other namespace, over this key and these bytes.
    stored[:HEADER_BYTES] = make_header(OTHER, key(1), page(1))
    kept.put(key(1), bytes(stored))
    assert read(store, key(1))[0] is Read.DAMAGED


def test_a_buffer_of_another_length_is_never_filled_with_half_a_page(kept: Kept) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    assert read(store, key(1), 4999)[0] is Read.DAMAGED
    store.write(key(1), page(1))
    assert read(store, key(1), 5001)[0] is Read.DAMAGED


@pytest.mark.tamper
def test_damage_is_told_and_nothing_else_is(kept: Kept) -> None:
    told: list[tuple[PageKey, str]] = []
    place = kept.open(Manners(on_damage=lambda place, key, fault: told.append((key, fault))))
    store = place.store(SPACE)
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    kept.put(key(2), flipped(kept.get(key(2)) or b"", HEADER_BYTES + 77))
    kept.put(key(3), flipped(kept.get(key(3)) or b"", 77))
    for number in (1, 2, 2, 3, 4):
        read(store, key(number))
    assert told == [(key(2), "checksum of the page"), (key(3), "checksum of the header")]


def test_damage_is_logged_in_one_line(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    store = kept.store()
    store.write(key(1), page(1))
    kept.put(key(1), flipped(kept.get(key(1)) or b"", HEADER_BYTES))
    read(store, key(1))
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("samestate.cache")]
    assert line == f"{kept.open().shown}: page {key(1).hex()} is damaged: checksum of the page"


def test_damage_may_be_kept_to_be_looked_at(kept: Kept) -> None:
    place = kept.open(Manners(keep_damaged=True))
    store = place.store(SPACE)
    store.write(key(1), page(1))
    damaged = flipped(kept.get(key(1)) or b"", HEADER_BYTES)
    kept.put(key(1), damaged)
    assert [read(store, key(1))[0] for _ in range(2)] == [Read.DAMAGED, Read.DAMAGED]
    assert kept.get(key(1)) == damaged
