"""The `vllm serve` lines in examples/ are lines of vLLM's, and what they name is there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
PRINTER = "#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n"


def words(script: Path, tmp_path: Path) -> list[str]:
    """What the script hands to `vllm`, word by word, as a shell makes it."""
    stand_in = tmp_path / "vllm"
    stand_in.write_text(PRINTER)
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["sh", str(script), "--seed", "7"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "a model"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


def connectors(transfer: dict[str, Any]) -> list[dict[str, Any]]:
    inner = transfer["kv_connector_extra_config"].get("connectors", [])
    return [transfer, *(one for child in inner for one in connectors(child))]


def test_all_are_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert len(SCRIPTS) == 4
    assert all(f"[{script.name}]({script.name})" in listed for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_a_line_of_vllms_and_names_what_is_there(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from samestate.cache.connector import complete
    from samestate.cache.stores.place import Address
    from samestate.cache.tier import StoreTier

    serve, model, *flags = words(script, tmp_path)
    assert (serve, model) == ("serve", "a model")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    assert args.seed == 7, "further flags are passed on"
    *_, ours = connectors(json.loads(flags[flags.index("--kv-transfer-config") + 1]))
    for one in connectors(json.loads(flags[flags.index("--kv-transfer-config") + 1])):
        assert hasattr(importlib.import_module(one["kv_connector_module_path"]), one["kv_connector"])
    options = ours["kv_connector_extra_config"]
    complete(options)
    CachePolicyFactory.get_cache_policy_cls(options["eviction_policy"])
    for tier in options["secondary_tiers"]:
        assert SecondaryTierFactory.get_tier_class(tier) is StoreTier
        assert Address(tier["url"]).scheme in ("file", "valkey")


@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_of_a_line_starts_and_answers(tiny_model: Path, tmp_path: Path) -> None:
    _, _, *flags = words(EXAMPLES / "disk.sh", tmp_path)
    options = json.loads(flags[flags.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    (tier,) = options["secondary_tiers"]
    orders = {
        "model": str(tiny_model),
        "type": tier["type"],
        # As in the line, but for the place and the size of the memory tier.
        "url": tier["url"].replace("/var/cache/samestate", str(tmp_path / "pages")),
        "options": options | {"cpu_bytes_to_use": 1 << 26, "secondary_tiers": []},
        "requests": [(1, 700, None)],
    }
    orders["options"]["secondary_tiers"] = [{"type": tier["type"], "url": orders["url"]}]
    child = Path(__file__).with_name("engine_child.py")
    done = subprocess.run([sys.executable, str(child), json.dumps(orders)], capture_output=True, text=True, check=False)
    assert '{"answers": [[[' in done.stdout, done.stderr[-3000:]
    assert list((tmp_path / "pages").rglob("*.page"))
