"""``samestate faults``: every fault caught, nothing said of clean runs, and the page of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from samestate.cli import faults as command
from samestate.engines.sim import Conduct, SimEngine
from samestate.faults.catalogue import FAULTS

from .test_run import line

Command = Callable[..., Result]
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
PRECISE = 0.8
"""Share of the faults that must be named by place."""


def found(result: Result) -> dict[str, Any]:
    return {fault["fault"]: fault for fault in json.loads(result.stdout)["faults"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "zero-pag"), "--only: no fault 'zero-pag'; did you mean 'zero-page'?"),
        (("--only", "zero-suffix", "--engine", "vllm"), "--only: zero-suffix cannot be armed on vllm"),
        (("--only", "double-force"), "use `samestate run budget-grid --fault double-force`"),
        (("--engine", "vllm", "--clean", "3"), "--clean: on vLLM"),
    ],
)
def test_what_cannot_be_run_is_one_line(samestate: Command, arguments: tuple[str, ...], said: str) -> None:
    result = samestate("faults", *arguments)
    assert result.exit_code == 2
    assert said in line(result)


def test_a_fault_is_caught_by_name_and_place_beside_clean_runs(samestate: Command) -> None:
    result = samestate("faults", "--only", "stale-page", "--only", "silent-rank", "--clean", "2", "--json")
    assert result.exit_code == 0, result.output
    stale, silent = found(result)["stale-page"], found(result)["silent-rank"]
    assert (stale["check"], stale["code"]) == ("page-bytes", "stale_page")
    assert (stale["place"]["group"], stale["place"]["op"]) == (1, "N511.reload")
    assert stale["caught"] and stale["precise"] and stale["as_expected"] and not stale["only_tokens"]
    assert "prefix-identity" in stale["others"]
    assert (silent["check"], silent["place"]["rank"]) == ("ranks", 1)
    told = json.loads(result.stdout)
    assert (told["uncaught"], told["false_alarms"], told["clean_runs"]) == ([], [], 2)


def test_a_fault_that_only_tokens_show_is_half_caught(samestate: Command) -> None:
    result = samestate("faults", "--only", "last-token-tail")
    assert result.exit_code == 0
    assert "half" in result.stdout
    assert (
        "1 of 1 faults caught, 0 (0 %) by a check that names the place, 1 only as tokens that differ" in result.stdout
    )


def test_json_and_markdown_together_are_refused(samestate: Command) -> None:
    result = samestate("faults", "--only", "zero-page", "--json", "--markdown")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--json, --markdown: are two forms of one page; leave one of them out" in result.stderr


def test_a_fault_that_is_named_twice_runs_once(samestate: Command) -> None:
    result = samestate("faults", "--only", "zero-page", "--only", "zero-page", "--clean", "0", "--json")
    assert result.exit_code == 0, result.output
    assert [fault["fault"] for fault in json.loads(result.stdout)["faults"]] == ["zero-page"]


def test_an_uncaught_fault_is_exit_code_1(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SimEngine.conducts, "zero-page", Conduct)
    result = samestate("faults", "--only", "zero-page", "--clean", "0")
    assert result.exit_code == 1
    assert "NOT CAUGHT" in result.stdout
    assert "0 of 1 faults caught" in result.stdout


def test_a_place_that_is_not_the_one_meant_is_said(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimEngine.conducts["zero-page"], "acts_on", {"group": 2})
    result = samestate("faults", "--only", "zero-page", "--clean", "0", "--json")
    assert result.exit_code == 0
    fault = found(result)["zero-page"]
    assert fault["caught"] and not fault["precise"]


def test_a_false_alarm_is_exit_code_1(samestate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = command.simulate
    monkeypatch.setattr(command, "simulate", lambda plan, fault, *rest: clean(plan, fault or "stale-page", *rest))
    result = samestate("faults", "--only", "zero-page", "--clean", "1")
    assert result.exit_code == 1
    assert "1 false alarm in 1 clean run" in result.stdout
    assert "false alarm: boundaries, variation 0: fail" in result.stdout


def test_archives_are_kept_where_they_are_wanted(samestate: Command, tmp_path: Path) -> None:
    result = samestate("faults", "--only", "zero-page", "--clean", "0", "--out", tmp_path / "kept")
    assert result.exit_code == 0
    assert (tmp_path / "kept" / "zero-page" / "seal.json").is_file()
    assert samestate("check", tmp_path / "kept" / "zero-page").exit_code == 1
    again = samestate("faults", "--only", "zero-page", "--out", tmp_path / "kept")
    assert again.exit_code == 2


@pytest.mark.slow
@pytest.mark.deep
def test_the_page_is_what_the_command_makes_and_200_clean_runs_raise_no_alarm(samestate: Command) -> None:
    result = samestate("faults", "--clean", "200", "--markdown")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == PAGE.read_text(encoding="utf-8"), "samestate faults --clean 0 --markdown > docs/faults.md"


def test_on_the_page_every_fault_is_caught_as_the_catalogue_expects() -> None:
    rows = {row.split("`")[1]: row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")}
    assert rows.keys() == FAULTS.keys()
    for name, fault in FAULTS.items():
        assert f"`{fault.check}`: `{fault.code}`" in rows[name]
    half = sum("only that tokens differ" in row for row in rows.values())
    assert 1 - half / len(rows) >= PRECISE
