"""A vLLM engine in a process of its own, driven over two pipes (see `protocol`).

``python -m samestate.engines.children.vllm_child DRIVER_PID READ_FD WRITE_FD``. Scheduler and, for one rank, worker
run in this process, so that transfers can be watched and faults armed; or, under ``VLLM_ENABLE_V1_MULTIPROCESSING=1``,
the engine core has a process of its own, as vLLM's default is. Standard output and error are the engine's log.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from samestate.engines.children.environment import DEFAULTS, FIXED

os.environ.update({**DEFAULTS, **os.environ, **FIXED})

from vllm import SamplingParams, envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from samestate.engines.children.arguments import BadArguments, engine_arguments
from samestate.engines.children.commands import answer_commands
from samestate.engines.children.connectors import transfer_config
from samestate.engines.children.control_state import (
    attend,
    begin_capture,
    captured,
    controls_in_force,
    engine_repairs,
    environments,
    kernels_selected,
    repairs_in_force,
    storages,
    tracing,
)
from samestate.engines.children.cores import bind_ranks
from samestate.engines.children.describing import effective_settings, eos_token_ids, identity_values, versions
from samestate.engines.children.identity import own_process
from samestate.engines.children.lifetime import end_with
from samestate.engines.children.probing import probe
from samestate.engines.children.protocol import (
    Answer,
    AnyReply,
    Arm,
    Armed,
    Asked,
    Close,
    Closed,
    CloseStreams,
    Count,
    Counted,
    Encode,
    Encoded,
    Find,
    Generate,
    Generated,
    Identified,
    Identify,
    LevelSet,
    Probe,
    Probed,
    Reset,
    SetLevel,
    Start,
    Started,
    StreamsClosed,
    WasReset,
)
from samestate.evidence.controls import (
    CAPTURE_VARIABLE,
    PROFILE_VARIABLE,
    SCHEDULE_VARIABLE,
    STORAGES_VARIABLE,
)
from samestate.evidence.records import COUNTERS, EngineStarted, EngineStopped, FaultArmed
from samestate.instruments import live_faults, recorder
from samestate.instruments.connector import set_level
from samestate.instruments.layout import checkpoint_interval, configured_interval
from samestate.instruments.matched_schedule import match_schedule
from samestate.instruments.recorded_scheduler import record_in_core
from samestate.instruments.schedule import record_schedule
from samestate.models.recipe import load_settings

SETTLE_SECONDS = 30.0
"""Longest wait for saves after a request; what is still open then shows as never completed."""
SHUTDOWN_SECONDS = 20.0
"""For a core's own process to end, before vLLM kills it and its stream with it."""
RESET_SECONDS = 2.0
"""Longest wait for finished requests to give their blocks back, beyond what saves are held back."""


