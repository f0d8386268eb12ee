"""A sealed archive whose control arm stands in for a live one, or is compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.records import EngineStarted
from samestate.lab.errors import RunError
from samestate.lab.resolve import Resolution
from samestate.plans.lending import objection
from samestate.plans.load import CONTROL, plan_sha256
from samestate.plans.model import ModelIdentity, Plan, ResolvedPlan


class SealedControl(NamedTuple):
    """An archive fit to lend its control arm."""

    archive: Archive
    seal_sha256: str
    resolution: Resolution
    """As the archive has it; under the borrowing plan's hash where that is another plan."""
    other_plan: bool
    """It is of the plan that the borrower names in `control_from`."""


def open_control(root: Path, plan: Plan, engine: str | None = None) -> SealedControl:
    """Open an archive that may lend its control arm to a run of `plan`.

    Raises `RunError` unless it is sealed, whole, of the same plan or of one that `plan` takes
    its control from (`samestate.plans.lending`), and has a control arm of its own, on `engine` where that is given.
    """
    try:
        archive = Archive.open(root)
    except ArchiveError as error:
        raise RunError(str(error)) from None
    defects = archive.verify()
    if archive.seal_sha256 is None:
        raise RunError(f"{root}: the archive has no seal, so its run did not complete; name a sealed one")
    if defects:
        first, *others = defects
        more = f" (and {len(others)} more)" if others else ""
        raise RunError(f"{root}: the archive is damaged: {first.where}: {first.what}{more}; name an undamaged one")
    other_plan = _other_plan(root, archive, plan)
    if CONTROL not in archive.arms or archive.imported_from(CONTROL) is not None:
        raise RunError(f"{root}: it ran no {CONTROL} arm of its own; name the archive that did")
    theirs = _engine(archive)
    if engine not in (None, theirs):
        raise RunError(
            f"{root}: its {CONTROL} arm ran on engine {theirs}, this run is on {engine}; name one that ran on it"
        )
    try:
        resolved = ResolvedPlan.model_validate_json(archive.resolved_json or b"")
    except ValidationError as error:
        raise RunError(f"{root}: resolved.json cannot be read ({error.errors()[0]['msg']}); run it again") from None
    missing = [one for one in resolved.inputs if one.sha256 is not None and one.sha256 not in archive.inputs]
    if missing:
        raise RunError(f"{root}: inputs.json lacks {len(missing)} of its prompts; run it again")
    resolved_json = archive.resolved_json or b""
    if other_plan:
        resolved = resolved.model_copy(update={"plan_sha256": plan_sha256(plan)})
        resolved_json = canonical_json(resolved.model_dump(mode="json"))
    return SealedControl(archive, archive.seal_sha256, Resolution(resolved, resolved_json, archive.inputs), other_plan)


def _engine(archive: Archive) -> str | None:
    """What the control's engine says it is; None when it says nothing."""
    lines = (line for process in archive.streams(CONTROL) for line in archive.records(CONTROL, process))
    return next((line.rec.engine for line in lines if isinstance(line.rec, EngineStarted)), None)


def _other_plan(root: Path, archive: Archive, plan: Plan) -> bool:
    """Whether the archive is of another plan, and may lend all the same. Raises `RunError`."""
    ours, theirs = plan_sha256(plan), sha256_hex(archive.plan_json or b"")
    if theirs == ours:
        return False
    try:
        lender = Plan.model_validate_json(archive.plan_json or b"")
    except ValidationError as error:
        raise RunError(f"{root}: plan.json cannot be read ({error.errors()[0]['msg']}); run it again") from None
    if why := objection(plan, lender):
        raise RunError(f"{root}: {why}; name an archive of such a plan with the same settings")
    return True


def require_same_model(control: SealedControl, model: ModelIdentity) -> None:
    """Raise `RunError` unless the archive was made with exactly these model files."""
    theirs = control.resolution.resolved.model
    if theirs.sha256 == model.sha256:
        return
    changed = sorted(name for name in {*theirs.files, *model.files} if theirs.files.get(name) != model.files.get(name))
    raise RunError(
        f"{control.archive.root}: was made with another model ({theirs.name} {theirs.sha256[:12]}, this one is "
        f"{model.name} {model.sha256[:12]}; {', '.join(changed[:3])} differ); pass the model that it names"
    )
