"""All commands of ``samestate``."""

from __future__ import annotations

import click

from samestate import __version__
from samestate.cli.amend import amend
from samestate.cli.archive import archive
from samestate.cli.bench import bench
from samestate.cli.cache import cache
from samestate.cli.case import case
from samestate.cli.check import check
from samestate.cli.claims import claims
from samestate.cli.compare import diff_call, diff_env, diff_schedule
from samestate.cli.diff import diff
from samestate.cli.doctor import doctor
from samestate.cli.explain import explain_archive
from samestate.cli.failures import Household
from samestate.cli.faults import faults
from samestate.cli.gate import gate
from samestate.cli.matrix import matrix
from samestate.cli.models import models
from samestate.cli.plan import plan
from samestate.cli.probe import probe_command
from samestate.cli.profile import profile
from samestate.cli.report import report
from samestate.cli.run import run
from samestate.cli.schema import schema
from samestate.cli.seal import seal
from samestate.cli.serve_args import serve_args
from samestate.cli.swap import swap
from samestate.cli.ticket import ticket
from samestate.cli.watch import watch


@click.group(cls=Household, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="samestate")
def samestate() -> None:
    """Prove that an LLM server's reused state is the state it would have computed.

    Exit codes: 0 pass · 1 fail · 2 usage, plan, environment or interrupted · 3 unknown.
    """


for _command in (
    doctor,
    serve_args,
    watch,
    run,
    bench,
    probe_command,
    matrix,
    faults,
    gate,
    swap,
    ticket,
    check,
    report,
    diff,
    explain_archive,
    seal,
    amend,
    archive,
    case,
    claims,
    plan,
    profile,
    models,
    cache,
    schema,
):
    samestate.add_command(_command)

for _comparison in (diff_schedule, diff_env, diff_call):
    diff.add_command(_comparison)
