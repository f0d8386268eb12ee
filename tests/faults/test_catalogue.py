"""Every fault is known by name, has a public precedent, names what must find it, and can be armed."""

from __future__ import annotations

import re

from samestate.checks.analyzers import ANALYZERS
from samestate.engines.sim import SimEngine
from samestate.faults.catalogue import FAULTS, Site, faults_on
from samestate.lab.exercises import exercise_of, exercises
from samestate.plans.drills import DRILLS, RANK_DRILLS

CHECKS = {check for analyzer in ANALYZERS.values() for check in analyzer.checks}


def test_every_fault_names_its_public_reports_its_check_and_its_finding() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
        assert fault.summary
        assert fault.reports or fault.site is Site.RECORDER
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in fault.reports), fault.reports
        assert fault.check in CHECKS
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", fault.code)
        assert fault.names
        assert fault.engines


def test_there_are_as_many_kinds_as_the_zoo_needs() -> None:
    assert len(FAULTS) >= 35
    assert len(faults_on("vllm")) >= 20


def test_the_simulated_engine_has_exactly_those_that_are_said_to_be_simulated() -> None:
    assert faults_on("sim").keys() == SimEngine.conducts.keys()


def test_every_live_fault_has_its_drill() -> None:
    assert faults_on("vllm").keys() == DRILLS.keys() | RANK_DRILLS.keys()


def test_every_simulated_fault_is_shown_by_an_exercise() -> None:
    ready = exercises()
    for name, fault in faults_on("sim").items():
        exercise = ready[exercise_of(name)]
        assert fault.check in ANALYZERS[exercise.plan.analyzer.id].checks, name
