"""Functions of vLLM that the budget recorder wraps or relies on: found, held against their known source, wrapped.

A recorder that does not know what it wraps records what it does not understand. It then refuses, and
the engine does not start: whoever asked for a trace gets one or a clear line, never a silent run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from typing_extensions import override

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.marker_records import TRACE_FOLDER
from samestate.evidence.record_base import PatchedFunction

BOTH = "0.32.0 and 0.33.0"
"""Releases in which a function's source is the same."""

Sources = Mapping[tuple[type, str], Mapping[str, str]]
"""(class, method) -> SHA-256 of its source -> releases that have it."""


class BudgetRecorderError(RuntimeError):
    """The recorder cannot record here; one line."""


def require(sources: Sources) -> list[PatchedFunction]:
    """Each function as it is now. Raises `BudgetRecorderError` where a source is not one of the known."""
    return [_require(owner, name, known) for (owner, name), known in sources.items()]


def _require(owner: type, name: str, known: Mapping[str, str]) -> PatchedFunction:
    found = vars(owner).get(name)
    function = found.__func__ if isinstance(found, staticmethod) else found
    where = f"{owner.__module__}.{owner.__qualname__}.{name}"
    if not callable(function):
        raise BudgetRecorderError(f"budget recorder: this vLLM has no {where}; {_remedy(known)}")
    if hasattr(function, "__wrapped__"):
        raise BudgetRecorderError(f"budget recorder: {where} was replaced already; load the recorder first")
    try:
        digest = sha256_hex(inspect.getsource(function).encode())
    except (OSError, TypeError):
        raise BudgetRecorderError(
            f"budget recorder: {where} has no source that can be read; {_remedy(known)}"
        ) from None
    if digest not in known:
        raise BudgetRecorderError(
            f"budget recorder: {where} has unknown source (sha256 {digest[:12]}…); {_remedy(known)}"
        )
    return PatchedFunction(module=owner.__module__, qualname=f"{owner.__qualname__}.{name}", source_sha256=digest)


def _remedy(known: Mapping[str, str]) -> str:
    return (
        f"it was written for vLLM {', '.join(sorted(set(known.values())))}: use one of these, or unset {TRACE_FOLDER}"
    )


def wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapper` around a method, for every object of the class."""
    setattr(owner, name, wrapper(vars(owner)[name]))


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call `action` once, as soon as `module` is imported; at once where it is.

    vLLM loads its plugins in every process, early and in the server's front end too. Importing a model
    runner there would be heavy, and would decide on a platform too soon.
    What `action` raises is raised by the import.
    """
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(module, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, and lets its loader call an action afterwards."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module = module
        self._action = action

    @override
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        # Another action may wait for the same module.
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action()
