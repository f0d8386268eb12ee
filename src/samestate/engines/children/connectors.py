"""The transfer configuration of each connector that a plan can name, with the audit around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig

from samestate.engines.children.protocol import Start
from samestate.evidence.controls import ENGINE_REPAIRS


def transfer_config(command: Start) -> KVTransferConfig | None:
    """What `--kv-transfer-config` would say; None without a connector. Raises ValueError for an unknown one."""
    if command.connector == "none":
        return None
    if command.connector not in _CONNECTORS:
        raise ValueError(f"connector {command.connector!r}: unknown; use none, {', '.join(_CONNECTORS)}")
    repair = command.repair if command.repair not in ENGINE_REPAIRS else None
    # A failed load must show: recomputing would hide it.
    inner = {"kv_role": "kv_both", "kv_load_failure_policy": "fail"} | _CONNECTORS[command.connector](command)
    if command.audit_level == "off":
        if repair is not None:
            raise ValueError(f"repair {repair!r}: is put on by the audit; use audit level metadata or above")
        return KVTransferConfig(**inner)
    return KVTransferConfig(
        kv_connector="AuditConnector",
        kv_connector_module_path="samestate.instruments.connector",
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "connectors": [inner],
            "samestate": {
                "stream_dir": command.stream_dir,
                "arm": command.arm,
                "level": command.audit_level,
                "save_delay_ms": command.save_delay_ms,
                "fault": command.fault,
                "repair": repair,
            },
        },
    )


def _native(command: Start) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "samestate.cache.spec",
            "cpu_bytes_to_use": command.external_cache_bytes,
            **command.connector_options,
        },
    }


def _dictionary(command: Start) -> dict[str, Any]:
    return {
        "kv_connector": "DictionaryConnector",
        "kv_connector_module_path": "samestate.cache.dictionary",
        "kv_connector_extra_config": {"cpu_bytes_to_use": command.external_cache_bytes, **command.connector_options},
    }


def _lmcache(command: Start) -> dict[str, Any]:
    if command.service is None:
        raise ValueError("connector 'lmcache': needs the address of LMCache's server")
    host, _, port = command.service.rpartition(":")
    return {
        "kv_connector": "HostLMCacheConnector",
        "kv_connector_module_path": "samestate.cache.lmcache",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{host}",
            "lmcache.mp.port": int(port),
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            **command.connector_options,
        },
    }


def _samestate(command: Start) -> dict[str, Any]:
    # What a busy machine is too slow for would only be a miss, and test nothing.
    tier = {"type": command.connector, "url": command.service, "time_limit_s": 60.0}
    tiers = [] if command.service is None else [tier]
    if not tiers and command.connector != "samestate-memory":
        raise ValueError(f"connector {command.connector!r}: needs the URL of the place behind its memory tier")
    return {
        "kv_connector": "SamestateConnector",
        "kv_connector_module_path": "samestate.cache.connector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": command.external_cache_bytes,
            "secondary_tiers": tiers,
            **command.connector_options,
        },
    }


_CONNECTORS: dict[str, Callable[[Start], dict[str, Any]]] = {
    "native": _native,
    "dictionary": _dictionary,
    "lmcache": _lmcache,
    "samestate-memory": _samestate,
    "samestate-disk": _samestate,
    "samestate-valkey": _samestate,
    "samestate-object": _samestate,
}
