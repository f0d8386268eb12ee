"""LMCache's multiprocess server beside an engine: started, watched, always reaped.

An arm's options are upstream's own names. ``lmcache.*`` goes to the connector in the engine; everything else is an
option of the server, with ``_`` or ``-``, and must be one that this release's ``--help`` names.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from typing_extensions import override

from samestate.engines import shared_memory
from samestate.engines.processes import kill_session, log_tail, session_members
from samestate.engines.releases import ReleaseError, source_in, version_in
from samestate.engines.services import Service, ServiceError, ServiceSpec
from samestate.evidence.records import Scalar, ServiceStarted
from samestate.plans.errors import nearest

PACKAGE = "lmcache"
HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 15.0
ANSWER_SECONDS = 10.0
"""For a health check, on a machine that is busy."""
CONNECTOR_TIMEOUT: Mapping[str, Scalar] = {"lmcache.mp.mq_timeout": 60}
"""Seconds; upstream waits 300 for a server that is gone."""
GROUPS = "separate_object_groups"
DATA_DIR = "{data_dir}"
"""In an option's value: a folder that outlives a restart of the server."""

_OURS = {"host", "port", "http_host", "http_port"}
_OURS_IN_ENGINE = {"lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.server_urls", "lmcache.mp.autostart"}
"""Any of them would lead the engine to another server than the one that is started, watched and recorded."""
_MODULE = "samestate.engines.children.lmcache_server"
_SEGMENT = re.compile(r"/dev/shm/(?:torch|lmcache_kv)_(\d+)_")


class Options(NamedTuple):
    """An arm's options by the side that they are for."""

    connector: dict[str, Scalar]
    server: dict[str, Scalar]
    """Under names with ``_``."""


def split(options: Mapping[str, Scalar]) -> Options:
    """Which side each option is for."""
    connector = {name: value for name, value in options.items() if name.startswith("lmcache.")}
    server = {name.replace("-", "_"): value for name, value in options.items() if name not in connector}
    return Options(connector, server)


def require_known(options: Mapping[str, Scalar], packages: Path | None) -> None:
    """Hold an arm's options against what the release knows. Raises `ServiceError`.

    Asks the server's ``--help`` where the arm has options for it, which takes seconds, once a process.
    """
    connector, server = split(options)
    for name in sorted(_OURS & server.keys()):
        raise ServiceError(f"option {name}: addresses are found at each start; remove it")
    for name in sorted(connector):
        if name in _OURS_IN_ENGINE or name.startswith("lmcache.mp.autostart."):
            raise ServiceError(f"option {name}: the engine is told of the server that is started; remove it")
    if server:
        known = _server_options(packages)
        for name, value in server.items():
            if name not in known:
                raise ServiceError(
                    f"option {name}: LMCache's server has none{nearest(name, known)}; connector options begin with "
                    "lmcache.mp., the server's are those of `lmcache server --help`"
                )
            if known[name] != isinstance(value, bool):
                raise ServiceError(f"option {name}: takes {'a value' if not known[name] else 'on or off'}, not {value}")
    for name in connector:
        if not _connector_knows(name, packages):
            raise ServiceError(f"option {name}: LMCache's connector has none; see its documentation for this release")


