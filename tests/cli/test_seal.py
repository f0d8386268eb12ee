"""`samestate seal` and `samestate check --trust`: from a key to a verdict that it vouches for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

pytest.importorskip("cryptography")

Command = Callable[..., Result]


@pytest.fixture
def archive(clean: Path, tmp_path: Path) -> Path:
    return shutil.copytree(clean, tmp_path / "archive")


@pytest.fixture
def key(samestate: Command, tmp_path: Path) -> Path:
    assert samestate("seal", "--new-key", tmp_path / "key").exit_code == 0
    return tmp_path / "key"


def test_a_signed_archive_passes_and_an_unsigned_one_is_unknown(samestate: Command, archive: Path, key: Path) -> None:
    public = f"{key}.pub"
    unsigned = samestate("check", archive, "--trust", public)
    assert unsigned.exit_code == 3
    assert "no valid signature by a trusted key" in unsigned.stdout
    assert samestate("seal", archive, "--key", key).exit_code == 0
    signed = samestate("check", archive, "--trust", public)
    assert signed.exit_code == 0, signed.output
    assert "signed by " in signed.stdout
    assert samestate("check", archive).exit_code == 0


def test_one_of_several_trusted_keys_is_enough(samestate: Command, archive: Path, key: Path, tmp_path: Path) -> None:
    samestate("seal", "--new-key", tmp_path / "other")
    samestate("seal", archive, "--key", key)
    assert samestate("check", archive, "--trust", tmp_path / "other.pub").exit_code == 3
    assert samestate("check", archive, "--trust", tmp_path / "other.pub", "--trust", f"{key}.pub").exit_code == 0


def test_the_kept_verdict_knows_nothing_of_trust(samestate: Command, archive: Path, key: Path) -> None:
    assert samestate("check", archive, "--trust", f"{key}.pub").exit_code == 3
    kept = [json.loads(path.read_bytes()) for path in (archive / "verdicts").iterdir()]
    assert [one["verdict"] for one in kept] == ["pass"]


@pytest.mark.tamper
def test_a_signed_withdrawal_cannot_be_taken_away(samestate: Command, archive: Path, key: Path) -> None:
    assert samestate("amend", archive, "--withdraw", "boundary-v1.json", "--reason", "wrong image").exit_code == 0
    assert samestate("seal", archive, "--key", key).exit_code == 0
    shutil.rmtree(archive / "amendments")
    assert samestate("check", archive).exit_code == 0
    result = samestate("check", archive, "--trust", f"{key}.pub")
    assert result.exit_code == 3
    assert "not all there any more" in " ".join(result.stdout.split())


def test_nothing_damaged_is_signed(samestate: Command, archive: Path, key: Path) -> None:
    (archive / "seal.json").unlink()
    result = samestate("seal", archive, "--key", key)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "sign a sealed, undamaged archive" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["seal"], "--key: name an ARCHIVE and the key"),
        (["seal", "nosuch"], "--key: name an ARCHIVE and the key"),
        (["seal", "nosuch", "--key", "k"], "the archive: nosuch does not exist"),
        (["seal", "a", "--new-key", "k"], "--new-key: makes a key and nothing else"),
        (["check", "nosuch", "--trust", "nokey"], "--trust: nokey cannot be read"),
        (["check", "nosuch", "--trust", __file__], "is no public Ed25519 key"),
    ],
)
def test_bad_input_is_one_line(samestate: Command, arguments: list[str], word: str) -> None:
    result = samestate(*arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert word in result.stderr
