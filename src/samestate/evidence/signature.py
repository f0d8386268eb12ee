"""Signatures of a seal: a DSSE envelope over an in-toto statement, signed with Ed25519.

DSSE: github.com/secure-systems-lab/dsse, protocol.md and envelope.md (v1). Statement: in-toto attestation
specification, v1. A seal shows that an archive has not changed since; a signature shows who says so.
Needs the extra ``[sign]``.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from samestate import __version__
from samestate.evidence.amendments import kept_verdicts, read_amendments
from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.outside import add_file, read_files
from samestate.evidence.seal import SEAL_NAME
from samestate.evidence.stream import Defect

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FOLDER = "signatures"
SUFFIX = ".dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:samestate:sealed-archive:v1"
MOST_KEY_BYTES = 1 << 16


class SignatureError(ArchiveError):
    """A key cannot be used, or an archive not be signed. ``str(error)`` is one line."""


class TrustedKey(NamedTuple):
    """A public key that a reader trusts."""

    id: str
    """SHA-256 of its DER SubjectPublicKeyInfo, as file names and envelopes say it."""
    key: Ed25519PublicKey


class Signed(NamedTuple):
    """A valid signature of this archive's seal by a trusted key."""

    file: str
    key_id: str
    amendments: list[str]
    """SHA-256 of the amendments that were there when it was signed, in order."""


class Signatures(NamedTuple):
    """What lies in ``signatures``, held against the trusted keys."""

    valid: list[Signed]
    defects: list[Defect]
    """Envelopes that are none, that name a trusted key without its signature, or that sign something else."""
    others: int
    """Envelopes of keys that are not trusted: nothing is known of them."""


class _Signature(msgspec.Struct, frozen=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    payload: str
    payloadType: str
    signatures: list[_Signature]


def new_key(path: Path) -> str:
    """Write an Ed25519 key as PEM (PKCS #8, mode 0600) and its public half as ``PATH.pub``; returns the key id.

    SignatureError when either file exists; OSError where they cannot be written.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public_path = path.with_name(path.name + ".pub")
    for one in (path, public_path):
        if os.path.lexists(one):
            raise SignatureError(f"--new-key: {one} exists; name another file, keys are never overwritten")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    for one, data, mode in ((path, private, 0o600), (public_path, public, 0o644)):
        fd = os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    return _key_id(key.public_key())


def trusted_key(path: Path) -> TrustedKey:
    """Read a public Ed25519 key, PEM. SignatureError with the remedy for anything else."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _key_bytes(path, "--trust")
    if b"PRIVATE KEY" in data:
        raise SignatureError(f"--trust: {path} is a private key; name the public one and keep this one to yourself")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError(
            f"--trust: {path} is no public Ed25519 key in PEM; `samestate seal --new-key` makes a pair"
        )
    return TrustedKey(_key_id(key), key)


def sign(archive: Archive, key_path: Path) -> Path:
    """Sign an archive's seal with a private Ed25519 key; returns the envelope's path.

    A signature of today's verdicts and amendments that is there already is not written twice. SignatureError when
    the key cannot be used, and when the archive is unsealed or damaged: nobody should vouch for that.
    """
    key = _private_key(key_path)
    if defects := archive.verify():
        where, what = defects[0]
        raise SignatureError(f"{archive.root} is not signed: {where}: {what}; sign a sealed, undamaged archive")
    payload = canonical_json(_statement(archive))
    key_id = _key_id(key.public_key())
    signature = base64.b64encode(key.sign(pae(PAYLOAD_TYPE, payload))).decode()
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key_id, "sig": signature}],
    }
    data = canonical_json(envelope)
    number = 1
    while True:
        name = f"{key_id}{SUFFIX}" if number == 1 else f"{key_id}.{number}{SUFFIX}"
        # Ed25519 is deterministic: the same statement has the same bytes.
        if add_file(archive.root, FOLDER, name, data) or read_files(archive.root, FOLDER)[0].get(name) == data:
            return archive.root / FOLDER / name
        number += 1


