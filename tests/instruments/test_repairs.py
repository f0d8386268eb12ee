"""A repair touches exactly what it was written for, and refuses everything else."""

from __future__ import annotations

import hashlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from samestate.instruments import repairs
from samestate.instruments.lmcache_transfers import CONNECTOR
from samestate.instruments.repairs import RepairError, apply


class Client:
    """LMCache's scheduler-side client, as far as lookups go."""

    def __init__(self) -> None:
        self.looked_up: list[tuple[str, list[int], dict[str, Any]]] = []

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], **options: Any) -> None:
        self.looked_up.append((request_id, token_ids, options))

    def check_lookup_result(self, request_id: str) -> int:
        return len(self.looked_up[-1][1]) // 4 * 4


class LMCacheMPConnector:
    """Looks up all tokens, at two places, as release 0.5.5 does."""

    def __init__(self) -> None:
        self.scheduler_adapter: Any = Client()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Asked by the scheduler."""
        client = self.scheduler_adapter
        client.maybe_submit_lookup_request(request.request_id, token_ids=request.tokens, cache_salt="")
        return client.check_lookup_result(request.request_id) - num_computed_tokens, True

    def on_new_request(self, request: Any) -> None:
        """Asked when a request arrives."""
        self.scheduler_adapter.maybe_submit_lookup_request(request.request_id, token_ids=request.tokens)

    def untouched(self) -> Any:
        return self.scheduler_adapter


LMCacheMPConnector.__module__ = CONNECTOR[0]


def pinned(kind: type) -> dict[str, dict[str, str]]:
    """Hashes as the repair keeps them."""
    return {
        name: {hashlib.sha256(inspect.getsource(getattr(kind, name)).encode()).hexdigest(): "0.5.5"}
        for name in repairs.STRICT_PREFIX
    }


REQUEST = SimpleNamespace(request_id="a", tokens=[1, 2, 3, 4, 5, 6, 7, 8])


def test_both_lookups_leave_out_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "STRICT_PREFIX", pinned(LMCacheMPConnector))
    connector, other = LMCacheMPConnector(), LMCacheMPConnector()
    client = connector.scheduler_adapter
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
    applied = apply("strict-prefix", connector)
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (4, True)
    connector.on_new_request(REQUEST)
    assert client.looked_up == [
        ("a", [1, 2, 3, 4, 5, 6, 7, 8], {"cache_salt": ""}),
        ("a", [1, 2, 3, 4, 5, 6, 7], {"cache_salt": ""}),
        ("a", [1, 2, 3, 4, 5, 6, 7], {}),
    ]
    assert connector.untouched() is client, "only the two calls see another client"
    assert other.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
    assert applied.name == "strict-prefix"
    assert [(f.module, f.qualname) for f in applied.functions] == [
        (__name__, "LMCacheMPConnector.get_num_new_matched_tokens"),
        (__name__, "LMCacheMPConnector.on_new_request"),
    ]
    assert {f.source_sha256 for f in applied.functions} == {
        digest for known in repairs.STRICT_PREFIX.values() for digest in known
    }
    assert set(vars(connector)) == {"scheduler_adapter", "get_num_new_matched_tokens", "on_new_request"}


def test_an_error_in_a_lookup_leaves_the_client_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "STRICT_PREFIX", pinned(LMCacheMPConnector))
    connector = LMCacheMPConnector()
    client = connector.scheduler_adapter
    apply("strict-prefix", connector)
    with pytest.raises(AttributeError):
        connector.on_new_request(SimpleNamespace())
    assert connector.scheduler_adapter is client


class Reserving(LMCacheMPConnector):
    def on_new_request(self, request: Any) -> None:
        self.scheduler_adapter.maybe_submit_lookup_request("a", [1], reserve_last_token=True)


class Shorter(LMCacheMPConnector):
    on_new_request = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "connector", "known", "said"),
    [
        ("other", LMCacheMPConnector(), LMCacheMPConnector, r"^repair 'other': unknown; use one of strict-prefix$"),
        ("strict-prefix", object(), LMCacheMPConnector, r"is for LMCache's connector, not object$"),
        ("strict-prefix", LMCacheMPConnector(), None, r"unknown source \(sha256 [0-9a-f]{12}…\); .* LMCache 0\.5\.5$"),
        ("strict-prefix", Reserving(), LMCacheMPConnector, r"leaves the last token out itself; drop it$"),
        ("strict-prefix", Shorter(), LMCacheMPConnector, r"has no on_new_request$"),
    ],
)
def test_whatever_it_was_not_written_for_is_refused_whole(
    name: str, connector: Any, known: type | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known is not None:
        monkeypatch.setattr(repairs, "STRICT_PREFIX", pinned(known))
    with pytest.raises(RepairError, match=said) as raised:
        apply(name, connector)
    assert "\n" not in str(raised.value)
    if isinstance(connector, LMCacheMPConnector):
        assert set(vars(connector)) == {"scheduler_adapter"}, "nothing was replaced"


def test_it_is_put_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "STRICT_PREFIX", pinned(LMCacheMPConnector))
    connector = LMCacheMPConnector()
    apply("strict-prefix", connector)
    with pytest.raises(RepairError, match=r"get_num_new_matched_tokens was replaced already$"):
        apply("strict-prefix", connector)
