"""Faults of reasoning budgets on vLLM's own code, without an engine: each acts while it is armed, and only then."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from samestate.evidence.marker_records import BUDGET_FAULT, REPAIRS, TRACE_FOLDER
from samestate.instruments import budget_faults, budget_plugin, budget_scheduler, budget_v1, expand_repair
from samestate.instruments.budget_armoury import BUDGET_FAULTS, arm
from samestate.instruments.budget_ring import BudgetRing
from samestate.instruments.budget_sources import BudgetRecorderError
from samestate.instruments.faults import FaultError

START, END, WORD, VOCABULARY = 3, 4, 7, 16
K, BUDGET = 3, 6


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm(None)


class Request:
    """One request with a budget in vLLM's V1 code, its logits rows taken step by step."""

    def __init__(self, drafts: int = K, prompt: list[int] | None = None) -> None:
        ids = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=[END])
        self.holder = ThinkingBudgetStateHolder(ids, 1, drafts, torch.device("cpu"), False)  # type: ignore[arg-type]
        self.output: list[int] = []
        params = SamplingParams(thinking_token_budget=BUDGET)
        added = [(0, params, [WORD, START] if prompt is None else prompt, self.output)]
        self.holder.sync_batch(BatchUpdate(batch_size=1, removed=[], added=added, moved=[]))  # type: ignore[arg-type]

    def stores(self, drafts: int) -> dict[int, int]:
        """Local row -> stored id of a step with so many drafts."""
        spec = [[WORD] * drafts]
        self.holder.update_state([self.output], spec)
        if not drafts:
            return self._stored(self.holder.apply_to_logits(self._logits(1), False, spec))
        bonus = self._stored(self.holder.apply_to_logits(self._logits(1), True, spec))
        target = self._stored(self.holder.apply_to_logits(self._logits(drafts), False, spec))
        return target | {drafts + row: id_ for row, id_ in bonus.items()}

    @staticmethod
    def _logits(rows: int) -> Any:
        logits = torch.zeros(rows, VOCABULARY)
        logits[:, WORD] = 5.0
        return logits

    @staticmethod
    def _stored(logits: Any) -> dict[int, int]:
        return {row: id_ for row, id_ in (logits == 1e9).nonzero().tolist()}


def at(tokens: int, drafts: int = K, own: int = K) -> dict[int, int]:
    """Stores of a step after so many committed tokens of reasoning."""
    request = Request(drafts)
    for _ in range(tokens):
        request.stores(0)
        request.output.append(WORD)
    return request.stores(own)


def test_clean_the_close_is_stored_on_the_row_of_the_budget() -> None:
    assert [at(tokens) for tokens in (2, 3, 4, 5, 6)] == [{}, {3: END}, {2: END}, {1: END}, {0: END}]


def test_ignored_with_drafts_and_kept_without() -> None:
    arm("budget-ignored")
    assert [at(tokens) for tokens in (3, 4, 6)] == [{}, {}, {}]
    assert at(BUDGET, drafts=0, own=0) == {0: END}
    arm(None)
    assert at(4) == {2: END}


def test_off_by_the_drafts_of_a_step() -> None:
    arm("budget-off-by-drafts")
    assert [at(tokens) for tokens in (4, 6, 7)] == [{}, {3: END}, {2: END}]
    assert at(BUDGET, drafts=0, own=0) == {0: END}


def test_stored_on_the_wrong_row() -> None:
    arm("store-on-wrong-row")
    assert [at(tokens) for tokens in (3, 4, 5, 6)] == [{3: END}, {1: END}, {2: END}, {1: END}]
    assert at(BUDGET, drafts=0, own=0) == {0: END}


@pytest.mark.parametrize("drafts", [0, K])
def test_forced_once_more_after_the_close(drafts: int) -> None:
    arm("double-force")
    request = Request(drafts)
    request.output += [WORD] * 2
    request.stores(drafts)
    request.output.append(END)
    assert request.stores(drafts) == {0: END}
    request.output += [END]
    assert request.stores(drafts) == {}
    arm(None)
    assert request.stores(drafts) == {}


