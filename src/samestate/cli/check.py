"""``samestate check``: judge an archive. Needs neither torch nor vLLM."""

from __future__ import annotations

from pathlib import Path

import click

from samestate.cli.judging import exit_code, judge_archive, known_file, print_json, print_report

_FILE = click.Path(path_type=Path)


@click.command("check")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--analyzer", metavar="ID", help="Judge with this analyzer instead of the plan's.")
@click.option(
    "--trust", type=_FILE, metavar="KEY", multiple=True, help="A public key; without a signature by it: exit 3."
)
@click.option(
    "--known", metavar="FILE", help="Findings that are accepted, until when and why; or a shipped file's name."
)
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
@click.pass_context
def check(
    ctx: click.Context, archive: Path, analyzer: str | None, trust: tuple[Path, ...], known: str | None, as_json: bool
) -> None:
    """Judge a sealed ARCHIVE from its records.

    The verdict is kept in the archive's `verdicts` folder where that can be written. With several --trust, a
    signature by one of the keys is enough. A fail whose every failing finding is in --known exits 0 and says so.
    """
    judgement = judge_archive(archive, analyzer, known=known_file(known) if known is not None else None, trust=trust)
    if as_json:
        print_json(judgement, archive)
    else:
        print_report(judgement)
    ctx.exit(exit_code(judgement.verdict))
