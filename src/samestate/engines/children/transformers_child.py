"""A transformers model in a process of its own, driven over two pipes (see `protocol`).

``python -m samestate.engines.children.transformers_child DRIVER_PID READ_FD WRITE_FD``. Standard output and error are
the engine's log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from samestate.engines.children.commands import answer_commands
from samestate.engines.children.identity import own_process
from samestate.engines.children.lifetime import end_with
from samestate.engines.children.protocol import (
    AnyReply,
    Arm,
    Armed,
    Close,
    Closed,
    CloseStreams,
    Count,
    Counted,
    Encode,
    Encoded,
    Generate,
    Generated,
    Identified,
    Identify,
    Reset,
    Start,
    Started,
    StreamsClosed,
    WasReset,
)
from samestate.engines.children.transformers_cache import Layout, UnknownEntry
from samestate.engines.children.transformers_engine import Runner
from samestate.engines.children.transformers_faults import conduct
from samestate.engines.children.transformers_journal import Journal
from samestate.engines.children.transformers_layout import engine_groups, registration
from samestate.engines.children.transformers_model import (
    Model,
    make_deterministic,
    versions,
)
from samestate.evidence.controls import CONTROLS
from samestate.evidence.records import (
    Control,
    EngineStarted,
    EngineStopped,
    FaultArmed,
    Scalar,
    SchedulerConfigured,
)
from samestate.instruments import recorder
from samestate.instruments.digests import HostDigester

CONNECTOR = "SnapshotCache"
"""What keeps snapshots outside, as the records name it."""
DEFAULTS: dict[str, Scalar] = {
    "block_size": 196,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "attn_implementation": "eager",
    "num_threads": 1,
}
"""Settings, and what holds where a plan does not say them."""
PROBE_TOKENS = 8
"""Tokens that are run once, before any request, to see which entries the model's cache has."""


class SettingError(ValueError):
    """A setting that this engine has not, or cannot follow. One line."""


def settings_in_force(settings: dict[str, Scalar], serve_args: list[str]) -> dict[str, Any]:
    """Defaults, the plan's settings and ``--name value`` arguments, the last of which win. Raises `SettingError`."""
    words = [word for argument in serve_args for word in argument.split("=", 1)]
    said = {flag[2:].replace("-", "_"): value for flag, value in pairwise(words) if flag.startswith("--")}
    found: dict[str, Any] = {**DEFAULTS, **settings, **said}
    for name, value in found.items():
        if name not in DEFAULTS:
            known = ", ".join(DEFAULTS)
            raise SettingError(f"engine.settings.{name}: the transformers engine has only {known}; remove it")
        if isinstance(DEFAULTS[name], int):
            if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
                raise SettingError(f"engine.settings.{name}: must be a whole number above 0, not {value!r}")
            found[name] = int(value)
    return found


