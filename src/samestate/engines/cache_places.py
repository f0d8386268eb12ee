"""Places behind the memory tier of our own cache, beside an engine: a folder, a Valkey server, an object store.

They take the part that a server has for other connectors: known before the engine starts, kept for arms that follow. A
folder needs no process. The object store is a folder too, reached as an object store.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from typing_extensions import override

import samestate
from samestate.engines.lmcache_server import HOST, START_SECONDS, STOP_SECONDS, hold_port
from samestate.engines.processes import kill_session, log_tail
from samestate.engines.services import Service, ServiceError, ServiceSpec
from samestate.evidence.records import Scalar, ServiceStarted

OURS = "samestate-"
"""Begins the names of our own cache's connectors."""
BINARIES = ("valkey-server", "redis-server")
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 20
"""For one request of an engine. What a busy machine is too slow for would only be a miss, and test nothing."""


def place_beside(spec: ServiceSpec) -> Service | None:
    """The place of the arm's connector; None: it has none. Raises `ServiceError`."""
    if spec.connector == "samestate-disk":
        return FolderPlace(spec, "file://")
    if spec.connector == "samestate-object":
        return FolderPlace(spec, "object+file://")
    return ValkeyServer(spec) if spec.connector == "samestate-valkey" else None


def server_binary() -> str | None:
    """Where a Valkey or Redis server is installed."""
    return next((found for name in BINARIES if (found := shutil.which(name))), None)


class FolderPlace(Service):
    """A folder that outlives its engines."""

    def __init__(self, spec: ServiceSpec, scheme: str) -> None:
        self._spec = spec
        self._scheme = scheme
        self._pages = spec.data_dir / "pages"
        self._running = False

    @property
    @override
    def address(self) -> str:
        return f"{self._scheme}{self._pages}"

    @property
    @override
    def connector_options(self) -> Mapping[str, Scalar]:
        return self._spec.options

    @override
    def start(self, checkpoint_interval: int) -> ServiceStarted:
        self._pages.mkdir(exist_ok=True)
        self._running = True
        return ServiceStarted(
            service=self._spec.connector,
            version=samestate.__version__,
            options={"scheme": self._scheme.removesuffix("://"), **self._spec.options},
            continues=False,
        )

    @override
    def alive(self) -> bool:
        return self._running and self._pages.is_dir()

    @override
    def stop(self) -> int:
        self._running = False
        return 0


class ValkeyServer(Service):
    """A Valkey or Redis server, in a session of its own, that ends with the process that started it."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Takes a free port and keeps it. Raises `ServiceError` where no server is installed."""
        binary = server_binary()
        if binary is None:
            raise ServiceError(f"arm {spec.arm}: no {' and no '.join(BINARIES)} on the PATH; install one")
        self._binary = binary
        self._spec = spec
        self._held = hold_port()
        self._port = self._held.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the server's process. Raises `ServiceError` when there is none."""
        if self._process is None:
            raise ServiceError(f"arm {self._spec.arm}: its Valkey server is not running")
        return self._process.pid

    @property
    @override
    def address(self) -> str:
        return f"valkey://{HOST}:{self._port}/0?timeout={PATIENCE_SECONDS}&connect_timeout={PATIENCE_SECONDS}"

    @property
    @override
    def connector_options(self) -> Mapping[str, Scalar]:
        return self._spec.options

    @override
    def start(self, checkpoint_interval: int) -> ServiceStarted:
        options: dict[str, Scalar] = {
            "maxmemory": self._spec.external_cache_bytes,
            "maxmemory-policy": "allkeys-lru",
            # What was written is there after a restart.
            "appendonly": "yes",
            "appendfsync": "no",
            "save": "",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        placed = [f"--bind={HOST}", f"--port={self._port}", f"--dir={self._spec.data_dir}", "--daemonize=no"]
        words = [word for argument in [*placed, *arguments] for word in argument.split("=", 1)]
        with self._spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "samestate.engines.children.bound", str(os.getpid()), self._binary, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        version = self._await_answer()
        return ServiceStarted(
            service=self._spec.connector, version=version, options=options | self._spec.options, continues=False
        )

    @override
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None and self._version() is not None

    @override
    def stop(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        kill_session(process)
        return 0

    def _await_answer(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while (version := self._version()) is None:
            if (code := self._process.poll()) is not None or time.monotonic() > deadline:
                ended = f"ended with exit code {code}" if code is not None else f"is silent after {START_SECONDS:.0f} s"
                tail = log_tail(self._spec.log_path)
                self.stop()
                raise ServiceError(f"arm {self._spec.arm}: its Valkey server {ended}; its log is service.log", tail)
            time.sleep(0.05)
        return version

    def _version(self) -> str | None:
        """``redis 7.0.15``, as the server says; None: it does not answer, or still loads what it kept."""
        try:
            with socket.create_connection((HOST, self._port), timeout=ANSWER_SECONDS) as connection:
                connection.sendall(b"INFO\r\nQUIT\r\n")
                said = b""
                while chunk := connection.recv(65536):
                    said += chunk
        except OSError:
            return None
        told = dict(line.split(":", 1) for line in said.decode(errors="replace").splitlines() if ":" in line)
        if told.get("loading", "0") != "0":
            return None
        for name in ("valkey", "redis"):
            if version := told.get(f"{name}_version"):
                return f"{name} {version}"
        return None
