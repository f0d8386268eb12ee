"""The transformers engine: clean runs pass, and each of its faults fails where the catalogue says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checks.agreement import compared
from quiet import Silent
from samestate.checks.analyzers import judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.base import Ask, CounterValues, Engine, EngineError, EngineSpec, Generation, ResetResult
from samestate.engines.children import transformers_child
from samestate.engines.children.protocol import (
    Arm,
    Asked,
    Close,
    Count,
    Encode,
    Generate,
    Reset,
)
from samestate.engines.children.transformers_child import SettingError, settings_in_force
from samestate.engines.children.transformers_faults import CONDUCTS, FaultError, conduct
from samestate.engines.children.transformers_model import Model
from samestate.engines.children.transformers_store import CacheFull, External
from samestate.engines.transformers import SETTINGS
from samestate.engines.vllm import start_command
from samestate.evidence.archive import Archive
from samestate.evidence.records import EngineStarted, RankRegistered
from samestate.faults.catalogue import FAULTS, Named, faults_on
from samestate.instruments import recorder
from samestate.lab.run import RunRequest, run_plan
from samestate.models.catalogue import ensure
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan

pytestmark = pytest.mark.slow
MODELS = ["qwen3-next-tiny", "qwen3.5-tiny", "granite-hybrid-tiny", "kimi-linear-tiny", "glm5-next-tiny"]
GLM = "glm5-next-tiny"
_PROCESSES = count(1)


class Here(Engine):
    """The child's own code in this process, which saves its start; `tests/cli/test_run_transformers.py` starts one."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._child = spec, transformers_child.Child()

    def start(self) -> EngineStarted:
        self._spec.log_path.write_text("in the test's process\n")
        return self._do(self._child.start, start_command(self._spec)).engine

    def encode(self, text: str) -> list[int]:
        return self._do(self._child.encode, Encode(text=text)).token_ids

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        asked = [Asked(request=ask.request, token_ids=list(ask.token_ids), salt=ask.salt) for ask in asks]
        command = Generate(asks=asked, output_tokens=output_tokens, seed=seed, ignore_eos=ignore_eos)
        return [
            Generation(a.request, a.token_ids, a.logprobs, a.finish_reason, a.cached_tokens, a.first_token_s, a.margins)
            for a in self._do(self._child.generate, command).answers
        ]

    def reset_local_cache(self) -> ResetResult:
        reply = self._do(self._child.reset, Reset())
        return ResetResult(reply.local_reset, external_kept=True, running_kept=True, attempts=reply.attempts)

    def counters(self) -> CounterValues:
        reply = self._do(self._child.count, Count())
        return CounterValues(reply.values, reply.missing)

    def arm_fault(self, name: str | None) -> None:
        self._do(self._child.arm, Arm(fault=name))

    def close(self) -> None:
        self._do(self._child.close, Close())
        recorder._streams.clear()

    @staticmethod
    def _do(handler: Callable[[Any], Any], command: Any) -> Any:
        try:
            return handler(command)
        except ValueError as error:
            raise EngineError(str(error)) from None


