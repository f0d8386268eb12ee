"""Traces the outputs of every module of a model's decoder layers, by digest, in the order in which they come.

A module's output comes after those of the modules inside it, so the first one that differs between two runs is the
innermost. Outputs of one step make one short record. Where a module returns no tensor, its tensor arguments are
digested after the call: it may have written there. What a module leaves elsewhere (caches, say) is not seen; nor are
calls that replay a CUDA graph or run compiled: the engine must be eager.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

import msgspec
import torch

from samestate.evidence.ground_records import TRACE_DIGITS, ModulesListed, StepTraced
from samestate.instruments.digests import Digester, digester_for
from samestate.instruments.nested import given, tensors
from samestate.instruments.storages import as_bytes
from samestate.instruments.tuners import own_rank

_LAYER = re.compile(r"(^|\.)layers\.\d+(\.|$)")


class TraceError(ValueError):
    """Nothing can be traced; one line."""


class ModuleTrace:
    """Watches all modules of one model's decoder layers, and of each operation the first steps."""

    def __init__(self, model: Any, steps: int, limit: int) -> None:
        """Keep `steps` of each operation and `limit` in all. Raises `TraceError`."""
        names = [name for name, _ in model.named_modules() if _LAYER.search(name)]
        if not names:
            raise TraceError(f"capture of '*': {type(model).__name__} has no module 'layers.0', so nothing is traced")
        self._steps, self._limit = steps, limit
        self._op: str | None = None
        self._step = 0
        self._open: tuple[int, int] | None = None
        """When the step began, and its tokens."""
        self._outputs: list[tuple[str, str]] = []
        self._listings: dict[tuple[str, ...], int] = {}
        self._records: list[StepTraced] = []
        self._digesters: dict[str, Digester] = {}
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        modules = dict(model.named_modules())
        for name in names:
            modules[name].register_forward_hook(self._after(name), with_kwargs=True)

    def attend(self, op: str | None) -> None:
        """Steps from here on are those of operation `op`; None: of none that is traced."""
        self._op, self._step, self._open = op, 0, None

    def taken(self) -> list[ModulesListed | StepTraced]:
        """Every listing, and every step that was kept."""
        rank = own_rank()
        listed = [
            ModulesListed(rank=rank, listing=number, outputs=list(names)) for names, number in self._listings.items()
        ]
        return [*listed, *self._records]

    def _begin(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._outputs = []
        kept = self._op is not None and self._step < self._steps and len(self._records) < self._limit
        self._open = (time.monotonic_ns(), _tokens(args, kwargs)) if kept else None

    def _end(self, _model: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if self._open is None or self._op is None:
            return
        at_ns, tokens = self._open
        names = tuple(name for name, _ in self._outputs)
        self._records.append(
            StepTraced(
                rank=own_rank(),
                op=self._op,
                step=self._step,
                at_ns=at_ns,
                tokens=tokens,
                listing=self._listings.setdefault(names, len(self._listings)),
                digests="".join(digest for _, digest in self._outputs),
            )
        )
        self._step, self._open = self._step + 1, None

    def _after(self, name: str) -> Any:
        def take(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._open is None:
                return
            tokens = self._open[1]
            found = list(tensors("", output))
            if not found:
                found = [(f" ({key})", one) for key, one in given(args, kwargs) if isinstance(one, torch.Tensor)]
            elif len(found) == 1:
                found = [("", found[0][1])]
            else:
                found = [(f" {place}", one) for place, one in found]
            self._outputs += [(f"{name}{place}", self._digest(one, tokens)) for place, one in found]

        return take

    def _digest(self, tensor: torch.Tensor, tokens: int) -> str:
        """Rows beyond the step's tokens (a buffer's) hold what earlier steps left there."""
        rows = tensor[:tokens] if tokens and tensor.dim() and tensor.shape[0] > tokens else tensor
        digester = self._digesters.setdefault(str(rows.device), digester_for(rows.device))
        values = digester.facts([as_bytes(rows)])[0].digest if rows.numel() else "empty"
        said = f"{rows.dtype} {list(rows.shape)} {values}"
        return hashlib.sha256(said.encode()).hexdigest()[:TRACE_DIGITS]


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens of the step, by the positions that every model of vLLM is given; 0: they are not there."""
    positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
    return int(positions.shape[-1]) if isinstance(positions, torch.Tensor) and positions.dim() else 0


_trace: ModuleTrace | None = None


def trace_in_worker(worker: Any, steps: int, limit: int) -> None:
    """For vLLM's ``collective_rpc``: trace this rank's model. Raises `TraceError`."""
    global _trace  # noqa: PLW0603 (one worker a process)
    _trace = ModuleTrace(worker.model_runner.get_model(), steps, limit)


def attend_in_worker(_worker: Any, op: str | None) -> None:
    """For vLLM's ``collective_rpc``: see `ModuleTrace.attend`."""
    if _trace is not None:
        _trace.attend(op)


def traced_in_worker(_worker: Any = None) -> bytes:
    """For vLLM's ``collective_rpc``: what was traced on this rank, as JSON."""
    return msgspec.json.encode(_trace.taken() if _trace else [])
