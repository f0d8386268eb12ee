"""Swap a diagnostic build in, probe it, and bring the incumbent back: each step is on the disk before it is done.

Whatever goes wrong, the way leads back to the incumbent. `Swap.resume` is that way alone. A restored incumbent that is
not what it was stays out of the route, and the swap unfinished, until it is mended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from samestate import __version__
from samestate.custody.back import Parts, WayBack
from samestate.custody.base import CustodyError, Failing, JudgeProbe, Supervisor, told
from samestate.custody.candidate import CandidateRun
from samestate.custody.journal import Locks, Steps, lock_paths, seen_identity, unfinished_step
from samestate.custody.observe import Watch, await_admission, await_idle, router_seen
from samestate.custody.preflight import examine, free_folder
from samestate.custody.private import LIMITS, SPEC, keep, release, reserve
from samestate.custody.probe import ARCHIVE, MakeProbe
from samestate.custody.processes import PlainProcess, limits_of
from samestate.custody.routers import router
from samestate.custody.snapshot import boot_id, declared
from samestate.custody.spec import Spec
from samestate.custody.supervisors import supervisor
from samestate.evidence.canonical import file_sha256
from samestate.evidence.custody_journal import JournalWriter, read_journal
from samestate.evidence.custody_records import (
    FORMAT,
    PRIVATE,
    Resumed,
    Step,
    SwapEnded,
    SwapStarted,
)


class Means(NamedTuple):
    """What a swap needs of others."""

    failing: Failing
    make_probe: MakeProbe
    judge_probe: JudgeProbe
    say: Callable[[str], None]
    """Hears of each step."""


class Swap:
    """One swap, begun or resumed. Raises `CustodyError`."""

    def __init__(self, spec: Spec, means: Means) -> None:
        self._spec, self._means = spec, means
        self._folder = Path(spec.records)
        self._incumbent: Supervisor = supervisor(spec.incumbent)
        self._router = router(spec)
        self._parts: Parts

    def run(self) -> None:
        """The whole swap, from a serving incumbent to a serving incumbent."""
        with ExitStack() as closing:
            locks = self._lock(closing)
            if locks.unfinished:
                raise CustodyError(f"{locks.unfinished}: holds a swap that has not ended; resume it with --resume")
            free_folder(self._folder)
            examine(self._spec, self._incumbent, self._router)
            plan = self._require_probe()
            self._create(locks)
            parts = self._open(JournalWriter.create(self._folder), closing)
            parts.steps.append(self._started(plan))
            failure = self._forward(parts)
            WayBack(parts).go(failure, locks)

    def resume(self) -> None:
        """Take over from a tool that died, towards the incumbent."""
        with ExitStack() as closing:
            locks = self._lock(closing)
            read = read_journal(self._folder)
            if not read.entries:
                locks.end(self._folder)
                raise CustodyError(f"{self._folder}: nothing was begun there, so nothing was touched; swap anew")
            if any(isinstance(entry.rec, SwapEnded) for entry in read.entries):
                locks.end(self._folder)  # the tool may have died before it could
                raise CustodyError(f"{self._folder}: that swap has ended; there is nothing to resume")
            release(self._folder)
            parts = self._open(JournalWriter.reopen(self._folder), closing)
            at = unfinished_step(read.entries)
            self._means.say(f"resumed in step {at}, towards the incumbent" if at else "resumed, towards the incumbent")
            parts.steps.append(Resumed(step=at, torn=read.torn, boot_id=boot_id()))
            with suppress(CustodyError):
                parts.watch.watch(self._incumbent.pid)
            parts.watch.start()
            WayBack(parts).go(None, locks)

    # --- forward ------------------------------------------------------------------------------------

    def _forward(self, parts: Parts) -> str | None:
        """As far as it goes; what went wrong, in one line."""
        run = CandidateRun(self._spec, parts.steps, self._router, parts.watch, self._means, self._incumbent)
        try:
            parts.watch.watch(self._incumbent.pid)
            parts.watch.start()
            self._snapshot(parts)
            self._drain(parts)
            self._stop(parts)
            if self._spec.candidate is not None:
                run.run(self._folder)
        except (Exception, KeyboardInterrupt) as error:  # whatever it is, the way leads back
            return told(error)
        return None

    def _snapshot(self, parts: Parts) -> None:
        parts.enter(Step.SNAPSHOT)
        parts.take("before")
        parts.steps.append(router_seen("before", self._router, self._spec.router.container))
        if isinstance(self._incumbent, PlainProcess):
            limits = limits_of(self._incumbent.pid)
            keep(self._folder, LIMITS, json.dumps(limits).encode())
        parts.ask("before")

    def _stop(self, parts: Parts) -> None:
        before = seen_identity(read_journal(self._folder).entries, "before")
        if before is None or self._incumbent.identity() not in (None, before):
            raise CustodyError("incumbent: is not the process that was recorded; who else starts it?")
        self._incumbent.knows(before)
        parts.enter(Step.STOP)
        parts.steps.stopped("incumbent", self._incumbent.stop())

    def _drain(self, parts: Parts) -> None:
        spec = self._spec
        parts.enter(Step.DRAIN)
        self._router.drain()
        if not await_admission(self._router, spec.router.drain_seconds, admitting=False):
            raise CustodyError(f"router: requests are still open after {spec.router.drain_seconds:g} s; wait longer")
        observe = spec.observe
        if not await_idle(
            "drained",
            spec.incumbent.url,
            observe.stable_samples,
            observe.idle_seconds,
            spec.router.drain_seconds,
            parts.steps.append,
        ):
            raise CustodyError("incumbent: was never seen idle after the drain; who else sends it requests?")
        parts.steps.append(router_seen("drained", self._router, self._spec.router.container))

    def _require_probe(self) -> str | None:
        """Name of the probe's plan. Raises `CustodyError` for one that cannot run, or that would have no candidate."""
        if self._spec.probe is None:
            return None
        plan = self._means.make_probe(self._spec.probe, self._folder / ARCHIVE).request.plan
        served = plan.markers is not None and plan.markers.route == "chat"
        if self._spec.candidate is not None and self._spec.candidate.kind == "plan" and not served:
            raise CustodyError(
                f"candidate.kind: plan {plan.name} starts no server of its own; make it a process, "
                "or choose a plan that asks over an API"
            )
        return plan.name

    # --- parts --------------------------------------------------------------------------------------

    def _lock(self, closing: ExitStack) -> Locks:
        locks = Locks(lock_paths(self._spec, self._incumbent.lock))
        closing.callback(locks.close)
        return locks

    def _create(self, locks: Locks) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        keep(self._folder, SPEC, self._spec.model_dump_json().encode())
        reserve(self._folder)
        if (process := self._spec.candidate.process if self._spec.candidate else None) and process.pid_file:
            # Of a candidate long gone: its number may be anybody's by now.
            Path(process.pid_file).unlink(missing_ok=True)
        locks.begin(self._folder)

    def _open(self, writer: JournalWriter, closing: ExitStack) -> Parts:
        steps = Steps(writer)
        closing.callback(steps.close)
        watch = Watch(self._spec.observe.period_seconds, steps.append)
        closing.callback(watch.halt)
        return Parts(self._spec, self._incumbent, self._router, steps, watch, self._means)

    def _started(self, plan: str | None) -> SwapStarted:
        spec = self._spec
        return SwapStarted(
            format=FORMAT,
            swap=spec.name,
            spec_sha256=file_sha256(self._folder / PRIVATE / SPEC),
            samestate_version=__version__,
            boot_id=boot_id(),
            expected_change=spec.policy.expected_change,
            ignore=spec.policy.ignore,
            candidate_differs=spec.candidate.differs if spec.candidate else [],
            required_before=spec.probe.required_before if spec.probe else [],
            smokes=[one.name for one in spec.smokes],
            stable_samples=spec.observe.stable_samples,
            period_ms=max(1, round(spec.observe.period_seconds * 1000)),
            probe=plan,
            identity=declared(spec.identity),
        )
