"""Every fault that can be armed on vLLM, armed and disarmed in one running engine, and what the product says of each.

A fault is found by the check that the catalogue names, at the place that it names; nothing is said of what ran
while none was armed, but for what a fault left behind in the external cache. `test_fault_records` looks at the
records themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from instruments.conftest import Drilled
from samestate.checks.base import Finding, Verdict
from samestate.faults.catalogue import FAULTS, Named
from samestate.plans.drills import CLEAN, DRILLS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

C = 256
IN_A_SCENARIO = {"boundary": "provenance", "paired-equality": "cold-equality"}
"""Checks of a matrix, and those that ask the same of a scenario."""

DAMAGED = {"destination_differs", "content_not_computed", "tokens_differ"}
"""A load that brings bytes that no state ever had."""
FOREIGN = {"content_not_credited", "tokens_differ"}
"""A load that brings another state, whole."""

SHOWN: dict[str, set[str]] = {
    "full-lookup": {
        "allocation_disagrees",
        "cached_tokens_disagree",
        "counter_disagrees",
        "lookup_disagrees",
        "retained_lookup_boundary",
        "state_never_computed",
        *FOREIGN,
    },
    "unaligned-credit": {"boundary_not_credited", "state_never_computed", *FOREIGN},
    "block-round-up": {"boundary_not_credited", "state_never_computed", *FOREIGN},
    "boundary-dip": {"stored_not_served"},
    "past-shared-prefix": {"stale_page", *FOREIGN},
    "joint-truncation": {
        "missing_group",
        "missing_part",
        "missing_rows",
        "saved_uncomputed_state",
        "state_never_computed",
        "tokens_differ",
    },
    "attach-changes-lookup": {"state_never_computed", "tokens_differ"},
    "stored-never-served": {"stored_not_served"},
    "third-sighting": {"stored_not_served"},
    "sync-load": {"state_read_before_load", "tokens_differ"},
    "fresh-state": {"tokens_differ"},
    "wrong-grid": {"saved_uncomputed_state", *FOREIGN},
    "null-block-saved": {"null_block_saved"},
    "scratch-saved": {"saved_uncomputed_state", "source_overwritten"},
    "trimmed-key": {"saved_uncomputed_state", "source_overwritten"},
    "overwritten-before-read": {"reuse_before_completion", "source_overwritten"},
    "early-complete": {"early_complete", "stored_differs", "zero_page"},
    "unsaved-group": {"stored_differs", "zero_page"},
    "failed-put-visible": {"save_failed", "zero_page"},
    "duplicate-keeps-damage": {"stored_differs"},
    "stale-page": {"stale_page", *FOREIGN},
    "zero-page": {"zero_page", *DAMAGED},
    "missing-group": {"missing_group", "missing_part", "missing_rows", "tokens_differ"},
    "attention-only": {"missing_group", "missing_part", "missing_rows", "tokens_differ"},
    "missing-entry": {"sentinel_left", *DAMAGED},
    "second-reload": {"stale_page", *FOREIGN},
    "early-load-complete": {"sentinel_left", "not_reported", *DAMAGED},
    "swallowed-load-failure": {"failed_load_credited", "load_failed", "sentinel_left", *DAMAGED},
    # The two were in one step, as no control was: unequal tokens cannot be laid to reuse.
    "crossed-requests": {"content_not_credited", "geometry_mismatch", "stale_page"},
    "swapped-layers": DAMAGED,
    "halves-swapped": {"destination_differs", "tokens_differ"},
    "short-copy": {"sentinel_left", *DAMAGED},
    "neighbour-write": {"guard_changed"},
    "wide-column": {"sentinel_left", *DAMAGED},
    # Under either salt the tokens, and so the states, are the same.
    "salt-ignored": {"content_not_credited", "foreign_salt", "not_saved_here"},
    "short-hash": {"never_computed", "not_saved_here", *FOREIGN},
    "read-during-eviction": {"destination_differs", *FOREIGN},
    "orphan-attention": {"stored_not_served"},
    "reset-keeps-local": {"reset_left_local", "stale_local"},
    "hits-silent": {"counter_disagrees"},
    "hits-overcounted": {"counter_disagrees"},
    "queries-doubled": {"queries_disagree"},
}
"""All codes that a fault's own operations show, and no others."""
AFTERWARDS: dict[str, set[str]] = {
    "joint-truncation": {"content_unknown", "state_never_computed", "tokens_differ"},
    "null-block-saved": {"content_not_computed", "tokens_differ"},
    "scratch-saved": {"content_not_computed", "content_not_credited", "tokens_differ"},
    "trimmed-key": {"content_not_computed", "tokens_differ"},
    "unsaved-group": {"content_not_computed", "tokens_differ"},
    "failed-put-visible": {"content_not_computed", "failed_save_served", "not_saved_here", "tokens_differ"},
    "duplicate-keeps-damage": {"content_not_computed", "tokens_differ"},
}
"""What the same prompt's reload shows once the fault is disarmed: it left something in the external cache."""
BY_CHANCE = {"duplicate-keeps-damage": {"stored_not_served"}}
"""What an armed fault shows besides when its first save is over early: it finds nothing of what is stored."""
OF_THE_OUTPUT = {"eos_in_output", "vacuous"}
"""What a model makes of a damaged state may hold an end of sequence, or be one token throughout."""


