"""vLLM's OpenAI API server as a child process that says what it serves, and whose whole group ends with its driver.

``python -m samestate.engines.children.server_child SERVE PIPE``: a `protocol.Serve` as JSON, and the
descriptor of a pipe whose other end the driver alone holds. ``vllm serve`` itself asks for a distribution named
``vllm``, which a CPU build is not; so its API server is started as its own launcher does. Standard output and error are
the server's log.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from samestate.engines.children.environment import DEFAULTS, FIXED
from samestate.engines.children.identity import own_process
from samestate.engines.children.lifetime import end_session_with
from samestate.engines.children.protocol import Serve, Start
from samestate.evidence.records import Scalar
from samestate.models.recipe import load_settings

SHUTDOWN_SECONDS = 20
"""For the engine core to end in order; vLLM's own default kills it, and what it was writing."""

HOMES = {
    "cli_env_setup": ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
}
"""Modules of vLLM that hold a function, 0.33's first."""


def main() -> None:
    """Serve until told to stop."""
    serve = msgspec.json.decode(sys.argv[1], type=Serve)
    end_session_with(int(sys.argv[2]))
    os.environ.update({**DEFAULTS, **os.environ, **FIXED})

    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.logger import configure_logging_from_args

    from samestate.engines.children.cores import bind_ranks

    moved("cli_env_setup")()
    args = _arguments(serve)
    bind_ranks(args.tensor_parallel_size)
    if serve.core is not None:
        _watch_core(serve.core, args)
    configure_logging_from_args(args)
    moved("validate_parsed_serve_args")(args)
    build_and_serve = entry.build_and_serve

    async def describe_and_serve(engine_client: Any, *rest: Any, **options: Any) -> Any:
        _describe(serve, engine_client)
        return await build_and_serve(engine_client, *rest, **options)

    entry.build_and_serve = describe_and_serve
    uvloop.run(entry.run_server(args))
    _stopped(serve)


def moved(name: str) -> Any:
    """A function of vLLM's entry points, where 0.33 has it or else where 0.32 had it."""
    for module in HOMES[name]:
        if find_spec(module) is not None:
            return getattr(import_module(module), name)
    raise ImportError(f"{name}: this vLLM has it at none of {', '.join(HOMES[name])}; samestate knows 0.32 and 0.33")


def _arguments(serve: Serve) -> Namespace:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # A plan knows settings by their whole names; an abbreviated flag would go unnoticed.
    parser = moved("make_arg_parser")(FlexibleArgumentParser(prog="vllm serve", allow_abbrev=False))
    parser.set_defaults(**{"shutdown_timeout": SHUTDOWN_SECONDS, **load_settings(serve.model), **serve.settings})
    return parser.parse_args(
        [
            *("--model", serve.model, "--served-model-name", serve.served_name),
            *("--host", serve.host, "--port", str(serve.port)),
            *serve.serve_args,
        ]
    )


def _watch_core(core: Start, args: Namespace) -> None:
    """Connector and audit as in an engine that is driven directly, and every batch on record."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from samestate.engines.children.connectors import transfer_config
    from samestate.instruments.recorded_scheduler import record_in_core

    args.kv_transfer_config = transfer_config(core)
    args.enable_prompt_tokens_details = True  # the answer's own word for p
    create = AsyncEngineArgs.create_engine_config

    def recorded(self: Any, *rest: Any, **options: Any) -> Any:
        config = create(self, *rest, **options)
        record_in_core(config.scheduler_config, Path(core.stream_dir), core.arm)
        return config

    AsyncEngineArgs.create_engine_config = recorded


def _connector(serve: Serve, transfer: Any) -> str | None:
    """Class of the connector, inside the audit where there is one."""
    if transfer is None:
        return None
    inner = transfer.kv_connector_extra_config.get("connectors") if serve.core is not None else None
    return str(inner[0]["kv_connector"] if inner else transfer.kv_connector)


def _worker_cpus(config: Any) -> dict[str, Scalar]:
    """On CPU platforms, the cores of each rank, as vLLM gives them to its workers; ``0,1|2,3``."""
    from vllm.platforms import current_platform
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if not current_platform.is_cpu():
        return {}
    ranks = OMPProcessManager(config).cpu_lists
    return {"cpu_worker.cpus": "|".join(",".join(map(str, cpus)) for cpus in ranks)}


def _stopped(serve: Serve) -> None:
    """The server ended in order. Its core's process closed its own streams before."""
    if serve.stream_dir is None or serve.core is None:
        return
    from samestate.evidence.records import EngineStopped
    from samestate.instruments import recorder

    recorder.stream(Path(serve.stream_dir), serve.name, "frontend").append(EngineStopped())
    recorder.close()


def _describe(serve: Serve, engine_client: Any) -> None:
    """What was started, as a stream of the frontend's own: this process may be killed at any time."""
    if serve.stream_dir is None:
        return
    from samestate.engines.children.describing import effective_settings, eos_token_ids, versions
    from samestate.evidence.records import EngineStarted
    from samestate.instruments import recorder
    from samestate.instruments.layout import configured_interval

    config = engine_client.vllm_config
    parallel = config.parallel_config
    stream = recorder.stream(Path(serve.stream_dir), serve.name, "frontend")
    stream.append(
        EngineStarted(
            engine="vllm",
            process=own_process(),
            versions=versions(),
            checkpoint_interval=configured_interval(config.cache_config),
            max_model_len=config.model_config.max_model_len,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            data_parallel=parallel.data_parallel_size,
            decode_context_parallel=parallel.decode_context_parallel_size,
            connector=_connector(serve, config.kv_transfer_config),
            audit_level=serve.core.audit_level if serve.core and config.kv_transfer_config else None,
            settings=effective_settings(config) | (_worker_cpus(config) if serve.core else {}),
            eos_token_ids=eos_token_ids(config.model_config, engine_client.tokenizer),
        )
    )
    if serve.core is None:
        recorder.close()
    else:
        recorder.flush()  # its end is a record too


if __name__ == "__main__":
    main()
