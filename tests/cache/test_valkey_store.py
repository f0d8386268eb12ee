"""A server that is down, slow, restarted, full, of others, or cut off in the middle of a page."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.kept import MIB, NAME, OTHER, SPACE, holds, key, page, read
from cache.servers import PASSWORD, QUOTED, Certificates, InServer, Proxy, Server, free_port
from samestate.cache.base import PageStore, Read, StoreError, Write
from samestate.cache.envelope import HEADER_BYTES, Namespace
from samestate.cache.stores import valkey as module
from samestate.cache.stores.place import Address, Manners
from samestate.cache.stores.valkey import NAMES, ValkeyPlace

QUICK = "timeout=0.5&connect_timeout=0.5&pause=0.001"
"""Where giving up is what is tested."""
PATIENT = "timeout=20&connect_timeout=20&pause=0.001"
"""Where a busy machine must not be taken for a broken server."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server to be ill-treated."""
    server = Server(tmp_path)
    yield server
    server.go_on()
    server.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def at(port: int, options: str = PATIENT) -> PageStore:
    return open_at(f"valkey://127.0.0.1:{port}/0?{options}").store(SPACE)


def open_at(url: str) -> ValkeyPlace:
    return ValkeyPlace.at(Address(url), Manners())


def every_call(store: PageStore) -> Iterator[Callable[[], object]]:
    """Each once the pause after the one before is over."""
    for call in (
        lambda: store.contains([key(1)]),
        lambda: read(store, key(1)),
        lambda: store.write(key(3), page(3)),
        lambda: store.delete([key(1)]),
        lambda: list(store.scan()),
    ):
        time.sleep(0.01)
        yield call


def eventually(happens: Callable[[], bool]) -> bool:
    """Tries for a while: a pause or a connection that must notice stands between."""
    for _ in range(200):
        try:
            if happens():
                return True
        except StoreError:
            pass
        time.sleep(0.02)
    return False


# --- down, restarted, standing still --------------------------------------------------------------


def test_nobody_listens() -> None:
    for call in every_call(at(free_port())):
        with pytest.raises(StoreError, match=r"valkey://127\.0\.0\.1:\d+/0: Error 111 .*refused"):
            call()


def test_a_killed_server_is_an_error_and_a_new_one_is_used(own: Server) -> None:
    store = at(own.port)
    store.write(key(1), page(1))
    own.kill()
    for call in every_call(store):
        with pytest.raises(StoreError):
            call()
    own.start()
    assert eventually(lambda: store.contains([key(1)]) == [False])
    assert store.write(key(1), page(1)) is Write.WRITTEN
    assert holds(store, 1)


def test_a_restart_between_two_calls_is_not_noticed(own: Server) -> None:
    store = at(own.port)
    store.write(key(1), page(1))
    own.kill()
    own.start()
    assert read(store, key(1))[0] is Read.MISS


def test_a_server_that_stands_still_is_given_up(own: Server) -> None:
    """In bounded time: else this test would not end before the test's own time is over."""
    store = at(own.port, QUICK)
    for number in (1, 2):
        at(own.port).write(key(number), page(number))
    own.stop()
    for call in every_call(store):
        with pytest.raises(StoreError, match=r"/0: (no answer in time|Timeout)"):
            call()
    own.go_on()
    assert eventually(lambda: holds(store, 2))
    # What was given up waited in the server's queue: it may still be done, whole.
    assert read(at(own.port), key(1))[0] in {Read.HIT, Read.MISS}
    assert read(at(own.port), key(3))[0] in {Read.HIT, Read.MISS}


def test_a_server_that_failed_is_left_alone_for_a_while(own: Server) -> None:
    store = at(own.port, "timeout=20&pause=3600")
    store.write(key(1), page(1))
    own.kill()
    with pytest.raises(StoreError):
        read(store, key(1))
    own.start()
    with pytest.raises(StoreError, match="left alone for a moment after: "):
        read(store, key(1))


def test_a_refusal_does_not_make_the_server_left_alone(own: Server) -> None:
    store = at(own.port, "timeout=20&pause=3600")
    with own.client() as client:
        client.config_set("min-replicas-to-write", 1)
    with pytest.raises(StoreError, match="NOREPLICAS"):
        store.write(key(1), page(1))
    with own.client() as client:
        client.config_set("min-replicas-to-write", 0)
    assert store.write(key(1), page(1)) is Write.WRITTEN


def test_a_server_that_takes_connections_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for call in every_call(at(mute.getsockname()[1], QUICK)):
            with pytest.raises(StoreError, match=r"/0: (no answer in time|Timeout)"):
                call()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"\0" * 5000, b"*1\r\n", b""])
def test_something_else_that_listens(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(4096)
                    client.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StoreError):
            read(at(listener.getsockname()[1], QUICK), key(1))
        listener.shutdown(socket.SHUT_RDWR)