class At(NamedTuple):
    """Where a fault is first named; what its code does not name is not compared."""

    op: str = "a.2"
    group: int = 0
    boundary: int = 2 * C


NAMED: dict[str, At] = {
    "boundary-dip": At(boundary=C),
    "past-shared-prefix": At("c.1"),
    "joint-truncation": At("b.1"),
    "attach-changes-lookup": At("b.1"),
    "wrong-grid": At("b.2"),
    "null-block-saved": At("a.1"),
    "scratch-saved": At("a.1"),
    "trimmed-key": At("a.1"),
    "overwritten-before-read": At("a.1"),
    "early-complete": At("a.1"),
    "unsaved-group": At("a.1"),
    "failed-put-visible": At(group=3),
    "duplicate-keeps-damage": At("a.1"),
    "second-reload": At("a.3"),
    "halves-swapped": At(group=3, boundary=C),
    "short-hash": At("b.1"),
}
"""Those that are not named in the first reload, at the first recurrent group and at [0, 2C)."""


def named(drilled: Drilled, fault: str) -> list[tuple[str, Finding]]:
    """The findings that the catalogue names for a fault, with their operations, in order."""
    told = FAULTS[fault]
    wanted = (IN_A_SCENARIO.get(told.check, told.check), told.code)
    return [
        (op, finding)
        for op in drilled.armed
        if drilled.owner(op) == fault
        for check, finding in drilled.findings.get(op, ())
        if (check, finding.code) == wanted
    ]


def place_names(finding: Finding) -> set[Named]:
    """The parts of a place that a finding fills."""
    return {name for name in Named if getattr(finding.place, name.value) is not None}


@pytest.mark.parametrize("fault", DRILLS)
def test_the_check_that_the_catalogue_names_finds_it_where_it_is(drilled: Drilled, fault: str) -> None:
    op, finding = named(drilled, fault)[0]
    at, names = NAMED.get(fault, At()), FAULTS[fault].names
    assert op == f"{fault}-{at.op}"
    assert finding.verdict is Verdict.FAIL
    assert names <= place_names(finding)
    assert (finding.place.request or "").startswith(op)
    assert finding.place.rank in (None, 0)
    if Named.GROUP in names:
        assert finding.place.group == at.group
    if Named.BOUNDARY in names:
        assert finding.place.boundary == at.boundary


@pytest.mark.parametrize("fault", DRILLS)
def test_a_fault_shows_in_its_own_operations_and_nowhere_else(drilled: Drilled, fault: str) -> None:
    def codes(*, armed: bool) -> set[str]:
        of_drill = drilled.operations(fault, armed=armed)
        return {finding.code for op in of_drill for _, finding in drilled.findings.get(op, ())} - OF_THE_OUTPUT

    assert codes(armed=True) - BY_CHANCE.get(fault, set()) == SHOWN[fault]
    assert codes(armed=False) == AFTERWARDS.get(fault, set())


@pytest.mark.parametrize("fault", DRILLS)
def test_after_each_fault_a_prompt_is_computed_and_reloaded_rightly(drilled: Drilled, fault: str) -> None:
    cold, reload = f"{fault}-{CLEAN}.1", f"{fault}-{CLEAN}.2"
    assert drilled.armed[cold] is drilled.armed[reload] is None
    assert drilled.findings.get(cold, []) == drilled.findings.get(reload, []) == []


def test_nothing_fails_that_belongs_to_no_operation(drilled: Drilled) -> None:
    """A save that failed is named by its number alone, and which checks did not come up."""
    assert {(check, one.code) for check, one in drilled.findings[""] if one.verdict is not Verdict.NOT_EXERCISED} == {
        ("transfers", "save_failed")
    }


def test_the_run_itself_is_sound(drilled: Drilled) -> None:
    """Faults are in the engine, not in the archive: nothing planned is missing, or went another way than planned."""
    for check in ("integrity", "coverage", "plan-identity", "settings", "preemptions", "layout"):
        assert drilled.results[check].verdict is Verdict.PASS, check
    assert drilled.results["poison"].examined > len(DRILLS)