def test_a_forced_row_is_masked_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 5.0, 1e9], [1.0, 5.0, 2.0]])
    greedy = SimpleNamespace(all_greedy=True)
    counts = torch.tensor([2])
    clean = rejection_sampler.apply_sampling_constraints(logits.clone(), counts, greedy)  # type: ignore[arg-type]
    assert clean.argmax(dim=-1).tolist() == [2, 1]
    arm("forced-row-masked")
    masked = rejection_sampler.apply_sampling_constraints(logits.clone(), counts, greedy)  # type: ignore[arg-type]
    assert masked.argmax(dim=-1).tolist() == [1, 1]
    assert torch.equal(masked[1], clean[1])


def test_another_rank_stores_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_faults, "get_tensor_model_parallel_world_size", lambda: 2)
    arm("rank-disagreement")
    monkeypatch.setattr(budget_faults, "get_tensor_model_parallel_rank", lambda: 0)
    first = at(4)
    monkeypatch.setattr(budget_faults, "get_tensor_model_parallel_rank", lambda: 1)
    second = at(4)
    assert first == {2: END}
    assert second[2] == END and second != first and set(second.values()) == {END, WORD}


def test_one_rank_alone_cannot_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_faults, "get_tensor_model_parallel_world_size", lambda: 1)
    arm("rank-disagreement")
    with pytest.raises(FaultError, match="one rank cannot"):
        Request()


class Held(BudgetRing):
    """A ring that writes nothing."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(dropped=0), None, 8)  # type: ignore[arg-type]


def test_the_ring_overflows_and_counts() -> None:
    ring = Held()
    arm("ring-overflow")
    for _ in range(3):
        ring.put(SimpleNamespace())  # type: ignore[arg-type]
    assert ring.dropped == 2
    arm(None)
    ring.put(SimpleNamespace())  # type: ignore[arg-type]
    assert ring.dropped == 2


def test_the_second_step_is_lost_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def end(observer: Any, step: Any, output: Any) -> None:
        seen.append([request.request for request in step.watched])

    monkeypatch.setattr(budget_v1.Observer, "end", end)
    arm("lost-step")
    for step in (["a"], ["a", "b"], ["a", "b"]):
        watched = [SimpleNamespace(request=name) for name in step]
        budget_v1.Observer.end(None, SimpleNamespace(watched=watched), None)  # type: ignore[arg-type]
    assert seen == [["a"], ["b"], ["a"]]
    arm(None)
    assert budget_v1.Observer.end is end


def test_what_was_trimmed_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[int]] = []

    def deliver(observer: Any, request: Any, position: int, before: list[int], after: int, stopped: bool) -> None:
        said.append(before)

    monkeypatch.setattr(budget_scheduler.Observer, "deliver", deliver)
    arm("trim-not-recorded")
    budget_scheduler.Observer.deliver(None, None, 0, [1, 2, 3], 2, True)  # type: ignore[arg-type]
    arm(None)
    budget_scheduler.Observer.deliver(None, None, 0, [1, 2, 3], 2, True)  # type: ignore[arg-type]
    assert said == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("fault", [name for name, fault in BUDGET_FAULTS.items() if fault.sources])
def test_unknown_source_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUDGET_FAULTS[fault], "sources", dict.fromkeys(BUDGET_FAULTS[fault].sources, "0" * 64))
    with pytest.raises(FaultError, match="unknown source") as caught:
        arm(fault)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_one_line() -> None:
    with pytest.raises(FaultError, match="no fault of reasoning budgets; use one of budget-ignored"):
        arm("zero-page")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({BUDGET_FAULT: "lost-step"}, "needs the recorder"),
        ({REPAIRS: "cpu-draft-row"}, "no repair is called 'cpu-draft-row'"),
    ],
)
def test_the_environment_must_be_whole(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str) -> None:
    for name in (BUDGET_FAULT, REPAIRS, TRACE_FOLDER):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(budget_plugin, "_registered", False)
    with pytest.raises(BudgetRecorderError, match=said) as caught:
        budget_plugin.register()
    assert "\n" not in str(caught.value)


def test_the_repair_of_drafted_rows_may_be_asked_for_twice() -> None:
    kernels = pytest.importorskip("vllm.utils.cpu_triton_utils")
    own = kernels._expand_kernel_impl
    try:
        for _ in range(2):
            expand_repair.ensure()
            assert kernels._expand_kernel_impl is expand_repair.expand
    finally:
        kernels._expand_kernel_impl = own
