"""What the bytes of a page depend on besides its key: the name under which stores keep them apart.

A key of vLLM's says which tokens came before, and what else those tokens stand for: adapter by name and path,
multimodal hash and place, prompt embeddings, cache salt (vllm/v1/core/kv_cache_utils.py,
`generate_block_hash_extra_keys`). It says nothing about the model. An `Identity` says the rest: weights and
configuration, every dtype and layout fact that the workers registered, ranks and world, how keys are hashed, versions.
Two engines share pages where all of it is equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from samestate.cache.layout import RankLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FORMAT = 1
"""Of pages and of the facts below. Pages of another format are another namespace."""
SOUND_HASHES = ("sha256", "sha256_cbor")
"""Hashes of vLLM's that nobody can make collide, and whose seed is the same in every engine."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json", "*.py", "*.model")
NOT_WEIGHTS = ("tokenizer*.json", "vocab*.json", "special_tokens_map.json", "generation_config.json", "*.model")
"""What turns text into tokens or chooses among them: keys are tokens already."""
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash")
_SHA256_HEX = 64


class IdentityError(ValueError):
    """It cannot be said what pages would depend on; one line with the remedy."""


class Identity(NamedTuple):
    """The facts, and a name for all of them together."""

    label: str
    """The model as its operator calls it; for people."""
    facts: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the facts, in hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    @property
    def canonical(self) -> bytes:
        return json.dumps(self.facts, sort_keys=True, separators=(",", ":")).encode()

    @property
    def namespace(self) -> str:
        """What a store is told."""
        return f"samestate-{FORMAT} {self.label} {self.digest}"


