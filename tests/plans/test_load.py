from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import TempPathFactory

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import Scalar
from samestate.plans.load import (
    PlanError,
    freeze,
    load,
    lock_json,
    plan_json,
    plan_sha256,
    shipped,
    validate_checks,
    with_engine,
)

SHIPPED = files("samestate.plans").joinpath("shipped/boundary.yaml").read_text()
SOURCE = "ab" * 32


def refusal(path: Path, text: str | bytes) -> str:
    """The one line with which `text` is refused, without the file's name in front."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as caught:
        load(str(path))
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def test_shipped_plans_have_titles() -> None:
    assert shipped() == {
        "boundary": "Nine prompt lengths around two checkpoint boundaries, cold against reload",
        "boundary-instrumented": "The boundary matrix with page digests, poisoned loads and delayed saves",
    }


def test_the_shipped_plan_says_what_it_does_not_show() -> None:
    said = " ".join(load("boundary").not_shown)
    for word in ("serial", "synthetic", "64 tokens", "memory pressure", "concurrency", "performance"):
        assert word in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "dtype: bfloat16",
            "dtype: [1]",
            "engine.settings.dtype: must be text, a number, true, false or null, not [1]",
        ),
        ("format: 1", "format: 2", "format: must be 1, not 2"),
        ("  external_cache_bytes: 1073741824\n", "", "engine.external_cache_bytes: is missing; add it"),
        ("seed: 42", "seed: 42\nsead: 1", "sead: is not a field of a plan; remove it; did you mean 'seed'?"),
        ("[2C-1,", "[3584,", "lengths[0]: must be text, not 3584; put it in quotes"),
        ("[2C-1,", "[2D,", "lengths[0]: '2D' is no prompt length; write '2C-1', 'C', '3C+1' or a number of tokens"),
        ("[2C-1,", "[2C,", "lengths[1]: '2C' repeats '2C'; remove one"),
        ("reset, reload]", "relod]", "operations[3]: must be 'cold', 'interposer', 'reset' or 'reload', not 'relod'"),
        (
            "reset, reload]",
            "reload]",
            "operations[3]: 'reload' without 'reset' before it is a local hit; put 'reset' before it",
        ),
        ("connector: native", "connector: lmcache", "arms[1].connector: must be 'none' or 'native', not 'lmcache'"),
        (
            "connector: none",
            "connector: native",
            "arms[0].connector: the control reuses nothing external; make it 'none'",
        ),
        (
            "connector: native",
            "connector: none",
            "arms[1].connector: a candidate without a connector tests nothing; make it 'native'",
        ),
        ("name: candidate", "name: control", "arms: must be one 'control' and one 'candidate', each once"),
        ("name: boundary", "name: My Plan", "name: must match ^[a-z0-9][a-z0-9.-]*$, 'My Plan' does not"),
        ("temperature: 0", "temperature: 1", "temperature: must be 0, not 1"),
        ("output_tokens: 64", "output_tokens: 0", "output_tokens: must be above 0, not 0"),
        ("ignore_eos: true", "ignore_eos: 1", "ignore_eos: should be a valid boolean, not 1"),
        ("    seed: 0", "    model: x", "engine.settings.model: is set for each arm; remove it"),
        (
            "    seed: 0",
            "    seed: .inf",
            "engine.settings.seed: inf has no exact JSON form; use a finite, smaller number",
        ),
        (
            "seed: 42",
            "seed: 9007199254740993",
            "seed: 9007199254740993 has no exact JSON form; use a finite, smaller number",
        ),
        (
            "    seed: 0",
            "    seed: 6.0e+16",
            "engine.settings.seed: 6e+16 has no exact JSON form; use a finite, smaller number",
        ),
        ("  - coverage", "  - integrity", "required_checks[1]: 'integrity' is there twice; remove one"),
        ("[kv_transfer_config]", "[a, a]", "differing_settings[1]: 'a' is there twice; remove one"),
        ("format: 1", "format: 1\nformat: 1", "line 3: not valid YAML ('format' is there twice); correct it"),
        ("format: 1", "format: 1\n? [a]\n: b", "line 3: not valid YAML (a key must be text); correct it"),
        ("title: N", "title: x: N", "line 4: not valid YAML (mapping values are not allowed here); correct it"),
    ],
)
def test_a_mistake_names_field_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SHIPPED
    assert refusal(tmp_path / "mine.yaml", SHIPPED.replace(old, new, 1)) == message


@pytest.mark.parametrize("data", [b"\xff\x00", b"\x00", b"a: *x", b"a: !!python/object:os.system x", b"&a [*a]", b"{"])
def test_what_is_no_yaml_or_json_is_refused(tmp_path: Path, data: bytes) -> None:
    refusal(tmp_path / "mine.yaml", data)


@pytest.mark.parametrize("data", ["", "[]", "text"])
def test_a_plan_is_a_mapping(tmp_path: Path, data: str) -> None:
    assert refusal(tmp_path / "mine.yaml", data).startswith("the plan: must be a mapping (key: value), not ")


def test_an_empty_list_of_required_checks_is_refused(tmp_path: Path) -> None:
    plan = load("boundary").model_dump(mode="json") | {"required_checks": []}
    assert refusal(tmp_path / "mine.json", json.dumps(plan)).startswith("required_checks: is empty")


def test_an_unknown_name_lists_the_shipped_plans_and_the_nearest() -> None:
    with pytest.raises(PlanError) as caught:
        load("boundry")
    assert str(caught.value) == "no plan 'boundry'; did you mean 'boundary'?; shipped: boundary, boundary-instrumented"


@pytest.mark.parametrize("path", ["no/such/plan", "nosuch.yaml", "nosuch.lock"])
def test_a_missing_file_is_called_one(path: str) -> None:
    with pytest.raises(PlanError, match=r": no such file; check the path"):
        load(path)


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"is a folder; name a plan file or one of: boundary"):
        load(str(tmp_path))


def test_yaml_json_and_lock_are_the_same_plan(tmp_path: Path) -> None:
    plan = freeze(load("boundary"), SOURCE)
    (tmp_path / "plan.json").write_bytes(plan_json(plan))
    (tmp_path / "boundary.lock").write_bytes(lock_json(plan))
    assert load(str(tmp_path / "plan.json")) == plan
    assert load(str(tmp_path / "boundary.lock")) == plan
    assert plan_sha256(plan) == sha256_hex(plan_json(plan))
    assert plan_json(plan) == plan_json(load(str(tmp_path / "boundary.lock")))


scalars = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=5)
numbers = st.floats(-(2**53), 2**53, exclude_min=True, exclude_max=True)


@settings(max_examples=50)
@given(values=st.dictionaries(st.sampled_from(["a", "on", "1"]), scalars | numbers, max_size=3))
def test_a_lock_survives_the_way_through_a_file(values: dict[str, Scalar], tmp_path_factory: TempPathFactory) -> None:
    shipped_plan = load("boundary")
    plan = shipped_plan.model_copy(update={"engine": shipped_plan.engine.model_copy(update={"settings": values})})
    path = tmp_path_factory.mktemp("locks") / "boundary.lock"
    path.write_bytes(lock_json(freeze(plan, SOURCE)))
    assert plan_json(load(str(path))) == plan_json(freeze(plan, SOURCE))


def test_a_lock_with_an_impossible_number_is_refused(tmp_path: Path) -> None:
    text = lock_json(load("boundary")).decode().replace('"seed":42', '"seed":90071992547409930')
    assert refusal(tmp_path / "boundary.lock", text).startswith("seed: 90071992547409930 has no exact JSON form")


def test_a_key_said_twice_in_json_is_refused(tmp_path: Path) -> None:
    text = plan_json(load("boundary")).decode().replace('"seed":42', '"seed":42,"seed":43')
    assert refusal(tmp_path / "plan.json", text) == "seed: is there twice; remove one"


def test_a_changed_lock_is_refused(tmp_path: Path) -> None:
    lock = json.loads(lock_json(freeze(load("boundary"), SOURCE)))
    lock["plan"]["output_tokens"] = 8
    line = refusal(tmp_path / "boundary.lock", json.dumps(lock))
    assert line.startswith("plan_sha256: the plan was changed after it was frozen (hash ")


def test_a_changed_plan_of_an_archive_is_refused(tmp_path: Path) -> None:
    data = plan_json(freeze(load("boundary"), SOURCE))
    path = tmp_path / "plan.json"
    sums = tmp_path / "SHA256SUMS"
    path.write_bytes(data)
    sums.write_text(f"{sha256_hex(data)}  plan.json\n")
    assert load(str(path)).name == "boundary"
    path.write_bytes(data.replace(b'"seed":42', b'"seed":43'))
    with pytest.raises(PlanError, match="the plan was changed after it was frozen"):
        load(str(path))
    sums.write_text("")
    with pytest.raises(PlanError, match="was none"):
        load(str(path))


def test_freezing_pins_the_analyzer_once() -> None:
    plan = freeze(load("boundary"), SOURCE)
    assert plan.analyzer.source_sha256 == SOURCE
    assert freeze(plan, SOURCE) == plan
    with pytest.raises(
        PlanError, match=r"^analyzer.source_sha256: the plan is frozen for another source of boundary-v1"
    ):
        freeze(plan, "cd" * 32)


def test_required_checks_must_be_known() -> None:
    plan = load("boundary")
    validate_checks(plan, plan.required_checks)
    with pytest.raises(PlanError) as caught:
        validate_checks(plan, ["integrity", "coverages"])
    assert str(caught.value) == (
        "required_checks[1]: no check 'coverage'; did you mean 'coverages'?; known: integrity, coverages"
    )


def test_serve_arguments_win_over_settings_and_enter_the_plan() -> None:
    plan = load("boundary")
    flags = ["--block-size", "256", "--max_model_len=4096", "--no-enable-prefix-caching"]
    changed = with_engine(plan, model="external", serve_args=flags)
    assert changed.engine.model == "external"
    assert changed.engine.serve_args == flags
    dropped = set(plan.engine.settings) - set(changed.engine.settings)
    assert dropped == {"block_size", "max_model_len", "enable_prefix_caching"}
    assert plan_sha256(changed) != plan_sha256(plan)


@pytest.mark.parametrize(
    "flag", ["--model", "--kv-transfer-config", "--kv_transfer_config={}", "--kv-transfer-config.a"]
)
def test_serve_arguments_that_belong_to_the_arms_are_refused(flag: str) -> None:
    with pytest.raises(PlanError, match="is set for each arm; remove it"):
        with_engine(load("boundary"), model="external", serve_args=[flag, "x"])
