"""The candidate's time: started, gated, probed, stopped. It never enters the route."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from samestate.custody.base import CustodyError, Failing, JudgeProbe, Router, Stopped, Supervisor
from samestate.custody.candidate_identity import lacking_fields, own_identity, own_sources
from samestate.custody.journal import Steps
from samestate.custody.observe import Watch, await_answer, router_seen
from samestate.custody.probe import ARCHIVE, MakeProbe, run_probe
from samestate.custody.processes import api_key
from samestate.custody.snapshot import snapshot, source_field
from samestate.custody.spec import CandidateSpec, Spec
from samestate.custody.supervisors import supervisor
from samestate.engines.base import EngineError
from samestate.engines.openai_client import OpenAIClient
from samestate.evidence.canonical import file_sha256
from samestate.evidence.custody_records import (
    CompositionSeen,
    GateSeen,
    Layer,
    ProbeEnded,
    SnapshotTaken,
    Step,
)

COMPOSITION = "custody-composition"


class Means(Protocol):
    """Of a swap's means, what the candidate's time needs."""

    @property
    def failing(self) -> Failing: ...
    @property
    def make_probe(self) -> MakeProbe: ...
    @property
    def judge_probe(self) -> JudgeProbe: ...
    @property
    def say(self) -> Callable[[str], None]: ...


class CandidateRun:
    """Steps candidate-start to candidate-stop. Raises `CustodyError`; whoever called it then stops the candidate."""

    def __init__(
        self, spec: Spec, steps: Steps, router: Router, watch: Watch, means: Means, incumbent: Supervisor
    ) -> None:
        assert spec.candidate is not None or spec.probe is None
        self._spec, self._steps, self._router = spec, steps, router
        self._watch, self._means, self._incumbent = watch, means, incumbent
        self._folder = Path(spec.records)
        self._refused: str | None = None
        self._planned: Path | None = None
        """Checkpoint that the plan serves, where it starts the candidate."""

    def run(self, folder: Path) -> None:
        """All of it, into `folder`."""
        candidate = self._spec.candidate
        assert candidate is not None
        self._folder = folder
        self._enter(Step.CANDIDATE_START)
        self._compose(candidate)
        if candidate.process is None:
            self._probe(own=True)
        else:
            process = supervisor(candidate.process)
            process.start()
            await_answer(process, candidate.process.url, candidate.process.start_seconds, "candidate")
            self.started(process.pid, candidate.process.url)
            if self._spec.probe is not None:
                self._probe(own=False)
            self.stopping()
            self._steps.stopped("candidate", process.stop())
        if self._steps.current is not Step.CANDIDATE_STOP:
            self._enter(Step.CANDIDATE_STOP)

    # --- what a plan that starts the candidate tells ----------------------------------------------------

    def started(self, pid: int, url: str) -> None:
        """It answers: snapshot and gates, then the probe may begin."""
        if self._steps.current is Step.CANDIDATE_STOP:  # a plan's next arm, on an engine of its own
            self._enter(Step.CANDIDATE_START)
        self._watch.watch(pid)
        own = self._spec.candidate.process if self._spec.candidate else None
        key = api_key(own) if own is not None else None
        identity = own_identity(self._spec, pid, self._planned)
        lacking = lacking_fields(self._spec.identity, identity)
        self._steps.append(SnapshotTaken(when="candidate", fields=[*snapshot(pid, url, identity, key), *lacking]))
        self._steps.append(router_seen("candidate", self._router, self._spec.router.container))
        self._enter(Step.GATES)
        self._gate(url)
        self._enter(Step.PROBE)

    def stopping(self) -> None:
        """The probe is over."""
        self._enter(Step.CANDIDATE_STOP)

    def stopped(self, process: str | None) -> None:
        """It is gone."""
        self._steps.stopped("candidate", Stopped(process, killed=False, left=[]))

    # --- parts ------------------------------------------------------------------------------------------

    def _enter(self, step: Step) -> None:
        self._steps.enter(step)
        self._means.say(step)

    def _gate(self, url: str) -> None:
        admission = self._router.admission()
        with OpenAIClient(url, seconds=10.0) as client:
            ready = client.healthy()
        beyond = self._means.failing(self._folder, COMPOSITION)
        gates = [
            ("route", not admission.admitting and not admission.sessions, "the route to the incumbent's place is open"),
            ("incumbent-gone", not self._incumbent.alive(), "the incumbent runs beside the candidate"),
            ("answers", ready, "the candidate is not ready"),
            ("composition", not beyond, "; ".join(beyond)),
        ]
        for name, ok, reason in gates:
            self._steps.append(GateSeen(name=name, ok=ok, reason="" if ok else reason))
        if refusing := next((gate for gate in gates if not gate[1]), None):
            self._refused = f"gate {refusing[0]}: {refusing[2]}"
            self._steps.leave("failed", self._refused)
            raise CustodyError(self._refused)

    def _probe(self, *, own: bool) -> None:
        """Run the plan; `own`: it starts the candidate itself. A probe that fails is the probe's verdict, no more."""
        assert self._spec.probe is not None
        asked = self._means.make_probe(self._spec.probe, self._folder / ARCHIVE)
        plan = asked.request.plan.name
        self._planned = asked.request.model if own else None
        try:
            ran = run_probe(asked, self if own else None)
        except (CustodyError, EngineError) as error:
            if self._refused is not None:
                raise
            archive = ARCHIVE if (self._folder / ARCHIVE).is_dir() else None
            self._steps.append(
                ProbeEnded(plan=plan, archive=archive, seal_sha256=None, verdict=None, checks={}, error=str(error))
            )
            return
        verdict, checks = self._means.judge_probe(ran.archive)
        self._steps.append(
            ProbeEnded(
                plan=plan, archive=ARCHIVE, seal_sha256=ran.seal_sha256, verdict=verdict, checks=checks, error=None
            )
        )

    def _compose(self, candidate: CandidateSpec) -> None:
        """What the candidate is made of, and what it is compared with and is not made of."""
        base = source_field(candidate.base, Path(self._spec.identity.sources[candidate.base]))
        folder = own_sources(self._spec, candidate).get(candidate.base)
        own = source_field(candidate.base, Path(folder)).value if folder is not None else None
        layers = []
        for one in candidate.layers:
            try:
                seen: str | None = file_sha256(Path(one.file))
            except OSError:
                seen = None
            layers.append(Layer(name=one.name, declared=one.sha256, seen=seen))
        self._steps.append(
            CompositionSeen(role="base", name=candidate.base, base=None, base_sha256=None, sha256=base.value, layers=[])
        )
        self._steps.append(
            CompositionSeen(
                role="candidate",
                name=candidate.name,
                base=candidate.base,
                base_sha256=own,
                sha256=None,
                layers=layers,
            )
        )
        if (reference := self._spec.reference) is not None:
            self._steps.append(
                CompositionSeen(
                    role="reference",
                    name=reference.name,
                    base=None,
                    base_sha256=None,
                    sha256=reference.sha256,
                    layers=[],
                )
            )
