"""A small HTTP server that answers as an engine with a prefix cache would, honestly or not.

Its model is a hash: the next token depends on every token before it, so any other state gives other tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"
STATE = tuple[bytes, int]


@dataclass
class Conduct:
    """How the server behaves; as it stands here: an honest vLLM with dev mode and usage details."""

    interval: int = 16
    """C."""
    vllm: bool = True
    metrics: bool = True
    tokenizer: bool = True
    ids: bool = True
    """It takes and returns token ids."""
    logprobs: bool = True
    salts: bool = True
    """It heeds ``cache_salt``."""
    refuses: tuple[str, ...] = ()
    """Fields that it answers 400 to."""
    pairs: bool = True
    """Two prompts in a request."""
    dev: bool = True
    details: bool = True
    """Usage says what was cached."""
    said_interval: int | None = None
    """Of its configuration; None: C."""
    max_model_len: int = 4096
    caching: bool = True
    outside: bool = False
    """A second cache, which a reset leaves alone."""
    capacity: int = 0
    """Prefixes that the local cache holds; 0: any number."""
    fault: str | None = None
    lie: str | None = None
    attention: bool = False
    """The model has attention alone: a whole prompt can be found, and its last token is computed again."""
    noise: float = 0.0
    """Nats by which log-probabilities of any two answers differ."""
    key: str | None = None
    busy: int = 0
    """Readings of ``/metrics`` that show a request of somebody else's."""
    llama: bool = False
    """It is llama.cpp: its form of log-probabilities, ``cache_prompt``, ``/props``, its names of metrics, and a usage
    of the first prompt of a request alone. To be said with ``vllm=False, salts=False, interval=1``."""
    foreign: int = 0
    """Tokens that somebody else looks up beside each of our requests."""


