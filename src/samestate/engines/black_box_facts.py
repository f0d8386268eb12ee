"""What a server says of itself before it is asked for a completion, read from its own words; nothing is asked here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from samestate.evidence.records import LOCAL_HITS, LOCAL_QUERIES

CACHE = "vllm:cache_config_info"
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
"""Requests that run or wait, as each server names them."""
COMPUTED, CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"
"""llama.cpp's: prompt tokens that were computed, and those that were not."""
LLAMA_CPP, SGLANG = "llama.cpp", "SGLang"
_OWNERS = {"llamacpp": LLAMA_CPP, "sglang": SGLANG}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Facts(NamedTuple):
    """What a server says before it is asked for a completion. None: it does not say."""

    model: str
    max_model_len: int | None
    """Tokens of a prompt and its answer together."""
    vllm: bool
    """It is vLLM, by its own metrics or models."""
    version: str | None
    tokenizer: bool
    counters: bool
    """``/metrics`` has counters of a prefix cache."""
    interval: int | None
    """C, as it is configured: what the server keeps may differ, so it is tried."""
    interval_from: str | None
    capacity: int | None
    """Tokens that its local cache can hold at most."""
    can_reset: bool
    """It has ``/reset_prefix_cache``."""
    began: float | None
    """When its process began, as ``/metrics`` has it: seconds since 1970."""
    software: str | None = None
    """Its name, where it is another than vLLM and says so."""

    @property
    def called(self) -> str:
        """Name and version, for who reads it."""
        return f"{'vLLM' if self.vllm else self.software or 'an OpenAI API server'} {self.version or ''}".rstrip()


def interval_in(config: Mapping[str, Any]) -> int | None:
    sizes = [count(config.get(name)) for name in ("block_size", "mamba_block_size")]
    return max((size for size in sizes if size), default=None)


def count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def count_of(word: str | None) -> int | None:
    return int(word) if word and word.isdecimal() and int(word) > 0 else None


def capacity(text: str, interval: int | None) -> int | None:
    """Of ``/metrics``, tokens. None: not said, or several engines have a cache each and none holds that of another."""
    if len(_lines(text, CACHE)) != 1:
        return None
    told = labels(text, CACHE)
    blocks, size = count_of(told.get("num_gpu_blocks")), interval or count_of(told.get("block_size"))
    return blocks * size if blocks and size else None


def _lines(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]


def labels(text: str, name: str) -> dict[str, str]:
    return dict(_LABEL.findall(next(iter(_lines(text, name)), "")))


def value(text: str, name: str) -> float | None:
    """Summed over labels."""
    try:
        values = [float(line.rsplit(" ", 1)[-1]) for line in _lines(text, name)]
    except ValueError:
        return None
    return sum(values) if values else None


def began(text: str) -> float | None:
    return value(text, "process_start_time_seconds")


def counters(text: str) -> dict[str, float]:
    """llama.cpp's counters of reuse, as records name them: tokens that were looked up, and those found; or none."""
    computed, cached = value(text, COMPUTED), value(text, CACHED)
    return {} if computed is None or cached is None else {LOCAL_QUERIES: computed + cached, LOCAL_HITS: cached}


def waiting(text: str) -> int | None:
    """Requests that run or wait there; None: not told."""
    gauges = [found for name in GAUGES if (found := value(text, name)) is not None]
    return int(sum(gauges)) if gauges else None


def owner(card: Mapping[str, Any]) -> str | None:
    """The software, by the card of a model that it serves."""
    return _OWNERS.get(str(card.get("owned_by")))


def context_in(properties: Mapping[str, Any]) -> int | None:
    """Of llama.cpp's ``/props``: tokens of a prompt and its answer together."""
    settings = properties.get("default_generation_settings")
    return count(settings.get("n_ctx")) if isinstance(settings, dict) else None


def title_in(schema: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Name and version that an ``/openapi.json`` has; FastAPI's own name is nobody's."""
    info = schema.get("info")
    title, version = (info.get("title"), info.get("version")) if isinstance(info, dict) else (None, None)
    if not isinstance(title, str) or not title.strip() or title == "FastAPI":
        return None, None
    return " ".join(title.split())[:60], version if isinstance(version, str) else None
