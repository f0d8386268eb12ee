"""SIGKILL at every step of the journal: the incumbent comes back, exactly, and the candidate never stays."""

from __future__ import annotations

import signal
from itertools import count
from pathlib import Path

import pytest

from custody.dying import swap_and_die
from custody.house import House
from samestate.checks.base import Verdict
from samestate.custody.haproxy import HAProxy
from samestate.custody.spec_file import load_spec
from samestate.custody.supervisors import supervisor
from samestate.engines.processes import identity
from samestate.evidence.custody_records import Step, StepBegan

NUMBER = count()
MOMENTS = [
    *((step, "began") for step in Step),
    *((step, "ended") for step in (Step.STOP, Step.CANDIDATE_START, Step.RESTORE, Step.DONE)),
    (Step.PROBE, "torn"),
]


@pytest.mark.parametrize(("step", "when"), MOMENTS, ids=str)
def test_resumed_towards_the_incumbent(lasting_house: House, step: Step, when: str) -> None:
    house = lasting_house
    fresh(house)
    spec = load_spec(house.spec)
    before = house.process().identity()
    assert swap_and_die(house.spec, step, when) == -signal.SIGKILL

    refused = house.call()  # without --resume nothing is begun over it
    assert (refused.exit_code, "--resume" in refused.output) == (2, True), refused.output

    done = house.call("--resume")
    assert done.exit_code == 3, done.output
    after = house.process().identity()
    stopped = list(Step).index(step) > list(Step).index(Step.STOP) or step is Step.STOP
    assert (after == before) is not stopped
    assert f"incumbent     {'restored' if stopped else 'untouched'}, by a tool that resumed (1)" in done.output
    # Killed before anything was recorded, nothing is claimed of what was never touched either.
    proven = Verdict.UNKNOWN if step is Step.SNAPSHOT else Verdict.PASS
    assert house.result("custody-restored").verdict is proven, done.output
    assert house.result("custody-memory").verdict is Verdict.UNKNOWN, "nobody watched for a while"
    assert house.result("custody-journal").verdict is Verdict.PASS
    assert HAProxy(spec.router).admission().admitting
    assert spec.candidate is not None and spec.candidate.process is not None
    assert supervisor(spec.candidate.process).identity() is None
    gone = (house.root / "candidate.pid").read_text().strip() if (house.root / "candidate.pid").exists() else ""
    assert not gone or identity(int(gone.partition("@")[0])) != gone or is_dead(gone)
    again = house.call("--resume")
    assert (again.exit_code, "nothing to resume" in again.output) == (2, True)


def fresh(house: House) -> None:
    """Records of their own for one more swap, and nothing left of the last candidate."""
    text = house.spec.read_text()
    name = f"records-{next(NUMBER)}"
    old = house.records.name
    house.spec.write_text(text.replace(f'records = "{old}"', f'records = "{name}"'))
    house.records = house.root / name
    (house.root / "candidate.pid").unlink(missing_ok=True)


def is_dead(who: str) -> bool:
    return Path(f"/proc/{who.partition('@')[0]}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")


def test_every_step_is_among_the_moments() -> None:
    assert {step for step, when in MOMENTS if when == "began"} == set(Step)
    assert StepBegan.__struct_config__.tag == "step_began"
