"""The guard ``split-top-p``: vLLM's split-row top-p kernel no longer masks a row whole; opt-in, own code.

The kernel (``v1/sample/ops/topk_topp_triton.py``) keeps the logits above ``log(pivot) + log(Z) + max``. Beside a logit
of 1e9, which a reasoning budget stores to force a token, float32 steps by 64: the sum rounds to the maximum itself,
nothing is above it, and the forced row keeps no token. The guard adds one case: where the cut-off is not below the
maximum, the maximum stays. Where it is below, the added case is empty and every bit is as before.

On a CPU vLLM has no Triton and filters otherwise; there the guard mends what `samestate.instruments.expand_repair`
says.

Source and patched source are pinned by hash, and the line to be replaced must be there exactly once; unknown source is
refused. Nothing on disk is touched. vLLM 0.33.0 masks by probability and keeps the maximum itself: it is left alone.
"""

from __future__ import annotations

import inspect
import linecache
import os
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.marker_records import SAMPLING_GUARD, SPLIT_TOP_P
from samestate.evidence.record_base import PatchedFunction
from samestate.instruments.budget_sources import when_imported
from samestate.instruments.interventions import applied

MODULE = "vllm.v1.sample.ops.topk_topp_triton"
KERNEL = "_topp_sb_mask_kernel"
LAUNCHER = "_topp_split_mask"
"""Holds the kernel beside the module's own name for it."""
ANCHOR = "        keep = x > pivot_logit\n"
PATCHED = "        keep = (x > pivot_logit) | ((x == M) & (x <= pivot_logit))\n"

FAULTY = {"cc5e79006c156f9140c3d0d849a0bdf0d037a40955e3b7556f7a5b5348b635f3": "0.32.0"}
"""Sources of the kernel, by SHA-256, that the guard was written for."""
MENDED = {"688182363793880ee78638217ca0f6e429f3529b6cdd93c0ec682d9e993eb0ec": "0.33.0"}
"""Sources that keep the maximum by themselves."""
AFTER = "728fae0d78d5edf7376c8d3cc04ef5698e4a722a02b93192552f3c1bb9495320"
"""What the faulty source must be once patched."""

_registered = False


class GuardError(RuntimeError):
    """The guard is unknown or does not fit; one line."""


class Guarded(NamedTuple):
    """What the guard did in this process."""

    before: PatchedFunction
    """The kernel as it was found."""
    patched_sha256: str | None
    """Of its source as it runs now; None: it was left as it was."""


def register() -> None:
    """The entry point of ``vllm.general_plugins``: put on what the environment asks for, once the kernel is imported.

    Raises `GuardError`: an unknown guard is asked for; unknown source, from the import of the module in question.
    """
    global _registered  # noqa: PLW0603 (vLLM may load a plugin twice)
    asked = os.environ.get(SAMPLING_GUARD)
    if not asked or _registered:
        return
    require_known(asked)
    _registered = True
    when_imported(MODULE, _on_kernel)
    when_imported("vllm.utils.cpu_triton_utils", _on_cpu)


def _on_kernel() -> None:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        done = guard()
        applied(SPLIT_TOP_P, [done.before] if done.patched_sha256 else [])


def _on_cpu() -> None:
    from samestate.instruments import expand_repair

    applied(SPLIT_TOP_P, [expand_repair.ensure().before])


def require_known(name: str) -> None:
    """Raises `GuardError` for any name but the one guard's."""
    if name != SPLIT_TOP_P:
        raise GuardError(f"guard {name!r}: unknown; use {SPLIT_TOP_P}, or leave it out ({SAMPLING_GUARD})")


def guard() -> Guarded:
    """Put the guard onto the kernel in this process; a source that needs none is left alone. Raises `GuardError`."""
    try:
        module = import_module(MODULE)
    except ImportError:
        raise GuardError(f"guard {SPLIT_TOP_P}: this vLLM has no {MODULE}; leave the guard out") from None
    source = kernel_source(module)
    digest = sha256_hex(source.encode())
    before = PatchedFunction(module=MODULE, qualname=KERNEL, source_sha256=digest)
    if digest in MENDED:
        return Guarded(before, None)
    if digest not in FAULTY:
        raise GuardError(
            f"guard {SPLIT_TOP_P}: {MODULE}.{KERNEL} has unknown source (sha256 {digest[:12]}…); it was written for "
            f"vLLM {', '.join(sorted(FAULTY.values()))}, and {', '.join(sorted(MENDED.values()))} needs none: "
            "leave it out"
        )
    patched = patch(source)
    after = sha256_hex(patched.encode())
    if after != AFTER:
        raise GuardError(f"guard {SPLIT_TOP_P}: the patched source is not the pinned one (sha256 {after[:12]}…)")
    replace_kernel(module, patched)
    return Guarded(before, after)


def kernel_source(module: ModuleType) -> str:
    """The source of the mask kernel as it was decorated. Raises `GuardError`: there is none, or no Triton."""
    kernel = getattr(module, KERNEL, None)
    if kernel is None:
        raise GuardError(f"guard {SPLIT_TOP_P}: {MODULE} has no {KERNEL}; this release of vLLM is not known")
    function = getattr(kernel, "fn", None)
    if not isinstance(function, FunctionType):
        raise GuardError(f"guard {SPLIT_TOP_P}: {KERNEL} is no Triton kernel here; vLLM found no Triton")
    try:
        return inspect.getsource(function)
    except OSError:
        raise GuardError(f"guard {SPLIT_TOP_P}: {KERNEL} has no source that can be read; leave it out") from None


def patch(source: str) -> str:
    """`source` with the one line replaced. Raises `GuardError`: the line is not there exactly once."""
    found = source.count(ANCHOR)
    if found != 1:
        raise GuardError(f"guard {SPLIT_TOP_P}: the line to be replaced is there {found} times, not once")
    return source.replace(ANCHOR, PATCHED)


def replace_kernel(module: ModuleType, source: str) -> Any:
    """Make the kernel anew from `source`, in `module` and in its launcher; the kernel that was there before."""
    former = getattr(module, KERNEL)
    # Triton reads a kernel's source by its file's name; this name stands for no file and is only remembered.
    name = f"{module.__file__}.{SPLIT_TOP_P}-{sha256_hex(source.encode())[:12]}"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(module))
    getattr(module, LAUNCHER).kernel = getattr(module, KERNEL)
    return former
