"""A small client of an OpenAI API server: one attempt a call, raw bytes and monotonic times kept, failures in one line.

It follows no redirect, takes no proxy from the environment and never tries again: a probe that was repeated is another
probe. Streams are read event by event; an event's time is that of the moment its last byte was here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, Self
from urllib.parse import urlsplit

from samestate.engines.openai_answers import (
    DONE,
    ClientError,
    Completion,
    Event,
    Events,
    Reply,
    json_object,
    one_line,
    read_completion,
    said,
)

if TYPE_CHECKING:
    import httpx  # at run time within functions: a command that calls no server need not wait for it

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DONE",
    "ClientError",
    "Completion",
    "Event",
    "OpenAIClient",
    "Reply",
    "address",
    "needs_certificates",
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODELS = "/v1/models"
CONNECT_SECONDS = 10.0
MOST_BYTES = 1 << 28
"""Of one answer."""
SECRET = 8
"""Characters of a key that no answer has by chance."""


def encoded(body: Mapping[str, Any]) -> bytes:
    """A body as it is sent."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()


def address(url: str) -> str:
    """``http://HOST:PORT``, whatever path of the API it was said with. Raises `ClientError` for what is no address."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and (parts.port or True)
    except ValueError:
        good = False
    if not good:
        shown = "an address with credentials" if "@" in url else one_line(url)
        raise ClientError(f"{shown}: is no address of a server; say it as http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def needs_certificates(url: str) -> bool:
    """Whether a server's certificate is to be verified: wherever there is one. Without, none need be read (50 ms)."""
    return urlsplit(url).scheme != "http"


