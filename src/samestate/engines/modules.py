"""Modules that vLLM's class of a model imports, though vLLM's own package does not ask for them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

NEEDED = {
    "Qwen3_5ForCausalLM": "torchvision",
    "Qwen3_5ForConditionalGeneration": "torchvision",
    "Qwen3_5MoeForCausalLM": "torchvision",
    "Qwen3_5MoeForConditionalGeneration": "torchvision",
}
"""By ``architectures`` of config.json. ``vllm/model_executor/models/qwen3_vl.py`` (0.32, 0.33), which all of these take
parts from, imports transformers' image processors: text alone needs them too."""
_REMEDIES = {
    "torchvision": "install a build of it for the torch that is installed (for CPUs: pip install torchvision "
    "--index-url https://download.pytorch.org/whl/cpu)"
}


def missing_module(model: Path) -> str | None:
    """What vLLM would miss for the model in this folder, with the remedy, in one line; None: nothing that is known of.

    A folder that cannot be read misses nothing here: vLLM says itself what is wrong with it.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    said = config.get("architectures") if isinstance(config, dict) else None
    for architecture in said if isinstance(said, list) else ():
        module = NEEDED.get(architecture) if isinstance(architecture, str) else None
        if module is not None and find_spec(module) is None:
            return f"vLLM's {architecture} imports {module}, which is not installed; {_REMEDIES[module]}"
    return None
