"""A server that repeats the key it was given: the client receives it without."""

from __future__ import annotations

import json

import pytest

from samestate.engines.openai_client import CHAT, ClientError, OpenAIClient

from .serving import ANSWER, Played, playing, said, streamed
from .test_openai_client import BODY, chunk

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("key", ["wolf-0123456789", "wolf"])
def test_a_key_that_the_server_repeats_is_not_received(key: str) -> None:
    """One of a few characters is found in any answer, and is no secret."""
    shown = "***" if len(key) > 8 else key
    answer = ANSWER | {"id": f"chatcmpl-{key}"}
    with playing(said(answer)) as server, OpenAIClient(server.url, api_key=key) as client:
        done = client.complete(CHAT, BODY)
    assert done.id == f"chatcmpl-{shown}" and json.loads(done.reply.body) == ANSWER | {"id": done.id}
    halves = f"data: {json.dumps(chunk(delta={'content': key}) | {'id': key})}\n\n".encode().partition(b"olf")
    played = Played(
        content_type="text/event-stream",
        chunks=(halves[0], b"".join(halves[1:]), *streamed(chunk(delta={}, finish_reason="stop")).chunks),
    )
    with playing(played) as server, OpenAIClient(server.url, api_key=key) as client:
        done = client.complete(CHAT, BODY | {"stream": True})
    assert (done.id, done.text) == (shown, shown)
    assert (key.encode() in b"".join([done.reply.body, *(one.data for one in done.reply.events)])) == (shown == key)


@pytest.mark.parametrize(
    "played",
    [
        Played(status=401, body=b'{"error": {"message": "no such key: wolf-0123456789"}}'),
        Played(status=307, headers={"Location": "http://elsewhere/?key=wolf-0123456789"}),
        Played(body=b"{}", content_type="text/html; x=wolf-0123456789"),
        Played(body=b'{"tokens": "wolf-0123456789"}'),
    ],
)
def test_a_refusal_that_repeats_the_key_is_told_without_it(played: Played) -> None:
    with (
        playing(played) as server,
        OpenAIClient(server.url, api_key="wolf-0123456789") as client,
        pytest.raises(ClientError) as failed,
    ):
        client.complete(CHAT, BODY)
    assert "wolf" not in str(failed.value)
