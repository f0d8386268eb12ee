"""``samestate claims``: hold sentences against the archives that should carry them."""

from __future__ import annotations

from pathlib import Path

import click

from samestate.checks.claim import read_claims
from samestate.checks.claims import Evidence, lint
from samestate.checks.history import History
from samestate.checks.written import WrittenError
from samestate.cli.failures import Failure
from samestate.cli.judging import judge_archive, require_archive
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable

REFUSED = 1
_PATH = click.Path(path_type=Path)


@click.group("claims")
def claims() -> None:
    """Sentences, held against the archives that should carry them."""


@claims.command("lint")
@click.argument("file", type=_PATH)
@click.option("--archive", "archives", type=_PATH, metavar="DIR", multiple=True, required=True, help="May be repeated.")
@click.pass_context
def lint_claims(ctx: click.Context, file: Path, archives: tuple[Path, ...]) -> None:
    """Refuse the claims in FILE that their evidence cannot carry.

    Exit codes: 0 none refused, 1 refused, 2 usage. What is not refused may still be wrong: this reads words.
    """
    try:
        written = read_claims(file)
    except WrittenError as error:
        raise Failure(str(error)) from None
    given: dict[str, Evidence] = {}
    for root in archives:
        require_archive(root, "--archive")
        judgement = judge_archive(root, None)
        if judgement.seal_sha256 is None:
            raise Failure(f"--archive: {root} has no seal, so no claim can name it; name a sealed archive")
        archive = Archive.open(root)
        given[judgement.seal_sha256] = Evidence(archive, judgement, History.read(archive))
    refused = lint(written, given)
    for one in refused:
        click.echo(printable(f"{one.claim}: [{one.rule}] {one.why}; {one.remedy}").replace("\n", " "))
    bad = len({one.claim for one in refused})
    click.echo(f"{bad or 'none'} of {len(written)} refused")
    ctx.exit(REFUSED if refused else 0)
