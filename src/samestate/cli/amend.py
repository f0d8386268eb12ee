"""``samestate amend``: say something of an archive after it was sealed, and change nothing in it."""

from __future__ import annotations

from pathlib import Path

import click

from samestate.cli.failures import Failure
from samestate.cli.judging import require_archive
from samestate.evidence.amendments import DECISIONS, Decision, KeptVerdict, Withdrawal, kept_verdicts
from samestate.evidence.amendments import amend as append
from samestate.evidence.archive import Archive
from samestate.plans.errors import nearest


@click.command("amend")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--text", default="", metavar="TEXT", help="What is to be said.")
@click.option("--finding", metavar="CODE", help="The finding that it corrects.")
@click.option("--by", metavar="NAME", help="Who says it.")
@click.option("--withdraw", metavar="VERDICT", help="A file of the archive's `verdicts`: nobody should rely on it.")
@click.option("--reason", metavar="TEXT", help="Why it is withdrawn.")
@click.option(
    "--decision", type=click.Choice(DECISIONS), help="What people decided on the candidate; say why in --text."
)
def amend(
    archive: Path,
    text: str,
    finding: str | None,
    by: str | None,
    withdraw: str | None,
    reason: str | None,
    decision: Decision | None,
) -> None:
    """Append a remark to a sealed ARCHIVE.

    Nothing is edited or removed: a verdict that proved wrong stays, with its withdrawal beside it, and
    `samestate check` then says unknown where it said pass.
    """
    require_archive(archive, "the archive")
    opened = Archive.open(archive)
    verdicts = kept_verdicts(archive, opened.seal_sha256)
    if finding is not None:
        codes = sorted({code for verdict in verdicts for code in verdict.codes})
        if finding not in codes:
            raise Failure(
                f"--finding: no finding {finding!r} in the kept verdicts{nearest(finding, codes)}; check first"
            )
    if (withdraw is None) != (reason is None) or (reason is not None and not reason.strip()):
        raise Failure("--withdraw and --reason belong together: name the verdict's file and say why")
    away = _withdrawal(verdicts, withdraw, reason) if withdraw is not None and reason is not None else None
    if decision is not None and not text.strip():
        raise Failure("--decision: say in --text what it rests on")
    click.echo(append(opened, text, by=by, finding=finding, withdraws=away, decision=decision))


def _withdrawal(verdicts: list[KeptVerdict], named: str, reason: str) -> Withdrawal:
    name = Path(named).name
    names = [Path(verdict.file).name for verdict in verdicts]
    for verdict in verdicts:
        if Path(verdict.file).name == name:
            return Withdrawal(
                file=verdict.file,
                sha256=verdict.sha256,
                analyzer=verdict.analyzer,
                verdict=verdict.verdict,
                reason=reason,
            )
    known = ", ".join(names) or "none; judge it with `samestate check` first"
    raise Failure(f"--withdraw: no verdict {name!r} of this seal{nearest(name, names)}; there are: {known}")