def read_signatures(root: Path, seal_sha256: str | None, trusted: Sequence[TrustedKey]) -> Signatures:
    """Hold every envelope against the trusted keys; never raises for what is there.

    A key id is a hint: every trusted key is tried on every signature, and a payload is read only once one fits.
    """
    from cryptography.exceptions import InvalidSignature

    files, defects = read_files(root, FOLDER)
    valid: list[Signed] = []
    others = 0
    for name, data in files.items():
        where = ascii(f"{FOLDER}/{name}")[1:-1]
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
            payload = base64.b64decode(envelope.payload, validate=True)
            signatures = [(one.keyid, base64.b64decode(one.sig, validate=True)) for one in envelope.signatures]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            defects.append(Defect(where, f"no DSSE envelope: {error}"))
            continue
        signer = None
        for key in trusted:
            for _, signature in signatures:
                try:
                    key.key.verify(signature, pae(envelope.payloadType, payload))
                except InvalidSignature:
                    continue
                signer = key
        if signer is None:
            claims = {key.id for key in trusted} & {key_id for key_id, _ in signatures}
            if claims:
                defects.append(Defect(where, "names a trusted key, and is not signed with it"))
            else:
                others += 1
            continue
        amendments, fault = _read_statement(envelope.payloadType, payload, seal_sha256)
        if fault:
            defects.append(Defect(where, fault))
        else:
            valid.append(Signed(where, signer.id, amendments))
    return Signatures(valid, defects, others)


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is really signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _statement(archive: Archive) -> dict[str, Any]:
    """What is signed: the seal's hash, and what stood beside it at this moment."""
    seal, plan = archive.seal_sha256, archive.plan_json
    amendments = read_amendments(archive.root, seal)
    if amendments.defects:
        where, what = amendments.defects[0]
        raise SignatureError(f"{archive.root} is not signed: {where}: {what}; restore the amendments first")
    predicate = {
        "plan_sha256": sha256_hex(plan or b""),
        "samestate_version": __version__,
        "verdicts": [
            {"file": one.file, "sha256": one.sha256, "analyzer": one.analyzer, "verdict": one.verdict}
            for one in kept_verdicts(archive.root, seal)
        ],
        "amendments": amendments.hashes,
    }
    subject = {"name": SEAL_NAME, "digest": {"sha256": seal}}
    return {"_type": STATEMENT_TYPE, "subject": [subject], "predicateType": PREDICATE_TYPE, "predicate": predicate}


def _read_statement(payload_type: str, payload: bytes, seal_sha256: str | None) -> tuple[list[str], str | None]:
    """The amendments that a signed statement counts, and why it says nothing of this seal, if so."""
    if payload_type != PAYLOAD_TYPE:
        return [], f"signs a payload of type {payload_type!a}, which says nothing of an archive"
    try:
        said = msgspec.json.decode(payload)
        kinds = (said["_type"], said["predicateType"])
        subject = said["subject"]
        amendments = msgspec.convert(said["predicate"]["amendments"], list[str])
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, KeyError) as error:
        return [], f"signs what is no statement of an archive: {type(error).__name__}"
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        return [], "signs a statement of another kind"
    if seal_sha256 is None or subject != [{"name": SEAL_NAME, "digest": {"sha256": seal_sha256}}]:
        return [], "signs another seal than this archive's"
    return amendments, None


def _private_key(path: Path) -> Ed25519PrivateKey:
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_key_bytes(path, "--key"), password=None)
    except TypeError:
        raise SignatureError(f"--key: {path} is encrypted; decrypt it with `openssl pkey` first") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(
            f"--key: {path} is no private Ed25519 key in PEM (PKCS #8); `samestate seal --new-key` makes one"
        )
    return key


def _key_bytes(path: Path, option: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_KEY_BYTES)
    except OSError as error:
        raise SignatureError(f"{option}: {path} cannot be read ({error.strerror}); name a key file") from None


def _key_id(key: Ed25519PublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return sha256_hex(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise SignatureError("signatures need another package; pip install 'samestate[sign]'") from None