def require_stable_keys(config: VllmConfig) -> None:
    """Raises `IdentityError` where keys would differ from start to start, or could be made to collide."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in SOUND_HASHES:
        raise IdentityError(
            f"prefix_caching_hash_algo={algorithm}: its keys can be made to collide, and pages are kept for others; "
            "start with --prefix-caching-hash-algo sha256"
        )
    if getattr(config, "weight_transfer_config", None) is not None:
        raise IdentityError(
            "weight_transfer_config: weights that change while the engine runs cannot be told apart in a store; "
            "leave the secondary tiers out"
        )


def identity(
    config: VllmConfig, ranks: Sequence[RankLayout], revision: str | None = None, tenant: str = ""
) -> Identity:
    """Everything that pages depend on. Reads every weight file that is not named by its content: may take long.

    Args:
        config: The engine's.
        ranks: What its workers registered, all of them.
        revision: The operator's word for what the weights are; files are then not read.
        tenant: A further word that keeps engines apart.

    Raises:
        IdentityError: the weights are neither local nor in the hub's cache, and no revision was given.

    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    facts = {
        "format": str(FORMAT),
        "vllm": str(vllm.__version__),
        "platform": str(current_platform.device_type),
        "tenant": tenant,
        "model.weights": revision or _digest_of(weight_files(model)),
        "model.config": _config_digest(model),
        "model.dtype": str(model.dtype),
        "model.quantization": str(model.quantization),
        "load_format": str(config.load_config.load_format),
        "cache.dtype": str(cache.cache_dtype),
        "cache.layout": str(cache.kv_cache_layout),
        "cache.mamba_cache_dtype": str(cache.mamba_cache_dtype),
        "cache.mamba_ssm_cache_dtype": str(cache.mamba_ssm_cache_dtype),
        "cache.mamba_cache_mode": str(cache.mamba_cache_mode),
        "keys.hash": str(cache.prefix_caching_hash_algo),
        "keys.seed": hashlib.sha256(_seed().encode()).hexdigest(),
        "keys.tokens": str(cache.hash_block_size),
        "speculation": _speculation(config),
    }
    if facts["load_format"].endswith("dummy"):
        facts["model.seed"] = str(model.seed)
    for name in ("world_size", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        facts[f"parallel.{name}"] = str(getattr(parallel, name))
    facts |= {f"rank{ranks[0].rank}.{name}": value for name, value in _rank_facts(ranks[0])}
    for rank in ranks[1:]:
        told = json.dumps(list(_rank_facts(rank)))
        facts[f"rank{rank.rank}"] = hashlib.sha256(told.encode()).hexdigest()
    return Identity(label=_label(model), facts=facts)


def _seed() -> str:
    """What vLLM derives the first hash of every chain from (v1/core/kv_cache_utils.py, `resolve_none_hash_seed`).

    The core sets it only after the handshake, at which this may be asked; the variable says it before.
    """
    return os.environ.get("PYTHONHASHSEED", get_none_hash_seed())


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs, field by field: ``cache.dtype: auto → fp8``."""
    return [
        f"{name}: {_short(old.get(name))} → {_short(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def weight_files(model: ModelConfig) -> dict[str, str]:
    """SHA-256 of every file that the weights are made of, by name. Raises `IdentityError`."""
    folder = _folder(model)
    names = {path.name for pattern in WEIGHTS for path in folder.glob(pattern)}
    names -= {path.name for pattern in NOT_WEIGHTS for path in folder.glob(pattern)}
    if not names:
        raise IdentityError(f"{folder}: holds no weights; say what they are with kv_connector_extra_config.revision")
    return {name: _content(folder / name) for name in sorted(names)}


def _folder(model: ModelConfig) -> Path:
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if not isinstance(found, str):
        raise IdentityError(
            f"{model.model}: is neither a folder nor in the hub's cache, so its weights have no name; "
            "say what they are with kv_connector_extra_config.revision"
        )
    return Path(found).parent


def _content(path: Path) -> str:
    """SHA-256 of a file. In the hub's cache a large file is a link to one that is named by it."""
    target = Path(os.path.realpath(path))
    if target.parent.name == "blobs" and len(target.name) == _SHA256_HEX:
        return target.name
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(files: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _config_digest(model: ModelConfig) -> str:
    """Of the configuration in force, overrides included."""
    tree = model.hf_config.to_dict()
    text = json.dumps(_without(tree, _VOLATILE), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _without(tree: Any, names: Sequence[str]) -> Any:
    if isinstance(tree, dict):
        return {str(name): _without(value, names) for name, value in tree.items() if name not in names}
    return [_without(value, names) for value in tree] if isinstance(tree, list | tuple) else tree


def _speculation(config: VllmConfig) -> str:
    speculative = config.speculative_config
    if speculative is None:
        return "none"
    draft = speculative.draft_model_config
    # A drafter's own layers lie in the same pages.
    own = draft is not None and draft.model != config.model_config.model
    weights = _digest_of(weight_files(draft)) if own else "none"
    return f"{speculative.method} {speculative.num_speculative_tokens} {weights}"


def _rank_facts(rank: RankLayout) -> Iterator[tuple[str, str]]:
    yield "row_offset", str(rank.row_offset)
    yield "matrices", " ".join(map(str, rank.matrices))
    for group in rank.groups:
        at = f"group{group.group}"
        yield f"{at}.kind", group.kind
        yield f"{at}.tokens_per_block", str(group.tokens_per_block)
        yield f"{at}.refs", " ".join(f"{matrix}:{size}" for matrix, size in group.refs)
        yield f"{at}.layers", " ".join(layer for layer, _ in group.facts)
        for told in dict.fromkeys(told for _, told in group.facts):
            yield f"{at}.{told.partition('(')[0]}", told


def _label(model: ModelConfig) -> str:
    name = Path(model.model).name if Path(model.model).is_dir() else str(model.model)
    return "".join(letter if letter.isalnum() or letter in "-._/" else "_" for letter in name) or "model"


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 120 else f"{value[:100]}… ({hashlib.sha256(value.encode()).hexdigest()[:8]})"
