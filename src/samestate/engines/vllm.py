"""vLLM in a child process that we start, drive and always reap. No torch, no vLLM here."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, ClassVar, NoReturn, TypeVar

import msgspec
from typing_extensions import override

from samestate.engines import shared_memory
from samestate.engines.base import (
    Ask,
    CounterValues,
    Engine,
    EngineError,
    EngineSpec,
    Generation,
    Kill,
    ProbeAsk,
    ProbeResult,
    ResetResult,
)
from samestate.engines.children.protocol import (
    AnyReply,
    Arm,
    Armed,
    Asked,
    Close,
    CloseStreams,
    Command,
    Count,
    Counted,
    Encode,
    Encoded,
    Failed,
    Find,
    Generate,
    Generated,
    Identified,
    Identify,
    LevelSet,
    Probe,
    Probed,
    Reply,
    Reset,
    SetLevel,
    Start,
    Started,
    StreamsClosed,
    WasReset,
)
from samestate.engines.processes import await_end, identity, kill_session, log_tail, session_members
from samestate.evidence.controls import ENGINE_REPAIRS
from samestate.evidence.marker_records import REPAIRS
from samestate.evidence.records import EngineStarted, Scalar

CLOSE_SECONDS = 30.0
INTERRUPTED_SECONDS = 2.0
"""For an engine in the middle of a command: its streams are incomplete either way."""
POLL_SECONDS = 2.0
SERVICE_GONE_SECONDS = 10.0
"""How long a service may refuse connections while the engine works: it may say itself what is wrong."""

R = TypeVar("R", bound=Reply)


def available() -> bool:
    """Whether vLLM is installed in this environment."""
    return find_spec("vllm") is not None


def start_command(spec: EngineSpec) -> Start:
    """`spec` in the words that a child process is told."""
    return Start(
        arm=spec.arm,
        model=str(spec.model),
        settings=spec.settings,
        serve_args=spec.serve_args,
        connector=spec.connector,
        external_cache_bytes=spec.external_cache_bytes,
        audit_level=spec.audit_level,
        save_delay_ms=spec.save_delay_ms,
        fault=spec.fault,
        stream_dir=str(spec.stream_dir),
        connector_options=dict(spec.connector_options),
        service=spec.service,
        repair=spec.repair,
    )


class VllmEngine(Engine):
    """One vLLM engine in a fresh process.

    The child leads a session of its own: a terminal's Ctrl-C reaches only the driver, and
    closing kills every process that the engine started.
    """

    child_module: ClassVar[str] = "samestate.engines.children.vllm_child"
    """The program of the child."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = False
        self._replies = msgspec.json.Decoder(AnyReply)

    @property
    def pid(self) -> int:
        """Process id of the child. Raises `EngineError` when there is none."""
        if self._process is None:
            raise EngineError(f"arm {self._spec.arm}: the engine is not running")
        return self._process.pid

    @override
    def prepare(self) -> None:
        if self._process is not None:
            return
        command_read, command_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self._log: IO[bytes] = self._spec.log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.child_module, str(os.getpid()), str(command_read), str(reply_write)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(command_read, reply_write),
            env=self._environment(),
            start_new_session=True,
        )
        os.close(command_read)
        os.close(reply_write)
        self._to_child = os.fdopen(command_write, "wb", buffering=0)
        self._from_child = os.fdopen(reply_read, "rb")

    def _environment(self) -> dict[str, str]:
        environment = os.environ | dict(self._spec.environment)
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self._spec.core == "own-process"))}
        if self._spec.repair in ENGINE_REPAIRS:
            asked = [name for name in environment.get(REPAIRS, "").split(",") if name and name != self._spec.repair]
            environment[REPAIRS] = ",".join([*asked, self._spec.repair])
        if self._spec.packages is not None:
            others = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(self._spec.packages), *([others] if others else [])])
        return environment

    @override
    def start(self) -> EngineStarted:
        self.prepare()
        return self._ask(start_command(self._spec), Started).engine

    @override
    def encode(self, text: str) -> list[int]:
        return self._ask(Encode(text=text), Encoded).token_ids

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        command = Generate(
            asks=[Asked(request=ask.request, token_ids=list(ask.token_ids), salt=ask.salt) for ask in asks],
            output_tokens=output_tokens,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        reply = self._ask(command, Generated)
        return [
            Generation(
                answer.request,
                answer.token_ids,
                answer.logprobs,
                answer.finish_reason,
                answer.cached_tokens,
                answer.first_token_s,
                answer.margins,
            )
            for answer in reply.answers
        ]

    @override
    def token(self, text: str) -> list[int]:
        return self._ask(Find(text=text), Encoded).token_ids

    @override
    def probe(self, ask: ProbeAsk) -> ProbeResult:
        asked = {**ask._asdict(), "token_ids": list(ask.token_ids), "stop_token_ids": list(ask.stop_token_ids)}
        reply = self._ask(Probe(**asked), Probed)
        return ProbeResult(**msgspec.structs.asdict(reply))

    @override
    def identity(self) -> dict[str, Scalar]:
        return self._ask(Identify(), Identified).values

    @override
    def reset_local_cache(self) -> ResetResult:
        reply = self._ask(Reset(), WasReset)
        return ResetResult(reply.local_reset, external_kept=True, running_kept=True, attempts=reply.attempts)

    @override
    def counters(self) -> CounterValues:
        reply = self._ask(Count(), Counted)
        return CounterValues(reply.values, reply.missing)

    @override
    def arm_fault(self, name: str | None) -> None:
        self._ask(Arm(fault=name), Armed)

    def set_audit_level(self, level: str) -> None:
        """Switch the audit to a level at or below the one it started with. Raises `EngineError`."""
        self._ask(SetLevel(level=level), LevelSet)

    @override
    def kill(self) -> Kill:
        self._ask(CloseStreams(), StreamsClosed)
        process = self._process
        assert process is not None
        killed, members = identity(process.pid), session_members(process.pid)
        kill_session(process)
        if process.returncode != -signal.SIGKILL:
            self._fail(f"the engine's process died before it was killed (exit code {process.returncode})")
        if left := await_end(members, CLOSE_SECONDS):
            self._fail(f"{len(left)} of the engine's processes outlived their kill")
        self._release(members)
        return Kill(killed or "", len(members))

    @override
    def close(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            with suppress(OSError, subprocess.TimeoutExpired):
                if process.poll() is None:
                    self._send(Close())
                    self._to_child.close()
                    process.wait(INTERRUPTED_SECONDS if self._busy else CLOSE_SECONDS)
        finally:
            members = session_members(process.pid)
            kill_session(process)
            self._release(members)

    def _release(self, members: set[int]) -> None:
        """What is left of processes that are gone."""
        self._process = None
        shared_memory.remove(members)
        for pipe in (self._to_child, self._from_child, self._log):
            pipe.close()

    def _ask(self, command: Command, expected: type[R]) -> R:
        if self._process is None:
            raise EngineError(f"arm {self._spec.arm}: the engine is not running")
        self._busy = True
        try:
            self._send(command)
            self._wait()
            line = self._from_child.readline()
        except BrokenPipeError:
            line = b""
        self._busy = False
        if not line:
            code = self._process.wait()
            self._fail(f"the engine's process died (exit code {code})")
        reply = self._replies.decode(line)
        if isinstance(reply, Failed):
            self._fail(reply.message)
        if isinstance(reply, expected):
            return reply
        self._fail(f"the engine answered {type(reply).__name__} to {type(command).__name__}")

    def _wait(self) -> None:
        """Until the child has written, or died. An engine waits for ever for a service that is gone; we do not.

        Raises `EngineError`.
        """
        deadline = time.monotonic() + self._spec.reply_seconds
        refused_since: float | None = None
        while not select.select([self._from_child], [], [], POLL_SECONDS)[0]:
            now = time.monotonic()
            refused_since = None if self._service_listens() else refused_since or now
            if refused_since is not None and now - refused_since > SERVICE_GONE_SECONDS:
                self._give_up(f"the service at {self._spec.service} is gone, and the engine still waits for it")
            if now > deadline:
                self._give_up(f"the engine gave no answer in {self._spec.reply_seconds:.0f} s")

    def _service_listens(self) -> bool:
        """Whether somebody takes connections at the service's address; True where nobody waits for that."""
        # Named by a URL it is a place behind our own cache, which goes on without it.
        if self._spec.service is None or "://" in self._spec.service:
            return True
        host, _, port = self._spec.service.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=POLL_SECONDS).close()
        except OSError:
            return False
        return True

    def _give_up(self, message: str) -> NoReturn:
        assert self._process is not None
        kill_session(self._process)
        self._fail(message)

    def _send(self, command: Command) -> None:
        self._to_child.write(msgspec.json.encode(command) + b"\n")

    def _fail(self, message: str) -> NoReturn:
        self._log.flush()
        raise EngineError(f"arm {self._spec.arm}: {message}", log_tail(self._spec.log_path))
