"""Where the candidate's own files lie: nothing of it is read at the incumbent's places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from samestate.custody.base import missing
from samestate.custody.served import place_of, served
from samestate.custody.snapshot import MODEL
from samestate.custody.spec import CandidateSpec, IdentitySpec, Spec
from samestate.evidence.custody_records import Field

_UNNAMED = "neither the spec nor the process's command line names it; candidate.model does"


def own_identity(spec: Spec, pid: int, planned: Path | None) -> IdentitySpec:
    """What is recorded of the candidate, the process `pid`, of what is recorded of the incumbent.

    `planned`: the checkpoint of the plan that started it; None: the spec's, else the one that its command line names.
    """
    candidate = spec.candidate
    assert candidate is not None
    model = template = None
    if spec.identity.model is not None:
        says = served(pid).model
        found = planned or candidate.model or (place_of(pid, says) if says is not None else None)
        model = str(found) if found is not None else None
    if spec.identity.model is not None or spec.identity.template is not None:
        template = candidate.template
    own = {"model": model, "template": template, "sources": own_sources(spec, candidate)}
    return spec.identity.model_copy(update=own)


def lacking_fields(incumbent: IdentitySpec, own: IdentitySpec) -> Iterator[Field]:
    """Of what the incumbent has, that of which nobody says where the candidate's lies: missing, and not unlike."""
    if incumbent.model is not None and own.model is None:
        yield from (missing(name, _UNNAMED) for name in MODEL)


def own_sources(spec: Spec, candidate: CandidateSpec) -> dict[str, str]:
    """Folders of the compared packages as the candidate has them: a plan's engine runs on this very interpreter.

    One that nobody names is left out: the incumbent's would say nothing of the candidate.
    """
    found = {name: candidate.sources[name] for name in spec.identity.sources if name in candidate.sources}
    if candidate.kind == "plan":
        for name in spec.identity.sources:
            with suppress(ImportError, ValueError):
                package = find_spec(name)
                if package is not None and package.submodule_search_locations:
                    found[name] = next(iter(package.submodule_search_locations))
    return found
