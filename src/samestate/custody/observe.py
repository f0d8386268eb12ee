"""What is seen of engine and host while a swap goes on."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from samestate.custody.base import CustodyError, Router, Supervisor
from samestate.custody.containers import container_fields
from samestate.custody.snapshot import PROC, cgroup
from samestate.engines.openai_client import ClientError, OpenAIClient
from samestate.evidence.custody_records import CgroupKills, CustodyRecord, HostSeen, IdleSeen, RouterSeen

Append = Callable[[CustodyRecord], None]
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_SECONDS = 10.0
_POLL_SECONDS = 0.05


def idle_seen(when: Literal["before", "drained", "after"], url: str) -> IdleSeen:
    """The engine's own counters at this moment, over all of its engines."""
    try:
        with OpenAIClient(url, seconds=_SECONDS) as client:
            text = client.text("/metrics")
        running, waiting = (_gauge(text, name) for name in (RUNNING, WAITING))
    except (ClientError, ValueError) as error:
        return IdleSeen(when=when, running=None, waiting=None, missing=str(error).replace(url, "the engine"))
    return IdleSeen(when=when, running=running, waiting=waiting, missing=None)


def _gauge(text: str, name: str) -> int:
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not values:
        raise ValueError(f"/metrics has no {name}")
    return int(sum(map(float, values)))


def await_idle(
    when: Literal["before", "drained", "after"], url: str, samples: int, between: float, seconds: float, append: Append
) -> bool:
    """Whether the engine was seen idle, 0 running and 0 waiting, `samples` times in a row within the time."""
    row, deadline = 0, time.monotonic() + seconds
    while True:
        seen = idle_seen(when, url)
        append(seen)
        row = row + 1 if (seen.running, seen.waiting) == (0, 0) else 0
        if row >= samples:
            return True
        if time.monotonic() > deadline or seen.missing:
            return False
        time.sleep(between)


def router_seen(
    when: Literal["before", "drained", "candidate", "restored", "after"], router: Router, container: str | None
) -> RouterSeen:
    """The router at this moment. Raises `CustodyError`."""
    admission = router.admission()
    kept = container_fields(container, "router.") if container is not None else []
    return RouterSeen(
        when=when,
        fields=[*router.fields(), *kept],
        admitting=admission.admitting,
        sessions=admission.sessions,
        failed=admission.failed,
    )


def await_admission(router: Router, seconds: float, *, admitting: bool) -> bool:
    """Whether the incumbent's place came to admit, or to be closed and empty, in time. Raises `CustodyError`."""
    deadline = time.monotonic() + seconds
    while True:
        now = router.admission()
        if now.admitting is admitting and (admitting or now.sessions == 0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def await_answer(process: Supervisor, url: str, seconds: float, who: str) -> None:
    """Wait until a process that was started says that it is ready. Raises `CustodyError`."""
    deadline = time.monotonic() + seconds
    with OpenAIClient(url, seconds=10.0) as client:
        while not client.healthy():
            if not process.alive():
                raise CustodyError(f"{who}: ended before it answered; see its log")
            if time.monotonic() > deadline:
                raise CustodyError(f"{who}: does not answer after {seconds:g} s; see its log")
            time.sleep(_POLL_SECONDS)


# --- the host ---------------------------------------------------------------------------------------


def memory_available(proc: Path = PROC) -> int | None:
    """``MemAvailable`` in bytes; None where it is not said."""
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def host_kills(proc: Path = PROC) -> int | None:
    """Processes that the kernel killed for want of memory since its start; None where it is not said."""
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def cgroup_kills(folder: Path) -> CgroupKills | None:
    """Kills that a memory cgroup counted: ``memory.events`` (v2) or ``memory.oom_control`` (v1). None: it is gone."""
    try:
        inode = folder.stat().st_ino
    except OSError:
        return None
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError, ValueError):
            for line in (folder / name).read_text().splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return CgroupKills(inode=inode, kills=int(value))
    return CgroupKills(inode=inode, kills=None)


def gpu_memory() -> list[int] | None:
    """Bytes in use by device; None where ``nvidia-smi`` gives no answer."""
    if not (PROC / "driver/nvidia/gpus").is_dir():
        return None
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return [int(line) << 20 for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


class Watch:
    """Observes the host twice a period, on a thread of its own, until it is closed: no gap is then longer than one.

    `watch` names a process whose cgroup is observed from then on, its end notwithstanding.
    """

    def __init__(self, period: float, append: Append) -> None:
        self._between = period / 2
        self._append = append
        self._folders: dict[Path, None] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="custody-watch", daemon=True)

    def watch(self, pid: int) -> None:
        """Observe this process's cgroup too. A process that is gone, or in none, adds nothing."""
        with suppress(OSError, LookupError, ValueError):
            folder = cgroup(pid).folder
            if folder is not None:
                with self._lock:
                    self._folders[folder] = None

    def start(self) -> None:
        """Begin, with an observation at once."""
        self.observe()
        self._thread.start()

    def observe(self) -> None:
        """One observation."""
        with self._lock:
            found = [cgroup_kills(folder) for folder in self._folders]
        self._append(
            HostSeen(
                memory_available=memory_available(),
                oom_kills=host_kills(),
                cgroups=[one for one in found if one is not None],
                gpu_memory_used=gpu_memory(),
            )
        )

    def close(self) -> None:
        """Stop, after a last observation."""
        self.halt()
        self.observe()

    def halt(self) -> None:
        """Stop. Safe to call twice, and before `start`."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._between
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + self._between
            try:
                self.observe()
            except (OSError, ValueError, CustodyError) as error:
                self.failure = str(error)
                return
