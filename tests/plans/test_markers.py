"""Marker plans: what they must say, what is refused, and what a tokenizer adds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from samestate.plans.load import PlanError, load, plan_json
from samestate.plans.markers import address, resolve_markers, temperature, with_repair
from samestate.plans.model import Plan
from samestate.plans.operations import cases, operation_ids, planned_inputs, workload

from .refusals import refusal

SHIPPED = (Path(__file__).parents[2] / "src/samestate/plans/shipped/reasoning-close.yaml").read_text(encoding="utf-8")
NAMES = ("reasoning-close", "budget-grid", "budget-sampled")


@pytest.fixture
def plan() -> Plan:
    return load("reasoning-close")


def letters(text: str) -> list[int]:
    return {"<think>": [3], "</think>": [4]}.get(text, [100 + ord(letter) for letter in text])


def test_study_b_is_what_is_planned(plan: Plan) -> None:
    assert plan.markers is not None
    (probe,) = plan.markers.probes
    assert (probe.budget, probe.max_tokens, probe.effort, probe.top_p) == (64, 512, "max", 0.95)
    assert (temperature(plan, probe), plan.markers.retries, plan.markers.allowed_probes) == (0.6, 0, 1)
    assert plan.markers.gates == ["selftest", "sampling"]
    assert (address(plan.markers), plan.allowed_attempts) == ("/v1/chat/completions", 1)


def test_a_probe_without_a_temperature_has_the_plans(plan: Plan) -> None:
    assert plan.markers is not None
    probe = plan.markers.probes[0].model_copy(update={"temperature": None})
    assert temperature(plan.model_copy(update={"temperature": 0.3}), probe) == 0.3


@pytest.mark.parametrize("name", NAMES)
def test_every_probe_is_counted(name: str) -> None:
    plan = load(name)
    assert plan.markers is not None
    probes = len(plan.markers.probes)
    work = workload(plan)
    assert (work.engine_starts, work.generations, work.resets) == (len(plan.arms), probes * len(plan.arms), 0)
    assert operation_ids(plan, 128) == [probe.name for probe in plan.markers.probes]
    assert cases(plan, 128, plan.arms[0].name) == planned_inputs(plan, 128) == []


def test_other_plans_do_not_say_that_they_have_none() -> None:
    assert not {"markers", "speculation"} & set(json.loads(plan_json(load("boundary"))))
    assert b"speculation" not in plan_json(load("boundary"))


def test_ids_are_the_tokenizers(plan: Plan) -> None:
    assert plan.markers is not None
    probe = plan.markers.probes[0].model_copy(update={"stop": ["a", "b"]})
    asked = plan.model_copy(update={"markers": plan.markers.model_copy(update={"probes": [probe]})})
    found = resolve_markers(asked, letters)
    assert (found.start_ids, found.end_ids) == ([3], [4])
    assert found.stop_ids == {"probe": [100 + ord("a"), 100 + ord("b")]}


@pytest.mark.parametrize(
    ("encode", "stop", "line"),
    [
        (lambda text: [], "a", "markers.start: '<think>' has no token in this tokenizer; name another"),
        (
            letters,
            "ab",
            "markers.probes[0].stop[0]: 'ab' is 2 tokens in this tokenizer, not one; name another",
        ),
    ],
)
def test_a_tokenizer_may_not_have_them(plan: Plan, encode: Callable[[str], list[int]], stop: str, line: str) -> None:
    assert plan.markers is not None
    probe = plan.markers.probes[0].model_copy(update={"stop": [stop]})
    asked = plan.model_copy(update={"markers": plan.markers.model_copy(update={"probes": [probe]})})
    with pytest.raises(PlanError) as refused:
        resolve_markers(asked, encode)
    assert str(refused.value) == line


def test_repairs_are_chosen(plan: Plan) -> None:
    assert plan.markers is not None
    assert plan.markers.repairs == ["cpu-draft-rows"]
    without = with_repair(plan, "none")
    assert without.markers is not None
    assert without.markers.repairs == []
    assert with_repair(without, "cpu-draft-rows") == plan
    with pytest.raises(PlanError, match=r"no repair 'cpu-draft'; did you mean 'cpu-draft-rows'\?"):
        with_repair(plan, "cpu-draft")
    with pytest.raises(PlanError, match="has no markers"):
        with_repair(load("boundary"), "none")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "template: none",
            "template: ledger-en",
            "template: 'ledger-en', and a marker plan's probes have their own text; make it 'none'",
        ),
        ("  end: </think>", "  end: <think>", "markers.end: is '<think>' as start is; name another"),
        (
            "  end: </think>",
            "  end: ''",
            "markers.start, markers.end: one is empty, so nothing marks reasoning; say both",
        ),
        ("guard: split-top-p", "guard: other", "markers.guard: no guard 'other'; known: split-top-p"),
        (
            "repairs: [cpu-draft-rows]",
            "repairs: [x]",
            "markers.repairs[0]: no repair 'x'; known: cpu-draft-rows",
        ),
        ("retries: 0", "retries: 1", "markers.retries: must be 0, not 1"),
        (
            "allowed_probes: 1",
            "allowed_probes: 2",
            "markers.allowed_probes: is 2 and an arm has 1 probes; nothing is tried again, so make them equal",
        ),
        (
            "max_tokens: 512",
            "max_tokens: 513",
            "markers.probes[0].max_tokens: the plan allows 512 (output_tokens); ask for fewer",
        ),
        (
            "budget: 64",
            "budget: null",
            "markers.probes: none has a budget, so no marker could be forced; give one a budget",
        ),
        ("top_p: 0.95", "top_p: 0", "markers.probes[0].top_p: must be above 0.0, not 0"),
        ('text: "close-never What are the sums?"', 'text: ""', "markers.probes[0].text: is empty; say what is asked"),
        ("effort: max", "stop: [a, a]", "markers.probes[0].stop: names a text twice; remove one"),
        (
            "connector: none",
            "connector: native",
            "arms[0].connector: markers are asked of the engine alone; make it 'none'",
        ),
        (
            ", draft_model: qwen3-tiny-draft",
            "",
            "arms[0].speculation.draft_model: comes with method 'draft_model', and only with it",
        ),
        (
            "method: draft_model,",
            "method: ngram,",
            "arms[0].speculation.draft_model: comes with method 'draft_model', and only with it",
        ),
        ("drafts: 3,", "drafts: 3, lookup: 2,", "arms[0].speculation.lookup: is for method 'ngram'; remove it"),
        (
            "    connector: none",
            "    connector: none\n    settings: {speculative_config: '{}'}",
            "arms[0].settings.speculative_config: is made of arms[0].speculation; write it there",
        ),
        (
            "external_cache_bytes: 0",
            "external_cache_bytes: 1",
            "engine.external_cache_bytes: no arm has an external cache; make it 0",
        ),
        (
            "route: chat",
            "route: engine",
            "markers.probes[0].effort: belongs to a chat template, and this route has none; remove it",
        ),
        (
            "template: none",
            "template: none\nlengths: [1C]",
            "markers: beside a matrix or a scenario; a plan is one of the three",
        ),
        (
            "template: none",
            "template: none\nrepetitions: [forward, forward]",
            "repetitions: only a matrix is repeated; remove them and run the scenario again",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert SHIPPED.count(old) >= 1
    assert refusal(tmp_path / "mine.yaml", SHIPPED.replace(old, new, 1)) == line


def test_an_effort_is_one_of_the_apis(tmp_path: Path) -> None:
    told = refusal(tmp_path / "mine.yaml", SHIPPED.replace("effort: max", "effort: most"))
    assert told.startswith("markers.probes[0].effort: must be 'none', 'minimal'")


def test_two_probes_or_arms_of_one_name(tmp_path: Path) -> None:
    tree = load("budget-sampled").model_dump(mode="json")
    tree["markers"]["probes"][1]["name"] = tree["markers"]["probes"][0]["name"]
    assert refusal(tmp_path / "mine.json", json.dumps(tree)).startswith("markers.probes[1].name: 'never-b5' is taken")
    tree = load("budget-sampled").model_dump(mode="json")
    tree["arms"][1]["name"] = tree["arms"][0]["name"]
    assert refusal(tmp_path / "mine.json", json.dumps(tree)) == "arms: 'sampled-none' is there twice; rename one"


@pytest.mark.parametrize(
    ("plan", "check", "line"),
    [
        ("reasoning-close", "gates", "required_checks: lacks 'gates', and markers.gates names some; add it"),
        ("budget-sampled", "speculation", "required_checks: lacks 'speculation', and an arm has drafts; add it"),
    ],
)
def test_what_a_plan_has_must_decide(tmp_path: Path, plan: str, check: str, line: str) -> None:
    tree = load(plan).model_dump(mode="json")
    tree["required_checks"].remove(check)
    assert refusal(tmp_path / "mine.json", json.dumps(tree)) == line


@pytest.mark.parametrize("field", ["gates", "repairs"])
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, field: str) -> None:
    tree = load("reasoning-close").model_dump(mode="json")
    tree["markers"][field] *= 2
    assert refusal(tmp_path / "mine.json", json.dumps(tree)) == f"markers.{field}: names one twice; remove it"


def test_a_marker_plan_without_markers_is_told_so(tmp_path: Path) -> None:
    tree = load("budget-sampled").model_dump(mode="json")
    del tree["markers"]
    assert refusal(tmp_path / "mine.json", json.dumps(tree)) == (
        "markers: is missing, and marker-post-stop-v1 judges marker plans; add it"
    )


def test_speculation_and_sampling_belong_to_marker_plans(tmp_path: Path) -> None:
    tree = load("boundary").model_dump(mode="json")
    tree["arms"][0]["speculation"] = {"method": "ngram", "drafts": 3}
    assert refusal(tmp_path / "mine.json", json.dumps(tree)) == (
        "arms[0].speculation: belongs to a marker plan; say it in engine.settings, or remove it"
    )
