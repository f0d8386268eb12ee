"""Who shares pages with whom: the facts, what changes them, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from samestate.cache.base import PageKey, Read, Write
from samestate.cache.identity import (
    Identity,
    IdentityError,
    changed,
    identity,
    require_stable_keys,
    weight_files,
)
from samestate.cache.identity_notes import NOTE_BYTES, note
from samestate.cache.layout import GroupLayout, RankLayout, Span, row_spans


@dataclass(frozen=True)
class Notes:
    """As much of a store as notes need."""

    pages: dict[PageKey, bytes]

    def read(self, key: PageKey, into: memoryview) -> Read:
        if key not in self.pages:
            return Read.MISS
        into[:] = self.pages[key]
        return Read.HIT

    def delete(self, keys: list[PageKey]) -> int:
        return sum(self.pages.pop(key, None) is not None for key in keys)

    def write(self, key: PageKey, page: memoryview) -> Write:
        assert key not in self.pages
        self.pages[key] = bytes(page)
        return Write.WRITTEN


def rank(number: int = 0, **changes: Any) -> RankLayout:
    groups = (
        GroupLayout(0, "state", 1792, ((0, 40),), (("layers.0", "MambaSpec(dtypes=float32)"),)),
        GroupLayout(1, "pages", 1792, ((0, 64), (1, 32)), (("layers.3", "FullAttentionSpec(head_size=16)"),)),
    )
    layout = RankLayout(rank=number, row_offset=number * 128, matrices=(64, 64), groups=groups)
    return replace(layout, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def engine(folder: Path) -> Any:
    """The parts of vLLM's configuration that are looked at."""
    hf = SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "_name_or_path": str(folder), "rope": {"theta": 1e4}})
    model = SimpleNamespace(
        model=str(folder), revision=None, hf_config=hf, dtype="torch.bfloat16", quantization=None, seed=0
    )
    cache = SimpleNamespace(
        cache_dtype="auto",
        kv_cache_layout="LBHNC",
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="float32",
        mamba_cache_mode="align",
        prefix_caching_hash_algo="sha256",
        hash_block_size=1792,
    )
    parallel = SimpleNamespace(
        world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        weight_transfer_config=None,
    )


@pytest.mark.sanity
def test_the_same_engine_started_again_has_the_same_name(folder: Path) -> None:
    one, other = identity(engine(folder), [rank()]), identity(engine(folder), [rank()])
    assert one == other
    assert one.namespace == f"samestate-1 {folder.name} {one.digest}"


def test_so_has_one_whose_folder_lies_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("other") / folder.name
    folder.rename(moved)
    folder.mkdir()
    for path in moved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert identity(engine(folder), [rank()]) == identity(engine(moved), [rank()])


def set_cache(name: str, value: object) -> Callable[[Any, Path], None]:
    return lambda config, folder: setattr(config.cache_config, name, value)


CHANGES: dict[str, Callable[[Any, Path], None]] = {
    "model.weights": lambda config, folder: (folder / "model.safetensors").write_bytes(b"weightz") and None,
    "model.config": lambda config, folder: setattr(config.model_config.hf_config, "to_dict", lambda: {"rope": 2}),
    "model.dtype": lambda config, folder: setattr(config.model_config, "dtype", "torch.float16"),
    "model.quantization": lambda config, folder: setattr(config.model_config, "quantization", "fp8"),
    "cache.dtype": set_cache("cache_dtype", "fp8"),
    "cache.layout": set_cache("kv_cache_layout", "BLHNC"),
    "cache.mamba_cache_dtype": set_cache("mamba_cache_dtype", "float32"),
    "cache.mamba_ssm_cache_dtype": set_cache("mamba_ssm_cache_dtype", "bfloat16"),
    "cache.mamba_cache_mode": set_cache("mamba_cache_mode", "all"),
    "keys.hash": set_cache("prefix_caching_hash_algo", "sha256_cbor"),
    "keys.tokens": set_cache("hash_block_size", 256),
    "parallel.tensor_parallel_size": lambda config, folder: setattr(config.parallel_config, "tensor_parallel_size", 2),
    "parallel.world_size": lambda config, folder: setattr(config.parallel_config, "world_size", 2),
    "load_format": lambda config, folder: setattr(config.load_config, "load_format", "gguf"),
}


@pytest.mark.parametrize("fact", CHANGES)
def test_another_fact_is_another_name_and_is_named(folder: Path, fact: str) -> None:
    before = identity(engine(folder), [rank()])
    config = engine(folder)
    CHANGES[fact](config, folder)
    now = identity(config, [rank()])
    assert now.namespace != before.namespace
    (difference,) = changed(before.facts, now.facts)
    assert difference.startswith(f"{fact}: ")


