"""All commands of ``samestate``."""

from __future__ import annotations

import click

from samestate import __version__
from samestate.cli.amend import amend
from samestate.cli.archive import archive
from samestate.cli.case import case
from samestate.cli.check import check
from samestate.cli.claims import claims
from samestate.cli.diff import diff
from samestate.cli.doctor import doctor
from samestate.cli.failures import Household
from samestate.cli.faults import faults
from samestate.cli.matrix import matrix
from samestate.cli.models import models
from samestate.cli.plan import plan
from samestate.cli.report import report
from samestate.cli.run import run
from samestate.cli.schema import schema
from samestate.cli.seal import seal


@click.group(cls=Household, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="samestate")
def samestate() -> None:
    """Prove that an LLM server's reused state is the state it would have computed.

    Exit codes: 0 pass · 1 fail · 2 usage, plan, environment or interrupted · 3 unknown.
    """


for _command in (
    doctor,
    run,
    matrix,
    faults,
    check,
    report,
    diff,
    seal,
    amend,
    archive,
    case,
    claims,
    plan,
    models,
    schema,
):
    samestate.add_command(_command)
