"""What is wrong with a plan, in one line that names the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from samestate.evidence.text import printable
from samestate.plans.model import AnalyzerPin, ArmPlan, EnginePlan, MarkerPlan, Plan, ProbePlan, SpeculationPlan

_MODELS = (Plan, EnginePlan, ArmPlan, AnalyzerPin, MarkerPlan, ProbePlan, SpeculationPlan)
_FIELDS = sorted({name for model in _MODELS for name in model.model_fields})
_SHOWN, _LONGEST = 40, 1000
"""Characters of a given value, and of a whole line: a plan may hold a word as long as its file."""

M = TypeVar("M", bound=BaseModel)


class PlanError(Exception):
    """A plan that cannot be followed. ``str(error)`` is one line that a terminal only shows."""

    def __init__(self, message: str) -> None:
        super().__init__(_cut(printable(message).replace("\n", " "), _LONGEST))

    def within(self, origin: str) -> PlanError:
        """The same error, headed by the file it came from."""
        return PlanError(f"{origin}: {self}")


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'boundary'?"``, or nothing when no known word is near."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def quoted(value: object) -> str:
    """`value` as Python writes it, cut after some characters."""
    return _cut(repr(value), _SHOWN)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def parse_model(model: type[M], data: str) -> M:
    """Parse JSON `data` as `model`; the first mistake becomes a `PlanError`."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first, *others = _distinct(error)
        more = f" (and {len(others)} more)" if others else ""
        raise PlanError(f"{_path(first)}: {_remedy(first)}{more}") from None


def _distinct(error: ValidationError) -> list[Any]:
    """One mistake a field (a union reports one for each of its members), misspelt fields first."""
    by_path = {_path(mistake): mistake for mistake in reversed(error.errors())}
    return sorted(reversed(by_path.values()), key=lambda mistake: mistake["type"] != "extra_forbidden")


def _path(mistake: Any) -> str:
    parts = list(mistake["loc"])
    # pydantic ends the place of a union's mistake with the member it tried.
    if parts[:2] == ["engine", "settings"]:
        parts = parts[:3]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".") or "the plan"


def _remedy(mistake: Any) -> str:
    kind, given, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    shown = quoted(given)
    if mistake["loc"][:2] == ("engine", "settings"):
        return f"must be text, a number, true, false or null, not {shown}"
    match kind:
        case "missing":
            return "is missing; add it"
        case "extra_forbidden":
            field = str(mistake["loc"][-1])
            return f"is not a field of a plan; remove it{nearest(field, _FIELDS)}"
        case "literal_error" | "enum":
            return f"must be {context['expected']}, not {shown}"
        case "string_type" if isinstance(given, int | float):
            return f"must be text, not {shown}; put it in quotes"
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}, {shown} does not"
        case "greater_than":
            return f"must be above {context['gt']}, not {shown}"
        case "model_type" | "dict_type":
            return f"must be a mapping (key: value), not {shown}"
        case _:
            return f"{str(mistake['msg']).removeprefix('Input ')}, not {shown}"