@dataclass
class Answering:
    """The server's state; `asked` holds the bodies of all completions that arrived."""

    conduct: Conduct
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    local: dict[tuple[str, tuple[int, ...]], STATE] = field(default_factory=dict)
    outside: dict[tuple[str, tuple[int, ...]], STATE] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("queries", "hits", "xh"), 0))
    sightings: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    began: float = 1.7e9
    readings: int = 0

    def restored(self, ids: tuple[int, ...], salt: str) -> tuple[int, STATE, bool]:
        """B, the state of [0, B), and whether it came from outside."""
        how, c = self.conduct, self.conduct.interval
        last = len(ids) if how.fault == "off-by-one" or how.attention else len(ids) - 1
        for b in range(last // c * c, 0, -c):
            for store, outside in ((self.local, False), (self.outside, True)):
                fits = outside or b < len(ids) or how.fault == "off-by-one"
                if fits and (state := store.get((salt, ids[:b]))) is not None:
                    return b, state, outside
        return 0, (b"", 0), False

    def compute(self, ids: tuple[int, ...], salt: str, *, whole: bool = False) -> tuple[STATE, int, bool]:
        """The state of all of `ids`, p, and whether it came from outside. `whole`: nothing is reused."""
        how, c = self.conduct, self.conduct.interval
        b, state, outside = self.restored(ids, salt) if how.caching and not whole else (0, (b"", 0), False)
        p = min(b, len(ids) - 1)
        if how.attention and b == len(ids):  # tokens before it are there, one by one
            state = self.computed((b"", 0), ids[:p])
        if (b and how.fault == "stale") or (how.fault == "stale-outside" and outside):
            state = (sha256(state[0] + b"stale").digest(), state[1])
        for at in range(p, len(ids)):
            state = self.computed(state, ids[at : at + 1])
            late = how.fault == "late" and (salt, ids) not in self.sightings
            if (at + 1) % c == 0 and how.caching and not late:
                for store in (self.local, self.outside) if how.outside else (self.local,):
                    store.setdefault((salt, ids[: at + 1]), state)
        self.sightings.add((salt, ids))
        while how.capacity and len(self.local) > how.capacity:
            self.local.pop(next(iter(self.local)))
        return state, b if how.attention else p, outside and bool(p)

    def computed(self, state: STATE, ids: tuple[int, ...]) -> STATE:
        for token in ids:
            state = (sha256(state[0] + token.to_bytes(4, "little")).digest(), token)
        return state

    def generate(self, state: STATE, tokens: int) -> tuple[list[int], list[float], list[float]]:
        ids, logprobs, margins = [], [], []
        for _ in range(tokens):
            digest = sha256(state[0]).digest()
            token, value = int.from_bytes(digest[:2], "little"), -digest[2] / 256
            ids.append(token)
            wobble = self.conduct.noise * ((len(self.asked) * 7919 + len(ids)) % 97) / 97
            logprobs.append(value - wobble)
            margins.append(0.5 + digest[3] / 256)
            state = (sha256(state[0] + token.to_bytes(4, "little")).digest(), token)
        return ids, logprobs, margins

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        how = self.conduct
        for name in how.refuses:
            if name in body:
                return 400, {"error": {"message": f"unknown field {name}"}}
        if body.get("model") != MODEL:
            return 404, {"error": {"message": "no such model"}}
        given = body["prompt"]
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        if len(prompts) > 1 and not how.pairs:
            return 400, {"error": {"message": "one prompt, please"}}
        if not how.ids and not all(isinstance(one, str) for one in prompts):
            return 422, {"error": {"message": "prompt must be a string"}}
        choices, sent, cached, generated = [], 0, 0, 0
        for index, prompt in enumerate(prompts):
            ids = tuple(encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
            salt = body.get("cache_salt", "") if how.salts else ""
            state, p, outside = self.compute(ids, salt, whole=how.llama and not body.get("cache_prompt", True))
            self.counters["queries"] += len(ids)
            self.counters["xh" if outside else "hits"] += p
            if not (how.llama and index):
                sent, cached = sent + len(ids), cached + p
            out, logprobs, margins = self.generate(state, body["max_tokens"])
            generated += len(out)
            choices.append(self.choice(index, out, logprobs, margins, body))
        self.counters["queries"] += how.foreign
        usage: dict[str, Any] = {"prompt_tokens": sent, "completion_tokens": generated}
        if how.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.told(cached, sent)}
        return 200, {"id": f"cmpl-{len(self.asked)}", "model": MODEL, "choices": choices, "usage": usage}

    def told(self, cached: int, sent: int) -> object:
        match self.conduct.lie:
            case "beyond" if cached:
                return sent + 5
            case "whole" if cached:
                return sent
            case "unaligned" if cached:
                return cached - 1
            case "silent":
                return 0
            case "negative":
                return -1
        return cached

    def choice(
        self, index: int, out: list[int], logprobs: list[float], margins: list[float], body: dict[str, Any]
    ) -> dict[str, Any]:
        how = self.conduct
        told: dict[str, Any] = {"index": index, "text": "".join(map(word, out)), "finish_reason": "length"}
        if how.ids and body.get("return_token_ids"):
            told["token_ids"] = out
        if how.llama:
            told.pop("token_ids", None)
            told["logprobs"] = {
                "content": [
                    {
                        "id": one,
                        "token": word(one),
                        "logprob": value,
                        "top_logprobs": [
                            {"token": word(one), "logprob": value},
                            {"token": "other", "logprob": value - margin},
                        ],
                    }
                    for one, value, margin in zip(out, logprobs, margins, strict=True)
                ]
            }
        elif how.logprobs and body.get("logprobs"):
            names = [
                f"token_id:{one}" if body.get("return_tokens_as_token_ids") and how.vllm else word(one) for one in out
            ]
            told["logprobs"] = {
                "tokens": names,
                "token_logprobs": logprobs,
                "top_logprobs": [
                    {name: value, "other": value - margin}
                    for name, value, margin in zip(names, logprobs, margins, strict=True)
                ],
            }
        return told

    def exposition(self) -> str:
        how = self.conduct
        self.readings += 1
        running = 1 if self.readings <= how.busy else 0
        if how.llama:
            computed = self.counters["queries"] - self.counters["hits"]
            return (
                f"llamacpp:prompt_tokens_total {computed}\n"
                f"llamacpp:prompt_tokens_cached_total {self.counters['hits']}\n"
                f"llamacpp:requests_processing {running}\nllamacpp:requests_deferred 0\n"
            )
        lines = [f"process_start_time_seconds {self.began}", f"vllm:num_requests_running {running}"]
        lines += [
            f'vllm:cache_config_info{{block_size="{how.said_interval or how.interval}",num_gpu_blocks="256"}} 1.0'
        ]
        names = {"queries": "prefix_cache_queries", "hits": "prefix_cache_hits"}
        names |= {"xh": "external_prefix_cache_hits"} if how.outside else {}
        lines += [f"vllm:{name}_total {self.counters[key]}.0" for key, name in names.items()]
        return "\n".join(lines) + "\n"


def encode(text: str) -> list[int]:
    """A token for each word, and one before them, as SentencePiece has it."""
    return [1, *(int.from_bytes(sha256(one.encode()).digest()[:2], "little") for one in text.split())]


def word(token: int) -> str:
    return f" w{token}"


@contextmanager
def answering(conduct: Conduct | None = None) -> Iterator[Answering]:
    """Serve until the block is over."""
    state = Answering(conduct or Conduct())
    how = state.conduct

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            with suppress(BrokenPipeError):  # who asked has left
                self.end_headers()
                self.wfile.write(body)
            self.close_connection = True

        def _json(self, status: int, tree: Any) -> None:
            self._send(status, json.dumps(tree).encode())

        def _allowed(self) -> bool:
            state.paths.append(self.path)
            if how.key is not None and self.headers.get("Authorization") != f"Bearer {how.key}":
                self._json(401, {"error": {"message": "no key"}})
                return False
            return True

        def do_GET(self) -> None:
            if not self._allowed():
                return
            path = self.path.partition("?")[0]
            if path == "/v1/models":
                owner = "vllm" if how.vllm else "llamacpp" if how.llama else "somebody"
                card: dict[str, Any] = {"id": MODEL, "owned_by": owner}
                card |= {"max_model_len": how.max_model_len} if how.vllm else {}
                self._json(200, {"data": [card]})
            elif path == "/props" and how.llama:
                self._json(200, {"build_info": "b1-test", "default_generation_settings": {"n_ctx": how.max_model_len}})
            elif path == "/version" and how.vllm:
                self._json(200, {"version": "0.0.test"})
            elif path == "/metrics" and how.metrics:
                self._send(200, state.exposition().encode(), "text/plain; version=0.0.4")
            elif path == "/reset_prefix_cache" and how.dev:
                self._json(405, {"detail": "Method Not Allowed"})
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self._allowed():
                return
            path = self.path.partition("?")[0]
            if path == "/tokenize" and how.tokenizer:
                asked = json.loads(data)
                text = asked.get("content" if how.llama else "prompt")
                if text is None:
                    self._json(400, {"error": {"message": "no text"}})
                else:
                    self._json(200, {"tokens": encode(text)[1:]})
            elif path == "/reset_prefix_cache" and how.dev:
                state.local.clear() if how.fault != "reset-keeps-local" else None
                self._json(200, {"success": True})
            elif path == "/v1/completions":
                state.open += 1
                state.most_open = max(state.most_open, state.open)
                body = json.loads(data)
                status, tree = state.complete(body)
                state.asked.append(body)
                if body.get("stream") and status == 200:
                    tree["usage"], usage = None, tree["usage"]
                    chunks = [tree, {**tree, "choices": [], "usage": usage}]
                    events = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
                    self._send(200, events.encode(), "text/event-stream")
                else:
                    self._json(status, tree)
                state.open -= 1
            else:
                self._json(404, {"detail": "Not Found"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
