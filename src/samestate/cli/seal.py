"""``samestate seal``: sign the seal of an archive, and make the key for it."""

from __future__ import annotations

from pathlib import Path

import click

from samestate.cli.failures import Failure
from samestate.cli.judging import require_archive
from samestate.evidence.archive import Archive
from samestate.evidence.signature import new_key, sign

_FILE = click.Path(path_type=Path)


@click.command("seal")
@click.argument("archive", type=_FILE, required=False)
@click.option("--key", type=_FILE, metavar="FILE", help="Private Ed25519 key, PEM (PKCS #8), to sign ARCHIVE with.")
@click.option("--new-key", type=_FILE, metavar="FILE", help="Make a key: FILE (private) and FILE.pub.")
def seal(archive: Path | None, key: Path | None, new_key: Path | None) -> None:
    """Sign the seal of ARCHIVE, or make a key.

    A run seals its archive itself. The signature lies beside that seal, names its hash, and counts the verdicts and
    amendments that are there; sign again after adding some. `samestate check --trust FILE.pub` asks for it.
    """
    if new_key is not None:
        if archive is not None or key is not None:
            raise Failure("--new-key: makes a key and nothing else; leave ARCHIVE and --key out")
        _make_key(new_key)
        return
    if archive is None or key is None:
        raise Failure("--key: name an ARCHIVE and the key to sign it with, or make a key with --new-key FILE")
    require_archive(archive, "the archive")
    click.echo(sign(Archive.open(archive), key))


def _make_key(path: Path) -> None:
    click.echo(f"private {path}\npublic  {path}.pub\nkey id  {new_key(path)}")
