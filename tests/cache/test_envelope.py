from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.kept import OTHER, SPACE, key, page
from samestate.cache.base import PageKey
from samestate.cache.envelope import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    PIECE_BYTES,
    Namespace,
    checksum,
    flat,
    header_fault,
    make_header,
    page_fault,
)


def test_a_sound_header_has_no_fault() -> None:
    header = make_header(SPACE, key(1), page(1))
    assert len(header) == HEADER_BYTES
    assert header_fault(header, SPACE, key(1), 5000) is None
    assert page_fault(header, checksum(page(1))) is None


@pytest.mark.parametrize(
    ("space", "of", "size", "fault"),
    [
        (OTHER, key(1), 5000, "of another namespace"),
        (SPACE, key(2), 5000, "of another key"),
        (SPACE, PageKey(key(1) + b"\0"), 5000, "of another key"),
        (SPACE, PageKey(key(1)[:-1]), 5000, "of another key"),
        (SPACE, key(1), 4999, "5000 bytes, not 4999"),
    ],
)
def test_a_header_of_something_else_says_of_what(space: Namespace, of: PageKey, size: int, fault: str) -> None:
    assert header_fault(make_header(SPACE, key(1), page(1)), space, of, size) == fault


def test_another_page_has_another_checksum() -> None:
    assert page_fault(make_header(SPACE, key(1), page(1)), checksum(page(2))) == "checksum of the page"


def test_another_format_is_named() -> None:
    header = bytearray(make_header(SPACE, key(1), page(1)))
    header[8] = 2
    assert header_fault(header, SPACE, key(1), 5000) == "format 2, not 1"


def test_something_else_is_no_page() -> None:
    assert header_fault(bytes(HEADER_BYTES), SPACE, key(1), 5000) == "no page"
    assert header_fault(b"SAMEPAGE", SPACE, key(1), 5000) == "8 bytes of a header of 256"


@given(key_=st.binary(min_size=1, max_size=MAX_KEY_BYTES), content=st.binary(max_size=200), at=st.integers(0, 255))
def test_every_byte_of_a_header_counts(key_: bytes, content: bytes, at: int) -> None:
    header = bytearray(make_header(SPACE, PageKey(key_), memoryview(content)))
    assert header_fault(header, SPACE, PageKey(key_), len(content)) is None
    header[at] ^= 0x40
    assert header_fault(header, SPACE, PageKey(key_), len(content)) is not None


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
def test_the_checksum_in_pieces_is_that_of_the_whole(size: int) -> None:
    assert checksum(page(1, size)) == xxhash.xxh3_128_digest(page(1, size))


def test_a_page_is_never_copied() -> None:
    buffer = bytearray(8)
    flat(memoryview(buffer).cast("d"))[3] = 7
    assert buffer[3] == 7


def test_a_namespace_is_found_again_by_its_name() -> None:
    lost = Namespace.unnamed(SPACE.digest)
    assert Namespace.called(SPACE.name) == SPACE
    assert Namespace.called(lost.name) == lost
    assert SPACE.digest != OTHER.digest
