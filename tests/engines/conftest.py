"""A stand-in for LMCache's package: the server's command line and its health, nothing behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

STAND_IN = """
import argparse, http.server, mmap, os, signal, sys, time

def main():
    parser = argparse.ArgumentParser(prog="lmcache")
    server = parser.add_subparsers().add_parser("server")
    for name in ("host", "port", "http-host", "http-port", "chunk-size", "l1-size-gb", "eviction-policy"):
        server.add_argument("--" + name)
    server.add_argument("--supported-transfer-mode", choices=["lmcache_driven", "auto"])
    server.add_argument("--l2-adapter", metavar="JSON")
    server.add_argument("--disable-metrics", action="store_true")
    server.add_argument("--separate-object-groups", action=argparse.BooleanOptionalAction)
    server.add_argument("--deaf", action="store_true")
    server.add_argument("--hang", action="store_true")
    server.add_argument("--late", type=float, default=0)
    server.add_argument("--leave", metavar="PID")
    args = parser.parse_args(sys.argv[1:])
    print("arguments", sys.argv, flush=True)
    print("environment", sorted(name for name in os.environ if name.startswith("LMCACHE")), flush=True)
    if args.chunk_size == "7":
        raise ValueError("chunk size 7 is odd")
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600 if args.hang else args.late)
    if args.leave:
        for maker in (os.getpid(), int(args.leave)):
            with open(f"/dev/shm/torch_{maker}_samestate_0", "w+b") as file:
                file.write(b"x" * 4096)
                file.flush()
                globals()[f"map_{maker}"] = mmap.mmap(file.fileno(), 4096)

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/healthcheck" else 404)
            self.end_headers()
        def log_message(self, *_):
            pass

    http.server.HTTPServer((args.http_host, int(args.http_port)), Health).serve_forever()
"""


@pytest.fixture
def lmcache_package(tmp_path: Path) -> Path:
    """A folder as `samestate.engines.releases.ensure` makes it."""
    folder = tmp_path / "packages"
    (folder / "lmcache" / "cli").mkdir(parents=True)
    (folder / "lmcache" / "__init__.py").touch()
    (folder / "lmcache" / "cli" / "__init__.py").touch()
    (folder / "lmcache" / "cli" / "main.py").write_text(STAND_IN)
    integration = folder / "lmcache" / "integration" / "vllm"
    integration.mkdir(parents=True)
    (integration / "adapter.py").write_text("mq_timeout = 300.0\n")
    info = folder / "lmcache-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.9\n")
    return folder
