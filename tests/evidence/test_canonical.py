from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from samestate.evidence.canonical import canonical_json, file_sha256, sha256_hex, token_digest


def test_canonical_json_is_sorted_and_without_spaces() -> None:
    assert canonical_json({"b": [1, 2.0, None], "a": "é"}) == '{"a":"é","b":[1,2,null]}'.encode()


@pytest.mark.parametrize("bad", [float("nan"), 2**60, {1: 2}, {1, 2}])
def test_canonical_json_refuses_what_json_cannot_hold(bad: object) -> None:
    with pytest.raises(ValueError):
        canonical_json({"x": bad})


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_sha256(tmp_path / "f") == sha256_hex(b"abc") == hashlib.sha256(b"abc").hexdigest()


def test_token_digest_is_of_little_endian_int32() -> None:
    assert token_digest([1, -2]) == hashlib.sha256(b"\x01\0\0\0\xfe\xff\xff\xff").hexdigest()
    with pytest.raises(ValueError, match="32-bit"):
        token_digest([2**31])
