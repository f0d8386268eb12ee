from __future__ import annotations

import shlex

import pytest

from samestate.lab.serving import Serving, read_serve_args
from samestate.models.fields import ConfigError
from samestate.plans.serve_args import SHORT_FLAGS


def read(text: str) -> Serving:
    return read_serve_args(shlex.split(text))


def test_what_is_not_said_is_none() -> None:
    assert read("") == Serving(said=frozenset())


def test_flags_are_read_in_every_spelling() -> None:
    spelled = read("--block-size=1792 --max_model_len 8k -tp 2 --mamba-ssm-cache-dtype float32 --dtype float16")
    assert (spelled.block_size, spelled.max_model_len, spelled.tensor_parallel) == (1792, 8000, 2)
    assert (spelled.state_dtype, spelled.dtype) == ("float32", "float16")
    assert spelled.said == {"block_size", "max_model_len", "tensor_parallel_size", "mamba_ssm_cache_dtype", "dtype"}
    assert read("--max-model-len 8K").max_model_len == 8192
    assert read("--max-model-len auto").max_model_len is None


def test_the_last_one_wins() -> None:
    assert read("--block-size 16 --block-size 32").block_size == 32
    assert read("--no-enable-prefix-caching --enable-prefix-caching").prefix_caching is True
    assert read("--enable-prefix-caching --no-enable-prefix-caching").prefix_caching is False


def test_drafts() -> None:
    drafting = read('--speculative-config \'{"method": "qwen3_next_mtp", "num_speculative_tokens": 3}\'')
    assert (drafting.drafts, drafting.drops_block) == (3, True)
    ngram = read('--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'')
    assert (ngram.drafts, ngram.drops_block) == (4, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--block-size big", "--block-size: 'big' is no whole number above 0"),
        ("--block-size 0", "--block-size: '0' is no whole number above 0"),
        ("--max-model-len long", "--max-model-len: 'long' is no length in tokens; say it as 8192 or 8k"),
        (f"--block-size 1{'0' * 5000}", "--block-size: is too large; say at most 1,000,000,000"),
        ("--max-model-len 0", "--max-model-len: must be 1 to"),
        (f"--max-model-len 1{'0' * 400}", "--max-model-len: must be 1 to"),
        ("--max-num-batched-tokens 0", "--max-num-batched-tokens: must be 1 to"),
        ("--enable-prefix-caching=false", "--enable-prefix-caching: takes no value; say .* or --no-enable-prefix-c"),
        ("--enable-prefix-caching False", "--enable-prefix-caching: takes no value"),
        ("--no-enable_chunked_prefill=0", "--enable-chunked-prefill: takes no value"),
        ("--gdn-prefill-backend banana", "--gdn-prefill-backend: 'banana' is none; use one of auto, triton, flashin"),
        ("-sc '{\"num_speculative_tokens\": -5}'", "--speculative-config: num_speculative_tokens must be a whole n"),
        ("-sc '{\"num_speculative_tokens\": 0}'", "--speculative-config: num_speculative_tokens must be a whole nu"),
        ("-sc '{\"num_speculative_tokens\": true}'", "--speculative-config: num_speculative_tokens must be a whole"),
        (f"-sc '{{\"num_speculative_tokens\": {10**12}}}'", "--speculative-config: num_speculative_tokens must be"),
        (f"-sc {'[' * 200_000}", "--speculative-config: is no JSON object"),
        ("--model m", "--serve-args: --model is said twice"),
        ("--config f.yaml", "--serve-args: --config hides settings in a file; write its flags out"),
        ("--speculative-config {", "--speculative-config: is no JSON object"),
        ("--no-enable-prefix-caching --mamba-cache-mode align", "--no-enable-prefix-caching: contradicts --mamba"),
        ("--no-enable-prefix-caching --prefix-match-unit 16", "--no-enable-prefix-caching: contradicts --prefix-m"),
        ("--no-enable-prefix-caching --kv-transfer-config '{}'", "--no-enable-prefix-caching: contradicts the conn"),
        ("--no-enable-prefix-caching --kv-offloading-size 4", "--no-enable-prefix-caching: contradicts the connec"),
    ],
)
def test_what_is_no_value_or_contradicts_is_one_line(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(arguments)


def test_what_does_not_contradict_is_let_through() -> None:
    assert read("--gdn-prefill-backend cutedsl").gdn_prefill == "cutedsl"
    assert read('-sc \'{"method": "mtp"}\'').drafts == 0
    assert read("--no-enable-prefix-caching").prefix_caching is False
    assert read("--enable-prefix-caching --mamba-cache-mode align --kv-transfer-config '{}'").connector


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("--block-sze 5", "--block-sze: is no whole flag; say --block-size"),
        ("--tensor-parallel 2", "--tensor-parallel: is no whole flag; say --tensor-parallel-size"),
        ("--no-enable-prefix-cachin", "--no-enable-prefix-cachin: is no whole flag; say --enable-prefix-caching"),
        ("-tp2", "-tp2: is no flag; say --tensor-parallel-size 2"),
    ],
)
def test_a_flag_that_vllm_would_not_take_is_not_passed_over(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert str(refused.value) == remedy


@pytest.mark.parametrize("short", [short for short in SHORT_FLAGS if len(short) > 1])
def test_a_short_flag_with_its_value_glued_on_is_no_flag_to_vllm(short: str) -> None:
    with pytest.raises(ConfigError, match=f"-{short}2: is no flag; say --{SHORT_FLAGS[short].replace('_', '-')} 2"):
        read(f"-{short}2")
    assert read("-O3") == read("-O3 -q8")._replace(said=read("-O3").said)


@pytest.mark.vllm
def test_the_short_flags_are_vllms_own() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from samestate.engines.children.server_child import moved

    parser = moved("make_arg_parser")(FlexibleArgumentParser(add_help=False))
    told = {short: action.dest for action in parser._actions for short in action.option_strings if short[:2] != "--"}
    # -O stands in no list: vLLM's parser rewrites it.
    assert {"O": SHORT_FLAGS["O"]} | {short.removeprefix("-"): name for short, name in told.items()} == SHORT_FLAGS


@pytest.mark.vllm
def test_no_flag_of_vllms_is_taken_for_a_misspelt_one() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    assert len(flags) > 100
    for flag in flags:
        try:
            read(flag)
        except ConfigError as error:
            assert "is no whole flag" not in str(error), flag
