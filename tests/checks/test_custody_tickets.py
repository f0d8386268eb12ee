"""Tickets: closed by a later run that asks the same and passes, and by no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from checks.custody_run import Records, changed, good, sealed, smoke
from samestate.checks.custody_analyzer import judge_custody
from samestate.checks.custody_history import CustodyHistory
from samestate.checks.custody_probe import ran
from samestate.checks.custody_tickets import Later, Ticket, later_swap, tickets, unmet
from samestate.cli.commands import samestate
from samestate.evidence import custody_records as c
from samestate.evidence.canonical import sha256_hex

replace = msgspec.structs.replace
LATER = "2026-01-02T00:00:00.000Z"


def opened(folder: Path, records: list[c.CustodyRecord], **more: Any) -> dict[str, Ticket]:
    Records(records, **more).write(folder)
    made = tickets(judge_custody(folder), CustodyHistory.read(folder), "0" * 64)
    return {one.id: one for one in made}


def later(folder: Path, records: list[c.CustodyRecord], wall: str = LATER, **more: Any) -> Later:
    Records(records, wall=wall, **more).write(folder)
    return later_swap(judge_custody(folder), CustodyHistory.read(folder))


def regressed() -> list[c.CustodyRecord]:
    return changed(good(), c.SmokeDone, lambda rec: smoke("after", ok=False, error="no JSON"), last=True)


def other_request(records: list[c.CustodyRecord]) -> list[c.CustodyRecord]:
    return [replace(rec, request_sha256="7" * 64) if isinstance(rec, c.SmokeDone) else rec for rec in records]


def started(**update: Any) -> list[c.CustodyRecord]:
    return changed(good(), c.SwapStarted, lambda rec: replace(rec, **update))


def probed(verdict: str, **checks: str) -> list[c.CustodyRecord]:
    return changed(good(), c.ProbeEnded, lambda rec: replace(rec, verdict=verdict, checks=checks))


def test_a_swap_that_passes_opens_none(tmp_path: Path) -> None:
    assert opened(tmp_path, good()) == {}


def test_the_same_swap_later_and_passing_closes_it(tmp_path: Path) -> None:
    ticket = opened(tmp_path / "a", regressed())["custody-smokes.strict"]
    assert ticket.criteria[0].request_sha256 == "1" * 64
    assert unmet(ticket, later(tmp_path / "b", good())) == []


@pytest.mark.parametrize(
    ("records", "wall", "words"),
    [
        (regressed(), LATER, "fail, and must be pass"),
        (good(), "2026-01-01T00:00:00.000Z", "must begin after"),
        (good(), "2025-12-31T00:00:00.000Z", "must begin after"),
        (good(), "some day", "must begin after"),
        (started(swap="another"), LATER, "of swap another"),
        (other_request(good()), LATER, "sent another request"),
        (started(smokes=[]), LATER, "not among its own"),
    ],
    ids=["fails", "at once", "before", "no time", "another swap", "another request", "no smoke"],
)
def test_another_run_leaves_it_open(tmp_path: Path, records: list[c.CustodyRecord], wall: str, words: str) -> None:
    ticket = opened(tmp_path / "a", regressed())["custody-smokes.strict"]
    lacking = unmet(ticket, later(tmp_path / "b", records, wall))
    assert any(words in line for line in lacking), lacking


def test_other_artefacts_from_before_leave_it_open(tmp_path: Path) -> None:
    lost = changed(good(), c.SmokeDone, lambda rec: replace(rec, response=None))
    ticket = opened(tmp_path / "a", lost)["custody-required"]
    lacking = unmet(ticket, later(tmp_path / "b", started(required_before=["template"])))
    assert any("smoke.strict is not required from before" in line for line in lacking)
    assert unmet(ticket, later(tmp_path / "c", good())) == []


def test_a_probe_s_ticket_asks_for_what_was_open_and_not_for_what_did_not_come_up(tmp_path: Path) -> None:
    unknown = probed("unknown", answer="unknown", transfers="not_exercised", latency="excluded")
    ticket = opened(tmp_path / "a", unknown)["probe.reasoning-close"]
    assert [one.check for one in ticket.criteria] == ["verdict", "answer"]
    assert (ticket.criteria[0].engine, ticket.criteria[0].plan_sha256) == ("vllm", sha256_hex(b"{}"))
    closing = later(tmp_path / "b", probed("pass", answer="pass", transfers="not_exercised"))
    assert unmet(ticket, closing) == []
    assert unmet(ticket, later(tmp_path / "c", probed("fail", answer="pass")))


@pytest.mark.parametrize(
    ("more", "words"),
    [({"engine": "sim"}, "ran on engine sim, not on vllm"), ({"plan": b"[]"}, "another plan of that name")],
    ids=["simulation", "plan"],
)
def test_another_plan_or_engine_leaves_a_probe_s_ticket_open(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    ticket = opened(tmp_path / "a", probed("unknown", answer="unknown"))["probe.reasoning-close"]
    lacking = unmet(ticket, later(tmp_path / "b", good(), **more))
    assert any(words in line for line in lacking), lacking


def test_a_simulation_closes_no_probe_that_came_to_nothing(tmp_path: Path) -> None:
    nothing = changed(good(), c.ProbeEnded, lambda rec: replace(rec, archive=None, seal_sha256=None, verdict=None))
    ticket = opened(tmp_path / "a", nothing)["probe.reasoning-close"]
    assert ticket.criteria[0].engine is None
    assert unmet(ticket, later(tmp_path / "b", good())) == []
    assert unmet(ticket, later(tmp_path / "c", good(), engine="sim"))


def test_a_damaged_later_run_closes_nothing(tmp_path: Path) -> None:
    smokes = opened(tmp_path / "a", regressed())["custody-smokes.strict"]
    asked = opened(tmp_path / "b", probed("unknown", answer="unknown"))["probe.reasoning-close"]
    folder = Records(good(), wall=LATER).write(tmp_path / "c")
    (folder / c.JOURNAL).write_bytes((folder / c.JOURNAL).read_bytes().replace(b'"n":4', b'"n":5'))
    stream = next(folder.glob("probe/arms/*/client.jsonl"))
    stream.write_bytes(stream.read_bytes() + b"\n")
    run = later_swap(judge_custody(folder), CustodyHistory.read(folder))
    assert any("its journal is damaged" in line for line in unmet(smokes, run))
    assert unmet(asked, run)


def test_what_an_archive_is_a_run_of(tmp_path: Path) -> None:
    sealed(tmp_path / "probe", "sim", b"[1]")
    found = ran(tmp_path / "probe")
    assert (found.plan_sha256, found.engine) == (sha256_hex(b"[1]"), "sim")
    assert found.began is not None
    assert ran(tmp_path / "nothing") == (None, None, None)


def test_a_ticket_without_criteria_is_none(tmp_path: Path) -> None:
    ticket = opened(tmp_path / "a", regressed())["custody-smokes.strict"]
    later(tmp_path / "b", good())
    file = tmp_path / "ticket.json"
    file.write_text(json.dumps({**ticket.model_dump(mode="json"), "criteria": []}))
    result = CliRunner().invoke(samestate, ["ticket", "check", str(file), str(tmp_path / "b")])
    assert (result.exit_code, "criteria: " in result.output) == (2, True)
    file.write_text(ticket.model_dump_json())
    assert CliRunner().invoke(samestate, ["ticket", "check", str(file), str(tmp_path / "b")]).exit_code == 0
