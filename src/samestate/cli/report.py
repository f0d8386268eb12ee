"""``samestate report``: what an archive says, for people and for other programs. Needs neither torch nor vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from samestate.checks.custody_analyzer import judge_custody
from samestate.checks.history import History
from samestate.cli.custody_files import is_custody, read_card, reproduced
from samestate.cli.failures import Failure
from samestate.cli.judging import exit_code, judge_archive, print_report
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable
from samestate.reports.html import html
from samestate.reports.junit import junit
from samestate.reports.markdown import markdown
from samestate.reports.model import Report
from samestate.reports.model import report as make_report
from samestate.reports.prometheus import prometheus

STDOUT = Path("-")
_FILE = click.Path(path_type=Path)


@click.command("report")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="One page with everything; no network.")
@click.option("--junit", "junit_file", type=_FILE, metavar="FILE", help="JUnit XML for continuous integration.")
@click.option("--markdown", "markdown_file", type=_FILE, metavar="FILE", help="Markdown, e.g. a GitHub step summary.")
@click.option("--prometheus", "prometheus_file", type=_FILE, metavar="FILE", help="Textfile for a node exporter.")
@click.option("--analyzer", metavar="ID", help="Judge with this analyzer instead of the plan's.")
@click.option("--trust", type=_FILE, metavar="KEY", multiple=True, help="As in `samestate check`.")
@click.option("--known", type=_FILE, metavar="FILE", help="As in `samestate check`.")
@click.option("--reproduce", is_flag=True, help="Of a swap: hold its documents, byte for byte, against its records.")
@click.pass_context
def report(
    ctx: click.Context,
    archive: Path,
    html_file: Path | None,
    junit_file: Path | None,
    markdown_file: Path | None,
    prometheus_file: Path | None,
    analyzer: str | None,
    trust: tuple[Path, ...],
    known: Path | None,
    reproduce: bool,
) -> None:
    """Judge ARCHIVE and write reports of it; without an option, for the terminal.

    FILE may be - for standard output. The files written are named. Exit codes are those of `samestate check`.
    """
    files = {
        "--html": html_file,
        "--junit": junit_file,
        "--markdown": markdown_file,
        "--prometheus": prometheus_file,
    }
    writers: dict[str, Callable[[Report], str]] = {
        "--html": lambda made: _page(made, archive, html_file),
        "--junit": junit,
        "--markdown": markdown,
        "--prometheus": prometheus,
    }
    wanted = {option: file for option, file in files.items() if file is not None}
    if reproduce or is_custody(archive):
        if wanted:
            raise Failure(f"{next(iter(wanted))}: a swap has documents of its own, beside its records; leave it out")
        _report_swap(ctx, archive, reproduce=reproduce)
    _require_places(wanted, archive)
    judgement = judge_archive(archive, analyzer, known=known, trust=trust)
    if not wanted:
        print_report(judgement)
        ctx.exit(exit_code(judgement.verdict))
    made = make_report(judgement, History.read(Archive.open(archive)))
    for option, file in wanted.items():
        _write(file, writers[option](made).encode())
    for file in wanted.values():
        # What goes to standard output stands there alone.
        if file != STDOUT:
            click.echo(file, err=STDOUT in wanted.values())
    ctx.exit(exit_code(judgement.verdict))


def _report_swap(ctx: click.Context, folder: Path, *, reproduce: bool) -> NoReturn:
    """The card of a swap; or 0 where its documents are what its records give, 1 where they are not."""
    if not is_custody(folder):
        raise Failure(f"--reproduce: {folder} holds no records of a swap; name the folder that `samestate swap` wrote")
    if not reproduce:
        click.echo(read_card(folder), nl=False)
        ctx.exit(exit_code(judge_custody(folder).verdict))
    lines = reproduced(folder)
    for line in lines or ["every document is, byte for byte, what the records give"]:
        click.echo(printable(line))
    ctx.exit(1 if lines else 0)


def _require_places(files: dict[str, Path], archive: Path) -> None:
    """Fail before anything is judged where a report cannot go."""
    taken: dict[Path, str] = {}
    for option, file in files.items():
        place = file if file == STDOUT else file.resolve()
        if place in taken:
            raise Failure(f"{option}: {file} is where {taken[place]} goes; name another file")
        taken[place] = option
        if file == STDOUT:
            continue
        if place.is_relative_to(archive.resolve()):
            raise Failure(f"{option}: {file} lies in the archive, which no file may join; name another place")
        if place.is_dir():
            raise Failure(f"{option}: {file} is a folder; name a file")
        if not place.parent.is_dir():
            raise Failure(f"{option}: {file.parent} is no folder; make it, or name another place")


def _page(made: Report, archive: Path, file: Path | None) -> str:
    target = Path.cwd() / "page" if file is None or file == STDOUT else file.resolve()
    try:
        return html(made, archive.resolve(), target)
    except ImportError as error:
        raise Failure(f"--html: {error.name or 'jinja2'} is not installed; pip install 'samestate[report]'") from None


def _write(file: Path, data: bytes) -> None:
    """Write a report, whole or not at all: whoever watches the file never reads half of one."""
    if file == STDOUT:
        click.echo(data, nl=False)
        return
    target = file.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    draft, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(draft, "wb") as writer:
            writer.write(data)
            os.fchmod(writer.fileno(), 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
