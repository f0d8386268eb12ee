"""Runs of a matrix, here or as tasks of a Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive
from samestate.lab import executors_task
from samestate.lab.errors import RunError
from samestate.lab.executors import EXCLUDED, SEALED, UNKNOWN, Planned, Share, here, over_ray

from .ray_cluster import done_by_number, outputs, parent, running, two_nodes

CHANGES = {
    "block_size: 1792": "block_size: 16",
    "max_model_len: 8192": "max_model_len: 2048",
    "num_gpu_blocks_override: 16": "num_gpu_blocks_override: 1600",
    "[2C-1, 2C, 2C+1, 2C+3, 2C+4, 2C+5, 3C-1, 3C, 3C+1]": "[60C-1, 60C, 60C+1]",
    "output_tokens: 64": "output_tokens: 4",
}
"""What makes plan boundary small."""


def planned(model: Path, archive: Path | str, *arguments: str) -> Planned:
    plan = files("samestate.plans").joinpath("shipped", "boundary.yaml").read_text(encoding="utf-8")
    for old, new in CHANGES.items():
        assert old in plan
        plan = plan.replace(old, new)
    return Planned(["plan.yaml", "--engine", "sim", f"--model={model}", *arguments], {"plan.yaml": plan}, str(archive))


def test_runs_go_one_after_the_other_and_one_that_cannot_run_stops_no_other(model: Path, tmp_path: Path) -> None:
    runs = [
        planned(model, tmp_path / "one"),
        planned(tmp_path / "nosuch", tmp_path / "two"),
        planned(model, tmp_path / "three", "--fault=full-lookup"),
    ]
    first, second, third = here(runs)
    assert (first.outcome, second.outcome, third.outcome) == (SEALED, EXCLUDED, SEALED)
    assert second.reason and f"no folder {tmp_path / 'nosuch'}" in second.reason and "\n" not in second.reason
    assert Archive.open(tmp_path / "one").verify() == []
    assert not (tmp_path / "two").exists()


def stub(tmp_path: Path, version: str, otherwise: str) -> str:
    """An interpreter that says this version, then does that."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *__version__*) {version};; *) {otherwise};; esac\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("version", "otherwise", "outcome", "reason"),
    [
        ("echo \"No module named 'samestate'\" >&2; exit 1", "exit 0", EXCLUDED, "has no samestate (No module named"),
        ("echo 0.0.9", "exit 0", EXCLUDED, "has samestate 0.0.9, and 1.0 asks; install one version on all nodes"),
        ("echo 1.0", "kill -9 $$", UNKNOWN, "`samestate run` ended by signal 9 and left no sealed archive"),
        ("echo 1.0", "exit 0", UNKNOWN, "ended with exit code 0 and left no sealed archive"),
        ("echo 1.0", 'echo "{\\"error\\": \\"no disk\\"}"; exit 2', EXCLUDED, "no disk"),
    ],
)
def test_what_a_node_can_lack(
    version: str, otherwise: str, outcome: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors_task.sys, "executable", stub(tmp_path, version, otherwise))
    told = executors_task.perform(["boundary"], {}, str(tmp_path / "archive"), "1.0")
    assert told["outcome"] == outcome
    assert told["reason"] is not None and reason in told["reason"] and "\n" not in told["reason"]


def test_an_archive_goes_to_an_object_store_with_its_seal_last(model: Path, tmp_path: Path) -> None:
    (done,) = here([planned(model, f"local://{tmp_path}/bucket/one")])
    assert done.outcome == SEALED, done.reason
    assert Archive.open(tmp_path / "bucket" / "one").verify() == []
    (tmp_path / "file").touch()
    (done,) = here([planned(model, f"local://{tmp_path}/file/one")])
    assert done.outcome == UNKNOWN
    assert done.reason is not None and "could not be stored at local://" in done.reason


