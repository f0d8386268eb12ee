"""One real engine for the whole room, and what its larger classes import."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from samestate.engines.base import EngineSpec
from samestate.engines.vllm import VllmEngine


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[VllmEngine]:
    """vLLM with `qwen3-next-tiny`, C = 1792, prefix caching on, no connector."""
    folder = tmp_path_factory.mktemp("tiny")
    settings = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 4,
        "block_size": 1792,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "seed": 0,
    }
    engine = VllmEngine(
        EngineSpec(
            arm="tiny",
            model=tiny_model,
            settings=settings,
            serve_args=[],
            connector="none",
            external_cache_bytes=1,
            audit_level="off",
            save_delay_ms=0,
            fault=None,
            stream_dir=folder,
            log_path=folder / "engine.log",
        )
    )
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def beside_torchvision(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which classes with a vision tower can be imported.

    transformers' image processors import torchvision, which has no build for a CPU's torch on PyPI. Text needs nothing
    of it: where it is absent, empty modules stand in.
    """
    if find_spec("torchvision") is not None:
        return {}
    root = tmp_path_factory.mktemp("stand-in")
    files = {
        "__init__.py": '__version__ = "0.28.0"\n',
        "io/__init__.py": "ImageReadMode = decode_image = None\n",
        "transforms/__init__.py": (
            "from enum import Enum\n"
            'InterpolationMode = Enum("Mode", "NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS")\n'
        ),
        "transforms/functional.py": "pil_to_tensor = None\n",
        "transforms/v2/__init__.py": "from . import functional\n",
        "transforms/v2/functional.py": "",
    }
    for name, content in files.items():
        (root / "torchvision" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "torchvision" / name).write_text(content)
    return {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}
