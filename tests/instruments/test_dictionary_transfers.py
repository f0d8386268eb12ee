"""The dictionary connector under the audit: its records and page rows without an engine, then plans on a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec

from quiet import Silent
from samestate.cache.dictionary_pages import Dictionary, Page, device_pages
from samestate.cache.families import Part, Transfer, geometry
from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Verdict
from samestate.engines.base import Engine, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import (
    AnyRecord,
    GuardsChecked,
    LoadCompleted,
    LoadSubmitted,
    PagesDigested,
    PageSide,
    PagesPoisoned,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
)
from samestate.evidence.stream import Defect, StreamWriter, read_stream
from samestate.instruments.dictionary_transfers import DictionaryAdapter
from samestate.instruments.pages import Layout
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load, with_connector

C, BLOCKS, PAGE, STATE = 4, 10, 128, 40
DELAY_MS = 20
SAVE = Transfer(7, "cold", [b"a"], [Part(0, 0, [1]), Part(1, 0, [2])])
LOAD = Transfer(8, "reload", [b"a"], [Part(0, 0, [5]), Part(1, 0, [6])])


class Audited:
    """A dictionary, its adapter at level poison, and what the adapter wrote down."""

    def __init__(self, folder: Path) -> None:
        attention = FullAttentionSpec(block_size=C, num_kv_heads=1, head_size=4, head_size_v=4, dtype=torch.float32)
        shape = {"shapes": ((STATE // 4,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        state = MambaSpec(block_size=C, page_size_padded=PAGE, **shape)
        size = 2 * BLOCKS * PAGE
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size, ["rows"], layer_stride=BLOCKS * PAGE, block_stride=PAGE),
                KVCacheTensor(size, ["state"], layer_stride=BLOCKS * PAGE, block_stride=PAGE, offset=BLOCKS * PAGE),
            ],
            kv_cache_groups=[KVCacheGroupSpec(["rows"], attention), KVCacheGroupSpec(["state"], state)],
        )
        self.cache = torch.randint(1, 256, (2, BLOCKS, PAGE), dtype=torch.uint8)
        views = self.cache.view(torch.float32)
        registered = {"rows": views[0], "state": views[1][:, : STATE // 4]}
        self._path = folder / "worker-0.jsonl"
        self._stream = StreamWriter(self._path, "candidate", "worker-0")
        moved = geometry(config)
        inner = SimpleNamespace(geometry=moved, watcher=None, dictionary=None)
        self.adapter = DictionaryAdapter(inner, config, 0, self._stream, _at_once, DELAY_MS)
        self.adapter.watch()
        self.dictionary = inner.dictionary = Dictionary(moved, device_pages(moved, config, registered), inner.watcher)
        self.adapter.watch_pages(Layout(config, registered, {}), poison=True)

    def records(self) -> list[tuple[int, AnyRecord]]:
        self._stream.close()
        lines = list(read_stream(self._path))
        assert not any(isinstance(line, Defect) for line in lines)
        return [(line.t_ns, line.rec) for line in lines[1:-1]]


def _at_once(observation: Callable[[], None]) -> None:
    observation()


@pytest.fixture
def audited(tmp_path: Path) -> Audited:
    return Audited(tmp_path)


def digests(records: list[tuple[int, AnyRecord]], side: PageSide, moment: str) -> list[str]:
    found = [one for _, one in records if isinstance(one, PagesDigested) and (one.side, one.moment) == (side, moment)]
    return [row.digest for one in found for row in one.rows]


def one(records: list[tuple[int, AnyRecord]], kind: type) -> tuple[int, AnyRecord]:
    (found,) = [(t, record) for t, record in records if isinstance(record, kind)]
    return found


@pytest.mark.sanity
def test_a_save_and_a_load_are_recorded_with_their_pages(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    audited.dictionary.load(LOAD)
    records = audited.records()
    source = digests(records, PageSide.SOURCE, "submitted")
    assert len(set(source)) == 2
    for side, moment in [
        (PageSide.SOURCE, "completed"),
        (PageSide.STORED, "completed"),
        (PageSide.STORED, "submitted"),
        (PageSide.DESTINATION, "completed"),
    ]:
        assert digests(records, side, moment) == source, (side, moment)
    moved = PAGE + STATE
    for kind in (SaveSubmitted, LoadSubmitted):
        _, submitted = one(records, kind)
        assert sum(part.bytes for part in submitted.parts) == moved  # type: ignore[union-attr]
        assert {part.boundary for part in submitted.parts} == {C}  # type: ignore[union-attr]
    for kind in (SaveCompleted, LoadCompleted):
        assert one(records, kind)[1].bytes == moved  # type: ignore[union-attr]
    assert one(records, LoadSubmitted)[1].boundary == C  # type: ignore[union-attr]
    assert one(records, PagesPoisoned)[1].bytes == moved  # type: ignore[union-attr]
    assert one(records, GuardsChecked)[1].changed == []  # type: ignore[union-attr]
    assert [group.bytes_per_block for group in audited.adapter.groups()] == [PAGE, STATE]


def test_a_save_that_is_held_back_really_is_and_the_worker_waits(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    records = audited.records()
    (begun, delay), (waited, wait), (done, _) = (
        one(records, kind) for kind in (SaveDelayed, SaveWaited, SaveCompleted)
    )
    assert delay.delay_ms == DELAY_MS  # type: ignore[union-attr]
    assert wait.jobs == [SAVE.job]  # type: ignore[union-attr]
    assert begun + DELAY_MS * 1_000_000 <= waited <= done
    assert wait.waited_ns >= DELAY_MS * 1_000_000  # type: ignore[union-attr]


def test_a_page_overwritten_before_its_copy_is_seen(audited: Audited) -> None:
    begin = audited.adapter.saves_begin

    def overwritten(saves: list[Transfer]) -> None:
        begin(saves)
        audited.cache[0, 1] = 9

    audited.adapter.saves_begin = overwritten  # type: ignore[method-assign, assignment]
    audited.dictionary.save([SAVE])
    records = audited.records()
    before, after = (digests(records, PageSide.SOURCE, moment) for moment in ("submitted", "completed"))
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)


def test_a_page_that_was_not_copied_keeps_its_poison(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    pages = audited.dictionary.pages

    def without_state(transfer: Transfer) -> list[Page]:
        return [page for page in pages(transfer) if page.group == 0 or transfer is SAVE]

    audited.dictionary.pages = without_state  # type: ignore[method-assign, assignment]
    audited.adapter._pages._tier._dictionary = SimpleNamespace(pages=pages)  # type: ignore[union-attr]
    audited.dictionary.load(LOAD)
    records = audited.records()
    arrived = [r for _, r in records if isinstance(r, PagesDigested) and r.side is PageSide.DESTINATION]
    assert [row.sentinel for row in arrived[0].rows] == [0, STATE]
    assert one(records, LoadCompleted)[1].bytes == PAGE  # type: ignore[union-attr]


def test_a_stored_page_that_changed_is_seen_at_the_load(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    next(iter(audited.dictionary.pages(SAVE))).stored.fill_(3)
    audited.dictionary.load(LOAD)
    records = audited.records()
    saved, loaded = digests(records, PageSide.STORED, "completed"), digests(records, PageSide.STORED, "submitted")
    assert (saved[0] != loaded[0], saved[1] == loaded[1]) == (True, True)


def test_a_page_beside_the_load_is_guarded(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    end = audited.adapter.load_ended

    def beside(load: Transfer, moved: int) -> None:
        audited.cache[0, 4] = 0
        end(load, moved)

    audited.adapter.load_ended = beside  # type: ignore[method-assign]
    audited.dictionary.load(LOAD)
    assert one(audited.records(), GuardsChecked)[1].changed == [[0, 4]]  # type: ignore[union-attr]


@pytest.mark.regression
def test_loads_side_by_side_do_not_accuse_each_other(audited: Audited) -> None:
    audited.dictionary.save([SAVE])
    beside = Transfer(9, "other", [b"a"], [Part(0, 0, [4]), Part(1, 0, [7])])
    for transfer in (LOAD, beside):
        audited.adapter.load_begins(transfer)
    for transfer in (LOAD, beside):
        for page in audited.dictionary.pages(transfer):
            page.device.copy_(page.stored)
    audited.cache[0, 8] = 0
    for transfer in (LOAD, beside):
        audited.adapter.load_ended(transfer, PAGE + STATE)
    checked = {r.job: r.changed for _, r in audited.records() if isinstance(r, GuardsChecked)}
    assert checked == {LOAD.job: [], beside.job: [[0, 8]]}


# --- on a real engine -----------------------------------------------------------------------------


def run(name: str, out: Path, model: Path, control: Path, **options: str) -> Judgement:
    """A shipped plan with the dictionary inside the audit; one engine start."""
    plan = with_connector(load(name), "dictionary")
    # It saves synchronously: every delay is a delay of the engine.
    delay = min(plan.instruments.save_delay_ms, 50)
    plan = plan.model_copy(update={"instruments": plan.instruments.model_copy(update={"save_delay_ms": delay})})
    plan = freeze(plan, source_sha256(plan.analyzer.id))

    def engine(spec: EngineSpec) -> Engine:
        return VllmEngine(spec._replace(connector_options=options))

    request = RunRequest(
        plan=plan,
        model=model,
        out=out,
        make_engine=engine,
        fault=None,
        control=control,
        reference=None,
        serve_args=[],
    )
    return judge(Archive.open(run_plan(request, Silent()).archive))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.deep
def test_every_byte_and_boundary_is_right_on_a_real_engine(
    clean_archive: Path, tiny_model: Path, tmp_path: Path
) -> None:
    judgement = run("boundary-instrumented", tmp_path / "run", tiny_model, clean_archive)
    assert judgement.verdict is Verdict.PASS
    assert all(row.equal and row.boundary == row.credited == row.content_boundary for row in judgement.table)
    delayed = next(result.summary for result in judgement.results if result.check == "save-completion")
    assert "0 delayed" not in delayed


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.deep
def test_the_lookup_over_the_full_prompt_fails_at_the_two_exact_boundaries(
    clean_archive: Path, tiny_model: Path, tmp_path: Path
) -> None:
    judgement = run("boundary", tmp_path / "run", tiny_model, clean_archive, lookup="full")
    assert judgement.verdict is Verdict.FAIL
    wrong = {row.tokens: (row.boundary, row.credited, row.equal) for row in judgement.table if not row.equal}
    assert wrong == {3584: (3584, 3583, False), 5376: (5376, 5375, False)}
    codes = {finding.code for result in judgement.results for finding in result.findings}
    assert "retained_lookup_boundary" in codes
