"""One plan over several releases, with one control for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestate.lab.errors import RunError
from samestate.lab.run import Progress, RunRequest, RunResult, run_plan


def run_releases(requests: Sequence[RunRequest], progress: Progress) -> Iterator[RunResult | RunError]:
    """Run them one after another; the first that seals an archive lends its control to those after it.

    One that cannot run is its error, and the others run all the same.
    """
    control = None
    for request in requests:
        try:
            result = run_plan(request._replace(control=control), progress)
        except RunError as error:
            yield error
            continue
        if len(request.plan.repetitions) == 1:  # each repetition has a control of its own
            control = control or result.archive
        yield result
