"""OpenAI API servers to send requests to: one of our own, started, watched and reaped, or one that already runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple, NoReturn

import msgspec
from typing_extensions import override

from samestate.engines import shared_memory
from samestate.engines.base import EngineError
from samestate.engines.children.protocol import Serve, Start
from samestate.engines.openai_client import OpenAIClient, address
from samestate.engines.processes import identity, kill_session, log_tail, session_members
from samestate.evidence.records import Scalar

HOST = "127.0.0.1"
START_SECONDS = 600.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.25
HEALTH_SECONDS = 10.0
"""For one health check, on a machine that is busy."""
SERVED_NAME = "samestate"
"""Name under which an engine of our own serves its model."""
_MODULE = "samestate.engines.children.server_child"


class ServerSpec(NamedTuple):
    """One engine to serve."""

    name: str
    """Of its arm: in its stream and in every error."""
    model: Path
    settings: Mapping[str, Scalar]
    """vLLM engine arguments by name."""
    serve_args: list[str]
    """Further arguments in ``vllm serve`` form; they win over `settings`."""
    log_path: Path
    stream_dir: Path | None = None
    """Where its frontend says what it serves (`EngineStarted`); None: nowhere."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Beside ours, for all of its processes: what instruments are told."""
    start_seconds: float = START_SECONDS
    core: Start | None = None
    """The connector of its engine core, and how closely that is watched; its schedule is then recorded too. None: as
    ``vllm serve`` alone."""


class Server(ABC):
    """A server at an address. Only safe when driven by one thread."""

    @property
    @abstractmethod
    def url(self) -> str:
        """``http://HOST:PORT``."""

    @property
    @abstractmethod
    def model(self) -> str:
        """The served model's name, as requests must say it. Raises `EngineError` where it cannot be asked."""

    @abstractmethod
    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        """Wait until it answers; `waiting` hears of the seconds so far. Raises `EngineError`."""

    @property
    @abstractmethod
    def process(self) -> str | None:
        """``4711@12345678``, as `samestate.engines.children.identity` has it; None: not ours to know."""

    @abstractmethod
    def close(self) -> None:
        """Stop and reap what was started. Safe to call twice, and after a death."""

    def log_tail(self) -> str:
        """The end of its log, where that is ours; possibly empty."""
        return ""

    def client(self, seconds: float = 600.0) -> OpenAIClient:
        """A client of its own. Raises `EngineError`."""
        return OpenAIClient(self.url, seconds=seconds)

    def alive(self) -> bool:
        """Whether it answers."""
        with self.client(HEALTH_SECONDS) as client:
            return client.healthy()


class RunningServer(Server):
    """A server that somebody else started, and that is left as it is."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Raises `EngineError` for what is no address."""
        self._key = api_key
        self._url = address(url)

    @property
    @override
    def url(self) -> str:
        return self._url

    @property
    @override
    def model(self) -> str:
        with self.client() as client:
            return client.models()[0]

    @property
    @override
    def process(self) -> None:
        return None

    @override
    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        with self.client(HEALTH_SECONDS) as client:
            client.models()

    @override
    def client(self, seconds: float = 600.0) -> OpenAIClient:
        return OpenAIClient(self._url, api_key=self._key, seconds=seconds)

    @override
    def close(self) -> None:
        pass


class ServedEngine(Server):
    """vLLM's API server in a session of its own, on a free port of 127.0.0.1.

    All its processes end with `close`, and when the process that started it is gone, even by SIGKILL.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Takes a free port and keeps it; nothing starts yet."""
        self._spec = spec
        self._held = _hold_port()
        self._port: int = self._held.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._identity: str | None = None

    @property
    @override
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    @override
    def model(self) -> str:
        return SERVED_NAME

    @property
    @override
    def process(self) -> str | None:
        return self._identity

    @property
    def pid(self) -> int:
        """Of the frontend's process, which leads the session. Raises `EngineError` when there is none."""
        if self._process is None:
            raise EngineError(f"server {self._spec.name}: is not running")
        return self._process.pid

    @override
    def start(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        self._launch()
        began = time.monotonic()
        while not self.alive():
            assert self._process is not None
            seconds = time.monotonic() - began
            if (code := self._process.poll()) is not None:
                self._fail(f"ended with exit code {code} before it answered")
            if seconds > self._spec.start_seconds:
                self._fail(f"does not answer after {self._spec.start_seconds:.0f} s")
            waiting(seconds)
            time.sleep(POLL_SECONDS)

    @override
    def log_tail(self) -> str:
        return log_tail(self._spec.log_path)

    @override
    def close(self) -> None:
        process, self._process = self._process, None
        self._held.close()
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
        finally:
            members = session_members(process.pid)
            kill_session(process)
            shared_memory.remove(members)
            os.close(self._driving)
            self._log.close()

    def _launch(self) -> None:
        spec = self._spec
        serve = Serve(
            name=spec.name,
            model=str(spec.model),
            settings=dict(spec.settings),
            serve_args=spec.serve_args,
            host=HOST,
            port=self._port,
            served_name=SERVED_NAME,
            stream_dir=str(spec.stream_dir) if spec.stream_dir else None,
            core=spec.core,
        )
        watched, self._driving = os.pipe()
        self._log: IO[bytes] = spec.log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, msgspec.json.encode(serve).decode(), str(watched)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(watched,),
            env=_environment(spec.environment),
            start_new_session=True,
        )
        os.close(watched)
        self._identity = identity(self._process.pid)

    def _fail(self, what: str) -> NoReturn:
        tail = self.log_tail()
        self.close()
        raise EngineError(f"server {self._spec.name}: {what}; its log is {self._spec.log_path.name}", tail)


def _environment(told: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the key that would lock our own client out."""
    ours = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    # Effective settings can then be read back: /server_info.
    return ours | {"VLLM_SERVER_DEV_MODE": "1"} | dict(told)


def _hold_port() -> socket.socket:
    """A free port, bound so that nobody is given it, and not listened on: the server may bind it too."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held
