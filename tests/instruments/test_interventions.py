"""What lies upon vLLM is told to every trace of the process, whichever came first, and to a forked one's anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

from samestate.evidence.record_base import PatchedFunction
from samestate.evidence.records import InterventionApplied
from samestate.instruments import interventions

FUNCTION = PatchedFunction(module="vllm.a", qualname="f", source_sha256="a" * 64)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interventions, "_applied", [])
    monkeypatch.setattr(interventions, "_watchers", [])


def test_a_trace_hears_of_what_was_before_it_and_of_what_comes() -> None:
    told: list[InterventionApplied] = []
    interventions.applied("one", [FUNCTION])
    interventions.watch(told.append)
    interventions.applied("two", [])
    assert told == [
        InterventionApplied(name="one", functions=[FUNCTION]),
        InterventionApplied(name="two", functions=[]),
    ]


def test_two_traces_of_a_process_hear_of_all() -> None:
    first: list[InterventionApplied] = []
    second: list[InterventionApplied] = []
    interventions.watch(first.append)
    interventions.applied("one", [FUNCTION])
    interventions.watch(second.append)
    assert first == second
    assert len(first) == 1


FORKED = """
import os
from samestate.instruments import interventions
parents = []
interventions.watch(lambda record: parents.append(record.name))
interventions.applied("patched", [])
if os.fork():
    os.wait()
else:
    own = []
    interventions.watch(lambda record: own.append(record.name))
    interventions.applied("later", [])
    print(own, parents, flush=True)
"""


def test_a_forked_process_begins_with_its_parent_s_patches_and_tells_its_own_trace() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['patched', 'later'] ['patched']", done.stderr
