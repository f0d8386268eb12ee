"""Options that put another connector, release or repair into a plan, and what the run then needs beside its engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import click

from samestate.cli.failures import Failure
from samestate.engines.cache_places import OURS, place_beside, server_binary
from samestate.engines.lmcache_server import PACKAGE, LMCacheServer, require_known
from samestate.engines.releases import ReleaseError, ensure, installed, known
from samestate.engines.services import Service, ServiceError, ServiceSpec
from samestate.evidence.controls import ENGINE_REPAIRS, STRICT_PREFIX
from samestate.evidence.records import Scalar
from samestate.plans.engine_repairs import with_engine_repair
from samestate.plans.load import with_connector
from samestate.plans.markers import NO_REPAIR, with_repair
from samestate.plans.markers import REPAIRS as MARKER_REPAIRS
from samestate.plans.model import Connector, Plan

NO_CONNECTOR = "none"
_CONNECTORS = [name for name in get_args(Connector) if name != NO_CONNECTOR]
_WORDS: dict[str, Scalar] = {"on": True, "true": True, "off": False, "false": False}

C = TypeVar("C", bound=Callable[..., Any])


class Choice(NamedTuple):
    """What the command line says about the connector; None and empty: as the plan says."""

    connector: Connector | None
    release: str | None
    options: tuple[str, ...]
    """``NAME=VALUE``."""
    repair: str | None

    def put_into(self, plan: Plan) -> Plan:
        """The plan under this choice. Raises `Failure` and `PlanError`."""
        if self == Choice(None, None, (), None):
            return plan
        if self.repair is not None:
            self._require_repair(plan)
        if plan.markers is not None and self.repair and self == Choice(None, None, (), self.repair):
            return with_repair(plan, self.repair)
        if self.repair in ENGINE_REPAIRS:
            return with_engine_repair(self._replace(repair=None).put_into(plan), self.repair)
        changed = with_connector(plan, self.connector) if self.connector else plan
        if not (self.release or self.options or self.repair):
            return changed
        if not any(arm.connector == PACKAGE for arm in changed.arms):
            raise Failure(
                "--lmcache-version, --connector-option and --repair are LMCache's; add --connector lmcache, "
                f"or leave them out (--repair {', '.join(ENGINE_REPAIRS)} is vLLM's)"
            )
        options = dict(map(parse_option, self.options))
        return with_connector(changed, None, release=self.release, options=options, repair=self.repair)

    def _require_repair(self, plan: Plan) -> None:
        known = (*MARKER_REPAIRS, NO_REPAIR) if plan.markers is not None else (STRICT_PREFIX, *ENGINE_REPAIRS)
        if self.repair not in known:
            raise Failure(f"--repair: plan {plan.name} knows no {self.repair!r}; use one of {', '.join(known)}")


class Beside(NamedTuple):
    """What a run needs beside its engine."""

    packages: Path | None
    make_service: Callable[[ServiceSpec], Service | None]


def options_for_lmcache(command: C) -> C:
    """Options of LMCache's connector and server, for a command that already says that it is LMCache."""
    for option in (
        click.option(
            "--repair",
            metavar="NAME",
            help="Put a repair onto LMCache (strict-prefix), onto vLLM (stable-topk, of GLM-5-Next's indexer), or onto "
            "vLLM in a marker plan (cpu-draft-rows, none).",
        ),
        click.option(
            "--connector-option",
            "connector_options",
            metavar="NAME=VALUE",
            multiple=True,
            help="An option of LMCache's connector (lmcache.mp.…) or server; on, off, numbers, text. Repeatable.",
        ),
    ):
        command = option(command)
    return command


def connector_options(command: C) -> C:
    """The options that make a `Choice`."""
    version = click.option("--lmcache-version", metavar="X.Y.Z", help="Default: the one installed beside vLLM.")
    connector = click.option("--connector", type=click.Choice(_CONNECTORS), help="Instead of the plan's.")
    return connector(version(options_for_lmcache(command)))


def parse_option(text: str) -> tuple[str, Scalar]:
    """``NAME=VALUE``; ``on``, ``off``, ``true``, ``false`` and numbers are what they say. Raises `Failure`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Failure(f"--connector-option: {text!r} is no NAME=VALUE; say it as separate_object_groups=on")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value


def beside(plan: Plan, engine: str) -> Beside:
    """What the plan's connector needs, fetched where it is absent; its options held against the release.

    Raises `Failure` for what cannot be had, before anything runs.
    """
    ours = sorted({arm.connector for arm in plan.arms if arm.connector.startswith(OURS)})
    repaired = sorted({arm.repair for arm in plan.arms if arm.repair in ENGINE_REPAIRS})
    if repaired and engine != "vllm":
        raise Failure(f"--repair: {repaired[0]} is of vLLM's code; use --engine vllm, or leave it out")
    if ours and engine == "sim":
        raise Failure(f"--engine sim: has no {ours[0]}; use --engine vllm, or another --connector")
    if "samestate-valkey" in ours and server_binary() is None:
        raise Failure("--connector samestate-valkey: no valkey-server and no redis-server on the PATH; install one")
    arms = [arm for arm in plan.arms if arm.connector == PACKAGE]
    if not arms:
        return Beside(None, _make_service)
    if engine == "sim":
        raise Failure("--engine sim: has no LMCache; use --engine vllm, or leave --connector lmcache out")
    releases = sorted({arm.release or "" for arm in arms})
    if len(releases) > 1:
        raise Failure(f"plan {plan.name}: names {len(releases)} releases of LMCache; a run has one")
    try:
        packages = _packages(releases[0])
        for arm in arms:
            require_known(arm.options, packages)
    except (ReleaseError, ServiceError) as error:
        raise Failure(str(error)) from None
    return Beside(packages, _make_service)


def _packages(release: str) -> Path | None:
    if release:
        click.echo(f"lmcache {release}", err=True)
        return ensure(PACKAGE, release)
    if installed(PACKAGE) is None:
        versions = ", ".join(one.version for one in known(PACKAGE))
        raise Failure(f"LMCache is not installed beside vLLM; add --lmcache-version X.Y.Z (run here: {versions})")
    return None


def _make_service(spec: ServiceSpec) -> Service | None:
    return LMCacheServer(spec) if spec.connector == PACKAGE else place_beside(spec)
