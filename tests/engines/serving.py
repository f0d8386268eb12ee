"""A small HTTP server that plays an OpenAI API server, well and badly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "9", "reasoning": "three times three"},
    "finish_reason": "stop",
    "stop_reason": 7,
    "token_ids": [5, 6, 7],
}
ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "tiny",
    "choices": [CHOICE],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}},
}


class Played(NamedTuple):
    """What the server answers to everything."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = MappingProxyType({})
    announced: int | None = None
    """Length that it says; None: the body's."""
    silent: bool = False
    """It takes the request and says nothing."""
    chunks: tuple[bytes, ...] = ()
    """Instead of `body`, one write each, and no length."""


def said(tree: Any) -> Played:
    """JSON."""
    return Played(body=json.dumps(tree).encode())


def streamed(*events: Any, done: bool = True) -> Played:
    """Server-sent events, one chunk each."""
    chunks = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    ends = (b"data: [DONE]\n\n",) if done else ()
    return Played(content_type="text/event-stream; charset=utf-8", chunks=(*chunks, *ends))


class Seen(NamedTuple):
    """One request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Playing:
    """A server that plays its part; `seen` holds what arrived."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.seen: list[Seen] = []
        self.url = f"http://127.0.0.1:{server.server_address[1]}"


@contextmanager
def playing(usual: Played, others: Mapping[str, Played] = MappingProxyType({})) -> Iterator[Playing]:
    """Serve until the block is over; `others`: what it answers on other paths than usual."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            playing.seen.append(Seen(self.command, self.path, dict(self.headers), body))
            played = others.get(self.path, usual)
            if played.silent:
                over.wait(60)
                self.close_connection = True
                return
            self.send_response(played.status)
            self.send_header("Content-Type", played.content_type)
            for name, value in played.headers.items():
                self.send_header(name, value)
            if played.chunks:
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(played.announced or len(played.body)))
            self.end_headers()
            for chunk in played.chunks or (played.body,):
                self.wfile.write(chunk)
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_POST = _answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    playing = Playing(server)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield playing
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
