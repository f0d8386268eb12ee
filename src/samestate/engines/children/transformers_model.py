"""A checkpoint in transformers' own classes: loading it, its forward pass, and what it keeps beside its cache."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import Cache

from samestate.evidence.records import Scalar
from samestate.models.recipe import load_settings

HEAD = "lm_head.weight"
DTYPES = ("bfloat16", "float16", "float32")
ATTENTION = ("eager", "sdpa")


class LoadError(ValueError):
    """The checkpoint cannot be run as it is. One line that says what to do."""


class Model:
    """One checkpoint, ready to run; deterministic, on CPU."""

    def __init__(self, folder: str, dtype: str, attention: str) -> None:
        """Raises `LoadError`, and what transformers raises for a folder that it cannot read."""
        if dtype not in DTYPES:
            raise LoadError(f"dtype: must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if attention not in ATTENTION:
            raise LoadError(f"attn_implementation: must be one of {', '.join(ATTENTION)}, not {attention!r}")
        if load_settings(folder):
            raise LoadError(f"{folder}: holds a recipe in place of weights, which vLLM alone follows; use a tiny model")
        self.config = AutoConfig.from_pretrained(folder)
        self.text_config = self.config.get_text_config(decoder=True)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        # The class that the config names, where transformers has it. Else the bare model, and the head put on here.
        named = next(iter(self.config.architectures or ()), "")
        whole = getattr(transformers, named, None)
        # A language model's class takes that part of a config which also describes a vision tower.
        own = getattr(whole, "config_class", None)
        part = own is not None and isinstance(self.text_config, own)
        self._model, info = (whole or AutoModel).from_pretrained(
            folder,
            config=self.text_config if part else self.config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            output_loading_info=True,
        )
        for what in ("missing_keys", "mismatched_keys", "error_msgs"):
            if wrong := sorted(map(str, info.get(what) or ())):
                name = type(self._model).__name__
                raise LoadError(f"{folder}: {len(wrong)} {what} for {name}, the first is {wrong[0]}; choose another")
        self._model.eval()
        self._head = None if whole is not None else _head(Path(folder), getattr(torch, dtype))

    @property
    def name(self) -> str:
        """The class that runs."""
        return type(self._model).__name__ + ("" if self._head is None else f"+{HEAD}")

    @property
    def dtype(self) -> str:
        """What it computes in, where a tensor says nothing else."""
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str:
        """Which implementation of attention is in force."""
        return str(self._model.config._attn_implementation)

    @property
    def pool(self) -> int:
        """Tokens that the sparse attention's indexer pools; 1 where it pools none."""
        return int(getattr(self.text_config, "index_kpool", None) or 1)

    @property
    def most_tokens(self) -> int:
        return int(self.text_config.max_position_embeddings)

    def fresh_cache(self) -> Cache:
        """A cache without tokens, of the classes that the model's own config chooses."""
        return DynamicCache(config=self.config)

    def step(self, token_ids: list[int], cache: Cache) -> torch.Tensor:
        """Run tokens behind those in `cache`; logits after the last, float32."""
        ids = torch.tensor([token_ids])
        if self._head is None:
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1].float()
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
        return torch.nn.functional.linear(out.last_hidden_state[0, -1], self._head).float()

    def kept_beside(self) -> dict[str, tuple[int, int]]:
        """Tensors that modules hold beside their parameters, and which version: what a step changes there is state."""
        found: dict[str, tuple[int, int]] = {}
        for path, module in self._model.named_modules():
            held = {**vars(module), **module._buffers}
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    found[f"{path}.{name}"] = (value.data_ptr(), value._version)
        return found

    def eos_token_ids(self, folder: str) -> list[int]:
        """Every known end-of-sequence id: tokenizer, model config, generation config."""
        told = [self.tokenizer.eos_token_id, getattr(self.config, "eos_token_id", None)]
        told.append(getattr(self.text_config, "eos_token_id", None))
        if (Path(folder) / "generation_config.json").is_file():
            told.append(GenerationConfig.from_pretrained(folder).eos_token_id)
        found: set[int] = set()
        for value in told:
            found.update([value] if isinstance(value, int) else value or [])
        return sorted(found)


def _head(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if HEAD in file.keys():  # noqa: SIM118 (no mapping)
                return file.get_tensor(HEAD).to(dtype)
    raise LoadError(f"{folder}: has no {HEAD}, and transformers no class that makes one; choose another checkpoint")


def versions() -> dict[str, str]:
    """Of the packages that decide what is computed; those that are not there are left out."""
    found = {"python": sys.version.split()[0]}
    for name in ("samestate", "transformers", "torch", "flash-linear-attention", "causal-conv1d", "kernels"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_deterministic(threads: int) -> dict[str, Scalar]:
    """One way to compute, and as many threads in every arm; what was set, by name."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    return {"num_threads": torch.get_num_threads(), "torch.deterministic_algorithms": True}
