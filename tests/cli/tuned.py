"""Child of test_profile: two autotuned kernels on Triton's interpreter, as an engine's process would run them.

Prints what they computed. ``FASTEST`` is the block whose measurement wins here, ``SKEWED`` the kernel that is given a
shape that nobody recorded.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from samestate.instruments.tuner_plugin import register

register()
OUT = torch.zeros(64)


def fastest(call, quantiles):  # type: ignore[no-untyped-def]
    call()
    return [float(int(OUT[0]) != int(os.environ["FASTEST"]))] * 3


def tuned(function):  # type: ignore[no-untyped-def]
    configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]
    return triton.autotune(configs=configs, key=["n"], do_bench=fastest)(triton.jit(function))


@tuned
def shown(out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros_like(at) + BLOCK, mask=at < n)


@tuned
def hidden(out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros_like(at) + BLOCK, mask=at < n)


n = 48 if os.environ.get("SKEWED") else 64
hidden[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](OUT, n)
shown[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](OUT, n)
print(int(OUT[0]))
