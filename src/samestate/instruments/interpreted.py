"""vLLM's Triton kernels on a machine without a GPU: their own code, in Triton's interpreter.

vLLM for CPUs puts placeholders where Triton would be. `interpret` gives it the real one, in a process that serves
nothing and has ``TRITON_INTERPRET=1`` from its start, for Triton decides at its import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any


class NoTriton(Exception):
    """The kernels cannot run here; one line with the remedy."""


def interpret() -> str:
    """Let vLLM's kernel modules that are imported from now on be interpreted; the version of Triton.

    Raises `NoTriton`: it is not installed, or was imported to compile; and where such a module is loaded already.
    """
    if importlib.util.find_spec("triton") is None:
        raise NoTriton("triton: not installed; pip install triton, whose interpreter runs the kernels on a CPU")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise NoTriton("TRITON_INTERPRET: not 1 in this process; start it with TRITON_INTERPRET=1")
    import triton
    import vllm.triton_utils as seen_by_vllm
    from triton import language

    if seen_by_vllm.triton is triton:
        return str(triton.__version__)
    early = [name for name in sys.modules if name.endswith((".topk_topp_triton", ".gpu.sample.thinking_budget"))]
    if early:
        raise NoTriton(f"{early[0]}: was imported before Triton was put in; interpret first")
    seen_by_vllm.triton, seen_by_vllm.tl, seen_by_vllm.HAS_TRITON = triton, language, True
    _patch_once()
    return str(triton.__version__)


def _patch_once() -> None:
    """The interpreter patches ``triton.language`` anew at every call of a function by another: half of its time."""
    from triton.runtime import interpreter

    original: Any = getattr(interpreter, "_patch_lang", None)
    if original is None:
        return
    patched: set[int] = set()

    def patch_lang(function: Any) -> _Kept:
        if id(function) not in patched:
            patched.add(id(function))
            original(function)
        return _Kept()

    interpreter._patch_lang = patch_lang


class _Kept:
    def restore(self) -> None:
        """Nothing else uses the language in this process."""
