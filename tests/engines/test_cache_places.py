"""Places beside an engine: known before they start, there again after a restart, gone with their driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestate.engines import cache_places
from samestate.engines.cache_places import FolderPlace, ValkeyServer, place_beside, server_binary
from samestate.engines.services import ServiceError, ServiceSpec

needs_server = pytest.mark.skipif(server_binary() is None, reason="no valkey-server and no redis-server")


def spec(folder: Path, connector: str, **options: object) -> ServiceSpec:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    return ServiceSpec("candidate", connector, None, options, 1 << 26, data, folder / "service.log")  # type: ignore[arg-type]


def ask(server: ValkeyServer, command: str) -> bytes:
    """One inline command."""
    import socket

    host, port = server.address.removeprefix("valkey://").partition("/0?")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{command}\r\nQUIT\r\n".encode())
        said = b""
        while chunk := connection.recv(4096):
            said += chunk
    return said


def test_connectors_and_places(tmp_path: Path) -> None:
    assert place_beside(spec(tmp_path, "native")) is None
    assert place_beside(spec(tmp_path, "samestate-memory")) is None
    disk, bucket = (place_beside(spec(tmp_path, name)) for name in ("samestate-disk", "samestate-object"))
    assert isinstance(disk, FolderPlace)
    assert isinstance(bucket, FolderPlace)
    assert disk.address == f"file://{tmp_path}/data/pages"
    assert bucket.address == f"object+file://{tmp_path}/data/pages"


def test_a_folder_is_there_while_it_is_used_and_keeps_what_it_has(tmp_path: Path) -> None:
    place = FolderPlace(spec(tmp_path, "samestate-disk", eviction_policy="family-value"), "file://")
    assert not place.alive()
    started = place.start(1792)
    assert (started.service, started.continues) == ("samestate-disk", False)
    assert started.options["eviction_policy"] == "family-value"
    assert place.connector_options == {"eviction_policy": "family-value"}
    page = tmp_path / "data" / "pages" / "page"
    page.touch()
    assert (place.alive(), place.stop(), place.alive()) == (True, 0, False)
    place.start(1792)
    assert place.alive()
    assert page.exists()


@needs_server
def test_a_server_answers_and_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    server = ValkeyServer(spec(tmp_path, "samestate-valkey"))
    assert server.stop() == 0
    try:
        started = server.start(1792)
        assert started.version.split()[0] in ("redis", "valkey")
        assert started.options["maxmemory"] == 1 << 26
        assert server.alive()
        assert ask(server, "SET page bytes").startswith(b"+OK")
        address = server.address
        server.stop()
        assert not server.alive()
        server.start(1792)
        assert server.address == address
        assert b"bytes" in ask(server, "GET page")
        os.kill(server.pid, signal.SIGKILL)
        while Path(f"/proc/{server.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        assert not server.alive()
    finally:
        server.stop()
    with pytest.raises(ServiceError, match="is not running"):
        _ = server.pid


@needs_server
def test_a_server_ends_with_its_driver(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    program = (
        "import sys, time; from pathlib import Path; from samestate.engines.cache_places import ValkeyServer\n"
        "from samestate.engines.services import ServiceSpec\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "spec = ServiceSpec('a', 'samestate-valkey', None, {}, 1 << 26, folder / 'data', folder / 'service.log')\n"
        "server = ValkeyServer(spec); server.start(1); print(server.pid, flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the server outlives its driver"
        time.sleep(0.05)


@needs_server
def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    one = ValkeyServer(spec(tmp_path, "samestate-valkey"))
    one._spec.data_dir.rmdir()
    with pytest.raises(ServiceError, match=r"arm candidate: its Valkey server ended with exit code 1; its log is"):
        one.start(1792)
    assert one.stop() == 0


def test_without_a_server_installed_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_places.shutil, "which", lambda name: None)
    with pytest.raises(ServiceError, match="no valkey-server and no redis-server on the PATH; install one"):
        ValkeyServer(spec(tmp_path, "samestate-valkey"))