class LMCacheServer(Service):
    """One server process, in a session of its own, that ends with the process that started it."""

    def __init__(self, spec: ServiceSpec) -> None:
        """Takes two free ports and keeps them. Raises `ServiceError` for a release that is not there."""
        self._spec = spec
        self._options = split(spec.options)
        try:
            self._version = version_in(PACKAGE, spec.packages)
        except ReleaseError as error:
            raise ServiceError(f"arm {spec.arm}: {error}") from None
        self._held = [hold_port(), hold_port()]
        self._port, self._http_port = (held.getsockname()[1] for held in self._held)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the server's process. Raises `ServiceError` when there is none."""
        if self._process is None:
            raise ServiceError(f"arm {self._spec.arm}: LMCache's server is not running")
        return self._process.pid

    @property
    @override
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    @override
    def connector_options(self) -> Mapping[str, Scalar]:
        groups = bool(self._options.server.get(GROUPS, False))
        return {**CONNECTOR_TIMEOUT, f"samestate.{GROUPS}": groups, **self._options.connector}

    @override
    def start(self, checkpoint_interval: int) -> ServiceStarted:
        require_known(self._spec.options, self._spec.packages)
        options: dict[str, Scalar] = {
            "chunk_size": checkpoint_interval,
            "l1_size_gb": self._spec.external_cache_bytes / 2**30,
            "eviction_policy": "LRU",
            "supported_transfer_mode": "lmcache_driven",
            # Else it wants an OpenTelemetry exporter.
            "disable_metrics": True,
            **self._options.server,
        }
        with self._spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*_command(), *self._addresses(), *self._arguments(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._spec.packages),
                start_new_session=True,
            )
        self._await_health()
        return ServiceStarted(service=PACKAGE, version=self._version, options=options, continues=False)

    @override
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None and self._healthy()

    @override
    def stop(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        makers = session_members(process.pid)
        sharers = _segment_makers(process.pid)
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        kill_session(process)
        # Engines that are gone: what they shared with this server may still have its name.
        gone = {pid for pid in sharers - makers if not Path(f"/proc/{pid}").exists()}
        return shared_memory.remove(makers | gone)

    def _addresses(self) -> list[str]:
        return [f"--host={HOST}", f"--port={self._port}", f"--http-host={HOST}", f"--http-port={self._http_port}"]

    def _arguments(self, options: Mapping[str, Scalar]) -> list[str]:
        """As the server's command line has them; a switch that is off: ``--no-…`` where there is one, else left out."""
        arguments = []
        for name, value in options.items():
            flag = name.replace("_", "-")
            if value is True:
                arguments.append(f"--{flag}")
            elif value is not False:
                arguments.append(f"--{flag}={value}".replace(DATA_DIR, str(self._spec.data_dir)))
            elif f"no_{name}" in _server_options(self._spec.packages):
                arguments.append(f"--no-{flag}")
        return arguments

    def _await_health(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                self._fail(f"ended with exit code {code} before it answered")
            if time.monotonic() > deadline:
                self._fail(f"does not answer after {START_SECONDS:.0f} s")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._http_port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _fail(self, what: str) -> NoReturn:
        tail = log_tail(self._spec.log_path)
        last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
        self.stop()
        cause = f" ({last})" if last else ""
        raise ServiceError(f"arm {self._spec.arm}: LMCache's server {what}{cause}; its log is service.log", tail)


def _command() -> list[str]:
    return [sys.executable, "-m", _MODULE, str(os.getpid())]


def _environment(packages: Path | None) -> dict[str, str]:
    """Ours, without LMCache's own variables: they would be settings that no archive names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    environment |= {
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        # As in the engine: one of LMCache's hash algorithms is Python's own.
        "PYTHONHASHSEED": "0",
    }
    # The engine has the other core.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if packages is not None:
        others = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *([others] if others else [])])
    return environment


@cache
def _server_options(packages: Path | None) -> dict[str, bool]:
    """The server's options, ``_`` in their names, ``no_…`` too, and whether each is a switch. Raises `ServiceError`."""
    done = subprocess.run(
        [*_command(), "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=_environment(packages) | {"COLUMNS": "80", "NO_COLOR": "1"},
        text=True,
        check=False,
    )
    usage = " ".join(done.stdout.partition("\n\n")[0].split())
    found = re.findall(r"--([a-z0-9-]+)( [^\]|]| \[)?", usage)
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ServiceError(f"LMCache's server cannot be asked for its options: {last}")
    return {name.replace("-", "_"): not value for name, value in found}


def _connector_knows(name: str, packages: Path | None) -> bool:
    """Whether the connector's source has the option's name: unknown ones it would ignore."""
    word = name.removeprefix("lmcache.mp.").removeprefix("lazy_offload_")
    wanted = re.compile(rf"\b{re.escape(word)}\b")
    sources = (source_in(PACKAGE, packages) / "integration" / "vllm").rglob("*.py")
    return any(wanted.search(path.read_text(errors="replace")) for path in sources)


def hold_port() -> socket.socket:
    """A free port, bound so that nobody is given it, and not listened on: the server may bind it too."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held


def _segment_makers(pid: int) -> set[int]:
    """Processes whose shared memory `pid` has mapped."""
    try:
        return {int(maker) for maker in _SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())}
    except OSError:
        return set()
