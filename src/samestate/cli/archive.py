"""``samestate archive``: an archive as one file, hashed again, and back; and its records as columns."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samestate.cli.judging import require_archive
from samestate.cli.progress import bytes_read
from samestate.evidence.archive import Archive
from samestate.evidence.columns import ABOUT_NAME, convert_archive
from samestate.evidence.export import Exported, export_archive, import_archive, verify_export

_PATH = click.Path(path_type=Path)


@click.group("archive")
def archive() -> None:
    """An archive as one file, and back; or its records as columns."""


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


@archive.command("verify")
@click.argument("tar", type=_PATH, metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def verify(tar: Path, as_json: bool) -> None:
    """Hash every file of an exported FILE again, unpack nothing, and hold hashes and counts against its seal."""
    done = verify_export(tar)
    if as_json:
        click.echo(json.dumps(done._asdict(), indent=2))
        return
    arms = ", ".join(f"{arm} {count}" for arm, count in done.by_arm.items())
    click.echo(
        f"{tar}\n{done.files:,} sealed files, as the seal counts, each with its listed SHA-256 ({arms}); "
        f"{done.beside:,} beside the seal\n{done.bytes:,} bytes, seal sha256 {done.seal_sha256}"
    )


@archive.command("convert")
@click.argument("folder", type=_PATH, metavar="ARCHIVE")
@click.argument("out", type=_PATH, metavar="OUT_DIR")
def convert(folder: Path, out: Path) -> None:
    """Write the records of a sealed ARCHIVE as Parquet files into OUT_DIR, for DuckDB and the like.

    One table for each kind of record, and one for page rows. They are for questions: no verdict rests on them.
    Needs the extra `columns`.
    """
    require_archive(folder, "the archive")
    total = sum(path.stat().st_size for path in folder.rglob("*.jsonl") if path.is_file())
    with bytes_read("converting", total) as advance:
        done = convert_archive(Archive.open(folder), out, advance)
    rows = ", ".join(f"{name} {count:,}" for name, count in done.tables.items())
    click.echo(f"{out}\n{sum(done.tables.values()):,} rows, {done.bytes:,} bytes: {rows}")
    click.echo(f"from seal sha256 {done.seal_sha256}, as {ABOUT_NAME} says; for questions, not for verdicts")


def _say(place: Path, done: Exported) -> None:
    click.echo(f"{place}\n{done.files:,} files, {done.bytes:,} bytes, seal sha256 {done.seal_sha256}")
