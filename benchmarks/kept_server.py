"""A Valkey or Redis server of a benchmark's own, killed when the benchmark is done with it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def running_server(folder: Path) -> Iterator[int | None]:
    """The port of a server that answers, on loopback, saving nothing; None: none is installed."""
    if SERVER is None:
        yield None
        return
    import valkey

    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
    try:
        with valkey.Valkey(port=port) as client:
            for _ in range(500):
                try:
                    client.ping()
                    break
                except valkey.ConnectionError:
                    time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


def url(port: int) -> str:
    """Of a tier in that server."""
    return f"valkey://127.0.0.1:{port}/0?timeout=60"
