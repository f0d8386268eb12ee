from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import TempPathFactory

from plans.refusals import refusal
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import Scalar
from samestate.plans.files import MAX_BYTES
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


SHIPPED_NAMES = [
    "boundary",
    "boundary-instrumented",
    "boundary-killed",
    "boundary-restart",
    "boundary-snapshot",
    "budget-grid",
    "budget-sampled",
    "cacheability",
    "churn",
    "continuation",
    "conversation",
    "latency",
    "local-hit",
    "pressure",
    "reasoning-close",
    "shared-prefix",
    "shared-prefix-restart",
    "shared-prefix-steps",
]


def test_shipped_plans_have_titles() -> None:
    titles = shipped()
    assert list(titles) == SHIPPED_NAMES
    assert len(set(titles.values())) == len(SHIPPED_NAMES)


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
        (
            "reset, reload]",
            "relod]",
            "operations[3]: must be 'cold', 'interposer', 'reset', 'reload', 'repeat' or 'prompt', not 'relod'",
        ),
        (
            "reset, reload]",
            "reload]",
            "operations[3]: 'reload' without 'reset' before it is a local hit; put 'reset' before it",
        ),
        (
            "connector: native",
            "connector: redis",
            "arms[1].connector: must be 'none', 'native', 'dictionary', 'lmcache', 'samestate-memory', "
            "'samestate-disk', 'samestate-valkey' or 'samestate-object', not 'redis'",
        ),
        (
            "connector: native",
            "connector: native, repair: strict-prefix",
            "arms[1].repair: is for connector 'lmcache', not 'native'; remove it",
        ),
        (
            "connector: native",
            "connector: native, follows: control",
            "arms: must be one 'control' and one 'candidate', each once",
        ),
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
        (
            "external_cache_bytes: 1073741824",
            "external_cache_bytes: 0",
            "engine.external_cache_bytes: is 0, and the candidate's connector needs room; make it larger",
        ),
        (
            "external_cache_bytes: 1073741824",
            "external_cache_bytes: 1\n  core: own-process",
            "engine.core: transfers are watched in the engine's own process; make it 'here'",
        ),
        (
            "[cold, interposer, interposer, reset, reload]",
            "[cold, repeat]",
            "arms: 'repeat' tests the local cache alone; make it one 'candidate' with connector 'none'",
        ),
        ("name: boundary", "name: My Plan", "name: must match ^[a-z0-9][a-z0-9.-]*$, 'My Plan' does not"),
        ("temperature: 0", "temperature: 1", "temperature: must be 0, not 1; only a marker plan samples"),
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
        (
            "[kv_transfer_config, cache_config.kv_cache_layout]",
            "[a, a]",
            "differing_settings[1]: 'a' is there twice; remove one",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: [vllm/vllm/envs.py, envs.py]",
            "expected_patched[1]: 'envs.py' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: ['vllm/../a.py']",
            "expected_patched[0]: 'vllm/../a.py' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: ['vllm//a.py']",
            "expected_patched[0]: 'vllm//a.py' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: ['../a.py']",
            "expected_patched[0]: '../a.py' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: ['vllm/vllm/_C.so']",
            "expected_patched[0]: 'vllm/vllm/_C.so' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: ['vllm/a.py ']",
            "expected_patched[0]: 'vllm/a.py ' is no DISTRIBUTION/PATH; say it as vllm/vllm/envs.py",
        ),
        (
            "format: 1",
            "format: 1\nexpected_patched: [vllm/a.py, vllm/a.py]",
            "expected_patched[1]: 'vllm/a.py' is there twice; remove one",
        ),
        (
            "analyzer: {id: boundary-v1",
            "expected_patched: []\nanalyzer: {id: probe-v1",
            "expected_patched: nothing of a server's files is recorded; remove it",
        ),
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
    assert str(caught.value) == "no plan 'boundry'; did you mean 'boundary'?; shipped: " + ", ".join(SHIPPED_NAMES)


@pytest.mark.parametrize("path", ["no/such/plan", "nosuch.yaml", "nosuch.lock"])
def test_a_missing_file_is_called_one(path: str) -> None:
    with pytest.raises(PlanError, match=r": no such file; check the path"):
        load(path)


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"is a folder; name a plan file or one of: boundary"):
        load(str(tmp_path))


