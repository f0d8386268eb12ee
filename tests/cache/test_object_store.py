"""Object stores: drivers that raise what they like, drivers that are missing, and a bucket where one is pretended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.kept import OTHER, SPACE, InObjects, holds, key, page, read
from samestate.cache.base import PageStore, Read, StoreError, Write
from samestate.cache.stores.object import ObjectPlace
from samestate.cache.stores.place import Address, Manners
from samestate.cache.stores.urls import open_place, open_store


@pytest.fixture
def kept(tmp_path: Path) -> InObjects:
    return InObjects(f"object+memory://{tmp_path.name}/pages")


class Refusal(Exception):
    """As drivers have their own."""


@pytest.mark.parametrize("error", [Refusal("slow down"), OSError(5, "gone"), TimeoutError("late"), ValueError("odd")])
def test_whatever_a_driver_raises_is_one_error(
    kept: InObjects, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    place = kept.open()
    store = place.store(SPACE)
    store.write(key(1), page(1))

    def refuse(*arguments: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        for name in ("cat_file", "pipe_file", "info", "find", "ls", "rm_file"):
            patch.setattr(place.files, name, refuse)
        for call in (
            lambda: store.contains([key(1)]),
            lambda: read(store, key(1)),
            lambda: store.write(key(2), page(2)),
            lambda: store.delete([key(1)]),
            lambda: list(store.scan()),
            place.namespaces,
        ):
            with pytest.raises(StoreError, match=r"^object\+memory://.*(slow down|gone|late|odd)"):
                call()
    assert holds(store, 1)


@pytest.mark.parametrize("error", [TypeError("no such argument: mode"), NotImplementedError()])
def test_a_driver_that_cannot_create_exclusively_looks_first(
    kept: InObjects, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    place = kept.open()
    store = place.store(SPACE)
    pipe = place.files.pipe_file

    def only_plain(path: str, value: bytes, **options: Any) -> None:
        if options:
            raise error
        pipe(path, value)

    monkeypatch.setattr(place.files, "pipe_file", only_plain)
    assert store.write(key(1), page(1)) is Write.WRITTEN
    monkeypatch.setattr(store, "_is_there", lambda path: False)
    assert store.write(key(1), page(2)) is Write.PRESENT
    assert holds(store, 1)


def test_a_page_half_put_is_not_seen_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = InObjects(f"object+file://{tmp_path}/pages").open()
    store = place.store(SPACE)
    store.write(key(0), page(0))
    pipe, seen = place.files.pipe_file, list[object]()

    def cut(path: str, value: bytes, **options: object) -> None:
        pipe(path, value[:100])
        seen.append((store.contains([key(1)]), [info.key for info in store.scan()]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place.files, "pipe_file", cut)
        with pytest.raises(StoreError, match="No space left on device"):
            store.write(key(1), page(1))
    assert seen == [([False], [key(0)])]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and ".page." in path.name] == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("object+sftp://host/x", "pages may be seen half-written there; use one of "),
        ("object+s3://bucket/x?endpoint=y", "no option endpoint; use none: the driver reads its own"),
        ("object+://bucket/x", "pages may be seen half-written there"),
    ],
)
def test_what_is_no_object_store_is_said(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ObjectPlace.at(Address(url), Manners())


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ValueError, match=r"object\+s3://bucket/x: Install s3fs to access S3"):
        open_place("object+s3://bucket/x")


# --- a bucket -------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageStore]:
    """A pretended S3, where moto and s3fs are installed: no dependencies of ours."""
    server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("pages")
    store = open_store("object+s3://pages/tier", SPACE.name)
    yield store
    store.close()
    running.stop()


def test_pages_in_a_bucket(bucket: PageStore) -> None:
    assert bucket.write(key(1), page(1)) is Write.WRITTEN
    assert bucket.write(key(1), page(2)) is Write.PRESENT
    assert holds(bucket, 1) and not holds(bucket, 2)
    with open_place_again() as place:
        assert place.namespaces() == [SPACE]
        assert not holds(place.store(OTHER), 1)
        # Exclusive creation is S3's own: nobody looked first.
        path = place.store(SPACE)._path(key(1))
        assert not place.create(path, b"late")
        place.files.pipe_file(path, place.files.cat_file(path)[:-1])
    assert [read(bucket, key(1))[0] for _ in range(2)] == [Read.DAMAGED, Read.MISS]
    assert bucket.write(key(3), page(3, 3 << 20)) is Write.WRITTEN
    assert [(info.key, info.stored_bytes) for info in bucket.scan()] == [(key(3), 256 + (3 << 20))]
    assert bucket.delete([key(1), key(3)]) == 1
    assert bucket.contains([key(3)]) == [False]


def open_place_again() -> Any:
    from contextlib import closing

    return closing(open_place("object+s3://pages/tier"))
