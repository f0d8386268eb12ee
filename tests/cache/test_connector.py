"""What an operator may say, and what is refused in one line. No engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from samestate.cache import tier_metrics
from samestate.cache.connector import complete
from samestate.cache.family_policy import FamilyPolicy, FamilyValuePolicy
from samestate.cache.spec import POLICIES, TIERS, SamestateOffloadingSpec
from samestate.cache.tier import StoreTier


def config(**changes: Any) -> OffloadingConfig:
    plain: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),),
        "worker_kv_bytes_per_block": 4096,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": 1 << 20},
        "engine_id": "samestate-test",
        "model": OffloadingModelConfig(name="m", dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    }
    return OffloadingConfig(**plain | changes)


def test_the_least_that_must_be_said_is_completed() -> None:
    said: dict[str, Any] = {"cpu_bytes_to_use": 1}
    complete(said)
    complete(said)
    assert said == {
        "cpu_bytes_to_use": 1,
        "spec_name": "SamestateOffloadingSpec",
        "spec_module_path": "samestate.cache.spec",
        "eviction_policy": "family-lru",
        "secondary_tiers": [],
    }
    assert OffloadingSpecFactory.get_spec_cls(said) is SamestateOffloadingSpec


def test_what_was_said_stays() -> None:
    said: dict[str, Any] = {"eviction_policy": "arc", "secondary_tiers": [{"type": "fs", "root_dir": "/x"}]}
    complete(said)
    assert (said["eviction_policy"], said["secondary_tiers"]) == ("arc", [{"type": "fs", "root_dir": "/x"}])


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"secondary_tiers": [{"type": "samestate-disk"}]}, r"secondary_tiers\[0\]\.url: missing; say where"),
        ({"secondary_tiers": [{"type": "samestate-disk", "url": 7}]}, r"secondary_tiers\[0\]\.url: missing"),
        ({"sync_load_budget_bytes": 1}, "kv_connector_extra_config.sync_load_budget_bytes: pages are loaded async"),
        ({"tenant": 7}, "kv_connector_extra_config.tenant: 7 is no text"),
        ({"revision": ["a"]}, "kv_connector_extra_config.revision"),
    ],
)
def test_what_does_not_fit_is_one_line(said: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        complete(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)}, "blocks_per_chunk=2: samestate's"),
        ({"canonical_layout": True}, "canonical_layout is not supported by samestate's tiers: leave it off"),
        ({"extra_config": {"cpu_bytes_to_use": 4095}}, "cpu_bytes_to_use=4095 holds no chunk: one takes 4096 bytes"),
        (
            {"extra_config": {"cpu_bytes_to_use": 1 << 20, "cuda_loads": "fast"}},
            "kv_connector_extra_config.cuda_loads: 'fast' is none of copy, auto, gather, staged",
        ),
    ],
)
def test_what_stores_could_not_tell_apart_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        SamestateOffloadingSpec(config(**changes))


def test_names_lead_to_our_classes() -> None:
    assert {SecondaryTierFactory.get_tier_class({"type": tier}) for tier in TIERS} == {StoreTier}
    assert [CachePolicyFactory.get_cache_policy_cls(name) for name in POLICIES] == [FamilyPolicy, FamilyValuePolicy]


def test_prometheus_is_told_of_ours_and_of_vllms() -> None:
    said: dict[str, Any] = {"secondary_tiers": [{"type": "samestate-disk", "url": "file:///x"}]}
    known = SamestateOffloadingSpec.build_metric_definitions(said)
    assert known.keys() > tier_metrics.definitions().keys()
    assert "vllm:kv_offload_tiering_read_bytes" in known