def test_yaml_json_and_lock_are_the_same_plan(tmp_path: Path) -> None:
    plan = freeze(load("boundary"), SOURCE)
    (tmp_path / "boundary.json").write_bytes(plan_json(load("boundary")))
    (tmp_path / "boundary.lock").write_bytes(lock_json(plan))
    assert load(str(tmp_path / "boundary.json")) == load("boundary")
    assert load(str(tmp_path / "boundary.lock")) == plan
    assert plan_sha256(plan) == sha256_hex(plan_json(plan))
    assert plan_json(plan) == plan_json(load(str(tmp_path / "boundary.lock")))


def test_a_list_of_patched_files_is_part_of_the_plan_and_goes_without_saying(tmp_path: Path) -> None:
    plain = load("boundary")
    assert b"expected_patched" not in plan_json(plain)
    hashes = {plan_sha256(plain)}
    for listed in ([], ["vllm/vllm/envs.py"]):
        plan = plain.model_copy(update={"expected_patched": listed})
        (tmp_path / "plan.json").write_bytes(plan_json(plan))
        assert load(str(tmp_path / "plan.json")) == plan
        hashes.add(plan_sha256(plan))
    assert len(hashes) == 3


texts = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), max_size=5)
scalars = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | texts
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


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    """`plan.json` of a sealed archive."""
    writer = ArchiveWriter.create(tmp_path / "archive", plan_json(freeze(load("boundary"), SOURCE)))
    writer.seal()
    return writer.root / "plan.json"


def test_the_plan_of_a_sealed_archive_is_a_frozen_plan(archived: Path) -> None:
    assert load(str(archived)) == freeze(load("boundary"), SOURCE)


def test_a_changed_plan_of_an_archive_is_refused(archived: Path) -> None:
    data, sums = archived.read_bytes(), archived.parent / "SHA256SUMS"
    changed = data.replace(b'"seed":42', b'"seed":43')
    assert refusal(archived, changed).startswith("the plan was changed after it was frozen (hash ")
    sums.write_text(sums.read_text().replace(sha256_hex(data), sha256_hex(changed)))
    assert refusal(archived, changed).startswith("its archive is damaged (SHA256SUMS: changed after sealing")
    sums.write_text("")
    assert "was none" in refusal(archived, data)


@pytest.mark.parametrize("gone", [["seal.json"], ["SHA256SUMS"], ["seal.json", "SHA256SUMS"]])
def test_a_frozen_plan_that_nothing_confirms_is_refused(archived: Path, gone: list[str]) -> None:
    for name in gone:
        (archived.parent / name).unlink()
    assert refusal(archived, archived.read_bytes()).startswith(UNCONFIRMED)


def test_a_frozen_plan_out_of_its_lock_or_archive_is_refused(archived: Path, tmp_path: Path) -> None:
    lock = json.loads(lock_json(freeze(load("boundary"), SOURCE)))
    assert refusal(tmp_path / "unwrapped.json", json.dumps(lock["plan"])).startswith(UNCONFIRMED)
    assert refusal(archived.parent / "copy.json", archived.read_bytes()).startswith(UNCONFIRMED)


UNCONFIRMED = "analyzer.source_sha256: a frozen plan counts only as its lock, or in its sealed archive; "


# --- what a file may hold ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a: &a [1]", "a: &a [x, x]\nb: [*a, *a]", "&a [*a]", "? &k a\n: 1", "<<: {a: &a 1}"])
def test_anchors_and_aliases_are_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path / "bomb.yaml", text).endswith(
        "not valid YAML (a plan has no anchors and aliases); correct it"
    )


@pytest.mark.parametrize("name", ["large.yaml", "large.json"])
def test_a_file_too_large_for_a_plan_is_not_parsed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{" + b" " * MAX_BYTES)
    with pytest.raises(PlanError, match="is larger than 256 KiB, so it is no plan"):
        load(str(tmp_path / name))


def test_a_device_without_end_is_no_plan() -> None:
    with pytest.raises(PlanError, match="is larger than 256 KiB"):
        load("/dev/zero")


@pytest.mark.parametrize(
    ("written", "code"),
    [("\\x1b[2J", "U+001B"), ("\\u202e", "U+202E"), ("\\ud800", "U+D800"), ("\\a", "U+0007"), ("\\u2028", "U+2028")],
)
def test_control_characters_are_refused(tmp_path: Path, written: str, code: str) -> None:
    text = SHIPPED.replace("title: N", f'title: "{written}"\nt: N', 1)
    assert refusal(tmp_path / "mine.yaml", text) == f"title: holds the control character {code}; remove it"


def test_a_control_character_in_a_key_or_a_list_is_refused_and_escaped(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path / "a.json", r'{"a": [{"\u001b[2J": 1}]}')
        == "a[0]: holds the control character U+001B; remove it"
    )
    assert refusal(tmp_path / "b.json", r'{"\u001b": 1, "\u001b": 2}') == r"\x1b: is there twice; remove one"