class OpenAIClient:
    """Calls one server. Not for several threads.

    Args:
        url: ``http://HOST:PORT``, without ``/v1``.
        api_key: Sent as a bearer token; never kept in a reply: where the server repeats one of `SECRET` characters
            or more, ``***`` stands instead.
        seconds: The longest that one call may take, and the longest silence within it.

    """

    def __init__(self, url: str, *, api_key: str | None = None, seconds: float = 600.0) -> None:
        import httpx

        self.url = address(url)
        self._seconds = seconds
        self._attempts = 0
        self._secret = api_key.encode() if api_key and len(api_key) >= SECRET else None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers | {"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
            # A connection each: one that the server has just closed would cost a probe.
            transport=httpx.HTTPTransport(
                verify=needs_certificates(self.url), retries=0, limits=httpx.Limits(max_keepalive_connections=0)
            ),
            follow_redirects=False,
            trust_env=False,
            event_hooks={"request": [self._count]},
        )

    @property
    def attempts(self) -> int:
        """Requests that went out, whatever came of them."""
        return self._attempts

    def get(self, path: str) -> Reply:
        """Raises `ClientError`."""
        return self._call("GET", path, b"", stream=False)

    def text(self, path: str) -> str:
        """A plain text, e.g. that of ``/metrics``. Raises `ClientError`."""
        return self._call("GET", path, b"", stream=False, whole="text/plain").body.decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any] | bytes, *, stream: bool = False) -> Reply:
        """An answer in one piece, or a stream where `stream` or the body says so. Raises `ClientError`.

        Bytes are sent as they are.
        """
        if isinstance(body, bytes):
            return self._call("POST", path, body, stream=stream)
        return self._call("POST", path, encoded(body), stream=stream or bool(body.get("stream")))

    def complete(self, path: str, body: Mapping[str, Any] | bytes, *, stream: bool = False) -> Completion:
        """The first choice that the server gives to `body`, streamed or not. Raises `ClientError`."""
        reply = self.post(path, body, stream=stream)
        where = f"{self.url}{path}"
        chunks = [json_object(event.data, where) for event in reply.events if event.data != DONE] or [reply.tree]
        return read_completion(chunks, reply, where)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` by the server's tokenizer, no special tokens added. Raises `ClientError`."""
        return self.tokenize({"prompt": text, "add_special_tokens": False})

    def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt, or of messages as the server renders them (``/tokenize``). Raises `ClientError`."""
        ids = self.post("/tokenize", body).tree.get("tokens")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ClientError(f"{self.url}/tokenize: returned no token ids; is it a vLLM server?")
        return ids

    def models(self) -> list[str]:
        """Names of the served models, at least one. Raises `ClientError`."""
        data = self.get(MODELS).tree.get("data")
        entries = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
        names = [name for one in entries if isinstance(name := one.get("id"), str)]
        if not names:
            raise ClientError(f"{self.url}{MODELS}: names no model; is it an OpenAI API server?")
        return names

    def healthy(self) -> bool:
        """Whether the server says that it is ready (vLLM's ``/health``)."""
        import httpx

        try:
            return self._http.get("/health").status_code == HTTPStatus.OK
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one call -------------------------------------------------------------------------------

    def _count(self, _: httpx.Request) -> None:
        self._attempts += 1

    def _call(self, method: str, path: str, data: bytes, *, stream: bool, whole: str = "application/json") -> Reply:
        import httpx

        where, before = f"{self.url}{path}", self._attempts
        headers = {"Content-Type": "application/json"} if data else {}
        began = time.monotonic_ns()
        try:
            with self._http.stream(method, path, content=data or None, headers=headers) as response:
                peer = self._peer(response)
                expected = "text/event-stream" if stream and response.status_code == 200 else whole
                body, events = self._read(response, where, began, stream=stream)
                ended = time.monotonic_ns()
                body, events = self._veiled(body), [Event(one.at_ns, self._veiled(one.data)) for one in events]
                location = self._veiled(response.headers.get("location", "nowhere").encode()).decode()
        except httpx.TimeoutException:
            self._fail(f"{where}: gave no answer in {self._seconds:g} s; see its log, or allow more time")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._fail(f"{where}: {_failure(error)}")
        if self._attempts - before != 1:
            self._fail(f"{where}: went out {self._attempts - before} times instead of once")
        _require_success(response.status_code, body, where, location)
        _require_type(response, expected, where)
        if stream and (not events or events[-1].data != DONE):
            self._fail(
                f"{where}: the stream was cut after {len(events)} events, without [DONE]; the server's log may say why"
            )
        return Reply(path, peer, data, body, events, began, ended)

    def _peer(self, response: httpx.Response) -> str:
        """Where the answer comes from; a server that closed already has no address, so that of the URL then."""
        try:
            address = response.extensions["network_stream"].get_extra_info("server_addr")
        except OSError:  # getpeername: not connected any more
            address = None
        return f"{address[0]}:{address[1]}" if address else urlsplit(self.url).netloc

    def _read(self, response: httpx.Response, where: str, began: int, *, stream: bool) -> tuple[bytes, list[Event]]:
        chunks: list[bytes] = []
        size = 0
        events = Events()
        for chunk in response.iter_raw():
            now = time.monotonic_ns()
            if now - began > self._seconds * 1e9:
                self._fail(f"{where}: was not done in {self._seconds:g} s; see its log, or allow more time")
            size += len(chunk)
            if size > MOST_BYTES:
                self._fail(f"{where}: answered more than {MOST_BYTES >> 20} MiB; ask for less")
            chunks.append(chunk)
            if stream:
                events.feed(chunk, now)
        return b"".join(chunks), events.complete

    def _veiled(self, received: bytes) -> bytes:
        """Without the key, should the server repeat it."""
        return received.replace(self._secret, b"***") if self._secret else received

    def _fail(self, message: str) -> NoReturn:
        raise ClientError(self._veiled(message.encode(errors="replace")).decode())


def _failure(error: Exception) -> str:
    import httpx

    match error:
        case httpx.ConnectError():
            return f"nobody answers there ({one_line(error)}); start the server, or check the address"
        case httpx.RemoteProtocolError() | httpx.ReadError():
            return f"the answer was cut ({one_line(error)}); the server's log may say why"
        case _:
            return f"{one_line(error)}; check the address and the server's log"


def _require_success(status: int, body: bytes, where: str, location: str) -> None:
    if status == HTTPStatus.OK:
        return
    words = said(body)
    match status:
        case 401 | 403:
            remedy = "it wants another key; give the right one"
        case 404:
            remedy = "check the address and the served model's name"
        case 429:
            remedy = "it is busy; nothing is tried again, so run again when it is idle"
        case _ if 300 <= status < 400:
            remedy = f"it points to {one_line(location)}; give that address"
        case _ if status >= 500:
            remedy = "see its log"
        case _:
            remedy = "it refuses the request; see its words"
    raise ClientError(f"{where}: answered {status}{f' ({words})' if words else ''}: {remedy}", status)


def _require_type(response: httpx.Response, expected: str, where: str) -> None:
    given = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != expected:
        raise ClientError(f"{where}: answered {given or 'no type'} instead of {expected}; is it an OpenAI API server?")
