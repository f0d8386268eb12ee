"""A sealed archive whose control arm stands in for a live one, or is compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import sha256_hex
from samestate.lab.errors import RunError
from samestate.lab.resolve import Resolution
from samestate.plans.load import CONTROL
from samestate.plans.model import ModelIdentity, ResolvedPlan


class SealedControl(NamedTuple):
    """An archive fit to lend its control arm."""

    archive: Archive
    seal_sha256: str
    resolution: Resolution


def open_control(root: Path, plan_sha256: str) -> SealedControl:
    """Open an archive of the plan `plan_sha256`.

    Raises `RunError` unless it is sealed, whole, of the same plan, and has a control arm of its own.
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
    theirs = sha256_hex(archive.plan_json or b"")
    if theirs != plan_sha256:
        raise RunError(
            f"{root}: its plan is {theirs[:12]}, this one is {plan_sha256[:12]}; name an archive of the same plan"
        )
    if CONTROL not in archive.arms or archive.imported_from(CONTROL) is not None:
        raise RunError(f"{root}: it ran no {CONTROL} arm of its own; name the archive that did")
    try:
        resolved = ResolvedPlan.model_validate_json(archive.resolved_json or b"")
    except ValidationError as error:
        raise RunError(f"{root}: resolved.json cannot be read ({error.errors()[0]['msg']}); run it again") from None
    missing = [prompt.sha256 for prompt in resolved.inputs if prompt.sha256 not in archive.inputs]
    if missing:
        raise RunError(f"{root}: inputs.json lacks {len(missing)} of its prompts; run it again")
    return SealedControl(
        archive, archive.seal_sha256, Resolution(resolved, archive.resolved_json or b"", archive.inputs)
    )


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
