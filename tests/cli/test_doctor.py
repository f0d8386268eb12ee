from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from samestate.engines.inquiry import InquiryError
from samestate.models.configs import shipped

Command = Callable[..., Result]


@pytest.mark.parametrize("model", sorted(shipped()))
def test_every_shipped_config_is_shown_without_an_engine(samestate: Command, model: str) -> None:
    result = samestate("doctor", "--model", model, "--platform", "cuda")
    assert result.exit_code == 0, result.output
    for word in ("smallest prompt", "external tier", "calculated", "native", "dictionary", "lmcache", "recurrent"):
        assert word in result.stdout
    assert result.stderr == ""


def test_the_table_says_c_and_pages(samestate: Command) -> None:
    shown = samestate("doctor", "--model", "glm-5.3-flash", "--platform", "cuda", "--tensor-parallel", "2").stdout
    assert "C                2,560 tokens" in shown
    assert "prompts below 2,561 tokens can never hit" in shown
    assert "2,621,440   2,170,880    17.2%" in shown


def test_json_has_the_same_facts_and_the_exit_code(samestate: Command) -> None:
    arguments = ("doctor", "--model", "qwen3-next-80b-a3b", "--platform", "cuda", "--json")
    result = samestate(*arguments, "--serve-args", "--max-model-len 512")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["exit_code"], report["interval"]) == (1, 1, 576)
    assert [finding["id"] for finding in report["findings"] if finding["state"] == "wrong"] == ["context"]
    assert report["pages"][0]["kind"] == "attention"
    assert json.loads(samestate(*arguments).stdout)["exit_code"] == 0


def test_an_unknown_architecture_exits_3(samestate: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery", "dtype": "bfloat16"}')
    result = samestate("doctor", "--model", tmp_path, "--platform", "cuda")
    assert result.exit_code == 3
    assert re.search(r"^C +unknown$", result.stdout, re.M)


def test_options_of_lmcache_reach_the_rules(samestate: Command) -> None:
    def exit_code(*options: str) -> int:
        lmcache = ("--connector", "lmcache", "--lmcache-version", "0.5.6")
        return samestate("doctor", "--model", "glm-5.3-flash", "--platform", "cuda", *lmcache, *options).exit_code

    groups = ("--connector-option", "separate_object_groups=on")
    assert exit_code(*groups, "--connector-option", "chunk_size=4608") == 0
    assert exit_code(*groups, "--connector-option", "chunk_size=4096") == 1
    assert exit_code("--connector-option", "chunk_size=4608") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mystery"], "--model: no folder mystery"),
        (["--serve-args", "'"], "--serve-args: No closing quotation; put the whole string in quotes"),
        (
            ["--lmcache-version", "0.5.6"],
            "--lmcache-version, --connector-option: are LMCache's; add --connector lmcache",
        ),
        (["--serve-args", "--no-enable-prefix-caching --mamba-cache-mode align"], "--no-enable-prefix-caching: contr"),
        (["--tensor-parallel", "3", "--platform", "cuda"], "--tensor-parallel: 3 ranks do not divide"),
        (["--tensor-parallel", "0"], "Invalid value for '--tensor-parallel'"),
        (["--serve-args", "--block-size 100"], "--block-size: 100 is no multiple of"),
        (["--tensor-parallel", "1000000000000"], "--tensor-parallel: 1000000000000 ranks; say 1 to 4,096"),
        (["--external-cache-bytes", "1" + "0" * 400], "Invalid value for '--external-cache-bytes'"),
        (["--connector", "lmcache", "--connector-option", "chunk_size=0"], "--connector-option: chunk_size must be"),
        (["--connector", "lmcache", "--connector-option", "chunk-size=-5"], "--connector-option: chunk_size must be"),
        (["--connector", "lmcache", "--connector-option", "chunk_size=on"], "--connector-option: chunk_size must be"),
    ],
)
def test_bad_input_is_one_line(samestate: Command, arguments: list[str], message: str) -> None:
    result = samestate("doctor", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"samestate: {message}")
    assert result.stderr.count("\n") == 1


def test_a_model_folder_without_a_config_is_one_line(samestate: Command, tmp_path: Path) -> None:
    result = samestate("doctor", "--model", tmp_path, "--json")
    assert result.exit_code == 2
    assert "holds no config.json" in json.loads(result.stdout)["error"]


def test_a_dead_vllm_is_one_line_with_its_log(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> None:
        raise InquiryError("vLLM died (exit code 1)", "its last words\n")

    monkeypatch.setattr("samestate.cli.doctor.examine", dies)
    result = samestate("doctor")
    assert result.exit_code == 2
    assert result.stderr == (
        "samestate: vLLM died (exit code 1); --platform cuda calculates instead of asking\n    its last words\n"
    )


def test_the_document_shows_what_is_printed(samestate: Command) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text()
    command, shown = re.findall(r"^```console\n\$ samestate (.*?)\n```\n\n```text\n(.*?)^```", text, re.M | re.S)[0]
    result = samestate(*shlex.split(command))
    assert result.exit_code == 0
    assert shown in result.stdout


def test_every_command_of_the_document_that_needs_no_engine_runs(samestate: Command) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text()
    commands = re.findall(r"^\$ samestate (doctor .*--platform cuda.*)$", text, re.M)
    assert len(commands) >= 4
    for command in commands:
        assert samestate(*shlex.split(command)).exit_code in (0, 1), command
