"""Files that people write for a judge: accepted findings, claims. One mistake is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from samestate.evidence.text import printable
from samestate.plans.errors import PlanError, nearest, quoted
from samestate.plans.files import parse, read_bytes, to_json


class WrittenError(Exception):
    """A file cannot be read as what it should be. ``str(error)`` is one line: file, field, remedy."""


class Written(BaseModel):
    """Strict, immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


W = TypeVar("W", bound=Written)


def read_written(path: Path, model: type[W]) -> W:
    """Read a YAML or JSON file as `model`. Raises WrittenError."""
    try:
        return model.model_validate_json(to_json(parse(read_bytes(path))))
    except PlanError as error:
        raise WrittenError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    except ValidationError as error:
        raise WrittenError(f"{path}: {_line(error.errors()[0], model)}") from None


def _line(mistake: Any, model: type[Written]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in mistake["loc"]]
    field = "".join(parts).removeprefix(".") or "the file"
    match mistake["type"]:
        case "missing":
            said = "is missing; add it"
        case "extra_forbidden":
            name = str(mistake["loc"][-1])
            said = f"is no field here; remove it{nearest(name, _fields(model))}"
        case "value_error":
            said = str(mistake["ctx"]["error"])
        case _:
            said = f"{str(mistake['msg']).removeprefix('Input ')}, not {quoted(mistake['input'])}; correct it"
    return printable(" ".join(f"{field}: {said}".split()))


def _fields(model: type[BaseModel]) -> set[str]:
    """The fields of a model and of the models in its lists."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        names.add(name)
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                names |= _fields(inner)
    return names
