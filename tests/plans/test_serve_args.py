"""What a plan makes of ``vllm serve`` arguments before an engine sees them."""

from __future__ import annotations

import pytest

from samestate.plans.load import PlanError, load, with_engine

BOUNDARY = load("boundary")


def settings_dropped(*serve_args: str) -> set[str]:
    """The settings of the plan that leave it for the arguments."""
    changed = with_engine(BOUNDARY, model="external", serve_args=list(serve_args))
    assert changed.engine.serve_args == list(serve_args)
    return set(BOUNDARY.engine.settings) - set(changed.engine.settings)


def refusal(*serve_args: str, settings: dict[str, int] | None = None) -> str:
    engine = BOUNDARY.engine.model_copy(update={"settings": settings or BOUNDARY.engine.settings})
    with pytest.raises(PlanError) as caught:
        with_engine(BOUNDARY.model_copy(update={"engine": engine}), model="external", serve_args=list(serve_args))
    return str(caught.value).removeprefix("engine.serve_args: ")


@pytest.mark.parametrize(
    "flag",
    [
        "--model",
        "--kv-transfer-config",
        "--kv_transfer_config={}",
        "--kv-transfer-config.kv_role",
        "--kv-connector",
        "--kv_connector_extra_config",
        "--kv-offloading-size=1",
    ],
)
def test_what_belongs_to_the_arms_is_refused(flag: str) -> None:
    assert refusal(flag, "x").endswith("is set for each arm; remove it")


@pytest.mark.parametrize(
    ("flag", "read_as"),
    [
        ("--mod", "--model"),
        ("--m=x", "--model"),
        ("--kv-transfer-conf", "--kv-transfer-config"),
        ("--kv_transfer", "--kv-transfer-config"),
        ("--kv-conn", "--kv-connector"),
        ("--confi", "--config"),
        ("--block-si", "--block-size"),
        ("--block_si=16", "--block-size"),
        ("--no-enable-prefix-cach", "--enable-prefix-caching"),
    ],
)
def test_the_beginning_of_a_flag_is_refused(flag: str, read_as: str) -> None:
    assert f"may be read as {read_as}; write the flag out" in refusal(flag, "16")


@pytest.mark.parametrize("flag", ["-t", "-d=2", "-p"])
def test_the_beginning_of_a_short_flag_is_refused(flag: str) -> None:
    assert refusal(flag, "2") == f"{flag!r} may be read as a longer flag; write the flag out"


def test_a_config_file_and_bare_dashes_are_refused() -> None:
    assert refusal("--config", "x.yaml") == "--config hides settings from the plan; write its flags out"
    assert refusal("--", "x") == "'--' is no flag; remove it"


@pytest.mark.parametrize(
    "flags",
    [
        ("--config-format", "hf"),
        ("--model-impl", "vllm"),
        ("--kv-cache-dtype", "auto"),
        ("--max-model-len", "-1"),
        ("--generation-config", "vllm"),
        ("-dpa", "127.0.0.1"),
    ],
)
def test_flags_that_only_look_alike_are_passed_on(flags: tuple[str, ...]) -> None:
    assert settings_dropped(*flags) <= {"max_model_len"}


@pytest.mark.parametrize(
    ("flags", "dropped"),
    [
        (("--block_size", "16"), "block_size"),
        (("--block_size=16",), "block_size"),
        (("--no-enable_prefix-caching",), "enable_prefix_caching"),
    ],
)
def test_underscores_are_hyphens(flags: tuple[str, ...], dropped: str) -> None:
    assert settings_dropped(*flags) == {dropped}


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("-tp", "2"), "tensor_parallel_size"),
        (("-tp=2",), "tensor_parallel_size"),
        (("-pp", "2"), "pipeline_parallel_size"),
        (("-dp", "2"), "data_parallel_size"),
        (("-dcp", "2"), "decode_context_parallel_size"),
        (("-qfp8",), "quantization"),
        (("-O3",), "optimization_level"),
        (("--device-memory-utilization", "0.5"), "gpu_memory_utilization"),
    ],
)
def test_a_short_flag_wins_over_its_setting(flags: tuple[str, ...], setting: str) -> None:
    engine = BOUNDARY.engine.model_copy(update={"settings": {setting: 1, "block_size": 16}})
    plan = BOUNDARY.model_copy(update={"engine": engine})
    assert with_engine(plan, model="external", serve_args=list(flags)).engine.settings == {"block_size": 16}


def test_a_plan_that_says_one_thing_twice_is_refused() -> None:
    engine = BOUNDARY.engine.model_copy(update={"settings": {"tensor_parallel_size": 1}, "serve_args": ["-tp", "2"]})
    with pytest.raises(PlanError, match=r"--tensor-parallel-size is in engine\.settings too; remove one"):
        with_engine(BOUNDARY.model_copy(update={"engine": engine}), model="external", serve_args=[])
