"""Profile files: canonical, hashed, of one place; and what processes report becomes one of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import KernelSelection, KernelsSelected
from samestate.evidence.tuner_profile import (
    ProfileError,
    TunerProfile,
    make,
    misfits,
    read,
    refuse_elsewhere,
    shown,
    write,
)
from samestate.evidence.tuner_report import TunerReport, profile_of, read_reports, report_name

VERSIONS = {"triton": "3.6.0", "torch": "2.11.0", "vllm": "0.33.0", "samestate": "0.1.0"}


def choice(kernel: str = "fla.kda", key: str = "64", block: int = 32) -> KernelSelection:
    return KernelSelection(kernel=kernel, key=[key, "torch.bfloat16"], config={"BK": block, "maxnreg": None})


def report(rank: int = 0, begun: int = 0, device: str = "NVIDIA H200", **change: Any) -> TunerReport:
    said = KernelsSelected(
        rank=rank, mode="record", profile_sha256=None, benchmarks=3, selections=[choice()], violations=[]
    )
    return TunerReport(
        begun_ns=begun, device=device, versions=VERSIONS, selected=msgspec.structs.replace(said, **change)
    )


def test_a_file_is_written_once_in_one_form(tmp_path: Path) -> None:
    made = make("NVIDIA H200", VERSIONS, {1: [choice("b"), choice("a")], 0: [choice()]})
    other = make("NVIDIA H200", VERSIONS, {0: [choice()], 1: [choice("a"), choice("b")]})
    sha256 = write(tmp_path / "a.json", made)
    assert write(tmp_path / "b.json", other) == sha256 == sha256_hex((tmp_path / "a.json").read_bytes())
    assert read(tmp_path / "a.json") == (made, sha256)
    assert made.kernels == ["a", "b", "fla.kda"]
    assert "samestate" not in made.versions


def test_choices_are_by_rank_kernel_and_key() -> None:
    made = make("cpu", VERSIONS, {0: [choice(block=32)], 1: [choice(block=64)]})
    place = ("fla.kda", ("64", "torch.bfloat16"))
    assert (made.choices(0)[place]["BK"], made.choices(1)[place]["BK"]) == (32, 64)
    with pytest.raises(ProfileError, match="no rank 2, only 0, 1"):
        made.choices(2)


def test_nothing_is_no_profile() -> None:
    for ranks in ({}, {0: []}):
        with pytest.raises(ProfileError, match="nothing to record"):
            make("cpu", VERSIONS, ranks)
    with pytest.raises(ProfileError, match="ran with BK=32 and with BK=64"):
        make("cpu", VERSIONS, {0: [choice(), choice(block=64)]})


def test_a_rank_that_chose_nothing_is_not_in_it() -> None:
    assert list(make("cpu", VERSIONS, {0: [choice()], 1: []}).ranks) == ["0"]


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ({}, "ranks: it holds no choice"),
        ({"0": []}, r"ranks\.0: it holds no choice"),
        ({"0": [choice()], "1": []}, r"ranks\.1: it holds no choice"),
        ({"00": [choice()]}, "'00' is no rank"),
        ({"first": [choice()]}, "'first' is no rank"),
        ({"0": [choice(), choice(block=64)]}, "stands there twice, or out of order"),
        ({"0": [choice("b"), choice("a")]}, "stands there twice, or out of order"),
        ({"0": [KernelSelection(kernel="a", key=["1"], config={})]}, "a has no configuration"),
    ],
)
def test_an_edited_file_that_nobody_recorded_is_refused(tmp_path: Path, ranks: Any, word: str) -> None:
    """Canonical each, and none made by a record: an empty one would be held by everything."""
    write(tmp_path / "a.json", TunerProfile(format=1, device="cpu", versions={}, ranks=ranks))
    with pytest.raises(ProfileError, match=f"not as it was recorded: .*{word}; record it again"):
        read(tmp_path / "a.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("device", "versions", "said"),
    [
        ("NVIDIA H200", {}, []),
        (None, {}, []),
        ("NVIDIA H100", {}, ["device NVIDIA H200 recorded, NVIDIA H100 here"]),
        ("NVIDIA H200", {"triton": "3.9.0"}, ["triton 3.6.0 recorded, 3.9.0 here"]),
        ("NVIDIA H200", {"fla-core": "0.6.0"}, ["fla-core absent when recorded, 0.6.0 here"]),
    ],
)
def test_another_place_is_named(device: str | None, versions: dict[str, str], said: list[str]) -> None:
    made = make("NVIDIA H200", VERSIONS, {0: [choice()]})
    assert misfits(made, device, VERSIONS | versions) == said
    if said:
        with pytest.raises(ProfileError, match="made elsewhere"):
            refuse_elsewhere(made, device, VERSIONS | versions)
    else:
        refuse_elsewhere(made, device, VERSIONS | versions)


def test_a_missing_package_is_another_place() -> None:
    made = make("cpu", VERSIONS, {0: [choice()]})
    assert misfits(made, "cpu", {"triton": "3.6.0", "torch": "2.11.0"}) == ["vllm 0.33.0 recorded, none here"]


# --- reports of processes ---------------------------------------------------------------------------


def test_ranks_come_together(tmp_path: Path) -> None:
    for pid, one in enumerate([report(1, begun=5), report(0, begun=9)]):
        (tmp_path / report_name(pid)).write_bytes(msgspec.json.encode(one))
    reports = read_reports(tmp_path)
    assert [one.selected.rank for one in reports] == [1, 0]
    made, otherwise = profile_of(reports)
    assert (sorted(made.ranks), otherwise, made.device) == (["0", "1"], [], "NVIDIA H200")


def test_a_later_process_that_chose_otherwise_is_listed() -> None:
    later = report(begun=2, selections=[choice(block=64), choice(key="128")], violations=["said so"])
    made, otherwise = profile_of([report(begun=1), later])
    assert [one.config["BK"] for one in made.ranks["0"]] == [32, 32]
    assert otherwise == [
        "rank 0: said so",
        "rank 0: fla.kda (64, torch.bfloat16): BK=32, a later process BK=64",
    ]


def test_reports_of_two_places_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="one profile is for one kind"):
        profile_of([report(), report(1, device="NVIDIA H100")])
    with pytest.raises(ProfileError, match="is samestate installed"):
        profile_of([])
    (tmp_path / report_name(1)).write_text("{")
    with pytest.raises(ProfileError, match=r"tuners-1\.json: cannot be read"):
        read_reports(tmp_path)


def test_a_configuration_is_shown_without_what_is_unset() -> None:
    assert shown({"num_warps": 4, "BK": 64, "maxnreg": None}) == "BK=64 num_warps=4"
    assert TunerProfile(format=1, device="cpu", versions={}, ranks={}).kernels == []
