"""What the autotuners of a process run with: recorded as they choose, or held to a profile, call by call.

Under a profile a call whose kernel and key were not recorded raises before the launch; any other has one configuration
to choose from, the recorded one, and what it really ran with is compared afterwards. Nothing is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import msgspec

from samestate.evidence.record_base import Scalar
from samestate.evidence.records import KernelSelection, KernelsSelected
from samestate.evidence.tuner_profile import ProfileError, TunerProfile, installed, refuse_elsewhere, shown
from samestate.evidence.tuner_report import TunerReport, report_name
from samestate.instruments import tuners

ALL = "*"
Run = Callable[..., Any]
Key = tuple[str, tuple[str, ...]]
"""Kernel, and what its tuner selects by."""


class ProfileViolation(RuntimeError):
    """An autotuned kernel did not, or would not, run as the profile says; one line."""


class Watch:
    """What the tuners of this process run with."""

    def __init__(self, profile: TunerProfile | None = None, sha256: str | None = None, folder: Path | None = None):
        self.profile, self.sha256, self._folder = profile, sha256, folder
        self.released: str | None = None
        """The kernel that chooses as it would without a profile."""
        self.others: frozenset[str] = frozenset()
        """Kernels that are held to another of their own configurations than the recorded one; `ALL`: every one."""
        self._choices: dict[Key, dict[str, Scalar]] | None = None
        self._configs: dict[int, tuple[Any, list[Any]]] = {}
        """Tuner and its own configurations, by identity."""
        self._other: dict[Key, Any] = {}
        self._begun_ns = time.monotonic_ns()
        self.forget_what_ran()

    def forget_what_ran(self) -> None:
        """What was chosen so far is no longer told."""
        self.selections: dict[Key, dict[str, Scalar]] = {}
        self.violations: list[str] = []
        self.benchmarks = 0

    # --- switches -------------------------------------------------------------------------------

    def release(self, kernel: str | None) -> None:
        """Let one kernel go, or none: its selection begins anew. Raises ProfileError for one that is not recorded."""
        self._known([kernel] if kernel else [])
        self.released, self.others = kernel, frozenset()
        self.begin_anew()

    def replace(self, kernels: Collection[str]) -> None:
        """Hold these kernels to another configuration than the recorded one. Raises ProfileError for unknown ones."""
        self._known([one for one in kernels if one != ALL])
        self.released, self.others = None, frozenset(kernels)
        self.begin_anew()

    def _known(self, kernels: list[str]) -> None:
        recorded = self.profile.kernels if self.profile else []
        for kernel in kernels:
            if kernel not in recorded:
                raise ProfileError(f"kernel {kernel!r} is not in the profile; it has: {', '.join(recorded) or 'none'}")

    def begin_anew(self) -> None:
        """Every tuner selects again."""
        self.forget_what_ran()
        self._other.clear()
        self.give_back()
        if (kind := tuners.tuner_class()) is not None:
            for tuner in tuners.find(kind):
                self._own(tuner)
                tuner.cache.clear()
        forget_launched()

    def give_back(self) -> None:
        """Every tuner gets its own configurations again, and nothing that it selected under this watch."""
        for tuner, configs in self._configs.values():
            tuner.configs = configs
            tuner.cache.clear()
        forget_launched()

    # --- one call of a tuner --------------------------------------------------------------------

    def run(self, inner: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel as `inner` would, held to the profile. Raises ProfileViolation."""
        configs = self._own(tuner)
        if not self._chooses(tuner):
            return inner(tuner, *args, **kwargs)
        kernel, key = tuners.name_of(tuner), tuners.key_of(tuner, args, kwargs)
        place = kernel, tuners.key_words(key)
        if self.profile is None:
            result = inner(tuner, *args, **kwargs)
        elif kernel == self.released:
            result = _run_released(inner, tuner, configs, args, kwargs)
        elif kernel in self.others or ALL in self.others:
            result = self._run_other(inner, tuner, configs, place, key, args, kwargs)
        else:
            result = self._run_pinned(inner, tuner, configs, place, key, args, kwargs)
        self._note(place, tuners.config_of(tuner.best_config))
        return result

    def _run_pinned(
        self,
        inner: Run,
        tuner: Any,
        configs: list[Any],
        place: Key,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        chosen = tuners.config_for(tuner, configs, self._recorded(place))
        result = _run_with(inner, tuner, chosen, key, args, kwargs)
        if (ran := tuners.config_of(tuner.best_config)) != tuners.config_of(chosen):
            self._violated(f"{_shown(place)} ran with {shown(ran)}, recorded {shown(tuners.config_of(chosen))}")
        return result

    def _run_other(
        self,
        inner: Run,
        tuner: Any,
        configs: list[Any],
        place: Key,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        recorded = self._recorded(place)
        if place in self._other:
            return _run_with(inner, tuner, self._other[place], key, args, kwargs)
        tuner.configs, tuner.nargs = configs, dict(zip(tuner.arg_names, args, strict=False))
        candidates = [one for one in tuner.prune_configs(kwargs) if tuners.config_of(one) != recorded]
        for config in [*candidates, tuners.config_for(tuner, configs, recorded)]:
            try:
                result = _run_with(inner, tuner, config, key, args, kwargs)
            except _unfit():
                continue
            self._other[place] = config
            return result
        raise ProfileViolation(f"{_shown(place)} runs with none of its {len(configs)} configurations")

    def _recorded(self, place: Key) -> dict[str, Scalar]:
        """What the profile holds for a kernel and key. Raises ProfileViolation, before anything was launched."""
        if self._choices is None:
            self._choices = self._own_choices()
        recorded = self._choices.get(place)
        if recorded is None:
            self._violated(f"{_shown(place)} is not in the profile: rejected before its launch")
        assert recorded is not None
        return recorded

    def _own_choices(self) -> dict[Key, dict[str, Scalar]]:
        """This rank's choices. Raises ProfileError, said in the report too, where the profile is not for this place."""
        assert self.profile is not None
        try:
            refuse_elsewhere(self.profile, tuners.device(), installed())
            return self.profile.choices(tuners.own_rank())
        except ProfileError as error:
            self.violations.append(str(error))
            self.write()
            raise

    def _violated(self, line: str) -> None:
        self.violations.append(line)
        self.write()
        raise ProfileViolation(f"tuner profile {(self.sha256 or '')[:12]}: {line}")

    def _own(self, tuner: Any) -> list[Any]:
        """The tuner's own configurations; what it selected before it was first seen is dropped."""
        if id(tuner) not in self._configs:
            self._configs[id(tuner)] = tuner, tuners.declared(tuner)
            if self.profile is not None:
                tuner.cache.clear()
        return self._configs[id(tuner)][1]

    def _chooses(self, tuner: Any) -> bool:
        """Whether it has several configurations, or one that was put in the place of those it was made with."""
        configs = self._own(tuner)
        return len(configs) > 1 or list(map(tuners.config_of, tuner.configs)) != list(map(tuners.config_of, configs))

    def _note(self, place: Key, config: dict[str, Scalar]) -> None:
        earlier = self.selections.get(place)
        if earlier == config:
            return
        if earlier is not None and self.profile is None:
            # Two tuners of one kernel: under a profile both are held to the first one's choice.
            line = f"{_shown(place)} ran with {shown(config)} too, recorded is {shown(earlier)}"
            if line not in self.violations:
                self.violations.append(line)
                self.write()
            return
        self.selections[place] = config
        self.write()

    # --- what is said of it ---------------------------------------------------------------------

    @property
    def mode(self) -> Literal["record", "pin", "release"]:
        """What is asked of the tuners."""
        if self.profile is None:
            return "record"
        return "release" if self.released or self.others else "pin"

    def selected(self, *, strays: bool = True) -> KernelsSelected:
        """What ran so far; with `strays`, which takes a walk through all modules, also what was selected beside it."""
        return KernelsSelected(
            rank=tuners.own_rank(),
            mode=self.mode,
            profile_sha256=self.sha256,
            benchmarks=self.benchmarks,
            selections=[
                KernelSelection(kernel=kernel, key=list(key), config=config)
                for (kernel, key), config in sorted(self.selections.items())
            ],
            violations=[*self.violations, *(self._strays() if strays and self.mode == "pin" else [])],
        )

    def _strays(self) -> list[str]:
        """Selections of tuners that were made beside `run`."""
        kind, found = tuners.tuner_class(), []
        for tuner in tuners.find(kind) if kind else ():
            if not self._chooses(tuner):
                continue
            for key, config in list(tuner.cache.items()):
                place = tuners.name_of(tuner), tuners.key_words(key)
                if (self._choices or {}).get(place) != tuners.config_of(config):
                    found.append(f"{_shown(place)} was selected beside the profile: {shown(tuners.config_of(config))}")
        return found

    def write(self, *, strays: bool = False) -> None:
        """Hand what ran so far to the folder that was named, if one was."""
        if self._folder is None or not (self.selections or self.violations):
            return
        report = TunerReport(
            begun_ns=self._begun_ns, device=tuners.device(), versions=installed(), selected=self.selected(strays=strays)
        )
        path = self._folder / report_name(os.getpid())
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(report))
        partial.replace(path)


def _run_with(
    inner: Run, tuner: Any, config: Any, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One configuration to choose from, and it is selected already: no version of ``run`` measures anything."""
    tuner.configs = [config]
    tuner.cache[key] = config
    return inner(tuner, *args, **kwargs)


def _run_released(inner: Run, tuner: Any, configs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Measured anew: what an earlier launch left on disk (``cache_results``) would be no choice."""
    tuner.configs, kept = configs, getattr(tuner, "cache_results", False)
    tuner.cache_results = False
    try:
        return inner(tuner, *args, **kwargs)
    finally:
        tuner.cache_results = kept


def _unfit() -> tuple[type[Exception], ...]:
    """What Triton raises where a configuration does not fit the device."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, CompileTimeAssertionFailure, PTXASError


def _shown(place: Key) -> str:
    kernel, key = place
    return f"{kernel} for key ({', '.join(key)})"


def forget_launched() -> None:
    """vLLM keeps selections of its Mamba kernels beside the tuner (layers/mamba/ops/triton_helpers.py)."""
    helpers = sys.modules.get("vllm.model_executor.layers.mamba.ops.triton_helpers")
    kept = getattr(helpers, "_autotuned_configs", None)  # not in every release, nor where Triton is off
    if kept is not None:
        kept.clear()
