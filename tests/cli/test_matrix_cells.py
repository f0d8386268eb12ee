"""`samestate matrix` without a subcommand: models × connectors × releases × plans, here or on Ray."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from samestate.cli.matrix_cells import PLAN_FILE, Asked, plan_cells
from samestate.lab.errors import RunError
from samestate.lab.executors import EXCLUDED, SEALED, UNKNOWN, Done, Planned, Share

from .test_run import line

Command = Callable[..., Result]
Ends = Callable[[Sequence[Planned]], Iterator[Done]]


@pytest.fixture
def cells(samestate: Command, checkpoint: Path) -> Command:
    return lambda *arguments: samestate("matrix", "--model", checkpoint, "--engine", "sim", *arguments)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ends], list[Any]]:
    """Stands in for a cluster; remembers what it was asked."""

    def stand_in(ends: Ends) -> list[Any]:
        asked: list[Any] = []

        def over(runs: Sequence[Planned], address: str | None, share: Share) -> Iterator[Done]:
            asked.extend([address, share])
            return ends(runs)

        monkeypatch.setattr("samestate.cli.matrix_cells.over_ray", over)
        return asked

    return stand_in


def rows(result: Result) -> list[dict[str, Any]]:
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_every_choice_is_a_cell_of_its_own() -> None:
    asked = Asked(
        ["m1", "m2"], ["native", "lmcache"], ["0.5.5", "0.5.6"], ["boundary", "shared-prefix"], "vllm", None, None
    )
    found = plan_cells(asked, "/out")
    assert len(found) == len({cell.run.archive for cell in found}) == 2 * 3 * 2
    assert found[0].run == Planned(
        ["boundary", "--engine", "vllm", "--model=m1", "--connector=native"], {}, "/out/1-m1-native-boundary"
    )
    assert found[-1].run.archive == "/out/12-m2-lmcache-0.5.6-shared-prefix"
    assert found[-1].run.arguments[3:] == ["--model=m2", "--connector=lmcache", "--lmcache-version=0.5.6"]
    (alone,) = plan_cells(Asked([], [], [], [], "vllm", None, None), "s3://bucket/m")
    assert (alone.label, alone.run.archive) == ("as planned", "s3://bucket/m/1-boundary")


def test_cells_run_here_and_are_judged(cells: Command, tmp_path: Path) -> None:
    result = cells("--connector", "native", "--fault", "full-lookup", "--json", "--out", tmp_path / "m")
    (row,) = rows(result)
    assert (row["cell"], row["verdict"], row["equal"]) == ("checkpoint0 native", "fail", "34/36")
    assert row["first_failing"] == {"N": 3584, "B": 3584, "p": 3583}
    assert result.exit_code == 1
    assert (Path(row["archive"]) / "seal.json").is_file()


def test_a_plan_of_ones_own_travels_as_text(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(files("samestate.plans").joinpath("shipped", "boundary.yaml").read_text(encoding="utf-8"))
    (cell,) = plan_cells(Asked([], [], [], [str(mine)], "sim", None, None), "/out")
    assert cell.run == Planned(
        [PLAN_FILE, "--engine", "sim"], {PLAN_FILE: mine.read_text(encoding="utf-8")}, "/out/1-mine"
    )


def test_archives_of_an_object_store_are_fetched_and_judged(cells: Command, tmp_path: Path) -> None:
    """fsspec's `local://` is no folder to us: it goes the way of s3://."""
    url = f"local://{tmp_path}/bucket"
    result = cells("--json", "--out", url)
    (row,) = rows(result)
    assert (row["verdict"], row["archive"]) == ("pass", f"{url}/1-checkpoint0-boundary"), result.output
    assert (tmp_path / "bucket" / "1-checkpoint0-boundary" / "seal.json").is_file()
    assert "is not empty" in line(cells("--out", url))
    assert result.exit_code == 0


def test_what_died_is_unknown_what_never_ran_is_excluded_and_both_say_why(
    cells: Command, ray: Callable[[Ends], list[Any]], clean: Path, tmp_path: Path
) -> None:
    def ends(runs: Sequence[Planned]) -> Iterator[Done]:
        assert len(runs) == 3
        yield Done(2, EXCLUDED, "node b: has no samestate", "b")
        Path(runs[0].archive).parent.mkdir(parents=True)
        Path(runs[0].archive).symlink_to(clean)
        yield Done(0, SEALED, None, "a")
        yield Done(1, UNKNOWN, "its task died: WorkerCrashedError", None)

    asked = ray(ends)
    options = ("--connector", "native", "--connector", "dictionary", "--connector", "lmcache")
    more = ("--executor", "ray", "--address", "head:6379", "--gpus-per-run", "1", "--cpus-per-run", "4")
    result = cells(*options, *more, "--json", "--out", tmp_path / "m")
    assert [row["verdict"] for row in rows(result)] == ["pass", "unknown", "excluded"]
    assert [row["error"] for row in rows(result)] == [
        None,
        "its task died: WorkerCrashedError",
        "node b: has no samestate",
    ]
    assert [row["node"] for row in rows(result)] == ["a", None, "b"]
    assert asked == ["head:6379", Share(4, 1)]
    assert result.exit_code == 2
    assert "2/3 checkpoint0 native, boundary: pass" in result.stderr


def test_a_cell_that_died_alone_makes_the_matrix_unknown(
    cells: Command, ray: Callable[[Ends], list[Any]], tmp_path: Path
) -> None:
    ray(lambda runs: iter([Done(0, UNKNOWN, "its task died", None)]))
    result = cells("--executor", "ray", "--out", tmp_path / "m")
    assert result.exit_code == 3
    assert "checkpoint0, boundary: its task died" in result.stdout


def test_an_archive_that_is_not_here_is_unknown(
    cells: Command, ray: Callable[[Ends], list[Any]], tmp_path: Path
) -> None:
    ray(lambda runs: iter([Done(0, SEALED, None, "a")]))
    result = cells("--executor", "ray", "--json", "--out", tmp_path / "m")
    (row,) = rows(result)
    assert row["verdict"] == "unknown"
    assert row["error"] == "node a sealed it there, and it is not here; name a folder that all nodes share"
    assert result.exit_code == 3


def test_bad_input_is_one_line(
    cells: Command, samestate: Command, ray: Callable[[Ends], list[Any]], clean: Path, tmp_path: Path
) -> None:
    assert line(cells("--gpus-per-run", "1")).startswith("--gpus-per-run: is Ray's; add --executor ray")
    assert line(cells("--release", "0.5.5")).startswith("--release: is LMCache's; add --connector lmcache")
    assert line(cells("--plan", "nosuch")).startswith("no plan 'nosuch'")
    assert line(cells("--plan", clean / "plan.json")).endswith("each cell makes another plan of it; name its YAML")
    assert line(cells("--serve-args", "--block-size '16")).startswith("--serve-args: No closing quotation")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in line(cells("--out", tmp_path / "full"))
    assert "is not empty" in line(cells("--out", f"file://{tmp_path}/full"))
    assert line(cells("--out", "nosuch://bucket/m")).startswith("--out: nosuch://bucket/m cannot be used (Protocol not")
    said = line(samestate("matrix", "--executor", "ray", "lmcache", "0.5.6"))
    assert said == "--executor: stands before lmcache; put it behind"

    def nowhere(runs: Sequence[Planned]) -> Iterator[Done]:
        raise RunError("--address: no Ray cluster at head:1 (nobody answers); start one")

    ray(nowhere)
    assert line(cells("--executor", "ray", "--out", tmp_path / "m")).startswith("--address: no Ray cluster at head:1")