# --- cut in the middle of a page ------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 5, 100, HEADER_BYTES + 8, HEADER_BYTES + 9, 300_000, 2 * MIB - 1])
def test_a_reply_cut_anywhere_is_an_error_and_never_a_page(server: Server, proxy: Proxy, after: int) -> None:
    kept, store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20"), at(proxy.port)
    kept.store().write(key(1), page(1, 2 * MIB))
    proxy.cut_reply_after = after
    with pytest.raises(StoreError):
        read(store, key(1), 2 * MIB)
    proxy.cut_reply_after = None
    assert eventually(lambda: holds(store, 1, 2 * MIB))


@pytest.mark.parametrize("after", [300, 100_000, 2 * MIB])
def test_a_page_cut_on_its_way_to_the_server_is_not_there(server: Server, proxy: Proxy, after: int) -> None:
    kept, store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20"), at(proxy.port)
    proxy.cut_request_after = after
    with pytest.raises(StoreError):
        store.write(key(1), page(1, 2 * MIB))
    assert kept.get(key(1)) is None
    proxy.cut_request_after = None
    assert eventually(lambda: store.write(key(1), page(1, 2 * MIB)) is Write.WRITTEN)
    assert holds(store, 1, 2 * MIB)


def test_a_trickle_is_given_up(server: Server, proxy: Proxy) -> None:
    """Every piece comes in time, the whole does not."""
    kept, store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20"), at(proxy.port, QUICK)
    kept.store().write(key(1), page(1, 2 * MIB))
    proxy.delay = 0.05
    with pytest.raises(StoreError, match="no answer in time"):
        read(store, key(1), 2 * MIB)
    proxy.delay = 0.0
    assert eventually(lambda: holds(store, 1, 2 * MIB))


def test_a_connection_is_good_after_damage_and_after_errors(server: Server) -> None:
    """One connection for all: what one request left would be the next one's answer."""
    kept = InServer(server, f"valkey://127.0.0.1:{server.port}/0?connections=1&timeout=20")
    store = kept.store()
    for number in (1, 2, 3):
        store.write(key(number), page(number))
    kept.put(key(1), b"short")
    kept.put(key(2), (kept.get(key(2)) or b"")[:-1] + b"!")
    with server.client() as client:
        client.delete(kept.name(key(4)))
        client.rpush(kept.name(key(4)), "a list")
    seen = [read(store, key(number))[0] for number in (1, 3, 2, 3, 4, 3, 5, 3)]
    assert seen == [
        Read.DAMAGED,
        Read.HIT,
        Read.DAMAGED,
        Read.HIT,
        Read.DAMAGED,
        Read.HIT,
        Read.MISS,
        Read.HIT,
    ]
    assert read(store, key(4))[0] is Read.MISS


def test_more_threads_than_connections_wait_for_one(server: Server) -> None:
    store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?connections=2&timeout=20").store()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            store.write(key(number), page(number, MIB))
            assert holds(store, number, MIB)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- room, and what the server's own policy takes ------------------------------------------------


def test_a_full_server_has_no_room(own: Server) -> None:
    store = at(own.port)
    store.write(key(1), page(1, MIB))
    with own.client() as client:
        client.config_set("maxmemory", "1mb")
        assert store.write(key(2), page(2, MIB)) is Write.NO_ROOM
        client.config_set("maxmemory", "0")
    assert holds(store, 1, MIB)
    assert store.write(key(2), page(2, MIB)) is Write.WRITTEN


def test_what_the_server_evicted_is_a_miss_and_its_name_is_given_again(own: Server) -> None:
    with own.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "6mb")
        place = open_at(f"valkey://127.0.0.1:{own.port}/0?timeout=20")
        store = place.store(SPACE)
        assert {store.write(key(number), page(number, MIB)) for number in range(20)} == {Write.WRITTEN}
        held = [holds(store, number, MIB) for number in range(20)]
        assert 0 < held.count(True) < 10
        client.delete(NAMES)
    assert place.namespaces() == [Namespace.unnamed(SPACE.digest)]
    store.write(key(30), page(30))
    assert place.namespaces() == [SPACE]


def test_a_page_larger_than_the_server_takes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_VALUE", MIB)
    store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20").store()
    assert store.write(key(1), page(1, MIB - HEADER_BYTES)) is Write.WRITTEN
    assert store.write(key(2), page(2, MIB - HEADER_BYTES + 1)) is Write.NO_ROOM


def test_looking_tells_when_a_page_was_used(server: Server) -> None:
    store = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20").store()
    store.write(key(1), page(1))
    (info,) = store.scan()
    assert info.last_used is not None
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lfu")
        (info,) = store.scan()
        client.config_set("maxmemory-policy", "noeviction")
    assert info.last_used is None