class Child:
    """One engine and its streams."""

    def start(self, command: Start) -> Started:
        recorder.drive()
        _require(command)
        settings = settings_in_force(command.settings, command.serve_args)
        deterministic = make_deterministic(settings["num_threads"])
        self._model = model = Model(command.model, settings["dtype"], settings["attn_implementation"])
        self._layout = layout = look_at(model, settings["block_size"])
        connected = command.connector != "none"
        audited = connected and command.audit_level != "off"
        reads_pages = audited and command.audit_level == "digest"
        folder = Path(command.stream_dir)
        self._stream = recorder.stream(folder, command.arm, "scheduler")
        worker = recorder.stream(folder, command.arm, "worker-0") if audited else None
        journal = Journal(layout, self._stream, worker, reads_pages=reads_pages)
        capacity = command.external_cache_bytes if connected else 0
        self._runner = Runner(model, layout, journal, capacity, count(1))
        self._most_tokens = min(settings["max_model_len"], model.most_tokens)
        self._eos = model.eos_token_ids(command.model)
        transfer = CONNECTOR if connected else None
        started = EngineStarted(
            engine="transformers",
            process=own_process(),
            versions=versions(),
            checkpoint_interval=layout.interval,
            max_model_len=self._most_tokens,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=transfer,
            audit_level=command.audit_level if audited else None,
            settings={
                "block_size": layout.interval,
                "model_class": model.name,
                "model_type": str(model.config.model_type),
                "dtype": model.dtype,
                "attn_implementation": model.attention,
                **deterministic,
                "kv_transfer_config": transfer,
                "kv_transfer_config.kv_role": "kv_both" if connected else None,
            },
            eos_token_ids=self._eos,
            controls=[Control(name=name, on=False, sha256=None) for name in CONTROLS],
        )
        self._stream.append(started)
        groups = engine_groups(layout)
        self._stream.append(
            SchedulerConfigured(block_size=layout.interval, saves_within_steps=False, engine_groups=groups)
        )
        if worker is not None:
            worker.append(registration(layout, HostDigester.algorithm if reads_pages else ""))
        self._set_fault(command.fault)
        recorder.flush()
        return Started(engine=started)

    def encode(self, command: Encode) -> Encoded:
        return Encoded(token_ids=list(self._model.tokenizer.encode(command.text, add_special_tokens=False)))

    def generate(self, command: Generate) -> Generated:
        for ask in command.asks:
            room = self._most_tokens - command.output_tokens
            if not 0 < len(ask.token_ids) <= room:
                raise SettingError(f"{len(ask.token_ids)} prompt tokens: max_model_len leaves room for 1 to {room}")
        eos = frozenset() if command.ignore_eos else frozenset(self._eos)
        return Generated(answers=[self._runner.run(ask, command.output_tokens, eos) for ask in command.asks])

    def identify(self, _: Identify) -> Identified:
        named = {f"version.{name}": version for name, version in versions().items()}
        return Identified(values={"process": own_process(), "model_class": self._model.name, **named})

    def reset(self, _: Reset) -> WasReset:
        self._runner.reset()
        return WasReset(local_reset=True, attempts=1)

    def count(self, _: Count) -> Counted:
        return Counted(values=dict(self._runner.counters), missing=[])

    def arm(self, command: Arm) -> Armed:
        self._set_fault(command.fault)
        return Armed()

    def close_streams(self, _: CloseStreams) -> StreamsClosed:
        recorder.close()
        return StreamsClosed()

    def close(self, _: Close) -> Closed:
        if hasattr(self, "_stream"):
            self._stream.append(EngineStopped())
        recorder.close()
        if problem := recorder.failure():
            raise OSError(problem)
        return Closed()

    def _set_fault(self, name: str | None) -> None:
        self._runner.conduct = conduct(name, self._layout)
        if name is not None:
            self._stream.append(FaultArmed(fault=name, parameters={}))


def _require(command: Start) -> None:
    """Raise `SettingError` for what a plan asks and this engine cannot do."""
    if command.audit_level not in ("off", "metadata", "digest"):
        raise SettingError(
            f"instruments.audit_level: {command.audit_level!r} is not for the transformers engine: it makes restored "
            "tensors anew, and there is nothing to poison; say 'digest'"
        )
    if command.save_delay_ms:
        raise SettingError("instruments.save_delay_ms: the transformers engine saves within its steps; make it 0")
    if command.repair or command.connector_options or command.service:
        raise SettingError("arms: the transformers engine has no connector's options, repairs or services; remove them")


def look_at(model: Model, interval: int) -> Layout:
    """The entries of the model's cache, seen after a few tokens. Raises `UnknownEntry`.

    What a step keeps anywhere else would not be in a snapshot: that is refused too.
    """
    before = model.kept_beside()
    cache = model.fresh_cache()
    with torch.no_grad():
        model.step([0] * PROBE_TOKENS, cache)
        after = model.kept_beside()
        model.step([0], cache)
    later = model.kept_beside()
    if changed := sorted(name for name in later if later[name] != after.get(name, later[name])):
        raise UnknownEntry(
            f"the model keeps {changed[0]} outside its cache and changes it in every step: it would be neither saved "
            "nor restored; choose another model"
        )
    if added := sorted((after.keys() | later.keys()) - before.keys()):
        raise UnknownEntry(f"a step leaves {added[0]} in the model, outside its cache; choose another model")
    return Layout(cache, interval, model.pool)


def serve(read_fd: int, write_fd: int) -> None:
    """Answer commands until `Close`, or until the driver is gone."""
    child = Child()
    handlers: dict[type, Callable[[Any], AnyReply]] = {
        Start: child.start,
        Encode: child.encode,
        Generate: child.generate,
        Identify: child.identify,
        Reset: child.reset,
        Count: child.count,
        Arm: child.arm,
        CloseStreams: child.close_streams,
        Close: child.close,
    }
    answer_commands(read_fd, write_fd, handlers)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    serve(int(sys.argv[2]), int(sys.argv[3]))
