"""Recording and pinning of autotuned kernels: Triton's own tuner over its interpreter, and a tuner that is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from samestate.evidence import tuner_profile as files
from samestate.evidence.controls import OTHER_VARIABLE, PROFILE_VARIABLE, RECORD_VARIABLE, RELEASE_VARIABLE
from samestate.evidence.tuner_profile import ProfileError, TunerProfile
from samestate.evidence.tuner_report import profile_of, read_reports
from samestate.instruments import tuner_plugin, tuner_profile, tuners
from samestate.instruments.tuner_profile import ProfileViolation, Watch, install, uninstall, watching

ADD, SCALE = f"{__name__}.add", f"{__name__}.scale"


def add(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + BLOCK, mask=at < n)


def scale(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * BLOCK, mask=at < n)


class Kernels:
    """Two kernels whose output shows which configuration ran, and the clock that their tuners look at."""

    def __init__(self, fastest: int) -> None:
        self.fastest = fastest
        self.add, self.scale = self._tuned(add), self._tuned(scale)

    def _tuned(self, function: Callable[..., None]) -> Any:
        configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]
        tuned = triton.autotune(configs=configs, key=["n"], do_bench=self._time)
        kernel = tuned(triton.jit(function))
        self._last: dict[str, int] = {}
        return kernel

    def _time(self, call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        return [0.0 if int(self.out[0]) in (self.fastest, self.fastest * 3) else 1.0] * 3

    def run(self, kernel: Any, n: int = 32, dtype: Any = torch.float32) -> int:
        """What the first element tells: the block that it ran with."""
        x = torch.full((n,), 3 if kernel is self.scale else 0, dtype=dtype)
        self.out = torch.zeros(n, dtype=dtype)
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, self.out, n)
        return int(self.out[0]) // (3 if kernel is self.scale else 1)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in (PROFILE_VARIABLE, RECORD_VARIABLE, RELEASE_VARIABLE, OTHER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield
    uninstall()


def launch(fastest: int, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels as a fresh process has them: nothing is selected yet, and another configuration may be fastest."""
    kernels = Kernels(fastest)
    for name in ("add", "scale"):
        monkeypatch.setitem(globals(), f"{name}_kernel", getattr(kernels, name))
    return kernels


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> TunerProfile:
    """Recorded where the block of 16 is the fastest."""
    kernels = launch(16, monkeypatch)
    watch = Watch()
    install(watch)
    assert (kernels.run(kernels.add), kernels.run(kernels.scale)) == (16, 16)
    selected = watch.selected()
    assert (selected.mode, selected.benchmarks, selected.violations) == ("record", 6, [])
    uninstall()
    return files.make("cpu", files.installed(), {0: selected.selections})


def pinned(profile: TunerProfile) -> Watch:
    watch = Watch(profile, "a" * 64)
    install(watch)
    return watch


def test_without_a_watch_another_launch_selects_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = launch(16, monkeypatch), launch(8, monkeypatch)
    assert (first.run(first.add), second.run(second.add)) == (16, 8)


def test_a_profile_names_kernel_key_and_choice(profile: TunerProfile) -> None:
    assert profile.kernels == [ADD, SCALE]
    one = profile.ranks["0"][0]
    assert one.key == ["32", "torch.float32", "torch.float32"]
    assert one.config == {"BLOCK": 16, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None,
                          "ir_override": None}  # fmt: skip
    assert (profile.device, profile.versions["triton"]) == ("cpu", triton.__version__)


