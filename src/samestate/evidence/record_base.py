"""What every record is made of."""

from __future__ import annotations

from typing import Annotated

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Scalar = str | int | float | bool | None


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all records; the JSON field ``kind`` names the type."""


class PatchedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that an intervention or an instrument replaced."""

    module: str
    qualname: str
    source_sha256: Sha256
    """Of the source as it was before."""
