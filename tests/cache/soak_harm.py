"""What is done to a cache's places while an engine uses them: bits flipped, pages cut, a full disk, a server killed."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from samestate.cache.identity_notes import NOTES
from samestate.engines.cache_places import ValkeyServer

PAGES_A_STROKE = 2
"""So many files are flipped at once, and so many cut."""
REQUESTS_A_STROKE = 4
MANY = 400
"""Requests; where they are fewer there is a stroke after each, or none of the damage would be met."""
SERVER_AWAY = ((0.20, 0.30), (0.60, 0.62))
"""From which share of the requests to which: killed, and started again."""
DISK_FULL = (0.40, 0.55)
SMALL_FILE = 64 << 10
"""Longest file where the disk cannot be filled; every page is longer."""
BALLAST = "ballast"


class Done(NamedTuple):
    """What was done."""

    flipped: int
    cut: int
    server_kills: int
    disk_full: str
    """How the disk was full: ``ENOSPC``, ``EFBIG``, or not at all."""


@contextmanager
def small_disk(at: Path, size: int) -> Iterator[bool]:
    """A disk of its own where one may be mounted; whether it was. A folder otherwise."""
    at.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    mounted = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(at)], check=True)


class Harm:
    """Does it, by how many requests are answered. No file is harmed twice: what is counted later can be told apart.

    Args:
        disk: Where the folder of pages lies.
        own_disk: Whether that is a disk that may be filled.
        server: Running.
        engine: Process id.
        requests: Of the whole run.

    """

    def __init__(self, disk: Path, own_disk: bool, server: ValkeyServer, engine: int, requests: int, seed: int) -> None:
        self._disk = disk
        self._own_disk = own_disk
        self._server = server
        self._engine = engine
        self._requests = requests
        self._chance = random.Random(seed)
        self._harmed: set[Path] = set()
        self._flipped = self._cut = self._kills = 0
        self._full = self._away = self._was_full = False

    def after(self, answered: int) -> None:
        """So many requests are answered: do what is due."""
        share = answered / self._requests
        if self._requests < MANY or answered % REQUESTS_A_STROKE == 0:
            self._stroke()
        self._fill(DISK_FULL[0] <= share < DISK_FULL[1])
        self._take_away(any(start <= share < end for start, end in SERVER_AWAY))

    def end(self) -> Done:
        """Undo what can be undone."""
        self._fill(False)
        self._take_away(False)
        how = ("ENOSPC" if self._own_disk else "EFBIG") if self._was_full else "not at all"
        return Done(self._flipped, self._cut, self._kills, how)

    def _stroke(self) -> None:
        pages = [path for path in self._pages() if path not in self._harmed]
        chosen = self._chance.sample(pages, min(2 * PAGES_A_STROKE, len(pages)))
        for number, path in enumerate(chosen):
            # Somebody may have removed it meanwhile.
            with suppress(FileNotFoundError), path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                at = self._chance.randrange(size)
                if number % 2:
                    file.truncate(at)
                    self._cut += 1
                else:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self._chance.randrange(8)]))
                    self._flipped += 1
                self._harmed.add(path)

    def _pages(self) -> list[Path]:
        spaces = [one.parent for one in self._disk.rglob("namespace.txt") if one.read_text().strip() != NOTES]
        return sorted(path for space in spaces for path in space.rglob("*.page"))

    def _fill(self, full: bool) -> None:
        if full == self._full:
            return
        self._full = full
        self._was_full |= full
        if not self._own_disk:
            hard = resource.prlimit(self._engine, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(self._engine, resource.RLIMIT_FSIZE, (SMALL_FILE if full else hard, hard))
        elif full:
            room = os.statvfs(self._disk)
            with (self._disk / BALLAST).open("wb", buffering=0) as file, suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize * 9 // 10)
                file.seek(0, os.SEEK_END)
                while True:
                    file.write(bytes(1 << 16))
        else:
            (self._disk / BALLAST).unlink()

    def _take_away(self, away: bool) -> None:
        if away == self._away:
            return
        self._away = away
        if away:
            os.kill(self._server.pid, signal.SIGKILL)
            self._kills += 1
            return
        self._server.stop()
        self._server.start(0)
