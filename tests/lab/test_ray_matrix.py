"""`samestate matrix --executor ray` on two nodes: real engines, and a worker that is killed in the middle of an arm."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.cli.commands import samestate
from samestate.evidence.archive import Archive
from samestate.lab.executors import SEALED, Done, Planned, Share, here, over_ray

from .ray_cluster import done_by_number, outputs, parent, running, two_nodes

pytestmark = [pytest.mark.slow]

SHORTEST = {
    "block_size: 1792": "block_size: 256",
    "max_model_len: 8192": "max_model_len: 1024",
    "[2C-1, 2C, 2C+1, 2C+3, 2C+4, 2C+5, 3C-1, 3C, 3C+1]": "[2C]",
    "output_tokens: 64": "output_tokens: 4",
}
"""What makes plan boundary one case of four generations."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def shortest() -> str:
    plan = files("samestate.plans").joinpath("shipped", "boundary.yaml").read_text(encoding="utf-8")
    for old, new in SHORTEST.items():
        assert old in plan
        plan = plan.replace(old, new)
    return plan


@pytest.mark.deep
@pytest.mark.vllm
def test_real_engines_on_two_nodes_find_what_one_machine_finds(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connectors, one of them with a fault; one archive in a shared folder, one by way of fsspec."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it for a task of one CPU
    plan = {"plan.yaml": shortest()}
    runs = [
        Planned(["plan.yaml", "--connector=dictionary"], plan, f"{tmp_path}/ray/one"),
        Planned(["plan.yaml", "--connector=native", "--fault=full-lookup"], plan, f"local://{tmp_path}/ray/two"),
    ]
    there = done_by_number(over_ray(runs, cluster.address, Share()))
    assert [one.outcome for one in there] == [SEALED, SEALED], there
    assert len({one.node for one in there}) == 2, "both nodes took a run"
    assert [one.outcome for one in on_this_machine(runs)] == [SEALED, SEALED]
    for name, expected in (("one", Verdict.PASS), ("two", Verdict.FAIL)):
        far, near = (Archive.open(tmp_path / where / name) for where in ("ray", "here"))
        assert far.verify() == near.verify() == []
        assert judge(far).verdict is judge(near).verdict is expected
        assert outputs(far) == outputs(near) != []


def on_this_machine(runs: Sequence[Planned]) -> list[Done]:
    """The same without Ray, both at once."""
    moved = [run._replace(archive=run.archive.replace("/ray/", "/here/")) for run in runs]
    with ThreadPoolExecutor() as pool:
        return [done for (done,) in pool.map(lambda run: list(here([run])), moved)]


def test_a_worker_killed_in_the_middle_of_an_arm_leaves_no_pass(cluster: Any, model: Path, tmp_path: Path) -> None:
    """The archive says that it is incomplete, and the matrix says unknown: its cell, its exit code."""
    out = tmp_path / "m"
    cut, whole = out / "1-model-native-boundary", out / "2-model-dictionary-boundary"
    killed = list[int]()

    def kill() -> None:
        """The worker of the first cell, its run held still meanwhile, once the second arm generates."""
        records = cut / "arms" / "candidate" / "client.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if records.is_file() and records.read_bytes().count(b"\n") > 20:
                (run,) = (one for one in running(str(cut)) if parent(one) > 1)
                os.kill(run, signal.SIGSTOP)
                killed.append(run)
                if not (cut / "seal.json").exists():
                    os.kill(parent(run), signal.SIGKILL)
                time.sleep(0.5)
                os.kill(run, signal.SIGCONT)
                return
            time.sleep(0.002)

    thread = Thread(target=kill)
    thread.start()
    connectors = ["--connector", "native", "--connector", "dictionary"]
    ray = ["--executor", "ray", "--address", cluster.address]
    command = ["matrix", "--engine", "sim", "--model", str(model), *connectors, *ray, "--out", str(out), "--json"]
    result = CliRunner().invoke(samestate, command)
    thread.join()
    assert killed
    first, second = json.loads(result.stdout)
    assert (first["verdict"], second["verdict"], result.exit_code) == ("unknown", "pass", 3)
    assert first["error"].startswith("its task died: ") and first["equal"] is None
    assert (second["archive"], second["equal"]) == (str(whole), "36/36")
    deadline = time.monotonic() + 10
    while running(str(cut)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(str(cut))
    checked = CliRunner().invoke(samestate, ["check", str(cut)])
    assert checked.exit_code == 3 and "seal.json: missing: the archive is incomplete" in checked.stdout
    assert "verdict unknown" in checked.stdout
    assert len({arm for arm, _, _ in outputs(Archive.open(cut))}) == 2, "both arms had begun"
