"""Signatures: the encoding is DSSE's, a valid one is found, and nothing else passes for one."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from samestate.evidence.amendments import amend
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.signature import (
    SignatureError,
    Signatures,
    new_key,
    pae,
    read_signatures,
    sign,
    trusted_key,
)

from .conftest import reseal_folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


def read(archive: Path, key: Path) -> Signatures:
    return read_signatures(archive, Archive.open(archive).seal_sha256, [trusted_key(key.with_name(key.name + ".pub"))])


def resign(envelope: Path, key: Path, payload: bytes, payload_type: str = "application/vnd.in-toto+json") -> None:
    """Sign any payload as an envelope, by the words of the DSSE protocol."""
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(private, Ed25519PrivateKey)
    signed = b"DSSEv1 %d %b %d %b" % (len(payload_type), payload_type.encode(), len(payload), payload)
    said = json.loads(envelope.read_bytes())
    said["payload"] = base64.b64encode(payload).decode()
    said["payloadType"] = payload_type
    said["signatures"][0]["sig"] = base64.b64encode(private.sign(signed)).decode()
    envelope.write_text(json.dumps(said))


def payload_of(envelope: Path) -> dict[str, object]:
    said: dict[str, object] = json.loads(base64.b64decode(json.loads(envelope.read_bytes())["payload"]))
    return said


def test_the_encoding_is_that_of_the_protocol() -> None:
    # The example of github.com/secure-systems-lab/dsse, protocol.md.
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_a_new_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    key_id = new_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert trusted_key(tmp_path / "key.pub").id == key_id
    for name in ("key", "key.pub"):
        (tmp_path / name).unlink()
        with pytest.raises(SignatureError, match="exists"):
            new_key(tmp_path / "key")
        (tmp_path / name).touch()


def test_a_signature_names_the_seal_and_leaves_it_whole(archive: Path, key: Path) -> None:
    path = sign(Archive.open(archive), key)
    found = read(archive, key)
    assert [one.file for one in found.valid] == [path.relative_to(archive).as_posix()]
    assert (found.defects, found.others) == ([], 0)
    assert path.name == f"{found.valid[0].key_id}.dsse.json"
    said = payload_of(path)
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    seal = sha256_hex((archive / "seal.json").read_bytes())
    assert said["subject"] == [{"name": "seal.json", "digest": {"sha256": seal}}]
    assert Archive.open(archive).verify() == []


def test_signing_twice_writes_once_and_again_after_an_amendment(archive: Path, key: Path) -> None:
    first = sign(Archive.open(archive), key)
    assert sign(Archive.open(archive), key) == first
    amend(Archive.open(archive), "a remark")
    second = sign(Archive.open(archive), key)
    assert second.name.endswith(".2.dsse.json")
    assert [len(one.amendments) for one in read(archive, key).valid] == [1, 0]


def test_a_key_that_is_not_trusted_says_nothing(archive: Path, key: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "stranger")
    sign(Archive.open(archive), tmp_path / "stranger")
    assert read(archive, key) == Signatures([], [], 1)


@pytest.mark.tamper
def test_every_byte_of_payload_and_signature_matters(archive: Path, key: Path) -> None:
    path = sign(Archive.open(archive), key)
    said = json.loads(path.read_bytes())
    for place in ("payload", "sig"):
        raw = bytearray(base64.b64decode(said["payload"] if place == "payload" else said["signatures"][0]["sig"]))
        for index in range(0, len(raw), 7):
            changed = json.loads(path.read_bytes())
            damaged = bytes(raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :])
            holder = changed if place == "payload" else changed["signatures"][0]
            holder[place] = base64.b64encode(damaged).decode()
            other = path.with_name("other.dsse.json")
            other.write_text(json.dumps(changed))
            found = read(archive, key)
            assert [one.file for one in found.valid] == [f"signatures/{path.name}"]
            assert [defect.what for defect in found.defects] == ["names a trusted key, and is not signed with it"]
            other.unlink()


@pytest.mark.tamper
def test_records_forged_and_sealed_again_lose_the_signature(archive: Path, key: Path) -> None:
    sign(Archive.open(archive), key)
    log = archive / "arms" / "control" / "engine.log"
    log.write_text("engine said something else\n")
    reseal_folder(archive)
    assert Archive.open(archive).verify() == []
    found = read(archive, key)
    assert found.valid == []
    assert [defect.what for defect in found.defects] == ["signs another seal than this archive's"]


@pytest.mark.tamper
@pytest.mark.parametrize("spoiled", ["type", "statement", "predicate", "subjects", "no-subject", "no-json", "deep"])
def test_a_true_signature_of_something_else(archive: Path, key: Path, spoiled: str) -> None:
    path = sign(Archive.open(archive), key)
    said, kind = payload_of(path), "application/vnd.in-toto+json"
    match spoiled:
        case "type":
            kind = "text/plain"
        case "statement":
            said["_type"] = "https://in-toto.io/Statement/v0.1"
        case "predicate":
            said["predicateType"] = "urn:other"
        case "subjects":
            assert isinstance(said["subject"], list)
            said["subject"] = said["subject"] * 2
        case "no-subject":
            del said["subject"]
    payload = {"no-json": b"{", "deep": b"[" * 100_000}.get(spoiled, json.dumps(said).encode())
    resign(path, key, payload, kind)
    found = read(archive, key)
    assert found.valid == []
    assert len(found.defects) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"payload":"!","payloadType":"x","signatures":[]}', b"\xff"])
def test_what_is_no_envelope(archive: Path, key: Path, content: bytes) -> None:
    (archive / "signatures").mkdir()
    (archive / "signatures" / "x.dsse.json").write_bytes(content)
    found = read(archive, key)
    assert found.valid == []
    assert len(found.defects) == 1


@pytest.mark.timeout(20)
def test_a_link_and_a_fifo_are_not_opened(archive: Path, key: Path) -> None:
    (archive / "signatures").mkdir()
    (archive / "signatures" / "a").symlink_to("/dev/zero")
    os.mkfifo(archive / "signatures" / "b")
    assert len(read(archive, key).defects) == 2


@pytest.mark.tamper
@pytest.mark.parametrize("damage", ["unsealed", "changed", "amendment"])
def test_nobody_vouches_for_what_is_not_whole(archive: Path, key: Path, damage: str) -> None:
    match damage:
        case "unsealed":
            (archive / "seal.json").unlink()
        case "changed":
            (archive / "arms" / "control" / "engine.log").write_text("changed")
        case "amendment":
            (archive / "amendments").mkdir()
            (archive / "amendments" / "0001.json").write_text("{}")
    with pytest.raises(SignatureError, match="is not signed"):
        sign(Archive.open(archive), key)
    assert not (archive / "signatures").exists()


def pem(private: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is no private Ed25519 key"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "is no private Ed25519 key"),
        (pem(Ed25519PrivateKey.generate(), b"password"), "is encrypted"),
    ],
    ids=["empty", "other kind", "encrypted"],
)
def test_keys_that_do_not_serve(archive: Path, tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(SignatureError, match=word):
        sign(Archive.open(archive), tmp_path / "bad")


def test_a_private_key_is_not_for_trusting(key: Path, tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match="keep this one to yourself"):
        trusted_key(key)
    with pytest.raises(SignatureError, match="cannot be read"):
        trusted_key(tmp_path / "nosuch")