@pytest.mark.parametrize(("code", "outcome"), [(1, UNKNOWN), (2, EXCLUDED)])
def test_what_was_begun_and_not_sealed_goes_there_too(
    code: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how far it came, and no line names a folder that is gone."""
    begun = f'for out; do :; done; mkdir "$out"; echo {{}} >"$out/plan.json"; echo "see $out" >&2; exit {code}'
    monkeypatch.setattr(executors_task.sys, "executable", stub(tmp_path, "echo 1.0", begun))
    archive = f"local://{tmp_path}/bucket/one"
    told = executors_task.perform(["boundary"], {}, archive, "1.0")
    assert told["outcome"] == outcome
    assert told["reason"] is not None and f"see {archive}" in told["reason"]
    assert [path.name for path in (tmp_path / "bucket" / "one").iterdir()] == ["plan.json"]
    (tmp_path / "file").touch()
    told = executors_task.perform(["boundary"], {}, f"local://{tmp_path}/file/one", "1.0")
    assert told["outcome"] == outcome
    assert told["reason"] is not None and "could not be stored at local://" in told["reason"]


def test_ray_is_not_imported_unless_asked(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from samestate.cli import commands; from samestate.lab.executors import here; list(here([])); "
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"Ray is not installed; pip install 'samestate\[ray\]'"):
        list(over_ray([], None, Share()))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:none", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_one_line_at_once(address: str) -> None:
    pytest.importorskip("ray")
    began = time.monotonic()
    with pytest.raises(RunError, match=f"--address: no Ray cluster at {address}") as caught:
        list(over_ray([], address, Share()))
    assert "\n" not in str(caught.value) and str(caught.value).endswith("; start one")
    assert time.monotonic() - began < 30


# --- a cluster ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


@pytest.mark.slow
def test_two_nodes_share_the_runs_and_find_what_one_machine_finds(cluster: Any, model: Path, tmp_path: Path) -> None:
    runs = [
        planned(model, tmp_path / "one"),
        planned(model, f"local://{tmp_path}/store/two", "--fault=full-lookup"),
        planned(model, tmp_path / "three", "--model=/nosuch"),
    ]
    found = done_by_number(over_ray(runs, cluster.address, Share()))
    assert [one.outcome for one in found] == [SEALED, SEALED, EXCLUDED]
    assert len({one.node for one in found}) == 2, "both nodes took runs"
    local = list(here([run._replace(archive=f"{run.archive}-here") for run in runs]))
    assert [one.outcome for one in local] == [one.outcome for one in found]
    for place, expected in ((tmp_path / "one", Verdict.PASS), (tmp_path / "store" / "two", Verdict.FAIL)):
        there, beside = Archive.open(place), Archive.open(place.with_name(f"{place.name}-here"))
        assert there.verify() == beside.verify() == []
        assert outputs(there) == outputs(beside)
        assert judge(there).verdict is judge(beside).verdict is expected
    assert outputs(Archive.open(tmp_path / "one")) != outputs(Archive.open(tmp_path / "store" / "two"))


@pytest.mark.slow
def test_a_task_that_dies_is_unknown_and_the_others_complete(cluster: Any, model: Path, tmp_path: Path) -> None:
    killed = list[int]()

    def kill() -> None:
        """The worker of the second run, as soon as its child is there."""
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for child in running(str(tmp_path / "two")):
                worker = parent(child)
                if worker > 1:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
                    return
            time.sleep(0.005)

    thread = Thread(target=kill)
    thread.start()
    runs = [planned(model, tmp_path / name) for name in ("one", "two", "three")]
    found = done_by_number(over_ray(runs, cluster.address, Share()))
    thread.join()
    assert killed
    assert [one.outcome for one in found] == [SEALED, UNKNOWN, SEALED]
    assert found[1].reason is not None and found[1].reason.startswith("its task died: ") and "\n" not in found[1].reason
    assert not (tmp_path / "two" / "seal.json").exists()
    deadline = time.monotonic() + 10
    while running(str(tmp_path / "two")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(str(tmp_path / "two")), "what a dead task had started is dead too"


@pytest.mark.slow
def test_what_no_node_can_hold_is_one_line(cluster: Any) -> None:
    with pytest.raises(RunError, match="a run asks 1 CPUs and 64 GPUs, and the cluster's nodes have") as caught:
        list(over_ray([], cluster.address, Share(gpus=64)))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_node_without_samestate_says_so(cluster: Any, model: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "without"
    blocker.mkdir()
    (blocker / "samestate.py").write_text("raise ModuleNotFoundError(\"No module named 'samestate'\")\n")
    node = cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, env_vars={"PYTHONPATH": str(blocker)})
    try:
        (done,) = over_ray([planned(model, tmp_path / "one")], cluster.address, Share(cpus=2))
    finally:
        cluster.remove_node(node)
    assert done.outcome == EXCLUDED
    assert done.reason is not None
    assert "has no samestate (ModuleNotFoundError: No module named 'samestate'); install samestate" in done.reason