def test_line_breaks_and_other_scripts_are_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        SHIPPED.replace("title: N", 'title: "两\u3000行\\n\\t é N', 1).replace(
            "against reload\n", 'against reload"\n', 1
        )
    )
    assert load(str(path)).title.startswith("两\u3000行\n\t é Nine")


@pytest.mark.parametrize("digits", ["9" * 5000, "-" + "9" * 5000, "9" * 400])
@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
def test_an_integer_of_many_digits_is_one_short_line(tmp_path: Path, name: str, digits: str) -> None:
    plan = load("boundary").model_dump(mode="json")
    text = json.dumps(plan) if name.endswith("json") else SHIPPED
    for old in ('"seed": 42', "seed: 42"):
        text = text.replace(old, old.replace("42", digits))
    assert len(refusal(tmp_path / name, text)) < 200


@pytest.mark.parametrize(
    ("field", "value", "expected"), [("format", True, "integer"), ("temperature", False, "number")]
)
def test_true_is_no_number(tmp_path: Path, field: str, value: bool, expected: str) -> None:
    plan = load("boundary").model_dump(mode="json") | {field: value}
    assert refusal(tmp_path / "mine.json", json.dumps(plan)) == f"{field}: should be a valid {expected}, not {value}"
    lock = json.loads(lock_json(load("boundary"))) | {"format": True}
    assert refusal(tmp_path / "mine.lock", json.dumps(lock)) == "format: should be a valid integer, not True"


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
    validate_checks(plan, plan.required_checks, plan.required_checks)
    with pytest.raises(PlanError) as caught:
        validate_checks(plan, ["integrity", "coverages"], [])
    assert str(caught.value) == (
        "required_checks[1]: no check 'coverage'; did you mean 'coverages'?; known: integrity, coverages"
    )


def test_the_floor_must_be_required() -> None:
    plan = load("boundary").model_copy(update={"required_checks": ["integrity", "settings"]})
    with pytest.raises(PlanError) as caught:
        validate_checks(plan, ["integrity", "settings", "coverage", "geometry"], ["coverage", "integrity", "geometry"])
    assert str(caught.value) == (
        "required_checks: boundary-v1 decides no run without coverage, geometry; add what is missing"
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


@pytest.mark.parametrize("size", ["0", "-16", "true", "'1792'", "1792.0"])
def test_a_block_size_that_is_none_is_named(tmp_path: Path, size: str) -> None:
    assert "block_size: 1792" in SHIPPED
    said = refusal(tmp_path / "p.yaml", SHIPPED.replace("block_size: 1792", f"block_size: {size}"))
    assert said.startswith("engine.settings.block_size: must be a whole number above 0")


def test_a_block_size_of_an_arm_is_named(tmp_path: Path) -> None:
    text = files("samestate.plans").joinpath("shipped/pressure.yaml").read_text()
    spoiled = text.replace("num_gpu_blocks_override: 96", "block_size: 0")
    assert spoiled != text
    said = refusal(tmp_path / "p.yaml", spoiled)
    assert "arms[1].settings.block_size: must be a whole number above 0" in said


def test_only_an_engine_that_another_follows_is_killed(tmp_path: Path) -> None:
    plan = load("boundary-killed")
    assert [arm.ended for arm in plan.arms] == ["stopped", "killed", "stopped"]
    shipped_plan = files("samestate.plans").joinpath("shipped/boundary-killed.yaml").read_text()
    late = tmp_path / "late.yaml"
    late.write_text(shipped_plan.replace("service: kept}", "service: kept, ended: killed}"))
    with pytest.raises(PlanError, match=r"arms\[2\]\.ended: no arm follows this one, so a kill would test nothing"):
        load(str(late))
    markers = load("budget-sampled").model_dump(mode="json")
    markers["arms"][0]["ended"] = "killed"
    assert refusal(tmp_path / "markers.json", json.dumps(markers)).startswith("arms[0].ended: no arm follows this one")


def test_a_plan_in_which_nothing_is_killed_keeps_its_hash() -> None:
    assert b'"ended"' not in plan_json(load("boundary-restart"))
    assert plan_json(load("boundary-killed")).count(b'"ended":"killed"') == 1
