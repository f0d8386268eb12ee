"""Entries of transformers' cache objects: all are found, a snapshot is exact, and what nobody knows is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from samestate.engines.children.transformers_cache import Layout, UnknownEntry
from samestate.engines.children.transformers_child import look_at
from samestate.engines.children.transformers_layout import registration
from samestate.engines.children.transformers_model import LoadError, Model
from samestate.models.catalogue import ensure

C = 36  # no multiple of GLM-5.3-Flash's pool of 16: tails of 4, 8 and 12 keys
pytestmark = pytest.mark.slow
MODELS = ["qwen3-next-tiny", "qwen3.5-tiny", "granite-hybrid-tiny", "kimi-linear-tiny", "glm5-next-tiny"]
LINEAR = ["conv", "recurrent"] * 3
KINDS = {
    "qwen3-next-tiny": [*LINEAR, "attention", "attention"],
    "qwen3.5-tiny": [*LINEAR, "attention", "attention"],
    "granite-hybrid-tiny": [*["conv", "recurrent"] * 5, "attention", "attention"],
    "kimi-linear-tiny": [*LINEAR, "attention", "attention"],
    "glm5-next-tiny": [*LINEAR, "attention", "indexer", "tail"],
}
Load = Callable[[str], Model]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    known: dict[str, Model] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield lambda name: known.setdefault(name, Model(str(ensure(name)), "bfloat16", "eager"))
    torch.set_num_threads(threads)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(261, 512) for _ in range(tokens)]


def prefill(model: Model, ids: list[int], cache: Any, start: int = 0) -> Any:
    logits = None
    for at in range(start, len(ids), C):
        logits = model.step(ids[at : min(at + C, len(ids))], cache)
    return logits


def greedy(model: Model, logits: Any, cache: Any, steps: int = 4) -> list[Any]:
    """The logits of some steps, each on the choice before."""
    found = [logits]
    for _ in range(steps):
        found.append(model.step([int(found[-1].argmax())], cache))
    return found


def snapshot(layout: Layout, cache: Any, boundary: int) -> dict[tuple[int, int], Any]:
    last = boundary // C - 1
    return {
        (entry.number, block): layout.read(cache, entry, block)
        for entry in layout.entries
        for block in ([last] if entry.axis is None else range(last + 1))
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_is_found_with_its_kind(load: Load, name: str) -> None:
    layout = look_at(load(name), C)
    assert [entry.kind.value for entry in layout.entries] == KINDS[name]
    registered = registration(layout, "xxh3-128")
    dtypes = {entry.kind.value: entry.logical_dtype for entry in registered.entries}
    assert dtypes.pop("recurrent") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}
    assert all(entry.effective_bytes for entry in registered.entries)
    for group in registered.transfer_groups:
        members = [entry for entry in registered.entries if entry.engine_group == group.engine_group]
        assert sum(entry.effective_bytes for entry in members) == group.bytes_per_block


def test_a_tail_is_the_unfinished_pool_and_there_is_none_where_pools_end_at_boundaries(load: Load) -> None:
    model = load("glm5-next-tiny")
    cache = model.fresh_cache()
    prefill(model, prompt(3 * C), cache)
    layout = look_at(model, C)
    tail, indexer = layout.entries[-1], layout.entries[-2]
    row = indexer.bytes // C
    for block, keys in enumerate([4, 8, 12]):
        page = layout.read(cache, tail, block)
        assert page[: keys * row].count_nonzero() and not page[keys * row :].count_nonzero()
        end = (block + 1) * C
        raw = cache.layers[3].indexer_keys[:, end - keys : end].contiguous().flatten().view(torch.uint8)
        assert torch.equal(page[: keys * row], raw)
    assert "tail" not in {entry.kind.value for entry in look_at(model, 32).entries}


@pytest.mark.parametrize("boundary", [C, 3 * C])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_restored_continues_bit_for_bit_as_what_was_computed(load: Load, name: str, boundary: int) -> None:
    model, ids = load(name), prompt(3 * C + 5)
    layout, cache = look_at(model, C), model.fresh_cache()
    prefill(model, ids[:boundary], cache)
    pages = snapshot(layout, cache, boundary)
    before = {at: page.clone() for at, page in pages.items()}
    computed = greedy(model, prefill(model, ids, cache, boundary), cache)
    for _ in range(2):  # restoring uses nothing up
        restored = model.fresh_cache()
        layout.restore(restored, pages, boundary)
        assert snapshot(layout, restored, boundary).keys() == pages.keys()
        assert all(torch.equal(page, before[at]) for at, page in snapshot(layout, restored, boundary).items())
        again = greedy(model, prefill(model, ids, restored, boundary), restored)
        assert all(torch.equal(one, other) for one, other in zip(computed, again, strict=True))
    assert all(torch.equal(page, before[at]) for at, page in pages.items())


def test_a_reference_to_the_cache_is_no_snapshot(load: Load) -> None:
    """Upstream writes recurrent states in place: what is kept by reference is another state a step later."""
    model, ids = load("kimi-linear-tiny"), prompt(C + 3)
    layout, cache = look_at(model, C), model.fresh_cache()
    prefill(model, ids[:C], cache)
    kept, shallow = snapshot(layout, cache, C), copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    prefill(model, ids, cache, C)
    later = snapshot(layout, shallow, C)
    changed = {
        layout.entries[number].kind.value
        for (number, _), page in later.items()
        if not torch.equal(page, kept[number, 0])
    }
    assert changed == {"conv", "recurrent"}


@pytest.mark.parametrize("name", MODELS)
def test_an_early_token_still_counts_after_a_restoration(load: Load, name: str) -> None:
    model, layout = load(name), look_at(load(name), C)
    outputs = []
    for first in (300, 301):
        ids = [*prompt(2), first, *prompt(4 * C)]
        cache, restored = model.fresh_cache(), model.fresh_cache()
        prefill(model, ids[: 4 * C], cache)
        pages = snapshot(layout, cache, 4 * C)
        # Of attention nothing but the last block, so that the state alone can tell.
        early = {at: page for at, page in pages.items() if layout.entries[at[0]].axis is None or at[1] == 3}
        layout.restore(restored, early, 4 * C)
        outputs.append(prefill(model, ids, restored, 4 * C))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in MODELS for kind in sorted(set(KINDS[name]))])
def test_every_kind_of_entry_matters(load: Load, name: str, kind: str) -> None:
    model, ids, boundary = load(name), prompt(5 * C + 3, seed=1), 5 * C
    layout, cache = look_at(model, C), model.fresh_cache()
    prefill(model, ids[:boundary], cache)
    pages = snapshot(layout, cache, boundary)
    computed = greedy(model, prefill(model, ids, cache, boundary), cache, steps=8)
    partial, restored = {at: p for at, p in pages.items() if layout.entries[at[0]].kind != kind}, model.fresh_cache()
    layout.restore(restored, partial, boundary)
    again = greedy(model, prefill(model, ids, restored, boundary), restored, steps=8)
    assert any(not torch.equal(one, other) for one, other in zip(computed, again, strict=True))


class Strange(DynamicLayer):
    """A layer of a class that nobody knows."""


def seen(model: Model) -> Any:
    cache = model.fresh_cache()
    model.step(prompt(8), cache)
    return cache


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda cache: cache.layers.append(Strange()),
            "layer 4 of the cache is a Strange, and what it keeps is not known",
        ),
        (lambda cache: cache.layers.append(DynamicSlidingWindowLayer(8)), "layer 4 of the cache is a DynamicSliding"),
        (lambda cache: setattr(cache.layers[3], "sums", torch.ones(2)), r"layer 3 .* keeps sums \(Tensor\), an entry"),
        (lambda cache: setattr(cache.layers[0], "past", [torch.ones(2)]), r"layer 0 .* keeps past \(list\), an entry"),
        (lambda cache: setattr(cache, "routes", {0: torch.ones(2)}), r"the cache keeps routes \(dict\), an entry"),
    ],
)
def test_an_entry_that_nobody_knows_is_refused(load: Load, spoil: Callable[[Any], None], message: str) -> None:
    cache = seen(load("kimi-linear-tiny"))
    spoil(cache)
    with pytest.raises(UnknownEntry, match=message):
        Layout(cache, C, 1)


def test_state_outside_the_cache_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("kimi-linear-tiny")
    module, step = model._model.model.norm, model.step
    module.running = torch.zeros(1)

    def stateful(ids: list[int], cache: Any) -> Any:
        module.running.add_(1)
        return step(ids, cache)

    monkeypatch.setattr(model, "step", stateful)
    with pytest.raises(UnknownEntry, match=r"the model keeps model\.norm\.running outside its cache and changes it"):
        look_at(model, C)
    del module.running
    monkeypatch.setattr(
        model,
        "step",
        lambda ids, cache: (hasattr(module, "kept") or setattr(module, "kept", torch.ones(1)), step(ids, cache))[1],
    )
    with pytest.raises(UnknownEntry, match=r"a step leaves model\.norm\.kept in the model"):
        look_at(model, C)
    del module.kept


def test_a_cache_without_a_config_is_another_class_of_layers(load: Load) -> None:
    """The cache is the one that the model's config chooses: a plain one would keep no state at all."""
    assert type(load("glm5-next-tiny").fresh_cache().layers[3]).__name__ == "DynamicIndexedLayer"
    assert not DynamicCache().layers


@pytest.mark.parametrize(
    ("dtype", "attention", "message"),
    [("int8", "eager", "dtype: must be one of"), ("bfloat16", "flash", "attn_implementation: must be one of")],
)
def test_a_setting_that_it_has_not_is_refused(dtype: str, attention: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        Model(str(tmp_path), dtype, attention)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = ensure("kimi-linear-tiny")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.A_log"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"1 missing_keys for KimiLinearForCausalLM, the first is model\.layers\.0\."):
        Model(str(tmp_path), "bfloat16", "eager")
