"""Recipes in place of weights: they sketch what the tiny checkpoints hold, and nothing else is followed."""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from samestate.models import glm5_next, granite_hybrid, kimi_linear, qwen3_5, qwen3_next, recipe
from samestate.models.build import PLANS, build
from samestate.models.configs import model_config
from samestate.models.delta_weights import DIGIT_WRITE, FAINT_WRITE, SET_CHANNEL, WRITE_BACK
from samestate.models.recipe import FILE, RecipeError, keys, load_flags, load_settings, mix, place, read
from samestate.models.sketch import Sketch
from samestate.models.tokenizer import DIGIT_IDS, LONGEST, VOCAB_SIZE, readable_ids
from samestate.models.weights import bfloat16

SMALL = ("glm5-next-small", "qwen3-next-small")
PUBLIC = {"glm5-next-small": "glm-5.3-flash", "qwen3-next-small": "qwen3-next-80b-a3b"}
FEWER = {
    "glm5-next-small": {"max_position_embeddings", "n_routed_experts", "num_hidden_layers", "vocab_size"},
    "qwen3-next-small": {"max_position_embeddings", "num_experts", "vocab_size"},
}
"""Fields whose values are not the public model's."""
PLACES = [22970, 10802, 43853, 23428]


def config(model: str) -> dict[str, Any]:
    """The language model's fields."""
    whole = model_config(model).config
    return whole.get("text_config", whole)


