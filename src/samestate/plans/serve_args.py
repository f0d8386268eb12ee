"""What ``vllm serve`` arguments set, as far as a plan must know it: nothing may be set behind its back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from samestate.plans.errors import PlanError

_OF_THE_ARMS = "is set for each arm; remove it"
_REFUSED = {
    "model": _OF_THE_ARMS,
    "kv_transfer_config": _OF_THE_ARMS,
    "kv_connector": _OF_THE_ARMS,
    # To vLLM a connector by another name.
    "kv_offloading_size": _OF_THE_ARMS,
    "kv_offloading_backend": _OF_THE_ARMS,
    # Secrets: a plan is sealed, and read by others.
    "hf_token": "is a secret, and a plan keeps none; set it in the environment",
    "api_key": "is a secret, and a plan keeps none; leave it out",
    "config": "hides settings from the plan; write its flags out",
}
SHORT_FLAGS = {
    "O": "optimization_level",
    "ac": "attention_config",
    "asc": "api_server_count",
    "cc": "compilation_config",
    "dc": "diffusion_config",
    "dcp": "decode_context_parallel_size",
    "dp": "data_parallel_size",
    "dpa": "data_parallel_address",
    "dpb": "data_parallel_backend",
    "dpe": "data_parallel_external_lb",
    "dph": "data_parallel_hybrid_lb",
    "dpl": "data_parallel_size_local",
    "dpm": "data_parallel_multi_port_external_lb",
    "dpn": "data_parallel_rank",
    "dpp": "data_parallel_rpc_port",
    "dpr": "data_parallel_start_rank",
    "ep": "enable_expert_parallel",
    "n": "nnodes",
    "pcp": "prefill_context_parallel_size",
    "pp": "pipeline_parallel_size",
    "q": "quantization",
    "r": "node_rank",
    "sc": "speculative_config",
    "tp": "tensor_parallel_size",
}
"""vLLM's short flags, without their dash, by vLLM's own names of what they set."""
_RANKS = "tensor_parallel_size"
_LEAST_OF_RANKS = "te"
"""vLLM's parser takes the beginning of a flag for the flag; no other begins so."""
_ALIASES = {"device_memory_utilization": "gpu_memory_utilization"}


def settings_named(serve_args: Iterable[str]) -> set[str]:
    """The settings that the arguments name, by vLLM's own names. An abbreviation stays one."""
    return {setting for argument in serve_args if (setting := _setting(argument)) is not None}


def ranks_said(serve_args: Sequence[str]) -> list[str]:
    """What the arguments say of the number of ranks, in order; vLLM heeds the last. By any spelling of the flag:
    ``--tensor-parallel-size N`` or ``=N``, ``_`` for ``-``, its beginning, ``-tp``; empty where a value is missing."""
    found = []
    for index, argument in enumerate(serve_args):
        setting = _setting(argument) or ""
        if setting.startswith(_LEAST_OF_RANKS) and _RANKS.startswith(setting):
            _, equals, value = argument.partition("=")
            found.append(value if equals else "".join(serve_args[index + 1 : index + 2]))
    return found


def check_serve_args(serve_args: Iterable[str], settings: Collection[str]) -> None:
    """Raise `PlanError` for an argument that belongs to the arms, hides a setting or could change one of `settings`.

    vLLM's parser may take the beginning of a flag for the flag.
    """
    for argument in serve_args:
        if argument == "--":
            raise PlanError("engine.serve_args: '--' is no flag; remove it")
        if _begins_a_short_flag(argument):
            raise PlanError(f"engine.serve_args: {argument!r} may be read as a longer flag; write the flag out")
        setting = _setting(argument)
        if setting is None:
            continue
        if why := _REFUSED.get("kv_connector" if setting.startswith("kv_connector") else setting):
            raise PlanError(f"engine.serve_args: {_flag(setting)} {why}")
        if setting in settings:
            raise PlanError(f"engine.serve_args: {_flag(setting)} is in engine.settings too; remove one")
        for known in (*_REFUSED, *settings):
            if known.startswith(setting):
                raise PlanError(
                    f"engine.serve_args: {_flag(setting)} may be read as {_flag(known)}; write the flag out"
                )


def refused_settings() -> dict[str, str]:
    """Settings that no plan names, and why."""
    return {name: why for name, why in _REFUSED.items() if name != "config"}


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _setting(argument: str) -> str | None:
    """What an argument sets; None for a value, and for a short flag that is not known here."""
    name = _name(argument)
    if argument.startswith("--"):
        name = name.replace("-", "_").removeprefix("no_")
        return _ALIASES.get(name, name)
    if argument.startswith("-"):
        # A letter may be followed by its value: -O3.
        return SHORT_FLAGS.get(name) or SHORT_FLAGS.get(name[:1])
    return None


def _begins_a_short_flag(argument: str) -> bool:
    name = _name(argument)
    single = argument.startswith("-") and not argument.startswith("--")
    return single and name not in SHORT_FLAGS and any(name and short.startswith(name) for short in SHORT_FLAGS)


def _name(argument: str) -> str:
    return argument.lstrip("-").partition("=")[0].partition(".")[0]
