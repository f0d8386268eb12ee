"""``samestate bench --connectors``: the plan under it, one engine a connector, all in one run."""

from __future__ import annotations

from typing import cast, get_args

from samestate.cli.failures import Failure
from samestate.engines.lmcache_server import PACKAGE
from samestate.plans.errors import nearest
from samestate.plans.latency import side_by_side
from samestate.plans.model import Connector, Plan

NAMES = get_args(Connector)


def side_plan(plan: Plan, text: str) -> Plan:
    """The plan with the connectors in ``none,native,lmcache-0.5.6``. Raises `Failure`."""
    chosen: dict[Connector, str | None] = {}
    for word in text.split(","):
        name, release = word.strip(), None
        if name.startswith(f"{PACKAGE}-"):
            name, release = PACKAGE, name.removeprefix(f"{PACKAGE}-")
        if name not in NAMES:
            raise Failure(f"--connectors: no connector {name!r}{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
        if name in chosen:
            raise Failure(f"--connectors: {name!r} is there twice; a run has one engine of each")
        chosen[cast(Connector, name)] = release
    if next(iter(chosen)) != "none" or len(chosen) < 2:
        raise Failure("--connectors: begins with none, to compare with, and names another; say none,native")
    return side_by_side(plan, chosen)