def small(model: str) -> dict[str, Sketch]:
    return {sketch.name: sketch for sketch in recipe.SKETCHES[model.removesuffix("-small")](config(model))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("qwen3-next-small", tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("qwen3-next-tiny", qwen3_next.weights),
        ("glm5-next-tiny", glm5_next.weights),
        ("kimi-linear-tiny", kimi_linear.weights),
        ("granite-hybrid-tiny", granite_hybrid.weights),
        ("qwen3.5-tiny", qwen3_5.weights),
    ],
)
def test_sketches_have_names_and_shapes_of_the_tiny_checkpoint(tmp_path: Path, model: str, weights: Any) -> None:
    build(model, tmp_path / "m")
    content = (tmp_path / "m" / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    assert {sketch.name: list(sketch.shape) for sketch in weights(config(model))} == {
        name: tensor["shape"] for name, tensor in header.items()
    }


@pytest.mark.parametrize("model", SMALL)
def test_small_folders_are_small_and_say_their_load_format(tmp_path: Path, model: str) -> None:
    build(model, tmp_path / "m")
    assert sum(file.stat().st_size for file in (tmp_path / "m").iterdir()) < 100_000
    assert not list((tmp_path / "m").glob("*.safetensors"))
    assert load_settings(str(tmp_path / "m")) == {"load_format": "samestate"}
    assert load_flags(str(tmp_path / "m")) == ["--load-format", "samestate"]
    assert json.loads((tmp_path / "m" / "tokenizer_config.json").read_bytes())["model_max_length"] == 131072 > LONGEST
    names = Counter(sketch.name for sketch in read(tmp_path / "m").followed(tmp_path / "m"))
    assert set(names.values()) == {1} and len(names) > 1000


def test_weights_in_files_need_no_setting(tmp_path: Path) -> None:
    assert load_settings(str(tmp_path)) == {} and load_flags("Qwen/Qwen3-Next-80B-A3B-Instruct") == []
    assert {name for name, plan in PLANS.items() if plan.file == FILE} == set(SMALL)


@pytest.mark.regression
@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_recipe_beside_weights_in_files_is_refused_in_one_line(folder: Path, weights: str) -> None:
    (folder / weights).write_bytes(b"x")
    with pytest.raises(RecipeError) as caught:
        load_settings(str(folder))
    assert (
        str(caught.value)
        == f"{folder}: holds weights in files ({weights}) and a recipe of weights ({FILE}); remove one"
    )
    newer = {"format": "samestate-weights/9"}
    (folder / FILE).write_text(json.dumps(newer))
    with pytest.raises(RecipeError, match="remove one"):
        load_settings(str(folder))
    (folder / FILE).unlink()
    assert load_settings(str(folder)) == {}


@pytest.mark.regression
@pytest.mark.parametrize(
    "content", ["{}", "[1, 2]", "no JSON", '{"format": "onnx"}', '{"w": "' + "0" * (1 << 17) + '"}']
)
def test_somebody_elses_weights_json_beside_weights_in_files_is_no_recipe(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert load_settings(str(tmp_path)) == {"load_format": "samestate"}, "alone it is one, and will be refused"
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert load_settings(str(tmp_path)) == {}


@pytest.mark.parametrize("model", SMALL)
def test_small_configs_are_the_public_ones_but_for_what_is_fewer(model: str) -> None:
    ours, public = config(model), config(PUBLIC[model])
    # Of a model with a vision tower, the class is named beside the language model's fields.
    ours = {"architectures": model_config(model).config["architectures"], **ours}
    assert {name for name, value in public.items() if ours.get(name) != value} == FEWER[model]
    tiny = config(model.replace("small", "tiny"))
    assert tiny.keys() <= ours.keys()
    # Releases of transformers before 5.19 know sparse attention under this word alone, later ones know both.
    period = [{"indexed_attention": "deepseek_sparse_attention"}.get(kind, kind) for kind in tiny["layer_types"]]
    assert ours["layer_types"] == period * (ours["num_hidden_layers"] // len(period))
    assert ours["vocab_size"] >= VOCAB_SIZE


@pytest.mark.parametrize("model", SMALL)
def test_the_set_channels_reach_every_layer(model: str) -> None:
    sketches, ours = small(model), config(model)
    hidden, layers = ours["hidden_size"], ours["num_hidden_layers"]
    written = [
        s for name, s in sketches.items() if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    ]
    assert len(written) > layers
    for sketch in written:
        assert sketch.shape[0] == hidden
        assert [(patch.rows, patch.columns, patch.value) for patch in sketch.patches] == [
            ((0, 1), range(sketch.shape[1]), 0.0)
        ]
        # As much in all as four layers of the tiny model write.
        assert sketch.std * sqrt(sketch.shape[1]) == pytest.approx(WRITE_BACK * sqrt(4 / layers))
    everybody, nobody, digits = sketches["model.embed_tokens.weight"].patches
    assert (len(everybody.rows), everybody.value) == (ours["vocab_size"], SET_CHANNEL)
    assert (nobody.value, digits.rows, digits.value) == (0.0, tuple(DIGIT_IDS), SET_CHANNEL)
    # The drafting layer's embedding is the model's.
    for name, sketch in sketches.items():
        if name.endswith("embed_tokens.weight"):
            assert sketch.patches == (everybody, nobody, digits)
    (unreadable,) = sketches["lm_head.weight"].patches
    assert set(range(ours["vocab_size"])) - set(unreadable.rows) == set(readable_ids())


def test_every_second_recurrent_head_remembers_where_key_heads_are_fewer() -> None:
    ours = config("qwen3-next-small")
    assert (ours["linear_num_key_heads"], ours["linear_num_value_heads"]) == (16, 32)
    faint, digit = small("qwen3-next-small")["model.layers.0.linear_attn.in_proj_ba.weight"].patches
    # Each key head: two rows of write strength, two of decay.
    assert faint.rows == digit.rows == tuple(range(0, 64, 4))
    assert (faint.columns, faint.value, digit.columns, digit.value) == (range(1), FAINT_WRITE, range(1, 2), DIGIT_WRITE)


def test_layers_of_multi_token_prediction_come_with_the_small_models_and_not_with_the_first_tiny_ones() -> None:
    drafting = {name for name in small("qwen3-next-small") if name.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= drafting
    assert not any(name.startswith("mtp.layers.1.") for name in drafting)
    tiny = {sketch.name for sketch in qwen3_next.weights(config("qwen3-next-tiny"))}
    assert not any(name.startswith("mtp.") for name in tiny)
    last = {name.removeprefix("model.layers.24.") for name in small("glm5-next-small") if ".layers.24." in name}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "embed_tokens.weight"} <= last
    assert {"self_attn.indexer.wk.weight", "mlp.experts.15.down_proj.weight"} <= last
    assert not any(name.startswith("hc_") for name in last)
    assert max(int(name.split(".")[2]) for name in small("glm5-next-small") if ".layers." in name) == 24
    tiny = {sketch.name for sketch in glm5_next.weights(config("glm5-next-tiny"))}
    assert max(int(name.split(".")[2]) for name in tiny if ".layers." in name) == 3


def test_glms_drafting_layer_stands_where_vllm_looks_for_it() -> None:
    whole = model_config("glm5-next-small").config
    assert (whole["model_type"], whole["text_config"]["model_type"]) == ("glm5_next", "glm5_next_text")
    assert whole["text_config"]["num_nextn_predict_layers"] == 1


def test_cells_are_spread_evenly_and_two_tensors_do_not_follow_each_other() -> None:
    first, second = (keys("a/0", name) for name in ("x", "y"))
    places = [[place(key, cell) for cell in range(20_000)] for key in (first, second)]
    for found in places:
        assert fmean(found) == pytest.approx(32768, rel=0.02)
        assert pstdev(found) == pytest.approx(65536 / sqrt(12), rel=0.02)
        assert len(set(found)) > 16_000
    product = fmean((one - 32768) * (other - 32768) for one, other in zip(*places, strict=True))
    assert abs(product) < 0.03 * 65536**2 / 12
    assert keys("a/1", "x") != first


def test_mixing_loses_nothing() -> None:
    words = {mix(word) for word in range(0, 2**32, 65537)}
    assert len(words) == 65536 and all(0 <= word < 2**32 for word in words)


def test_places_of_a_stream_are_these() -> None:
    """Held still: weights that were made by one samestate are those of the next."""
    assert [place(keys("a/0", "x"), cell) for cell in (0, 1, 2, 2**31)] == PLACES


def test_a_patch_covers_its_cells_and_later_ones_win() -> None:
    weight = (
        Sketch("w", (3, 4), 0.0, 1.0).patched([0, 2], range(1, 3), 5.0).patched([2], range(2, 3), 7.0).weight("a/0")
    )
    one, five, seven = (bfloat16(value) for value in (1.0, 5.0, 7.0))
    assert list(weight.values) == [one, five, five, one, one, one, one, one, one, five, seven, one]


def test_a_recipe_reads_back(folder: Path) -> None:
    said = read(folder)
    assert said.recipe == "qwen3-next" and said.stream == "qwen3-next-small/0"
    assert (folder / FILE).read_bytes() == said.content()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "samestate-weights/2"}, "format is not samestate-weights/1; build the folder again"),
        (
            {"recipe": "mamba"},
            "recipe is none of glm5-next, granite-hybrid, kimi-linear, qwen3-next, qwen3.5; build the folder again",
        ),
        ({"stream": 3}, "must have format, recipe, stream, sketches as ASCII text and nothing else"),
        ({"seed": "0"}, "must have format, recipe, stream, sketches as ASCII text and nothing else"),
    ],
)
def test_a_damaged_recipe_is_one_line(folder: Path, change: dict[str, object], message: str) -> None:
    said = json.loads((folder / FILE).read_bytes())
    (folder / FILE).write_text(json.dumps(said | change))
    with pytest.raises(RecipeError, match=message) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_no_recipe_and_no_json_are_one_line(folder: Path) -> None:
    (folder / FILE).write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        read(folder)
    (folder / FILE).unlink()
    with pytest.raises(RecipeError, match=r"holds no weights\.json.*; leave --load-format out"):
        read(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_experts", 31, "sketches: config.json or the recipe"), ("hidden_size", None, "cannot be followed with this")],
)
def test_another_config_is_refused(folder: Path, field: str, value: object, message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {field: value}))
    with pytest.raises(RecipeError, match=message):
        read(folder).followed(folder)


def test_a_recipe_that_changed_refuses_what_was_built_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(folder).followed(folder)
    monkeypatch.setattr(qwen3_next, "GATE", 2.0)
    with pytest.raises(RecipeError, match=r"sketches: .* the recipe of this samestate is not the one"):
        read(folder).followed(folder)
