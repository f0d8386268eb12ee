"""The client against servers that behave, and against every way in which they do not."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from samestate.engines.openai_client import (
    CHAT,
    COMPLETIONS,
    DONE,
    ClientError,
    OpenAIClient,
    address,
    encoded,
    needs_certificates,
)

from .serving import ANSWER, CHOICE, Played, free_port, playing, said, streamed

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "3·3?"}]}


def refusal(played: Played, *, seconds: float = 20.0, stream: bool = False) -> str:
    """The line that a badly played answer gets; one request went out."""
    with playing(played) as server, OpenAIClient(server.url, seconds=seconds) as client:
        with pytest.raises(ClientError) as failed:
            client.complete(CHAT, BODY | ({"stream": True} if stream else {}))
        assert client.attempts == len(server.seen) == 1
    line = str(failed.value)
    assert "\n" not in line
    return line.replace(server.url, "")


def chunk(**choice: object) -> dict[str, object]:
    return {"id": "chatcmpl-2", "model": "tiny", "choices": [{"index": 0, **choice}]}


def test_an_answer_is_kept_raw_and_read() -> None:
    with playing(said(ANSWER)) as server, OpenAIClient(f"{server.url}/v1/") as client:
        answer = client.complete(CHAT, BODY)
    assert (answer.id, answer.model, answer.text, answer.reasoning) == ("chatcmpl-1", "tiny", "9", "three times three")
    assert (answer.prompt_token_ids, answer.token_ids) == ([1, 2], [5, 6, 7])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 7)
    assert answer.usage == ANSWER["usage"]
    assert json.loads(answer.reply.body) == ANSWER
    assert answer.reply.sent == encoded(BODY) == server.seen[0].body
    assert answer.reply.peer == server.url.removeprefix("http://")
    assert answer.reply.began_ns < answer.reply.ended_ns
    assert (server.seen[0].method, server.seen[0].path) == ("POST", CHAT)


def test_bytes_are_sent_as_they_are() -> None:
    data = b'{"model":"tiny",   "messages":[]}'
    with playing(said(ANSWER)) as server, OpenAIClient(server.url) as client:
        client.complete(CHAT, data)
    assert server.seen[0].body == data


def test_a_stream_gives_the_same_with_a_time_for_every_event() -> None:
    events = [
        chunk(delta={"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]},
        chunk(delta={"reasoning": "three "}, token_ids=[5]),
        chunk(delta={"reasoning": "times\u2028"}, token_ids=[]),
        chunk(delta={"content": "9"}, token_ids=[6, 7], finish_reason="stop", stop_reason=7),
        {"id": "chatcmpl-2", "model": "tiny", "choices": [], "usage": ANSWER["usage"]},
    ]
    with playing(streamed(*events)) as server, OpenAIClient(server.url) as client:
        answer = client.complete(CHAT, BODY | {"stream": True})
    assert (answer.token_ids, answer.prompt_token_ids) == ([5, 6, 7], [1, 2])
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("9", "three times\u2028", "stop")
    assert answer.usage == ANSWER["usage"]
    assert [json.loads(event.data) for event in answer.reply.events[:-1]] == events
    assert answer.reply.events[-1].data == DONE
    times = [answer.reply.began_ns, *(event.at_ns for event in answer.reply.events), answer.reply.ended_ns]
    assert all(before <= after for before, after in pairwise(times))


def test_events_may_be_cut_anywhere_and_end_with_carriage_returns() -> None:
    whole = b"".join(streamed(chunk(delta={"content": "9"}, token_ids=[6])).chunks).replace(b"\n", b"\r\n")
    played = Played(content_type="text/event-stream", chunks=(b": hello\r\n\r\n", whole[:7], whole[7:31], whole[31:]))
    with playing(played) as server, OpenAIClient(server.url) as client:
        answer = client.complete(CHAT, BODY | {"stream": True})
    assert (answer.text, answer.token_ids, len(answer.reply.events)) == ("9", [6], 2)


def test_a_text_completion_has_its_prompt_in_the_choice() -> None:
    tree = {"id": "cmpl-1", "model": "tiny", "choices": [{"index": 0, "text": "9", "prompt_token_ids": [1]}]}
    with playing(said(tree)) as server, OpenAIClient(server.url) as client:
        answer = client.complete(COMPLETIONS, {"model": "tiny", "prompt": "3·3?"})
    assert (answer.text, answer.prompt_token_ids, answer.token_ids, answer.usage) == ("9", [1], None, None)


def test_a_key_is_sent_and_not_kept() -> None:
    with playing(said(ANSWER)) as server, OpenAIClient(server.url, api_key="wolf") as client:
        answer = client.complete(CHAT, BODY)
    assert server.seen[0].headers["Authorization"] == "Bearer wolf"
    assert "wolf" not in repr(answer)


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with playing(said(ANSWER)) as server, OpenAIClient(server.url) as client:
        assert client.complete(CHAT, BODY).text == "9"


def test_tokens_models_and_health_are_asked() -> None:
    with playing(said({"tokens": [3, 4]})) as server, OpenAIClient(server.url) as client:
        assert client.encode("</think>") == [3, 4]
        assert json.loads(server.seen[0].body) == {"prompt": "</think>", "add_special_tokens": False}
        assert client.healthy()
    with playing(said({"data": [{"id": "tiny"}]})) as server, OpenAIClient(server.url) as client:
        assert client.models() == ["tiny"]
    with playing(Played(status=503)) as server, OpenAIClient(server.url) as client:
        assert not client.healthy()


# --- every way to fail: one line, one attempt -------------------------------------------------------


def test_nobody_is_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with OpenAIClient(url, seconds=20) as client:
        with pytest.raises(ClientError, match=r"nobody answers there .*; start the server, or check the address$"):
            client.complete(CHAT, BODY)
        assert client.attempts == 1
        assert not client.healthy()


def test_a_server_that_says_nothing() -> None:
    assert (
        refusal(Played(silent=True), seconds=0.3) == f"{CHAT}: gave no answer in 0.3 s; see its log, or allow more time"
    )


@pytest.mark.parametrize(
    ("status", "tree", "line"),
    [
        (401, {"error": "Unauthorized"}, "answered 401 (Unauthorized): it wants another key; give the right one"),
        (403, {}, "answered 403: it wants another key; give the right one"),
        (
            404,
            {"error": {"message": "no model\n`x`"}},
            "answered 404 (no model `x`): check the address and the served model's name",
        ),
        (
            429,
            {"error": {"message": "busy"}},
            "answered 429 (busy): it is busy; nothing is tried again, so run again when it is idle",
        ),
        (400, {"detail": "budget"}, "answered 400 (budget): it refuses the request; see its words"),
        (500, {"error": {"message": "\x1b[31mboom"}}, "answered 500 ([31mboom): see its log"),
    ],
)
def test_a_refusal_is_told_with_the_servers_words(status: int, tree: object, line: str) -> None:
    played = said(tree)._replace(status=status, headers={"Retry-After": "0"})
    assert refusal(played) == f"{CHAT}: {line}"


def test_a_redirect_is_not_followed() -> None:
    played = Played(status=307, headers={"Location": "http://elsewhere"})
    assert refusal(played) == f"{CHAT}: answered 307: it points to http://elsewhere; give that address"


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_instead_of_an_answer(stream: bool) -> None:
    wanted = "text/event-stream" if stream else "application/json"
    line = refusal(Played(body=b"<html>", content_type="text/html"), stream=stream)
    assert line == f"{CHAT}: answered text/html instead of {wanted}; is it an OpenAI API server?"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 100_000])
def test_no_object(body: bytes) -> None:
    assert refusal(Played(body=body)) == f"{CHAT}: answered no JSON object; is it an OpenAI API server?"


@pytest.mark.parametrize("tree", [{}, {"choices": 3}, {"choices": [3]}, {"choices": [CHOICE | {"token_ids": ["x"]}]}])
def test_another_shape(tree: object) -> None:
    line = refusal(said(tree))
    assert line.startswith(f"{CHAT}: its answer has another shape (")
    assert line.endswith("); is it an OpenAI API server?")


def test_no_choice() -> None:
    assert refusal(said({"choices": []})) == f"{CHAT}: answered without a choice; see its log"


def test_a_body_that_is_cut() -> None:
    line = refusal(Played(body=b'{"id":', announced=400))
    assert line.startswith(f"{CHAT}: the answer was cut (")


def test_a_stream_that_is_cut() -> None:
    line = refusal(streamed(chunk(delta={"content": "9"}, token_ids=[6]), done=False), stream=True)
    assert line == f"{CHAT}: the stream was cut after 1 events, without [DONE]; the server's log may say why"


def test_a_stream_that_tells_of_an_error() -> None:
    line = refusal(streamed({"error": {"message": "engine died"}}), stream=True)
    assert line == "the server broke off: engine died; see its log"


@pytest.mark.parametrize("tree", [{}, {"tokens": ["a"]}, {"tokens": [True]}])
def test_no_tokens(tree: object) -> None:
    with (
        playing(said(tree)) as server,
        OpenAIClient(server.url) as client,
        pytest.raises(ClientError, match="token ids"),
    ):
        client.encode("x")


@pytest.mark.parametrize("tree", [{}, {"data": []}, {"data": [{}]}])
def test_no_models(tree: object) -> None:
    with (
        playing(said(tree)) as server,
        OpenAIClient(server.url) as client,
        pytest.raises(ClientError, match="no model"),
    ):
        client.models()


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://[::1", "http://me:wolf@x"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ClientError, match=r"is no address of a server; say it as http://HOST:PORT$") as failed:
        address(url)
    assert "wolf" not in str(failed.value)


def test_an_address_may_name_the_api() -> None:
    assert address("http://x:80/v1/") == address("http://x:80") == "http://x:80"


# --- odd answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER | {"usage": [1]},
        ANSWER | {"usage": "3"},
        ANSWER | {"usage": {"prompt_tokens": True}},
        ANSWER | {"usage": {"completion_tokens": -1}},
        ANSWER | {"usage": {"completion_tokens": "3"}},
        ANSWER | {"usage": {"completion_tokens_details": [1]}},
        ANSWER | {"usage": {"completion_tokens_details": {"reasoning_tokens": 1.5}}},
        ANSWER | {"choices": [CHOICE, CHOICE | {"index": 1}]},
        ANSWER | {"choices": [CHOICE, CHOICE]},
        ANSWER | {"choices": [CHOICE | {"token_ids": [5, True]}]},
        ANSWER | {"choices": [CHOICE | {"token_ids": [-1]}]},
        ANSWER | {"choices": [CHOICE | {"token_ids": "567"}]},
        ANSWER | {"choices": [CHOICE | {"finish_reason": 3}]},
        ANSWER | {"choices": [CHOICE | {"stop_reason": True}]},
        ANSWER | {"prompt_token_ids": ["1"]},
    ],
)
def test_an_answer_of_another_shape_is_no_answer(answer: dict[str, object]) -> None:
    assert "its answer has another shape" in refusal(said(answer))


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 2, "completion_tokens": 0}])
def test_counts_that_are_left_out_are_no_mistake(usage: dict[str, object] | None) -> None:
    with playing(said(ANSWER | {"usage": usage})) as server, OpenAIClient(server.url) as client:
        assert client.complete(CHAT, BODY).usage == usage


def test_a_server_that_closes_after_its_answer_is_read_all_the_same() -> None:
    """HTTP/1.0: the answer ends where the connection does."""
    body = json.dumps(ANSWER).encode()
    head = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            received = b""
            while b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < len(encoded(BODY)):
                received += connection.recv(1 << 16)
            connection.sendall(head + body)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        port = listening.getsockname()[1]
        with OpenAIClient(f"http://127.0.0.1:{port}") as client:
            answer = client.complete(CHAT, BODY)
        server.join()
    assert (answer.text, answer.reply.peer) == ("9", f"127.0.0.1:{port}")


def test_a_peer_that_has_no_address_any_more_is_that_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object, name: str) -> None:
        if name == "server_addr":
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("httpcore._backends.sync.SyncStream.get_extra_info", gone)
    with playing(said(ANSWER)) as server, OpenAIClient(server.url) as client:
        assert client.complete(CHAT, BODY).reply.peer == server.url.removeprefix("http://")


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_server_for_whose_certificate_nobody_vouches_is_refused(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("cryptography")
    from cache.servers import make_certificates

    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shaken: list[bool] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except ssl.SSLError:
                    shaken.append(False)
                else:
                    shaken.append(True)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        with OpenAIClient(url, seconds=20) as client, pytest.raises(ClientError, match=r"(?i)certificate"):
            client.get("/v1/models")
        server.join(20)
    assert shaken == [False]
    assert not needs_certificates("http://127.0.0.1:8000")