class Child:
    """One engine and its streams."""

    def __init__(self) -> None:
        self.engine: LLMEngine | None = None
        self.core: EngineCore | None = None
        """None where it runs in a process of its own."""

    # --- commands -------------------------------------------------------------------------------

    def start(self, command: Start) -> Started:
        recorder.drive()
        stream_dir = Path(command.stream_dir)
        # Saves that are held back must still be open when the next operation starts: that is what they test.
        self._save_delay_ms = command.save_delay_ms
        self._refuse_unheard()
        args = self._engine_args(command)
        bind_ranks(args.tensor_parallel_size)
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            self.stream = recorder.stream(stream_dir, command.arm, "frontend")
            self.engine = _engine_with_own_core(args, stream_dir, command.arm)
        else:
            self.stream = recorder.stream(stream_dir, command.arm, "scheduler")
            self.engine = LLMEngine.from_engine_args(args)
            self.core = self.engine.engine_core.engine_core
            record_schedule(self.core.scheduler, self.stream)
            for environment in environments(self.core.model_executor):
                self.stream.append(environment)
            self._digest_storages(self.core, "start")
            begin_capture(self.core.model_executor, self.engine.vllm_config)
            for applied in repairs_in_force(self.core.model_executor, command.repair):
                self.stream.append(applied)
        self._match_schedule()
        started = self._describe(command)
        self.stream.append(started)
        recorder.flush()
        return Started(engine=started)

    def encode(self, command: Encode) -> Encoded:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer: leave out --skip-tokenizer-init")
        return Encoded(token_ids=list(tokenizer.encode(command.text, add_special_tokens=False)))

    def find(self, command: Find) -> Encoded:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer: leave out --skip-tokenizer-init")
        return Encoded(token_ids=[id_ for id_ in range(len(tokenizer)) if tokenizer.decode([id_]) == command.text])

    def probe(self, command: Probe) -> Probed:
        return probe(self._engine, command)

    def identify(self, _: Identify) -> Identified:
        return Identified(values=identity_values(self._engine.vllm_config))

    def generate(self, command: Generate) -> Generated:
        params = SamplingParams(
            temperature=0.0,
            seed=command.seed,
            max_tokens=command.output_tokens,
            ignore_eos=command.ignore_eos,
            detokenize=False,
            logprobs=2,  # the chosen token and the runner-up
        )
        self._attend(command.asks[0].request if len(command.asks) == 1 else None)
        begun = time.monotonic()
        requests = [self._engine.add_request(ask.request, _prompt(ask), params) for ask in command.asks]
        last: dict[str, RequestOutput] = {}
        first_token_s: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first_token_s.setdefault(output.request_id, time.monotonic() - begun)
                last[output.request_id] = output
        self._attend(None)
        if not self._save_delay_ms:
            self._settle()
        asked = zip((ask.request for ask in command.asks), requests, strict=True)
        return Generated(answers=[answer(request, last[name], first_token_s[name]) for name, request in asked])

    def reset(self, _: Reset) -> WasReset:
        """A connector may hold a finished request's blocks until its saves are done: step the idle engine."""
        deadline = time.monotonic() + RESET_SECONDS + self._save_delay_ms / 1000
        attempts = 1
        while not self._engine.reset_prefix_cache(reset_running_requests=False, reset_connector=False):
            if time.monotonic() > deadline:
                return WasReset(local_reset=False, attempts=attempts)
            attempts += 1
            if self.core is not None:
                self.core.step_fn()
            time.sleep(0.02)
        return WasReset(local_reset=True, attempts=attempts)

    def count(self, _: Count) -> Counted:
        values: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            if metric.name in COUNTERS:
                values[metric.name] = values.get(metric.name, 0.0) + float(metric.value)
        return Counted(values=values, missing=[name for name in COUNTERS if name not in values])

    def arm(self, command: Arm) -> Armed:
        # What was begun under one fault ends under it.
        self._settle()
        executor = self.core.model_executor if self.core else None
        if isinstance(executor, MultiprocExecutor):
            live_faults.arm(command.fault, elsewhere=(KVConnectorRole.WORKER,))
            executor.collective_rpc(live_faults.arm_in_worker, args=(command.fault,))
        else:
            live_faults.arm(command.fault)
        self.stream.append(FaultArmed(fault=command.fault or "none", parameters={}))
        return Armed()

    def set_level(self, command: SetLevel) -> LevelSet:
        set_level(command.level)
        return LevelSet()

    def close_streams(self, _: CloseStreams) -> StreamsClosed:
        self._settle()
        self._observe_end()
        executor = self.core.model_executor if self.core else None
        if isinstance(executor, MultiprocExecutor):
            executor.collective_rpc(recorder.close_in_worker)
        recorder.close()
        return StreamsClosed()

    def close(self, _: Close) -> Closed:
        if self.engine is not None:
            self._settle()
            self._observe_end()
            self.engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)
            self.engine = None
            self.stream.append(EngineStopped())
        recorder.close()
        if problem := recorder.failure():
            raise OSError(problem)
        return Closed()

    # --- parts ----------------------------------------------------------------------------------

    @property
    def _engine(self) -> LLMEngine:
        assert self.engine is not None, "no engine was started"
        return self.engine

    def _observe_end(self) -> None:
        """Record what is recorded once, when all operations are over."""
        if self.core is None:
            return
        self._digest_storages(self.core, "end")
        for call in captured(self.core.model_executor):
            self.stream.append(call)
        for selected in kernels_selected(self.core.model_executor):
            self.stream.append(selected)

    def _settle(self) -> None:
        """Step the idle engine until no transfer is left, so that one operation's saves end in it."""
        if self.core is None:
            return
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            scheduler = self.core.scheduler
            connector = scheduler.connector
            # A finished request stays in `requests` while a connector still reads its blocks (LMCache).
            if connector is None or not (connector.has_pending_push_work() or scheduler.requests):
                return
            self.core.step_fn()
            time.sleep(0.0005)

    def _attend(self, op: str | None) -> None:
        """Tell the modules' trace, where there is one, which operation's steps come."""
        if self.core is not None and tracing():
            attend(self.core.model_executor, op)

    def _digest_storages(self, core: EngineCore, moment: Literal["start", "end"]) -> None:
        if os.environ.get(STORAGES_VARIABLE, "0") not in ("", "0"):
            for digested in storages(core.model_executor, moment):
                self.stream.append(digested)

    def _match_schedule(self) -> None:
        """Put the matched schedule on where the environment asks for it. Raises ValueError where it cannot be."""
        self._schedule_sha256: str | None = None
        mode = os.environ.get(SCHEDULE_VARIABLE) or "0"
        if self.core is not None and mode != "0":
            self._schedule_sha256 = match_schedule(self.core.scheduler, mode)

    def _refuse_unheard(self) -> None:
        """Raises ValueError for what was asked of a core that would never hear of it."""
        for name in (SCHEDULE_VARIABLE, STORAGES_VARIABLE, CAPTURE_VARIABLE):
            if envs.VLLM_ENABLE_V1_MULTIPROCESSING and os.environ.get(name, "0") not in ("", "0"):
                raise ValueError(f"{name}: needs the core in this process; leave it unset for this plan")
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING and (repairs := engine_repairs()):
            raise ValueError(f"repair {repairs[0]!r}: is read back where the core runs in this process; leave it out")

    def _engine_args(self, command: Start) -> EngineArgs:
        # Where a tuner profile is in force nothing else may tune, unless somebody says so: the record shows it.
        untuned = {"enable_flashinfer_autotune": False} if os.environ.get(PROFILE_VARIABLE) else {}
        defaults = untuned | load_settings(command.model) | command.settings
        try:
            args = EngineArgs.from_cli_args(engine_arguments(command.model, command.serve_args, defaults))
        except BadArguments as error:
            raise BadArguments(f"--serve-args: {error}") from None
        args.disable_log_stats = False
        args.kv_transfer_config = transfer_config(command)
        return args

    def _describe(self, command: Start) -> EngineStarted:
        config = self._engine.vllm_config
        parallel = config.parallel_config
        # With a core of its own: a plan's arms then have no connector (samestate.plans.load).
        connector = self.core.scheduler.connector if self.core else None
        groups = self.core.scheduler.kv_cache_config if self.core else None
        children = getattr(connector, "sub_connectors", None)
        return EngineStarted(
            engine="vllm",
            process=own_process(),
            versions=versions(),
            checkpoint_interval=checkpoint_interval(groups) if groups else configured_interval(config.cache_config),
            max_model_len=config.model_config.max_model_len,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_parallel=parallel.data_parallel_size,
            decode_context_parallel=parallel.decode_context_parallel_size,
            connector=type(children[0] if children else connector).__name__ if connector else None,
            audit_level=command.audit_level if connector else None,
            settings=effective_settings(config),
            eos_token_ids=eos_token_ids(self._engine.model_config, self._engine.tokenizer),
            controls=controls_in_force(command.repair, self._schedule_sha256),
        )


