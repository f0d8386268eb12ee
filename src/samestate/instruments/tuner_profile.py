"""Hold every Triton autotuner of this process to a profile, or record what each one chose.

Wraps `Autotuner.run` once, for all tuners and subclasses (FLA's ends in it): see `tuner_watch`; and `__init__`, to know
what a tuner had to choose from before a file chose for it. Own code; nothing on disk is touched. Kernels that
`torch.compile` inlines have tuners of Inductor's own and are not seen.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from samestate.evidence.controls import OTHER_VARIABLE, PROFILE_VARIABLE, RECORD_VARIABLE, RELEASE_VARIABLE
from samestate.evidence.tuner_profile import ProfileError, installed, read, refuse_elsewhere
from samestate.instruments import tuners
from samestate.instruments.tuner_watch import ALL, ProfileViolation, Watch, forget_launched

__all__ = ["ALL", "ProfileViolation", "Watch"]
Run = Callable[..., Any]

_watch: Watch | None = None


def watching() -> Watch | None:
    """The watch of this process, if one was installed."""
    return _watch


def install(watch: Watch, kind: Any = None) -> None:
    """Put a watch around every tuner of this process; a later one takes the earlier one's place."""
    global _watch  # noqa: PLW0603 (one process, one watch)
    kind = kind or tuners.tuner_class()
    if kind is None:
        raise ProfileError("tuner profile: Triton cannot be imported here: there is nothing to record or to hold")
    if _watch is not None:
        _watch.give_back()
    _watch = watch
    if not hasattr(kind, "_samestate_run"):
        kind._samestate_init, kind.__init__ = kind.__init__, _declared(kind.__init__)
        kind._samestate_run, kind.run = kind.run, _watched(kind.run)
        kind._samestate_bench, kind._bench = kind._bench, _counted(kind._bench)
    watch.begin_anew() if watch.profile is not None else forget_launched()


def uninstall(kind: Any = None) -> None:
    """Take the watch off again; every tuner gets its configurations back."""
    global _watch  # noqa: PLW0603
    kind = kind or tuners.tuner_class()
    if _watch is not None:
        _watch.give_back()
    if kind is not None and hasattr(kind, "_samestate_run"):
        kind.__init__, kind.run, kind._bench = kind._samestate_init, kind._samestate_run, kind._samestate_bench
        del kind._samestate_init, kind._samestate_run, kind._samestate_bench
    _watch = None


def _declared(inner: Run) -> Run:
    @wraps(inner)
    def make(tuner: Any, *args: Any, **kwargs: Any) -> None:
        inner(tuner, *args, **kwargs)
        tuners.declare(tuner)

    return make


def _watched(inner: Run) -> Run:
    @wraps(inner)
    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return _watch.run(inner, tuner, args, kwargs) if _watch else inner(tuner, *args, **kwargs)

    return run


def _counted(inner: Run) -> Run:
    @wraps(inner)
    def bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if _watch is not None:
            _watch.benchmarks += 1
        return inner(tuner, *args, **kwargs)

    return bench


def install_from_environment() -> None:
    """What the environment variables of `samestate.evidence.controls` ask for. Raises ProfileError, one line."""
    if _watch is not None:
        return
    path, folder = os.environ.get(PROFILE_VARIABLE), os.environ.get(RECORD_VARIABLE)
    profile, sha256 = read(Path(path)) if path else (None, None)
    if profile is not None:
        refuse_elsewhere(profile, None, installed())
    watch = Watch(profile, sha256, Path(folder) if folder else None)
    install(watch)
    if released := os.environ.get(RELEASE_VARIABLE):
        watch.release(released)
    if others := os.environ.get(OTHER_VARIABLE):
        watch.replace(others.split(","))
    atexit.register(watch.write, strays=True)


def selected_in_worker(_worker: Any = None) -> bytes | None:
    """For vLLM's ``collective_rpc``: this rank's `KernelsSelected` as JSON, or None without a watch."""
    return msgspec.json.encode(_watch.selected()) if _watch else None


def _forget_in_child() -> None:
    if _watch is not None:
        _watch.forget_what_ran()


os.register_at_fork(after_in_child=_forget_in_child)
