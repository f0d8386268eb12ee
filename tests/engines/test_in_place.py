"""Weights made in place: bit for bit what the recipe counts, and never a parameter that is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from samestate.engines.children import in_place
from samestate.engines.children.in_place import InPlaceLoader, made, require_whole
from samestate.models import recipe
from samestate.models.build import build
from samestate.models.recipe import RecipeError, keys, place
from samestate.models.sketch import Sketch
from samestate.models.weights import bfloat16, evenly_spread


def bits(values: torch.Tensor) -> list[int]:
    return [cell & 0xFFFF for cell in values.view(torch.int16).flatten().tolist()]


def test_vllm_finds_the_format() -> None:
    found = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert found["samestate_weights"] == "samestate.engines.children.weights_plugin:register"


def test_it_waits_for_vllm_to_import_its_loaders() -> None:
    program = (
        "import sys; from samestate.engines.children.weights_plugin import register; register(); register();"
        "print([n for n in ('vllm', 'torch') if n in sys.modules]);"
        "from vllm.config.load import LoadConfig; from vllm.model_executor.model_loader import get_model_loader;"
        "print(type(get_model_loader(LoadConfig(load_format='samestate'))).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[0] == "[]", done.stderr
    assert done.stdout.splitlines()[-1] == "InPlaceLoader", done.stderr


@pytest.mark.parametrize("at_once", [7, 1 << 24])
def test_bits_are_those_that_the_recipe_counts(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(in_place, "CELLS_AT_ONCE", at_once)
    sketch = Sketch("layer.weight", (5, 6), 0.4, -0.1).patched([1, 3], range(2, 5), 9.0)
    key, spread = keys("a/0", "layer.weight"), evenly_spread(0.4, -0.1)
    expected = [spread[place(key, cell)] for cell in range(30)]
    for row in (1, 3):
        expected[6 * row + 2 : 6 * row + 5] = [bfloat16(9.0)] * 3
    assert bits(made(sketch, "a/0", "cpu")) == expected


def test_rows_of_several_matrices_are_counted_through_as_in_a_file() -> None:
    sketch = Sketch("w", (2, 2, 3), 0.0, 1.0).patched([1, 2], range(2, 3), 5.0)
    assert bits(made(sketch, "a/0", "cpu")) == list(sketch.weight("a/0").values)


def test_the_same_stream_gives_the_same_and_another_another() -> None:
    sketch = Sketch("layer.weight", (64, 64), 1.0)
    assert bits(made(sketch, "a/0", "cpu")) == bits(made(sketch, "a/0", "cpu"))
    assert bits(made(sketch, "a/0", "cpu")) != bits(made(sketch, "a/1", "cpu"))
    assert bits(made(sketch, "a/0", "cpu")) != bits(made(sketch._replace(name="other.weight"), "a/0", "cpu"))


def test_scale_and_constants() -> None:
    values = made(Sketch("w", (400, 400), 0.25, 1.0), "a/0", "cpu").float()
    assert float(values.std()) == pytest.approx(0.25, rel=0.02) and float(values.mean()) == pytest.approx(1.0, rel=0.01)
    # As a matrix of independent values: its largest singular value is twice what each row alone would give.
    drawn = made(Sketch("m", (512, 512), 1.0), "a/0", "cpu").float()
    assert float(torch.linalg.matrix_norm(drawn, 2)) == pytest.approx(2 * 512**0.5, rel=0.05)
    assert set(bits(made(Sketch("c", (3, 3), 0.0, 2.5), "a/0", "cpu"))) == {bfloat16(2.5)}


class Model(torch.nn.Module):
    """Takes one tensor of the recipe, as two halves of a fused parameter if it is whole."""

    def __init__(self, halves: int = 2, says: bool = True) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(2, 2048, dtype=torch.float32))
        self.counts = torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
        self._halves, self._says = halves, says

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        for name, value in weights:
            if name == "model.layers.3.input_layernorm.weight":
                for half in range(self._halves):
                    self.fused.data[half].copy_(value)
                break
        return {"fused"} if self._says else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("qwen3-next-small", tmp_path / "m")
    return tmp_path / "m"


def load(model: torch.nn.Module, folder: Path) -> None:
    loader = InPlaceLoader(SimpleNamespace(load_format="samestate"))
    described = SimpleNamespace(model=str(folder))
    loader.download_model(described)
    loader.load_weights(model, described)


def few(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Norms alone are made: the rest is gigabytes."""
    whole = recipe.Recipe.followed
    monkeypatch.setattr(
        recipe.Recipe,
        "followed",
        lambda self, at: [one for one in whole(self, at) if one.name.endswith("layernorm.weight")],
    )


@pytest.mark.parametrize("says", [True, False])
def test_a_whole_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, says: bool) -> None:
    few(monkeypatch, folder)
    model = Model(says=says)
    load(model, folder)
    assert not model.fused.isnan().any() and model.counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("says", [True, False])
def test_half_a_fused_parameter_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, says: bool) -> None:
    few(monkeypatch, folder)
    with pytest.raises(RecipeError, match="only a part of this vLLM's model: fused not whole"):
        load(Model(halves=1, says=says), folder)


def test_a_parameter_that_nobody_named_is_refused() -> None:
    filled = {name: torch.zeros(2) for name in "abcdefg"}
    require_whole(filled, set(filled), Path("m"))
    with pytest.raises(RecipeError, match="b, c, d, e and 2 more not whole; use a vLLM that samestate knows"):
        require_whole(filled, {"a"}, Path("m"))


def test_transformers_says_that_it_follows_no_recipe(folder: Path) -> None:
    pytest.importorskip("transformers")
    from samestate.engines.children.transformers_model import LoadError
    from samestate.engines.children.transformers_model import Model as Transformers

    with pytest.raises(LoadError, match="recipe in place of weights, which vLLM alone follows; use a tiny model"):
        Transformers(str(folder), "bfloat16", "eager")


def test_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no weights\.json"):
        load(Model(), tmp_path)