@pytest.fixture(scope="module", autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every engine as if in a process of its own, and every archive judged by `verify.py` too."""
    monkeypatch.setattr(transformers_child, "own_process", lambda: f"test-{next(_PROCESSES)}")
    monkeypatch.setattr(recorder, "_driven", False)
    with compared():
        yield


def small(lengths: Sequence[str] = ("2C", "2C+1"), output_tokens: int = 6, **settings: Any) -> Plan:
    """The shipped plan over two lengths, one of them a boundary, with fewer tokens."""
    plan = load("boundary-snapshot")
    engine = plan.engine.model_copy(update={"settings": plan.engine.settings | settings})
    operations = [one for at, one in enumerate(plan.operations) if at != 2]
    update = {"engine": engine, "lengths": list(lengths), "operations": operations, "output_tokens": output_tokens}
    return freeze(plan.model_copy(update=update), source_sha256("boundary-snapshot-v1"))


def run(out: Path, model: str, plan: Plan | None = None, **options: Any) -> Path:
    plan = plan or small()
    told = {"fault": None, "control": None, "reference": None, **options}
    request = RunRequest(
        plan=plan, model=ensure(model), out=out, make_engine=Here, serve_args=plan.engine.serve_args, **told
    )
    return run_plan(request, Silent()).archive


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A clean run's archive, made once."""
    known: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("clean")

    def made(model: str) -> Path:
        if model not in known:
            known[model] = run(folder / model, model)
        return known[model]

    return made


@pytest.mark.parametrize("model", MODELS)
def test_a_clean_run_passes_with_every_entry_of_the_model(clean: Callable[[str], Path], model: str) -> None:
    archive = Archive.open(clean(model))
    judgement = judge(archive)
    assert judgement.verdict is Verdict.PASS, [finding.message for one in judgement.results for finding in one.findings]
    assert {result.check for result in judgement.results if result.verdict is Verdict.PASS} >= set(judgement.required)
    assert not judgement.performance_eligible
    registered = [line.rec for line in archive.records("candidate", "worker-0") if isinstance(line.rec, RankRegistered)]
    kinds = {entry.kind.value for entry in registered[0].entries}
    assert kinds == {"attention", "conv", "recurrent"} | ({"indexer", "tail"} if model == GLM else set())


SAID = {
    "tail-not-restored": r"entry 8 \(tail of layers\.3\.tail\), \[0, 196\): other bytes arrived than the tier holds",
    "indexer-not-restored": r"entry 7 \(indexer of layers\.3\.indexer\), \[0, 196\): other bytes arrived than the tier",
    "full-lookup": r"checkpoint of \[0, 392\) restored, 391 tokens credited, 1 scheduled: the last token is ",
    "stale-page": r"entry \d \((conv|recurrent) of layers\.\d\), \[0, 196\): other bytes were loaded than were",
    "attention-only": r"group 1 \(conv, recurrent\): 1 pages of \[0, 196\) were neither loaded nor local",
    "zero-page": r"entry \d \((conv|recurrent) of layers\.\d\), \[0, 196\): all bytes are zero \(destination\)",
}
"""What the finding says: the kind of entry, or the boundary that is wrong."""


@pytest.mark.parametrize("fault", faults_on("transformers"))
def test_a_fault_fails_under_the_check_that_the_catalogue_names(
    clean: Callable[[str], Path], fault: str, tmp_path: Path
) -> None:
    judgement = judge(Archive.open(run(tmp_path / "faulty", GLM, fault=fault, control=clean(GLM))))
    told = FAULTS[fault]
    assert judgement.verdict is Verdict.FAIL
    (result,) = [one for one in judgement.results if one.check == told.check]
    assert result.verdict is Verdict.FAIL
    named = [finding for finding in result.findings if finding.code == told.code]
    assert any(re.search(SAID[fault], finding.message) for finding in named), result.findings
    fills = {Named.REQUEST: "request", Named.RANK: "rank", Named.GROUP: "group", Named.LAYER: "layer"}
    for finding in named:
        assert finding.place.boundary in (196, 392)
        assert all(getattr(finding.place, fills[name]) is not None for name in told.names if name in fills)
    if fault != "tail-not-restored":  # of a few keys among many, six tokens may tell nothing: pages do
        assert [one.verdict for one in judgement.results if one.check == "paired-equality"] == [Verdict.FAIL]


@pytest.mark.parametrize("model", ["qwen3.5-tiny", "granite-hybrid-tiny"])
def test_states_that_do_not_arrive_fail_on_other_recurrences_too(
    clean: Callable[[str], Path], model: str, tmp_path: Path
) -> None:
    judgement = judge(Archive.open(run(tmp_path / "faulty", model, fault="zero-page", control=clean(model))))
    assert judgement.verdict is Verdict.FAIL
    failed = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    assert {FAULTS["zero-page"].check, "paired-equality"} <= failed


def test_the_catalogue_and_the_engine_know_the_same_faults() -> None:
    assert faults_on("transformers").keys() == CONDUCTS.keys()


@pytest.mark.parametrize(
    ("model", "interval", "message"),
    [
        ("kimi-linear-tiny", 196, "this model's cache has no tail entry; choose"),
        (GLM, 192, r"has no tail entry \(a tail needs a block size that is no multiple of index_kpool\)"),
    ],
)
def test_a_fault_of_an_entry_that_the_model_has_not_is_refused(model: str, interval: int, message: str) -> None:
    layout = transformers_child.look_at(Model(str(ensure(model)), "bfloat16", "eager"), interval)
    with pytest.raises(FaultError, match=message):
        conduct("tail-not-restored", layout)
    with pytest.raises(FaultError, match="the transformers engine has only attention-only, full-lookup"):
        conduct("short-copy", layout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_sise": 64}, r"engine\.settings\.block_sise: the transformers engine has only block_size, dtype"),
        ({"block_size": 0}, r"engine\.settings\.block_size: must be a whole number above 0, not 0"),
        ({"num_threads": True}, r"engine\.settings\.num_threads: must be a whole number above 0, not True"),
    ],
)
def test_a_setting_that_it_cannot_follow_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        settings_in_force(settings, [])


def test_serve_arguments_win_and_both_ends_know_the_same_settings() -> None:
    found = settings_in_force({"block_size": 64}, ["--block-size", "80", "--dtype=float32"])
    assert (found["block_size"], found["dtype"]) == (80, "float32")
    assert tuple(found) == SETTINGS


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"audit_level": "poison"}, "audit_level: 'poison' is not for the transformers engine"),
        ({"save_delay_ms": 5}, "save_delay_ms: the transformers engine saves within its steps; make it 0"),
        ({"repair": "strict-prefix"}, "the transformers engine has no connector's options, repairs or services"),
        ({"settings": {"tensor_parallel_size": 2}}, "tensor_parallel_size: the transformers engine has only"),
    ],
)
def test_what_it_cannot_do_is_refused_when_it_starts(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    told = {"settings": {}, "serve_args": [], "connector": "native", "external_cache_bytes": 1, "save_delay_ms": 0}
    rest = {"audit_level": "digest", "fault": None, "stream_dir": tmp_path, "log_path": tmp_path / "log"}
    with pytest.raises(EngineError, match=message):
        Here(EngineSpec(**{"arm": "candidate", "model": tmp_path, **told, **rest, **asked})).start()


def test_an_external_cache_that_is_full_says_so() -> None:
    external = External(3)
    external.put((0, b"one"), torch.ones(2, dtype=torch.uint8))
    with pytest.raises(CacheFull, match=r"full at 3 bytes; make engine\.external_cache_bytes larger"):
        external.put((0, b"two"), torch.ones(2, dtype=torch.uint8))
