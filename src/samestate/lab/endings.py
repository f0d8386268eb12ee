"""How an attempt ended, and what its caller is told."""

from __future__ import annotations

import errno
from pathlib import Path

from samestate.engines.base import EngineError
from samestate.engines.services import ServiceError
from samestate.evidence.archive import ArchiveError
from samestate.evidence.records import Outcome
from samestate.lab.errors import RunError
from samestate.plans.model import Plan
from samestate.plans.operations import workload

BYTES_PER_OUTPUT_TOKEN = 1024
"""What an output token costs in an archive, at most: its schedule records of two sources."""


def explain(error: BaseException, plan: Plan, out: Path, *, entered: bool) -> tuple[Outcome, BaseException]:
    """How the attempt ended, and the exception that says so to the caller. `entered`: a request had been made."""
    match error:
        case KeyboardInterrupt():
            return Outcome.INTERRUPTED, error
        case RunError():
            return Outcome.FAILED if entered else Outcome.EXCLUDED, error
        case EngineError() | ServiceError():
            return Outcome.FAILED if entered else Outcome.EXCLUDED, RunError(str(error), error.log_tail)
        case ArchiveError():
            return Outcome.FAILED, RunError(str(error))
        case OSError():
            return Outcome.FAILED, disk_error(error, plan, out)
        case _:
            return Outcome.FAILED, error


def disk_error(error: OSError, plan: Plan, out: Path) -> RunError:
    """What the file system refused, with the room that the archive at `out` needs."""
    what = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{error.filename or out}: {what}; check the path and its permissions")
    work = workload(plan)
    times = work.repetitions if plan.latency else 1 if plan.scenario or plan.markers else work.engine_starts
    output_tokens = work.output_tokens * times
    megabytes = 1 + output_tokens * BYTES_PER_OUTPUT_TOKEN // 10**6
    return RunError(f"{out}: {what}; the archive needs about {megabytes} MB: make room or choose another --out")


def one_line(error: BaseException) -> str:
    """As the archive keeps it."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by the user"
    text = " ".join(str(error).split())
    return text if isinstance(error, RunError | EngineError | ServiceError) else f"{type(error).__name__}: {text}"
