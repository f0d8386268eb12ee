"""Environment of every vLLM that is started here, set before vLLM is imported."""

from __future__ import annotations

FIXED = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    # vLLM seeds its block hashes from it: the same prompt then has the same key in every process.
    "PYTHONHASHSEED": "0",
}
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    # Spinning OpenMP threads starve each other where cores are shared: ten times slower beside one busy process.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "LMCACHE_LOG_LEVEL": "WARNING",
}
"""The user's own win over these."""