def test_a_pinned_launch_runs_what_was_recorded_and_measures_nothing(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = launch(8, monkeypatch)
    watch = pinned(profile)
    assert [kernels.run(kernels.add), kernels.run(kernels.scale), kernels.run(kernels.add)] == [16, 16, 16]
    selected = watch.selected()
    assert (selected.mode, selected.benchmarks, selected.violations) == ("pin", 0, [])
    assert selected.selections == profile.ranks["0"]
    assert [config.kwargs for config in kernels.add.configs] == [{"BLOCK": 16}]


def test_what_was_selected_before_is_dropped(profile: TunerProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launch(8, monkeypatch)
    assert kernels.run(kernels.add) == 8
    pinned(profile)
    assert kernels.run(kernels.add) == 16


@pytest.mark.parametrize("shape", [{"n": 48}, {"dtype": torch.float64}])
def test_an_unrecorded_key_is_rejected_before_its_launch(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    kernels = launch(8, monkeypatch)
    watch = pinned(profile)
    with pytest.raises(ProfileViolation, match="is not in the profile: rejected before its launch"):
        kernels.run(kernels.add, **shape)
    assert kernels.out.eq(0).all()
    assert len(watch.selected().violations) == 1


def test_an_unrecorded_tuner_is_rejected(profile: TunerProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launch(8, monkeypatch)
    kept = [one for one in profile.ranks["0"] if one.kernel == ADD]
    pinned(files.make("cpu", files.installed(), {0: kept}))
    assert kernels.run(kernels.add) == 16
    with pytest.raises(ProfileViolation, match=rf"{SCALE} for key .* not in the profile"):
        kernels.run(kernels.scale)


def test_a_tuner_with_one_configuration_has_nothing_to_select(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = launch(8, monkeypatch)
    only = triton.autotune(configs=[triton.Config({"BLOCK": 32})], key=["n"])(triton.jit(add))
    watch = pinned(profile)
    assert kernels.run(only) == 32
    assert watch.selected().selections == []


def test_another_configuration_than_recorded_runs_when_it_is_asked_for(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = launch(8, monkeypatch)
    watch = pinned(profile)
    watch.replace([SCALE])
    assert (kernels.run(kernels.add), kernels.run(kernels.scale), kernels.run(kernels.scale)) == (16, 8, 8)
    assert (watch.selected().mode, watch.selected().benchmarks) == ("release", 0)
    watch.replace([tuner_profile.ALL])
    assert (kernels.run(kernels.add), kernels.run(kernels.scale)) == (8, 8)
    watch.release(None)
    assert (kernels.run(kernels.add), kernels.run(kernels.scale)) == (16, 16)


def test_one_kernel_is_released_and_the_others_stay(profile: TunerProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launch(32, monkeypatch)
    watch = pinned(profile)
    watch.release(ADD)
    assert (kernels.run(kernels.add), kernels.run(kernels.scale)) == (32, 16)
    selected = watch.selected()
    assert (selected.mode, selected.benchmarks) == ("release", 3)
    with pytest.raises(ProfileError, match=r"kernel 'none\.such' is not in the profile"):
        watch.release("none.such")


def test_a_released_kernel_measures_anew_whatever_lies_on_disk(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = launch(32, monkeypatch)

    def recorded(key: Any, configs: Any, measure: Any) -> bool:
        kernels.add.cache[key] = next(one for one in configs if one.kwargs["BLOCK"] == 16)
        return True

    monkeypatch.setattr(kernels.add, "cache_results", True)
    monkeypatch.setattr(kernels.add, "check_disk_cache", recorded)
    assert kernels.run(kernels.add) == 16
    watch = pinned(profile)
    watch.release(ADD)
    assert (kernels.run(kernels.add), watch.selected().benchmarks) == (32, 3)
    assert kernels.add.cache_results is True


@pytest.mark.parametrize("change", [{"device": "NVIDIA H200"}, {"ranks": {"3": []}}])
def test_a_refusal_is_in_the_report(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Who reads it sees that the profile was broken, and not a command that failed for itself."""
    kernels = launch(8, monkeypatch)
    mine = {"format": 1, "device": "cpu", "versions": files.installed(), "ranks": profile.ranks}
    install(Watch(TunerProfile(**mine | change), "a" * 64, tmp_path))
    with pytest.raises(ProfileError) as refused:
        kernels.run(kernels.add)
    (report,) = read_reports(tmp_path)
    assert report.selected.violations == [str(refused.value)]


class Loading(Autotuner):  # type: ignore[misc]
    """As FLA's: what a file says goes into the cache before Triton's own `run`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.cache[tuners.key_of(self, args, kwargs)] = triton.Config({"BLOCK": 4})
        return super().run(*args, **kwargs)


class Replacing(Autotuner):  # type: ignore[misc]
    """As FLA's since 0.5: before the first call what a file says takes the place of all configurations."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "checked"):
            self.checked, self.configs = True, [triton.Config({"BLOCK": 4})]
        return super().run(*args, **kwargs)


@pytest.mark.parametrize("blocks", [(8, 16, 32), (8,)])
def test_a_configuration_from_a_file_is_a_choice(monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, ...]) -> None:
    """Also where the tuner was made with one configuration alone, and first seen when the file had been read."""
    kernels = launch(32, monkeypatch)
    watch = Watch()
    install(watch)
    replacing = made_by(Replacing, blocks)
    assert kernels.run(replacing) == 4
    (choice,) = watch.selected().selections
    assert (choice.config["BLOCK"], watch.benchmarks) == (4, 0)
    other = msgspec.structs.replace(choice, config={**choice.config, "BLOCK": 8})

    held = pinned(files.make("cpu", files.installed(), {0: [other]}))
    assert kernels.run(made_by(Replacing, blocks)) == 8
    assert (held.selected().violations, held.benchmarks) == ([], 0)

    stranger = msgspec.structs.replace(choice, kernel="another.kernel")
    pinned(files.make("cpu", files.installed(), {0: [stranger]}))
    with pytest.raises(ProfileViolation, match="is not in the profile: rejected before its launch"):
        kernels.run(made_by(Replacing, blocks))


class Stubborn(Autotuner):  # type: ignore[misc]
    """Selects beside Triton's `run`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        config = self.cache[tuners.key_of(self, args, kwargs)] = triton.Config({"BLOCK": 4})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())


def made_by(kind: Any, blocks: tuple[int, ...] = (8, 16, 32)) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    function = triton.jit(add)
    return kind(function, function.arg_names, configs, ["n"], None, None)


def test_a_subclass_that_loads_its_choice_is_recorded_and_held(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, loading = launch(8, monkeypatch), made_by(Loading)
    watch = Watch()
    install(watch)
    assert kernels.run(loading) == 4
    loaded = files.make("cpu", files.installed(), {0: watch.selected().selections})
    uninstall()
    pinned(profile)
    assert kernels.run(loading) == 16
    uninstall()
    # No decorator lists the configuration that the file had.
    pinned(loaded)
    assert kernels.run(kernels.add) == 4


def test_a_selection_beside_the_watch_is_found_afterwards(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, stubborn = launch(8, monkeypatch), made_by(Stubborn)
    monkeypatch.setitem(globals(), "stubborn_kernel", stubborn)
    watch = pinned(profile)
    assert kernels.run(stubborn) == 4
    (line,) = watch.selected().violations
    assert "was selected beside the profile: BLOCK=4" in line


def test_a_run_that_takes_another_configuration_is_found_after_the_call(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = launch(8, monkeypatch)
    watch = pinned(profile)

    def other(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.best_config = triton.Config({"BLOCK": 32})

    args = (torch.zeros(32), torch.zeros(32), 32)
    with pytest.raises(ProfileViolation, match=r"ran with BLOCK=32 .*, recorded BLOCK=16"):
        watch.run(other, kernels.add, args, {})
    assert len(watch.selected().violations) == 1


def test_tuners_are_found_in_modules_and_behind_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launch(8, monkeypatch)
    heuristic = triton.heuristics({"EVEN": lambda args: True})(kernels.add)
    owner = type("Owner", (), {})()
    owner.kernel = kernels.scale
    for name, value in (("add_kernel", heuristic), ("scale_kernel", owner)):
        monkeypatch.setitem(globals(), name, value)
    found = [tuner for tuner in tuners.find(Autotuner) if tuners.name_of(tuner) in (ADD, SCALE)]
    assert found in ([kernels.add, kernels.scale], [kernels.scale, kernels.add])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"device": "NVIDIA H200"}, "device NVIDIA H200 recorded, cpu here"),
        ({"ranks": {"3": []}}, "the profile has no rank 0, only 3"),
    ],
)
def test_a_profile_of_another_place_is_refused_at_the_first_call(
    profile: TunerProfile, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], line: str
) -> None:
    kernels = launch(8, monkeypatch)
    mine = {"format": 1, "device": "cpu", "versions": files.installed(), "ranks": profile.ranks}
    pinned(TunerProfile(**mine | change))
    with pytest.raises(ProfileError, match=line):
        kernels.run(kernels.add)


def test_two_tuners_of_one_kernel_are_held_to_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = launch(16, monkeypatch), launch(8, monkeypatch)
    watch = Watch()
    install(watch)
    assert (first.run(first.add), second.run(second.add), second.run(second.add)) == (16, 8, 8)
    (line,) = watch.selected().violations
    assert "ran with BLOCK=8" in line and "recorded is BLOCK=16" in line
    assert [one.config["BLOCK"] for one in watch.selected().selections] == [16]


# --- by environment, as in an engine's processes -----------------------------------------------------


def test_the_plugin_is_off_unless_a_variable_asks() -> None:
    tuner_plugin.register()
    assert watching() is None
    assert not hasattr(Autotuner, "_samestate_run")


def test_record_then_pin_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path))
    kernels = launch(16, monkeypatch)
    tuner_plugin.register()
    kernels.run(kernels.add)
    recorded, otherwise = profile_of(read_reports(tmp_path))
    assert (recorded.kernels, otherwise) == ([ADD], [])
    uninstall()

    monkeypatch.setattr(tuner_profile, "_watch", None)
    path = tmp_path / "profile.json"
    sha256 = files.write(path, recorded)
    monkeypatch.setenv(PROFILE_VARIABLE, str(path))
    again = launch(8, monkeypatch)
    tuner_plugin.register()
    assert again.run(again.add) == 16
    (report,) = read_reports(tmp_path)
    assert (report.selected.mode, report.selected.profile_sha256, report.selected.benchmarks) == ("pin", sha256, 0)


def test_other_versions_are_refused_before_an_engine_starts(
    tmp_path: Path, profile: TunerProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    files.write(path, TunerProfile(format=1, device="cpu", versions={"triton": "0.1"}, ranks=profile.ranks))
    monkeypatch.setenv(PROFILE_VARIABLE, str(path))
    with pytest.raises(ProfileError, match=r"made elsewhere \(triton 0.1 recorded, .* here;.*\): record one here"):
        tuner_plugin.register()


@pytest.mark.regression
def test_a_vllm_that_keeps_nothing_beside_its_tuners_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.32 has no such store, and what had imported it in the process broke every watch."""
    name = "vllm.model_executor.layers.mamba.ops.triton_helpers"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kernels = launch(16, monkeypatch)
    watch = Watch()
    install(watch)
    assert kernels.run(kernels.add) == 16
    assert watch.selected().mode == "record"