def _prompt(ask: Asked) -> TokensPrompt:
    prompt = TokensPrompt(prompt_token_ids=ask.token_ids)
    if ask.salt is not None:
        prompt["cache_salt"] = ask.salt
    return prompt


def answer(request: str, output: RequestOutput, first_token_s: float) -> Answer:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    sampled = zip(token_ids, completion.logprobs or (), strict=bool(completion.logprobs))
    steps = [(float(of_step[token].logprob), _runner_up(token, of_step)) for token, of_step in sampled]
    logprobs = [chosen for chosen, _ in steps]
    margins = [chosen - second for chosen, second in steps]
    return Answer(
        request=request,
        token_ids=token_ids,
        logprobs=_finite(logprobs),
        margins=_finite(margins),
        finish_reason=completion.finish_reason,
        cached_tokens=output.num_cached_tokens,
        first_token_s=first_token_s,
    )


def _runner_up(token: int, of_step: dict[int, Logprob]) -> float:
    """The largest log-probability but that of `token`; minus infinity where there is none."""
    return max((float(one.logprob) for other, one in of_step.items() if other != token), default=-math.inf)


def _finite(values: list[float]) -> list[float] | None:
    """JSON has no NaN, which is what a model makes of a page that was never written."""
    return values if values and all(map(math.isfinite, values)) else None


def _engine_with_own_core(args: EngineArgs, stream_dir: Path, arm: str) -> LLMEngine:
    """As `LLMEngine.from_engine_args`, and the core records its schedule. vLLM's own choices are made first."""
    config = args.create_engine_config()
    record_in_core(config.scheduler_config, stream_dir, arm)
    executor = Executor.get_class(config)
    return LLMEngine(config, executor, log_stats=not args.disable_log_stats, multiprocess_mode=True)


def serve(read_fd: int, write_fd: int) -> None:
    """Answer commands until `Close`, or until the driver is gone."""
    child = Child()
    handlers: dict[type, Callable[[Any], AnyReply]] = {
        Start: child.start,
        Encode: child.encode,
        Find: child.find,
        Generate: child.generate,
        Probe: child.probe,
        Identify: child.identify,
        Reset: child.reset,
        Count: child.count,
        Arm: child.arm,
        SetLevel: child.set_level,
        CloseStreams: child.close_streams,
        Close: child.close,
    }
    answer_commands(read_fd, write_fd, handlers)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    serve(int(sys.argv[2]), int(sys.argv[3]))
