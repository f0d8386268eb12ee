"""What ``vllm serve`` arguments say about the cache, read without vLLM. What is not read here is left to vLLM.

Flags have vLLM's names, with ``-`` or ``_``; a later one wins, as it does there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from samestate.models.fields import MOST, ConfigError
from samestate.plans.serve_args import SHORT_FLAGS, settings_named

_SCALES = {"": 1, "k": 1000, "m": 10**6, "K": 1024, "M": 2**20}
"""As vLLM reads lengths (``human_readable_int`` in ``vllm/engine/arg_utils.py``)."""
_BLOCK_DROPPING = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Draft methods that give a hit's last block back (`use_eagle_block_drop` in ``vllm/config/speculative.py``)."""
_MOST_DRAFTS = 10_000
_GDN_PREFILL = ("auto", "triton", "flashinfer", "cutedsl", "aiter_flydsl")
"""``--gdn-prefill-backend`` in ``vllm/engine/arg_utils.py``; ``auto`` goes without saying."""
_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
_TRUTHS = ("true", "false", "on", "off", "yes", "no", "1", "0")
_READ = (
    *("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "speculative_config"),
    *("block_size", "max_model_len", "max_num_batched_tokens", "prefix_match_unit", "dtype", "kv_cache_dtype"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "gdn_prefill_backend"),
    *("prefix_caching_hash_algo", "kv_transfer_config", *_SWITCHES),
)
_ALIKE = 0.9
"""Of two names, as `difflib` counts it: no flag of vLLM's is so like one that is read."""


class Serving(NamedTuple):
    """The settings that cache sizes and hits follow from. None: not said."""

    said: frozenset[str]
    """Every setting that the arguments name."""
    tensor_parallel: int | None = None
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    block_size: int | None = None
    max_model_len: int | None = None
    chunk_tokens: int | None = None
    prefix_match_unit: int | None = None
    dtype: str = "auto"
    cache_dtype: str = "auto"
    conv_dtype: str = "auto"
    state_dtype: str = "auto"
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    state_mode: str | None = None
    drafts: int = 0
    drops_block: bool = False
    gdn_prefill: str = "auto"
    hash_algorithm: str | None = None
    """Of the keys of blocks."""
    connector: bool = False
    """A transfer configuration is given."""


def read_serve_args(arguments: Sequence[str]) -> Serving:
    """The cache's settings in `arguments`. Raises `ConfigError` for what is no value, and for contradictions."""
    _refuse_misspelt(arguments)
    _refuse_valued_switches(arguments)
    values = dict(_pairs(arguments))
    method, drafts = _speculation(values.get("speculative_config"))
    serving = Serving(
        said=frozenset(settings_named(arguments)),
        tensor_parallel=_whole(values, "tensor_parallel_size"),
        pipeline_parallel=_whole(values, "pipeline_parallel_size") or 1,
        decode_context_parallel=_whole(values, "decode_context_parallel_size") or 1,
        block_size=_whole(values, "block_size"),
        max_model_len=_length(values, "max_model_len"),
        chunk_tokens=_length(values, "max_num_batched_tokens"),
        prefix_match_unit=_whole(values, "prefix_match_unit"),
        dtype=values.get("dtype") or "auto",
        cache_dtype=values.get("kv_cache_dtype") or "auto",
        conv_dtype=values.get("mamba_cache_dtype") or "auto",
        state_dtype=values.get("mamba_ssm_cache_dtype") or "auto",
        prefix_caching=_switch(arguments, "enable_prefix_caching"),
        chunked_prefill=_switch(arguments, "enable_chunked_prefill"),
        state_mode=values.get("mamba_cache_mode"),
        drafts=drafts,
        drops_block=any(word in method for word in _BLOCK_DROPPING),
        gdn_prefill=_gdn_prefill(values.get("gdn_prefill_backend")),
        hash_algorithm=values.get("prefix_caching_hash_algo"),
        connector=any(name.startswith(("kv_transfer_config", "kv_offloading")) for name in _names(arguments)),
    )
    _refuse_contradictions(serving)
    return serving


def _refuse_contradictions(serving: Serving) -> None:
    if "model" in serving.said:
        raise ConfigError("--serve-args: --model is said twice; leave the one in --serve-args out")
    if "config" in serving.said:
        raise ConfigError("--serve-args: --config hides settings in a file; write its flags out")
    off = serving.prefix_caching is False
    if off and serving.connector:
        raise ConfigError(
            "--no-enable-prefix-caching: contradicts the connector in --kv-transfer-config, which finds prefixes by "
            "their hashes; leave one of them out"
        )
    if off and serving.state_mode == "align":
        raise ConfigError("--no-enable-prefix-caching: contradicts --mamba-cache-mode align; leave one of them out")
    if off and serving.prefix_match_unit is not None:
        raise ConfigError("--no-enable-prefix-caching: contradicts --prefix-match-unit; leave one of them out")


def _flag(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-").replace("-", "_").partition(".")[0]


def _names(arguments: Sequence[str]) -> list[str]:
    return [_flag(argument) for argument in arguments if argument.startswith("--")]


def _named(argument: str) -> str | None:
    """The setting of a flag, a short one too; None for a value."""
    if argument.startswith("--"):
        return _flag(argument)
    return SHORT_FLAGS.get(argument.partition("=")[0].removeprefix("-")) if argument.startswith("-") else None


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Settings with their values, ``--name=value`` and ``--name value`` alike."""
    for index, argument in enumerate(arguments):
        name = _named(argument)
        if name is None:
            continue
        _, equals, value = argument.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        yield name, value if equals else following


def _refuse_misspelt(arguments: Sequence[str]) -> None:
    """What vLLM would refuse, or would complete, must not pass for something that is not read here."""
    for argument in arguments:
        # Of a flag of one letter a number may be a part: -O3.
        glued = re.fullmatch(r"-([a-z]{2,})(\d+)", argument)
        if glued and (name := SHORT_FLAGS.get(glued[1])):
            raise ConfigError(f"{argument}: is no flag; say --{name.replace('_', '-')} {glued[2]}")
    for said in _names(arguments):
        name = said.removeprefix("no_")
        if name in _READ:
            continue
        meant = [one for one in _READ if one.startswith(name)] or get_close_matches(name, _READ, n=1, cutoff=_ALIKE)
        if meant:
            raise ConfigError(f"--{said.replace('_', '-')}: is no whole flag; say --{meant[0].replace('_', '-')}")


def _switch(arguments: Sequence[str], name: str) -> bool | None:
    """The last of ``--name`` and ``--no-name``; None where neither is said."""
    said = [one for one in _names(arguments) if one in (name, f"no_{name}")]
    return said[-1] == name if said else None


def _refuse_valued_switches(arguments: Sequence[str]) -> None:
    """vLLM's parser takes no value for a switch, so ``=false`` would not turn it off."""
    for index, argument in enumerate(arguments):
        name = _flag(argument).removeprefix("no_")
        following = "".join(arguments[index + 1 : index + 2]).lower()
        if argument.startswith("--") and name in _SWITCHES and ("=" in argument or following in _TRUTHS):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: takes no value; say --{flag} or --no-{flag}")


def _gdn_prefill(text: str | None) -> str:
    if text is not None and text not in _GDN_PREFILL:
        raise ConfigError(f"--gdn-prefill-backend: {text!r} is none; use one of {', '.join(_GDN_PREFILL)}")
    return text or "auto"


def _whole(values: dict[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]+", text) or not text.strip("0"):
        raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is no whole number above 0")
    # By its length first: Python reads no number of thousands of digits.
    if len(text) > len(str(MOST)) or int(text) > MOST:
        raise ConfigError(f"--{name.replace('_', '-')}: is too large; say at most {MOST:,}")
    return int(text)


def _length(values: dict[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None or text in ("auto", "-1"):
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)", text)
    if found is None:
        raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is no length in tokens; say it as 8192 or 8k")
    length = float(found[1]) * _SCALES[found[2]]
    if not 1 <= length <= MOST:
        raise ConfigError(f"--{name.replace('_', '-')}: must be 1 to {MOST:,} tokens; say it as 8192 or 8k")
    return int(length)


def _speculation(text: str | None) -> tuple[str, int]:
    if text is None:
        return "", 0
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config: is no JSON object; quote it as one word")
    drafts = config.get("num_speculative_tokens")
    if drafts is not None and (type(drafts) is not int or not 1 <= drafts <= _MOST_DRAFTS):
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens must be a whole number from 1 to {_MOST_DRAFTS:,}"
        )
    return str(config.get("method", "")), drafts or 0