def test_keys_of_others_are_never_touched(server: Server) -> None:
    kept = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20")
    place = kept.open()
    store = place.store(SPACE)
    with server.client() as client:
        client.set(kept.name(key(1)) + b"x", "odd")
        client.set("samestate:1:nothing", "odd")
        client.set("session:17", "theirs")
        store.write(key(1), page(1))
        assert [info.key for info in store.scan()] == [key(1)]
        assert place.namespaces() == [SPACE]
        assert client.get("session:17") == b"theirs"


def test_databases_are_apart(server: Server) -> None:
    InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20")
    first, second = (open_at(f"valkey://127.0.0.1:{server.port}/{n}?timeout=20").store(SPACE) for n in (0, 5))
    first.write(key(1), page(1))
    assert second.contains([key(1)]) == [False]


@pytest.mark.tamper
def test_a_name_that_is_not_this_namespace_s_is_not_believed(server: Server) -> None:
    kept = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20")
    kept.store().write(key(1), page(1))
    with server.client() as client:
        assert client.hget(NAMES, SPACE.digest.hex()) == NAME.encode()
        client.hset(NAMES, SPACE.digest.hex(), OTHER.name)
    assert kept.open().namespaces() == [Namespace.unnamed(SPACE.digest)]


# --- passwords and encryption ---------------------------------------------------------------------


def refused(url: str) -> str:
    with pytest.raises(StoreError) as refusal:
        read(open_at(url).store(SPACE), key(1))
    return str(refusal.value)


def test_the_password_and_the_certificate_are_needed(secure_server: Server, certificates: Certificates) -> None:
    there, ca = f"127.0.0.1:{secure_server.port}/0?{PATIENT}", f"&ca={certificates.ca}"
    assert "Authentication required" in refused(f"valkeys://{there}{ca}")
    assert "invalid username-password pair" in refused(f"valkeys://:wrong@{there}{ca}")
    assert "certificate verify failed" in refused(f"valkeys://:{QUOTED}@{there}")
    refused(f"valkey://:{QUOTED}@{there}")


def test_a_server_of_another_name_is_refused(secure_server: Server, certificates: Certificates) -> None:
    url = f"valkeys://:{QUOTED}@localhost:{secure_server.port}/0?{PATIENT}&ca={certificates.ca}"
    assert "certificate verify failed" in refused(url)


def test_a_password_may_lie_in_a_file(secure_server: Server, certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    url = (
        f"valkeys://default@127.0.0.1:{secure_server.port}/0?timeout=20"
        f"&ca={certificates.ca}&password_file={tmp_path / 'password'}"
    )
    store = InServer(secure_server, url).store()
    store.write(key(1), page(1))
    assert holds(store, 1)


def test_secrets_are_never_shown(secure_server: Server, certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wr0ng-one")
    there = f"127.0.0.1:{secure_server.port}/0?{PATIENT}&ca={certificates.ca}"
    told = [
        refused(f"valkeys://:wr0ng-one@{there}"),
        refused(f"valkeys://{there}&password_file={tmp_path / 'password'}"),
        refused(f"valkey://user:{QUOTED}@127.0.0.1:{free_port()}/0"),
    ]
    with pytest.raises(ValueError) as bad:
        open_at(f"valkey://:{QUOTED}@127.0.0.1:6379/0?quota=3")
    for text in (*told, str(bad.value), open_at(f"valkey://:{QUOTED}@127.0.0.1:6379/0").shown):
        assert not any(word in text for word in ("wr0ng", "s3cr3t", "signs")), text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("valkey:///0", "say valkey://host:port/0"),
        ("valkey://host/zero", "the database is a number"),
        ("valkey://host:99999/0", "the port is no number"),
        ("valkey://host/0?timeout=soon", "timeout=soon: say seconds, e.g. timeout=2"),
        ("valkey://host/0?timeout=-1", "say seconds"),
        ("valkey://host/0?timeout=nan", "say seconds"),
        ("valkey://host/0?connections=0", "say a whole number"),
        ("valkey://host/0?retries=3", "no option retries; use timeout, connect_timeout"),
        ("valkey://host/0?ca=/ca.pem", "valkey is not encrypted; use valkeys://"),
        ("valkey://host/0?password_file=/nonexistent/file", "cannot be read"),
    ],
)
def test_a_url_that_makes_no_sense_is_said(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_at(url)


def test_closing_twice_does_no_harm_and_opens_again(server: Server) -> None:
    place = InServer(server, f"valkey://127.0.0.1:{server.port}/0?timeout=20").open()
    store = place.store(SPACE, alone=True)
    store.write(key(1), page(1))
    store.close()
    store.close()
    place.close()
    assert holds(store, 1)
