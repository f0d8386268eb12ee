"""Captures the calls of named modules: every argument and output by digest, scalars by value (requirements 50, 51).

Arguments are digested before the call, and again after it: one that changed was written in place, and is an output
too. What a module reads beside its arguments (caches, metadata, its own parameters) is not seen; calls that replay a
CUDA graph or run compiled are not either: start the engine eager.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.ground_records import OPAQUE
from samestate.evidence.records import Argument, CallCaptured, CallsCounted
from samestate.instruments.digests import Digester, digester_for
from samestate.instruments.nested import given, parts
from samestate.instruments.storages import as_bytes
from samestate.instruments.tuners import own_rank

_LONGEST = 200
"""Characters of a scalar that are kept as they are; of a longer one the beginning and its hash."""


class CaptureError(ValueError):
    """No such module; one line."""


class Capture:
    """Watches modules of one model."""

    def __init__(self, model: Any, names: list[str], limit: int) -> None:
        """Hook the modules `names`, each a full name or a unique end of one. Raises `CaptureError`."""
        self._limit = limit
        self._calls: dict[str, int] = {}
        self._open: dict[str, list[tuple[int, dict[str, Argument]]]] = {}
        self._records: list[CallCaptured] = []
        self._digesters: dict[str, Digester] = {}
        modules = dict(model.named_modules())
        for name in names:
            whole = _resolve(name, modules)
            self._calls[whole], self._open[whole] = 0, []
            modules[whole].register_forward_pre_hook(self._before(whole), with_kwargs=True)
            modules[whole].register_forward_hook(self._after(whole), with_kwargs=True)

    def taken(self) -> tuple[list[CallCaptured], list[CallsCounted]]:
        """Every captured call, and how many there were of each module."""
        rank = own_rank()
        captured = [one.module for one in self._records]
        counted = [
            CallsCounted(rank=rank, module=name, calls=calls, captured=captured.count(name))
            for name, calls in sorted(self._calls.items())
        ]
        return self._records, counted

    def _before(self, name: str) -> Any:
        def take(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept = self._calls[name] < self._limit
            self._open[name].append((time.monotonic_ns(), self._facts(given(args, kwargs)) if kept else {}))

        return take

    def _after(self, name: str) -> Any:
        def take(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            at_ns, before = self._open[name].pop()
            call = self._calls[name]
            self._calls[name] += 1
            if call >= self._limit:
                return
            after = self._facts(given(args, kwargs))
            written = {key: one for key, one in after.items() if one != before[key]}
            outputs = self._facts(parts("output", output)) | {f"{key} (after)": one for key, one in written.items()}
            self._records.append(
                CallCaptured(
                    rank=own_rank(),
                    module=name,
                    call=call,
                    at_ns=at_ns,
                    inputs=[msgspec.structs.replace(one, written=key in written) for key, one in before.items()],
                    outputs=[msgspec.structs.replace(one, name=key) for key, one in outputs.items()],
                )
            )

        return take

    def _facts(self, values: Iterator[tuple[str, Any]]) -> dict[str, Argument]:
        return {name: self._fact(name, value) for name, value in values}

    def _fact(self, name: str, value: Any) -> Argument:
        if not isinstance(value, torch.Tensor):
            return Argument(name=name, value=_word(value), shape=None, written=False)
        digester = self._digesters.setdefault(str(value.device), digester_for(value.device))
        (facts,) = digester.facts([as_bytes(value)])
        dtype = str(value.dtype).removeprefix("torch.")
        return Argument(name=name, value=f"{dtype} {facts.digest}", shape=list(value.shape), written=False)


def _word(value: Any) -> str:
    """A scalar by its value; of another object only that it is there."""
    if value is not None and not isinstance(value, bool | int | float | str):
        return f"{OPAQUE}{type(value).__name__}>"
    said = repr(value)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}… sha256 {sha256_hex(said.encode())}"


def _resolve(name: str, modules: dict[str, Any]) -> str:
    found = [one for one in modules if one == name] or [one for one in modules if one.endswith(f".{name}")]
    if len(found) != 1:
        said = f"{len(found)} modules end so, e.g. {found[0]}" if found else "the model has no such module"
        raise CaptureError(f"capture of {name!r}: {said}; name one of it as named_modules() does")
    return found[0]


_capture: Capture | None = None


def capture_in_worker(worker: Any, names: list[str], limit: int) -> None:
    """For vLLM's ``collective_rpc``: watch these modules of this rank's model. Raises `CaptureError`."""
    global _capture  # noqa: PLW0603 (one worker a process)
    _capture = Capture(worker.model_runner.get_model(), names, limit)


def captured_in_worker(_worker: Any = None) -> bytes:
    """For vLLM's ``collective_rpc``: what was captured on this rank, as JSON."""
    records, counted = _capture.taken() if _capture else ([], [])
    return msgspec.json.encode((records, counted))