@pytest.mark.parametrize(
    ("layout", "fact"),
    [
        (rank(matrices=(64, 128)), "rank0.matrices"),
        (rank(row_offset=4096), "rank0.row_offset"),
        (rank(groups=(replace(rank().groups[0], tokens_per_block=256), rank().groups[1])), "rank0.group0.tokens_per"),
        (rank(groups=(replace(rank().groups[0], refs=((0, 48),)), rank().groups[1])), "rank0.group0.refs"),
        (
            rank(groups=(rank().groups[0], replace(rank().groups[1], facts=(("layers.3", "FullAttentionSpec(2)"),)))),
            "rank0.group1.FullAttentionSpec",
        ),
    ],
)
def test_another_layout_is_another_name(folder: Path, layout: RankLayout, fact: str) -> None:
    before, now = identity(engine(folder), [rank()]), identity(engine(folder), [layout])
    (difference,) = changed(before.facts, now.facts)
    assert difference.startswith(fact)
    assert before.digest != now.digest


def test_every_rank_counts(folder: Path) -> None:
    one = identity(engine(folder), [rank(0), rank(1)])
    other = identity(engine(folder), [rank(0), rank(1, matrices=(64, 96))])
    assert changed(one.facts, other.facts)[0].startswith("rank1: ")


def test_a_tenant_is_a_name_of_its_own(folder: Path) -> None:
    names = {identity(engine(folder), [rank()], tenant=tenant).namespace for tenant in ("", "a", "b")}
    assert len(names) == 3


def test_files_that_do_not_change_what_is_computed_from_tokens_do_not_count(folder: Path) -> None:
    before = weight_files(engine(folder).model_config)
    (folder / "tokenizer.json").write_text("other")
    (folder / "README.md").write_text("other")
    assert weight_files(engine(folder).model_config) == before
    assert before.keys() == {"config.json", "model.safetensors"}


def test_the_operators_word_spares_reading_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)
    assert identity(engine(folder), [rank()], revision="release 7").facts["model.weights"] == "release 7"


def test_a_file_of_the_hubs_cache_is_known_by_its_name(folder: Path) -> None:
    blob = folder / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"never read")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(blob)
    assert weight_files(engine(folder).model_config)["model.safetensors"] == "ab" * 32


def test_a_model_without_local_files_is_refused_in_one_line(folder: Path) -> None:
    config = engine(folder)
    config.model_config.model = "nobody/nothing"
    with pytest.raises(IdentityError, match=r"nobody/nothing: is neither a folder nor in the hub's cache.*revision"):
        identity(config, [rank()])


@pytest.mark.parametrize(("algorithm", "sound"), [("sha256", True), ("sha256_cbor", True), ("xxhash", False)])
def test_keys_that_could_collide_are_refused(folder: Path, algorithm: str, sound: bool) -> None:
    config = engine(folder)
    config.cache_config.prefix_caching_hash_algo = algorithm
    if sound:
        require_stable_keys(config)
    else:
        with pytest.raises(IdentityError, match="--prefix-caching-hash-algo sha256"):
            require_stable_keys(config)


def test_weights_that_change_under_way_are_refused(folder: Path) -> None:
    config = engine(folder)
    config.weight_transfer_config = SimpleNamespace()
    with pytest.raises(IdentityError, match="leave the secondary tiers out"):
        require_stable_keys(config)


# --- notes ----------------------------------------------------------------------------------------


def test_a_change_is_said_once() -> None:
    notes: Any = Notes({})
    first = Identity("tiny", {"cache.dtype": "auto", "vllm": "1"})
    assert note(notes, first) == []
    assert note(notes, first) == []
    second = Identity("tiny", {"cache.dtype": "fp8", "vllm": "1"})
    assert note(notes, second) == ["cache.dtype: auto → fp8"]
    assert note(notes, second) == []
    assert all(len(page) == NOTE_BYTES for page in notes.pages.values())


def test_another_model_is_no_change() -> None:
    notes: Any = Notes({})
    note(notes, Identity("tiny", {"a": "1"}))
    assert note(notes, Identity("large", {"a": "2"})) == []


def test_an_unreadable_note_is_replaced() -> None:
    now, pages = Identity("tiny", {"a": "1"}), {}
    notes: Any = Notes(pages)
    note(notes, now)
    (key,) = pages
    pages[key] = bytes(NOTE_BYTES)
    assert note(notes, now) == []
    assert pages[key] != bytes(NOTE_BYTES)


# --- where a page lies ----------------------------------------------------------------------------


def test_a_groups_bytes_are_its_own_on_every_rank_and_neighbours_are_joined() -> None:
    assert row_spans([rank()]) == {0: (Span(0, 40),), 1: (Span(0, 96),)}
    assert row_spans([rank(0), rank(1)]) == {
        0: (Span(0, 40), Span(128, 168)),
        1: (Span(0, 96), Span(128, 224)),
    }


def test_ranks_that_keep_one_copy_have_one_span() -> None:
    assert row_spans([rank(0), rank(1, row_offset=0)]) == row_spans([rank()])


def test_the_seed_of_the_keys_is_the_same_before_the_core_has_set_it_and_after(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    unsaid = identity(engine(folder), [rank()])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    before = identity(engine(folder), [rank()])
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "7")
    assert identity(engine(folder), [rank()]) == before != unsaid
