from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import Result

from samestate.plans.load import load, plan_sha256, shipped

Command = Callable[..., Result]


def test_list(samestate: Command) -> None:
    lines = samestate("plan", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    assert "Nine prompt lengths" in lines[0]
    assert [plan["name"] for plan in json.loads(samestate("plan", "list", "--json").stdout)] == list(shipped())


def test_show_says_what_a_plan_takes(samestate: Command) -> None:
    shown = samestate("plan", "show", "boundary").stdout
    for fact in ("engine starts    2 ", "45 an arm: 36 generations, 9 resets", "2,304 an arm", "27 distinct", "5377"):
        assert fact in shown
    facts = json.loads(samestate("plan", "show", "boundary", "--json").stdout)
    assert facts["workload"]["engine_starts"] == 2
    assert facts["plan"]["analyzer"]["source_sha256"] is not None


def test_show_says_what_a_repeated_plan_takes(samestate: Command) -> None:
    shown = " ".join(samestate("plan", "show", "continuation").stdout.split())
    for fact in (
        "engine starts 4 (control: none, candidate: native)",
        "repetitions 2 (forward, forward), the same inputs in each: control, candidate, control-2, candidate-2",
        "50 an arm: 40 generations, 10 resets",
        "9,472 an arm, 64 to 256 a generation",
        "30 distinct, templates password-retrieval-zh, ledger-en, ordered-rules-zh, python-reasoning-en",
        "ledger: 2C-1, 2C, 3C, 256 tokens, template ledger-en",
    ):
        assert fact in shown
    assert "repetitions" not in samestate("plan", "show", "boundary").stdout.partition("required checks")[0]
    assert json.loads(samestate("plan", "show", "continuation", "--json").stdout)["workload"]["repetitions"] == 2


def test_show_says_which_engine_is_killed(samestate: Command) -> None:
    shown = " ".join(samestate("plan", "show", "boundary-killed").stdout.split())
    assert "(control: none, candidate: samestate-disk, killed, candidate-2: samestate-disk)" in shown


def test_a_lock_is_the_plan_that_was_shown(samestate: Command, tmp_path: Path) -> None:
    lock = tmp_path / "b.lock"
    frozen = samestate("plan", "freeze", "boundary", "--out", lock)
    shown = json.loads(samestate("plan", "show", lock, "--json").stdout)
    assert frozen.exit_code == 0
    assert plan_sha256(load(str(lock))) == shown["plan_sha256"]
    assert shown["plan_sha256"] in frozen.stdout
    assert samestate("plan", "freeze", "boundary", "--out", lock).exit_code == 0
    lock.write_text("mine")
    refused = samestate("plan", "freeze", "boundary", "--out", lock)
    assert (refused.exit_code, lock.read_text()) == (2, "mine")
    assert "exists and holds something else; name another file" in refused.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "- coverage",
            "- coverag",
            "required_checks[1]: no check 'coverag'; did you mean 'coverage'?; known: integrity",
        ),
        ("  - geometry\n", "", "required_checks: boundary-v1 decides no run without geometry; add what is missing"),
        ("boundary-v1", "boundary-v9", "analyzer.id: no analyzer 'boundary-v9'; did you mean 'boundary-v1'?"),
        ("template: password-retrieval-zh", "template: x", "template: no template 'x'; known: "),
        ("model: qwen3-next-tiny", "model: x", "engine.model: no model 'x'; known: "),
    ],
)
def test_names_that_mean_nothing(samestate: Command, tmp_path: Path, old: str, new: str, message: str) -> None:
    shipped = Path(load.__code__.co_filename).parent / "shipped" / "boundary.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(shipped.read_text().replace(old, new, 1))
    result = samestate("plan", "show", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"samestate: {message}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["show", "freeze"])
def test_a_template_of_a_series_that_does_not_exist_is_named(samestate: Command, tmp_path: Path, command: str) -> None:
    text = files("samestate.plans").joinpath("shipped/continuation.yaml").read_text()
    (tmp_path / "p.yaml").write_text(text.replace("template: ordered-rules-zh", "template: nope"))
    out = ("--out", tmp_path / "p.lock") if command == "freeze" else ()
    result = samestate("plan", command, tmp_path / "p.yaml", *out)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "series[1].template: no template 'nope'" in result.stderr
    assert not (tmp_path / "p.lock").exists()
