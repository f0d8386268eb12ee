"""``samestate archive``: an archive as one file, and back."""

from __future__ import annotations

from pathlib import Path

import click

from samestate.cli.judging import require_archive
from samestate.evidence.archive import Archive
from samestate.evidence.export import Exported, export_archive, import_archive

_PATH = click.Path(path_type=Path)


@click.group("archive")
def archive() -> None:
    """An archive as one file, and back."""


@archive.command("export")
@click.argument("folder", type=_PATH, metavar="ARCHIVE")
@click.option("--out", type=_PATH, metavar="FILE", help="Default: ./<name of the archive>.tar")
def export(folder: Path, out: Path | None) -> None:
    """Pack a sealed ARCHIVE into one tar: the same archive gives the same bytes."""
    require_archive(folder, "the archive")
    target = out or Path(f"{folder.resolve().name}.tar")
    _say(target, export_archive(Archive.open(folder), target))


@archive.command("import")
@click.argument("tar", type=_PATH, metavar="FILE")
@click.argument("folder", type=_PATH, metavar="DIR")
def import_(tar: Path, folder: Path) -> None:
    """Unpack an exported archive from FILE into DIR, whole and undamaged or not at all."""
    _say(folder, import_archive(tar, folder))


def _say(place: Path, done: Exported) -> None:
    click.echo(f"{place}\n{done.files:,} files, {done.bytes:,} bytes, seal sha256 {done.seal_sha256}")
