"""A plan whose own engine is the candidate: a stub stands for vLLM's server, and a short drive for the plan's arms."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from custody.dying import swap_and_die
from custody.house import STUB, House, free_ports
from samestate.checks.base import Verdict
from samestate.custody import probe
from samestate.engines.base import EngineError
from samestate.engines.processes import identity
from samestate.engines.server import ServerSpec
from samestate.engines.vllm import available
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.custody_journal import read_journal
from samestate.evidence.custody_records import Step, StepBegan
from samestate.lab.run import RunError, RunRequest, RunResult

pytestmark = pytest.mark.skipif(not available(), reason="vLLM is not installed")


class StandIn:
    """As `ServedEngine`, with the stub; like it, its process ends with this one."""

    def __init__(self, spec: ServerSpec) -> None:
        self._port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self._port}"
        self.model = "stub"

    def start(self, waiting: object = None) -> None:
        line = f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, {self._argv()})"
        self._child = subprocess.Popen([sys.executable, "-c", line], stderr=subprocess.DEVNULL)
        House.await_health(f"{self.url}/health")
        self.process = identity(self._child.pid)
        self.pid = self._child.pid

    def _argv(self) -> list[str]:
        return [sys.executable, str(STUB), str(self._port)]

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def drive(request: RunRequest, progress: object) -> RunResult:
    """What a marker plan does with its server."""
    server = request.make_server(ServerSpec("candidate", request.model, {}, [], request.out))
    try:
        server.start()
        seal = ArchiveWriter.create(request.out, b"{}").seal()
    except EngineError as error:
        raise RunError(str(error)) from None
    finally:
        server.close()
    return RunResult(request.out, seal, {})


@pytest.fixture
def planned(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(probe, "ServedEngine", StandIn)
    monkeypatch.setattr(probe, "run_plan", drive)
    # Its archive holds nothing to judge.
    nothing = SimpleNamespace(verdict=Verdict.UNKNOWN, results=[])
    monkeypatch.setattr("samestate.cli.swap.judge_archive", lambda *_: nothing)
    text = house.spec.read_text()
    text = re.sub(r"\[candidate\.process\]\n(?:.+\n)+", "", text).replace('kind = "process"', 'kind = "plan"')
    text = re.sub(r'plan = ".*"\nengine = "sim"\nmodel = "model"', 'plan = "reasoning-close"', text)
    text = text.replace('model = "model"\nlayers', "layers")
    more = '"cwd", "umask", "limits", "model.*", "template",'  # the plan serves a checkpoint of its own
    house.spec.write_text(text.replace('differs = ["pid",', f'differs = ["pid", {more}'))
    return house


def test_a_plan_s_own_engine_is_started_gated_and_stopped_as_the_candidate(planned: House) -> None:
    done = planned.call()
    assert done.exit_code == 0, done.output
    steps = [one.rec.step for one in read_journal(planned.records).entries if isinstance(one.rec, StepBegan)]
    assert steps == list(Step)
    assert planned.result("custody-composition").verdict is Verdict.PASS
    judgement = planned.judged()
    assert judgement.probe is not None and (judgement.probe.plan, judgement.probe.verdict) == (
        "reasoning-close",
        "unknown",
    )


def test_one_that_differs_beyond_what_is_declared_is_never_probed(planned: House) -> None:
    planned.change('"environment", "environment.*", ', "")
    done = planned.call()
    assert done.exit_code == 1, done.output
    assert Step.PROBE not in [
        one.rec.step for one in read_journal(planned.records).entries if isinstance(one.rec, StepBegan)
    ]
    assert planned.judged().incumbent == "restored"


def test_its_model_is_the_plan_s_and_not_the_incumbent_s(planned: House) -> None:
    planned.change('"model.*", ', "")
    done = planned.call()
    assert done.exit_code == 1, done.output
    result = planned.result("custody-composition")
    assert any(one.message.startswith("candidate, model.files.config.json: ") for one in result.findings)
    assert planned.judged().incumbent == "restored"


def test_a_model_of_its_own_beside_the_plan_s_is_refused(planned: House) -> None:
    planned.change('layers = [{name = "marker', 'model = "model"\nlayers = [{name = "marker')
    done = planned.call()
    assert (done.exit_code, "candidate.model: goes with kind process" in done.output) == (2, True), done.output


@pytest.mark.parametrize("step", [Step.CANDIDATE_START, Step.GATES, Step.PROBE, Step.CANDIDATE_STOP])
def test_killed_with_the_candidate_as_its_child(planned: House, step: Step) -> None:
    assert swap_and_die(planned.spec, step, "began") == -signal.SIGKILL
    done = planned.call("--resume")
    assert done.exit_code == 3, done.output
    assert planned.result("custody-restored").verdict is Verdict.PASS
    assert planned.judged().incumbent == "restored"
    assert Path(planned.records / "decision.json").is_file()


def test_a_plan_without_a_server_of_its_own_is_refused(planned: House) -> None:
    planned.change('plan = "reasoning-close"', 'plan = "boundary"')
    done = planned.call()
    assert (done.exit_code, "starts no server of its own" in done.output) == (2, True), done.output
    assert not planned.records.exists()
