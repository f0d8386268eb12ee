"""The entry point that every vLLM process loads: idle unless asked, and whole or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from samestate.evidence.marker_records import TRACE_ARM, TRACE_CAPACITY, TRACE_FOLDER
from samestate.instruments.budget_recorder import CAPACITY, Remembered, asked
from samestate.instruments.budget_sources import BudgetRecorderError

OURS = "[f for f in sys.meta_path if 'samestate' in type(f).__module__]"


def child(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTATE_")}
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | environ, capture_output=True, text=True, check=False
    )


def test_vllm_finds_it() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["samestate_budget"] == "samestate.instruments.budget_plugin:register"


def test_unasked_it_imports_nothing_of_vllm_and_no_torch() -> None:
    program = (
        "import sys; from samestate.instruments.budget_plugin import register; register();"
        f"print([n for n in ('vllm', 'torch') if n in sys.modules], len({OURS}))"
    )
    assert child(program).stdout.strip() == "[] 0"
    assert child(program, **{TRACE_FOLDER: ""}).stdout.strip() == "[] 0"


def test_asked_it_waits_for_vllm_to_import_its_runners() -> None:
    program = (
        "import sys; from samestate.instruments.budget_plugin import register; register(); register();"
        f"print('vllm' in sys.modules, len({OURS}))"
    )
    done = child(program, **{TRACE_FOLDER: "/nowhere", TRACE_ARM: "candidate"})
    assert done.stdout.strip() == "False 4", done.stderr


def test_it_is_off_without_a_folder() -> None:
    assert asked({}) is None
    assert asked({TRACE_FOLDER: "", TRACE_ARM: "candidate"}) is None


def test_it_takes_folder_arm_and_capacity() -> None:
    trace = asked({TRACE_FOLDER: "/t", TRACE_ARM: "control"})
    assert trace is not None
    assert (str(trace.folder), trace.arm, trace.capacity) == ("/t", "control", CAPACITY)
    trace = asked({TRACE_FOLDER: "/t", TRACE_ARM: "control", TRACE_CAPACITY: "3"})
    assert trace is not None
    assert trace.capacity == 3


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({TRACE_FOLDER: "/t"}, TRACE_ARM),
        ({TRACE_FOLDER: "/t", TRACE_ARM: "a", TRACE_CAPACITY: "0"}, TRACE_CAPACITY),
        ({TRACE_FOLDER: "/t", TRACE_ARM: "a", TRACE_CAPACITY: "many"}, TRACE_CAPACITY),
    ],
)
def test_an_environment_that_is_not_whole_is_refused_in_one_line(environ: dict[str, str], field: str) -> None:
    with pytest.raises(BudgetRecorderError) as refused:
        asked(environ)
    assert str(refused.value).startswith(f"{field}:")
    assert "\n" not in str(refused.value)


def test_the_oldest_name_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestate.instruments.budget_recorder.REMEMBERED", 2)
    names = Remembered()
    assert [names.add(name) for name in ("a", "b", "a", "c")] == [True, True, False, True]
    assert ("a" in names, "b" in names, "c" in names) == (False, True, True)
