"""The body that was sent, held against the one that the plan makes: part of ``probes``.

Whatever a body says beside the plan could change the sampling (``logit_bias``, another seed), so nothing may be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from samestate.checks.base import Finding
from samestate.checks.marker_probes import Probe
from samestate.checks.verdicts import fail
from samestate.evidence.canonical import canonical_json, token_digest
from samestate.evidence.probe_records import ProbeSent
from samestate.plans import markers as marker_plans
from samestate.plans.model import Plan, ProbePlan


def body_of(sent: ProbeSent) -> dict[str, Any] | None:
    """The body as an object; None: it is none, or says a field twice, which `echo` tells."""
    try:
        body = json.loads(sent.body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is there twice")
    return fields


def other_body(plan: Plan, wanted: ProbePlan, probe: Probe, digests: set[str | None]) -> Iterator[Finding]:
    """The body is the one that the plan makes, field by field: what else it says would change the sampling."""
    sent, body = probe.sent.rec, body_of(probe.sent.rec)
    if body is None or plan.markers is None:
        return
    due: dict[str, Any] = {
        "temperature": marker_plans.temperature(plan, wanted),
        "top_p": wanted.top_p,
        "seed": plan.seed,
        "stop_token_ids": sent.stop_token_ids,
        "ignore_eos": plan.ignore_eos,
    }
    if plan.markers.route == "chat":
        due |= {"model": sent.model, "messages": [{"role": "user", "content": wanted.text}], "n": 1, "stream": False}
        due |= {"max_completion_tokens": wanted.max_tokens, "return_token_ids": True}
        due |= {"reasoning_effort": wanted.effort} if wanted.effort is not None else {}
        due |= {"thinking_token_budget": wanted.budget} if wanted.budget is not None else {}
    else:
        ids = body.get("token_ids")
        right = isinstance(ids, list) and all(type(one) is int for one in ids) and {token_digest(ids)} == digests
        due |= {"request": probe.name, "budget": wanted.budget, "max_tokens": wanted.max_tokens}
        due["token_ids"] = ids if right else "those of resolved.json"
    for name in sorted(due.keys() | body.keys()):
        ours, theirs = due.get(name, ...), body.get(name, ...)
        if ours is ... or theirs is ... or not _alike(ours, theirs):
            told, planned = ("nothing" if one is ... else repr(one)[:80] for one in (theirs, ours))
            message = f"{probe.title}: the body says {told} of {name}, the plan {planned}"
            yield fail("other_body", message, probe.place, [probe.sent.where])


def _alike(left: Any, right: Any) -> bool:
    """1 and 1.0 are one number; true and 1 are not alike."""
    try:
        return canonical_json(left) == canonical_json(right)
    except (TypeError, ValueError):
        return False
