from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from samestate.cli.schema import SCHEMAS, schema_of
from samestate.plans.load import load, plan_json, shipped

jsonschema = pytest.importorskip("jsonschema")
Command = Callable[..., Result]
PUBLISHED = Path(__file__).parents[2] / "docs/schemas"


def faults(name: str, value: Any) -> list[str]:
    """What is wrong with `value` under a schema."""
    return [error.message for error in jsonschema.Draft202012Validator(schema_of(name)).iter_errors(value)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_is_published_as_it_is_printed(samestate: Command, name: str) -> None:
    """Else publish it again: ``samestate schema NAME > docs/schemas/NAME.schema.json``."""
    printed = samestate("schema", name)
    assert printed.exit_code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(printed.stdout))
    assert (PUBLISHED / f"{name}.schema.json").read_text() == printed.stdout


def test_nothing_else_is_published() -> None:
    assert {file.name for file in PUBLISHED.iterdir()} == {f"{name}.schema.json" for name in SCHEMAS}


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_plan_fits(name: str) -> None:
    assert faults("plan", json.loads(plan_json(load(name)))) == []


def test_every_line_of_a_run_fits(clean: Path) -> None:
    validator = jsonschema.Draft202012Validator(schema_of("records"))
    streams = sorted([clean / "attempts.jsonl", *clean.glob("arms/*/*.jsonl")])
    kinds: dict[str, Any] = {}
    for stream in streams:
        for line in stream.read_text().splitlines():
            said = json.loads(line)
            kinds.setdefault(said["rec"]["kind"], said)
    assert len(kinds) > 15
    for said in kinds.values():
        assert [error.message for error in validator.iter_errors(said)] == []


def test_the_kept_verdict_fits(clean: Path) -> None:
    assert faults("verdict", json.loads((clean / "verdicts/boundary-v1.json").read_bytes())) == []


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("plan", lambda plan: plan | {"unknown": 1}),
        ("plan", lambda plan: plan | {"output_tokens": 0}),
        ("records", lambda line: line | {"prev": "short"}),
        ("records", lambda line: line | {"rec": line["rec"] | {"kind": "nosuch"}}),
        ("verdict", lambda verdict: verdict | {"verdict": "good"}),
        ("verdict", lambda verdict: {key: verdict[key] for key in verdict if key != "scope"}),
    ],
)
def test_what_does_not_fit_is_found(clean: Path, name: str, spoil: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    values = {
        "plan": json.loads(plan_json(load("boundary"))),
        "records": json.loads((clean / "attempts.jsonl").read_text().splitlines()[0]),
        "verdict": json.loads((clean / "verdicts/boundary-v1.json").read_bytes()),
    }
    assert faults(name, copy.deepcopy(values[name])) == []
    assert faults(name, spoil(values[name])) != []


def test_another_name_is_one_line(samestate: Command) -> None:
    result = samestate("schema", "nosuch")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
