"""Speculative decoding of a marker plan's arm, as vLLM's engine arguments have it."""

from __future__ import annotations

import json
from typing import Any

from samestate.evidence.records import Scalar
from samestate.lab.errors import RunError
from samestate.models import catalogue
from samestate.plans.model import SpeculationPlan


def speculative_config(said: SpeculationPlan | None) -> dict[str, Scalar]:
    """``speculative_config`` as JSON text, nothing for no drafts; a draft model is built where it is absent.

    Raises `RunError`.
    """
    if said is None:
        return {}
    config: dict[str, Any] = {"method": said.method, "num_speculative_tokens": said.drafts}
    if said.draft_model is not None:
        try:
            config["model"] = str(catalogue.ensure(said.draft_model))
        except catalogue.ModelError as error:
            raise RunError(f"speculation.draft_model: {error}") from None
    if said.lookup is not None:
        config |= {"prompt_lookup_max": said.lookup, "prompt_lookup_min": said.lookup}
    return {"speculative_config": json.dumps(config)}
