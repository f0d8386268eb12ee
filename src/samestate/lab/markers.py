"""The arms of a marker plan: gates, engine, identity, probes one at a time, identity again, reaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from samestate.engines.base import Engine, EngineError, EngineSpec
from samestate.engines.server import Server, ServerSpec
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import canonical_json, token_digest
from samestate.evidence.marker_records import BUDGET_FAULT, REPAIRS, SAMPLING_GUARD, TRACE_ARM, TRACE_FOLDER
from samestate.evidence.records import ContactLevel, PlanResolved, Scalar
from samestate.evidence.stream import StreamWriter
from samestate.lab.errors import RunError
from samestate.lab.gates import RunGate, receipts
from samestate.lab.probing import Asked, EngineRoute, Route, failed, identity_read, sent
from samestate.lab.served_probes import ServedRoute
from samestate.lab.speculation import speculative_config
from samestate.models.catalogue import ModelError, identity
from samestate.plans.load import PlanError, plan_sha256
from samestate.plans.markers import resolve_markers
from samestate.plans.model import ArmPlan, InputIdentity, MarkerPlan, ModelIdentity, Plan, ResolvedPlan

MakeServer = Callable[[ServerSpec], Server]


class Report(Protocol):
    """What a run tells of itself."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        """A probe is over."""


class Means(NamedTuple):
    """What the arms are run with."""

    plan: Plan
    markers: MarkerPlan
    model: Path
    identity: ModelIdentity
    make_engine: Callable[[EngineSpec], Engine]
    make_server: MakeServer
    run_gate: RunGate
    fault: str | None
    timed: Callable[[str], AbstractContextManager[None]]
    reach: Callable[[ContactLevel], None]
    report: Report


class MarkerRun:
    """All arms of a marker plan, into an archive. Raises `RunError` and `EngineError`."""

    def __init__(self, means: Means, archive: ArchiveWriter) -> None:
        self._means = means
        self._archive = archive
        self._resolved: ResolvedPlan | None = None
        self._resolved_sha256 = ""
        self._asked: list[Asked] = []

    def run(self) -> None:
        """Arm after arm, each on an engine of its own."""
        for arm in self._means.plan.arms:
            client = StreamWriter(self._archive.arm_dir(arm.name) / "client.jsonl", arm.name, "client")
            route = self._route(arm)
            try:
                self._run_arm(arm, route, client)
            finally:
                with suppress(EngineError):
                    route.close()
                client.close()

    def _run_arm(self, arm: ArmPlan, route: Route, client: StreamWriter) -> None:
        means = self._means
        with means.timed(f"{arm.name}: gates"):
            means.reach(ContactLevel.HOST)
            gates = list(receipts(means.markers.gates, means.markers.guard, means.run_gate))
        with means.timed(f"{arm.name}: start"):
            if all(receipt.ok for receipt in gates):
                route.start(lambda seconds: None)
                means.reach(ContactLevel.MODEL)
                before = identity_read(route, "before", means.identity)
                self._resolve(route, before.values.get("cache_config.block_size"))
                client.append(PlanResolved(resolved_sha256=self._resolved_sha256))
                client.append(before)
        for receipt in gates:
            client.append(receipt)
        client.flush()
        if refusing := next((receipt for receipt in gates if not receipt.ok), None):
            raise RunError(
                f"arm {arm.name}: gate {refusing.gate} did not pass ({refusing.reason}), so nothing was probed"
            )
        with means.timed(f"{arm.name}: probes"):
            self._probe(arm, route, client)
            client.append(identity_read(route, "after", self._checkpoint()))
        with means.timed(f"{arm.name}: stop"):
            route.close()

    def _checkpoint(self) -> ModelIdentity:
        """The checkpoint as it lies there now."""
        try:
            return identity(self._means.model)
        except ModelError as error:
            raise RunError(str(error)) from None

    def _probe(self, arm: ArmPlan, route: Route, client: StreamWriter) -> None:
        means = self._means
        means.reach(ContactLevel.REQUEST)
        for done, asked in enumerate(self._asked, 1):
            model, body = route.message(asked)
            client.append(sent(means.plan, means.markers, asked, model, body))
            client.flush()
            try:
                client.append(route.send(asked, body))
            except EngineError as error:
                client.append(failed(asked.probe, error, getattr(route, "url", "")))
                raise
            finally:
                client.flush()
            means.report.operation(arm.name, done, len(self._asked), asked.probe.name)

    def _resolve(self, route: Route, block_size: Scalar) -> None:
        """Token ids of markers, stops and prompts, by the first engine; another engine must have the same."""
        means = self._means
        try:
            markers = resolve_markers(means.plan, route.encode)
        except PlanError as error:
            raise RunError(str(error)) from None
        asked = [
            Asked(probe, route.prompt(probe), markers.stop_ids.get(probe.name, [])) for probe in means.markers.probes
        ]
        digests = [token_digest(one.prompt_ids) for one in asked]
        resolved = ResolvedPlan(
            format=1,
            plan_sha256=plan_sha256(means.plan),
            checkpoint_interval=block_size if isinstance(block_size, int) else 1,
            lengths=[len(one.prompt_ids) for one in asked],
            model=means.identity,
            inputs=[
                InputIdentity(case=one.probe.name, role="target", tokens=len(one.prompt_ids), sha256=digest)
                for one, digest in zip(asked, digests, strict=True)
            ],
            operations=[one.probe.name for one in asked],
            markers=markers,
        )
        if self._resolved is None:
            self._resolved, self._asked = resolved, asked
            self._archive.write_inputs(dict(zip(digests, (one.prompt_ids for one in asked), strict=True)))
            self._resolved_sha256 = self._archive.write_resolved(canonical_json(resolved.model_dump(mode="json")))
        elif resolved != self._resolved:
            raise RunError("the engines of two arms read the plan's texts as other tokens; give them one tokenizer")

    # --- engines --------------------------------------------------------------------------------

    def _route(self, arm: ArmPlan) -> Route:
        means, plan = self._means, self._means.plan
        config = speculative_config(arm.speculation)
        settings = {**plan.engine.settings, **arm.settings, **config}
        log_path, folder = self._archive.log_path(arm.name), self._archive.arm_dir(arm.name)
        environment = self._environment(arm, folder)
        if means.markers.route == "chat":
            spec = ServerSpec(arm.name, means.model, settings, plan.engine.serve_args, log_path, folder, environment)
            return ServedRoute(plan, means.markers, means.make_server(spec))
        return EngineRoute(
            plan,
            means.markers,
            means.make_engine(
                EngineSpec(
                    arm=arm.name,
                    model=means.model,
                    settings=settings,
                    serve_args=plan.engine.serve_args,
                    connector="none",
                    external_cache_bytes=0,
                    audit_level="off",
                    save_delay_ms=0,
                    fault=None,  # of connectors; budget faults are told by the environment
                    stream_dir=folder,
                    log_path=log_path,
                    core=plan.engine.core,
                    environment=environment,
                )
            ),
        )

    def _environment(self, arm: ArmPlan, folder: Path) -> Mapping[str, str]:
        """What instruments in the engine's processes are told."""
        markers = self._means.markers
        return {
            TRACE_FOLDER: str(folder.resolve()),
            TRACE_ARM: arm.name,
            SAMPLING_GUARD: markers.guard or "",
            REPAIRS: ",".join(markers.repairs),
            BUDGET_FAULT: self._means.fault or "",
        }
