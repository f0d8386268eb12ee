"""A small OpenAI API server as a process of its own: real HTTP, counters, a model, answers with and without JSON.

``stub_server.py PORT [--no-json] [--wait MS] [--key KEY] [--model DIR] [--chat-template FILE]``. ``--no-json``: it
knows no ``response_format``. ``--key``: it answers under ``/v1`` to nobody who does not send that. The last two are
said, as servers of models are told them, and not read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--no-json", action="store_true")
parser.add_argument("--wait", type=float, default=2.0)
parser.add_argument("--label", default="stub")
parser.add_argument("--key")
parser.add_argument("--model")
parser.add_argument("--chat-template")
options = parser.parse_args()
running: list[int] = []
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refused(self) -> bool:
        wanted = options.key is None or self.headers.get("Authorization") == f"Bearer {options.key}"
        if self.path.startswith("/v1") and not wanted:
            self._answer(401, b'{"error": {"message": "Unauthorized"}}')
            return True
        return False

    def do_GET(self) -> None:
        if self._refused():
            return
        match self.path.partition("?")[0]:
            case "/health":
                self._answer(200, b"{}")
            case "/metrics":
                gauges = {"running": len(running), "waiting": 0}
                text = "".join(f'vllm:num_requests_{name}{{engine="0"}} {n}.0\n' for name, n in gauges.items())
                self._answer(200, text.encode(), "text/plain; version=0.0.4")
            case "/v1/models":
                models = [{"id": "stub", "created": time.time_ns(), "max_model_len": 2048, "root": options.label}]
                self._answer(200, json.dumps({"data": models}).encode())
            case _:
                self._answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self._refused():
            return
        with lock:
            running.append(1)
        try:
            time.sleep(options.wait / 1000)
            self._complete(body)
        finally:
            with lock:
                running.pop()

    def _complete(self, body: dict[str, Any]) -> None:
        content = "nine"
        if "response_format" in body:
            if options.no_json:
                self._answer(400, json.dumps({"error": {"message": "response_format: no parser"}}).encode())
                return
            content = json.dumps({"answer": 9})
        message = {"role": "assistant", "content": content}
        tree = {"id": "x", "model": "stub", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        self._answer(200, json.dumps(tree).encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def stop(*_: object) -> None:
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
print("serving", os.getpid(), file=sys.stderr, flush=True)
Server(("127.0.0.1", options.port), Handler).serve_forever(0.02)
