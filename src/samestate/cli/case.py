"""``samestate case``: one failing request, for a bug report."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from samestate.checks.history import History
from samestate.cli.failures import Failure
from samestate.cli.judging import judge_archive, require_archive
from samestate.evidence.archive import Archive
from samestate.reports.case import CaseError, bundle

_PATH = click.Path(path_type=Path)


@click.group("case")
def case() -> None:
    """One failing request, for a bug report."""


@case.command("export")
@click.argument("archive", type=_PATH)
@click.argument("op", metavar="OP")
@click.option("--out", type=_PATH, metavar="DIR", help="Default: ./case-OP")
@click.option("--redact-tokens", is_flag=True, help="Digests of the tokens instead of the tokens.")
def export(archive: Path, op: str, out: Path | None, redact_tokens: bool) -> None:
    """Write a small folder about operation OP of ARCHIVE, e.g. N3584.reload, that can be attached to an issue.

    It holds no paths, hosts, users, texts of errors, serve arguments or environment. Token ids are in it: with
    prompts of your own, think of --redact-tokens.
    """
    require_archive(archive, "the archive")
    judgement = judge_archive(archive, None)
    opened = Archive.open(archive)
    try:
        made = bundle(opened, History.read(opened), judgement, op, redact_tokens=redact_tokens)
    except CaseError as error:
        raise Failure(str(error)) from None
    target = out or Path(f"case-{op}")
    _write(target, archive, made.files)
    click.echo(f"{target}\n{len(made.files)} files, {made.records:,} records; read them before you send them")


def _write(target: Path, archive: Path, files: dict[str, str]) -> None:
    """Write the folder whole or not at all."""
    if target.exists() or target.is_symlink():
        raise Failure(f"--out: {target} exists; name another folder")
    if target.resolve().is_relative_to(archive.resolve()):
        raise Failure(f"--out: {target} lies in the archive, which no file may join; name another place")
    if not target.resolve().parent.is_dir():
        raise Failure(f"--out: {target.parent} is no folder; make it, or name another place")
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.resolve().parent))
    try:
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
