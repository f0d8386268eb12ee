"""transformers as the reference engine, in a child process: prefill by C, snapshots of its cache, restoration at B.

No torch and no transformers here. The process is driven as one of vLLM is.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar

from samestate.engines.vllm import VllmEngine

SETTINGS = ("block_size", "dtype", "max_model_len", "attn_implementation", "num_threads")
"""What a plan and ``--serve-args`` may set, under vLLM's names where it has them."""


LEAST = (5, 19)
"""The first release with the cache classes that are known here, and with GLM-5.3-Flash."""


def available() -> bool:
    """Whether torch and a transformers of `LEAST` or later are installed in this environment."""
    if any(find_spec(name) is None for name in ("torch", "transformers")):
        return False
    release = version("transformers").split(".")
    return tuple(int(number) for number in release[:2]) >= LEAST


class TransformersEngine(VllmEngine):
    """One transformers model in a fresh process, whose cache object is saved and restored explicitly."""

    child_module: ClassVar[str] = "samestate.engines.children.transformers_child"
