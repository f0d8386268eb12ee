"""The way back to the incumbent, whatever came before: what a swap ends with, and all that a resumption does."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from samestate.custody.base import CustodyError, Router, Stopped, Supervisor, Unfinished, told
from samestate.custody.candidate import Means
from samestate.custody.journal import Locks, Steps, begun_steps, seen_identity, seen_values
from samestate.custody.observe import Watch, await_admission, await_answer, await_idle, router_seen
from samestate.custody.ports import listening
from samestate.custody.private import LIMITS, release
from samestate.custody.processes import PlainProcess, api_key
from samestate.custody.smokes import smoke
from samestate.custody.snapshot import argv_field, boot_id, snapshot
from samestate.custody.spec import Spec
from samestate.custody.supervisors import supervisor
from samestate.engines.processes import await_end, identity, session_members
from samestate.evidence.custody_journal import read_journal
from samestate.evidence.custody_records import (
    PRIVATE,
    Entry,
    SnapshotTaken,
    Step,
    StepEnded,
    SwapEnded,
    SwapStarted,
)

_CHILD_SECONDS = 60.0
RESTORED = ("custody-restored", "custody-unpatched")
"""Checks whose contrary evidence keeps a restored incumbent out of the route."""


class Parts(NamedTuple):
    """What a swap is made of, once its journal is open."""

    spec: Spec
    incumbent: Supervisor
    router: Router
    steps: Steps
    watch: Watch
    means: Means

    def enter(self, step: Step) -> None:
        """Begin a step, on the disk and for whoever listens."""
        self.steps.enter(step)
        self.means.say(step)

    def take(self, when: Literal["before", "after"]) -> None:
        """Record the incumbent as it is."""
        key = api_key(self.spec.incumbent)
        fields = snapshot(self.incumbent.pid, self.spec.incumbent.url, self.spec.identity, key)
        self.steps.append(SnapshotTaken(when=when, fields=[*fields, *self.incumbent.fields()]))

    def ask(self, when: Literal["before", "after"]) -> None:
        """Send the smokes."""
        key = api_key(self.spec.incumbent)
        for one in self.spec.smokes:
            self.steps.append(smoke(one, when, self.spec.incumbent.url, Path(self.spec.records), key))


class WayBack:
    """Walked once. A process that the records do not know as the incumbent or the candidate is never ended."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._spec, self._incumbent, self._router = parts.spec, parts.incumbent, parts.router
        self._steps, self._watch, self._means = parts.steps, parts.watch, parts.means
        self._folder = Path(parts.spec.records)

    def go(self, failure: str | None, locks: Locks) -> None:
        """To the incumbent. `failure`: why it is gone now. Raises `Unfinished` where that is not reached."""
        release(self._folder)
        try:
            entries = read_journal(self._folder).entries
            if failure is not None:
                self._means.say(f"{self._steps.current}: {failure}")
                self._steps.leave("failed", failure)
            stopped = self._return(entries)
            self._parts.enter(Step.DONE)
            self._watch.close()
            self._steps.leave("ok")
            self._steps.append(SwapEnded(incumbent="restored" if stopped else "untouched", disposition="held"))
            locks.end(self._folder)
        except (Exception, KeyboardInterrupt) as error:  # whatever it is, the remedy is to be read
            at = self._steps.current or "the way back"
            with suppress(Exception, KeyboardInterrupt):
                self._steps.leave("failed", told(error))
            raise Unfinished(f"{at}: {told(error)}; then `samestate swap {self._folder} --resume`") from None

    def _return(self, entries: list[Entry]) -> bool:
        """Whether the incumbent had to be started again, or was by somebody else."""
        begun, before = begun_steps(entries), seen_identity(entries, "before")
        if before is not None:
            self._incumbent.knows(before)
        now = self._incumbent.identity()
        stopped = Step.STOP in begun or now is None or (before is not None and now != before)
        rebooted = _rebooted(entries)
        if Step.CANDIDATE_START in begun:
            self._end_candidate(rebooted=rebooted)
        if stopped:
            self._restore(entries, before, rebooted=rebooted)
        self._verify(stopped=stopped)
        if Step.DRAIN in begun or not self._router.admission().admitting:
            self._readmit()
        return stopped

    def _end_candidate(self, *, rebooted: bool) -> None:
        process = self._spec.candidate.process if self._spec.candidate else None
        if self._steps.current is Step.CANDIDATE_STOP:
            return
        entries = read_journal(self._folder).entries
        ended = [one.rec for one in entries if isinstance(one.rec, StepEnded)]
        if any(one.step is Step.CANDIDATE_STOP and one.outcome == "ok" for one in ended):
            return
        self._parts.enter(Step.CANDIDATE_STOP)
        who = seen_identity(entries, "candidate")
        if process is not None:
            kept = supervisor(process)
            gone = rebooted and isinstance(kept, PlainProcess)
            self._steps.stopped("candidate", Stopped(who, killed=False, left=[]) if gone else kept.stop())
        elif who is not None:
            # A child of the program that died: it ends by itself.
            pid = int(who.partition("@")[0])
            left = await_end(session_members(pid), _CHILD_SECONDS) if identity(pid) == who else set()
            self._steps.stopped("candidate", Stopped(who, killed=False, left=sorted(left)))

    def _restore(self, entries: list[Entry], before: str | None, *, rebooted: bool) -> None:
        self._parts.enter(Step.RESTORE)
        now = self._incumbent.identity()
        # The one that was told to end when the tool died; or the one that was started and found to be another.
        ours = [before, seen_identity(entries, "after") if self._against() else None]
        if now is not None and now not in ours and self._stranger(now, entries):
            now = None
        elif now is not None and now in ours:
            self._steps.stopped("incumbent", self._incumbent.stop())
            now = None
        elif now is None and not rebooted:
            rest = self._incumbent.stop()  # its leader may have ended alone
            if rest.process is not None:
                self._steps.stopped("incumbent", rest)
        if now is None:
            self._limit()
            self._incumbent.start()
        seconds = self._spec.incumbent.start_seconds
        await_answer(self._incumbent, self._spec.incumbent.url, seconds, "incumbent")
        self._watch.watch(self._incumbent.pid)

    def _stranger(self, now: str, entries: list[Entry]) -> bool:
        """Whether a mere number names a process that is nothing like the incumbent: it came again, or is old."""
        if not (isinstance(self._incumbent, PlainProcess) and self._incumbent.by_number):
            return False
        pid = int(now.partition("@")[0])
        argv = argv_field(pid).value
        listens = any(one.name == "ports" and one.value is not None for one in listening(pid, self._spec.incumbent.url))
        return not listens and argv is not None and argv != seen_values(entries, "before").get("argv")

    def _limit(self) -> None:
        if isinstance(self._incumbent, PlainProcess):
            with suppress(OSError, ValueError):
                found = json.loads((self._folder / PRIVATE / LIMITS).read_bytes())
                self._incumbent.limits = {int(number): (soft, hard) for number, (soft, hard) in found.items()}

    def _verify(self, *, stopped: bool) -> None:
        spec, observe = self._spec, self._spec.observe
        self._parts.enter(Step.VERIFY)
        self._parts.ask("after")
        await_idle("after", spec.incumbent.url, observe.stable_samples, observe.idle_seconds, 60.0, self._steps.append)
        self._parts.take("after")
        self._steps.append(router_seen("restored", self._router, spec.router.container))
        against = self._against()
        # One that was never stopped is the same process still: out of the route it would be no safer.
        if against and stopped:
            more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
            raise CustodyError(f"the incumbent is not what it was: {against[0]}{more}; mend that")

    def _against(self) -> list[str]:
        return [line for check in RESTORED for line in self._means.failing(self._folder, check)]

    def _readmit(self) -> None:
        self._parts.enter(Step.READMIT)
        self._router.ready()
        if not await_admission(self._router, self._spec.incumbent.start_seconds, admitting=True):
            raise CustodyError("router: does not admit the incumbent again; see its health checks")
        self._steps.append(router_seen("after", self._router, self._spec.router.container))


def _rebooted(entries: list[Entry]) -> bool:
    """Whether the machine was started again since the swap began: nothing of then runs, whatever has its number."""
    started = next((one.rec for one in entries if isinstance(one.rec, SwapStarted)), None)
    return started is not None and started.boot_id != boot_id()
