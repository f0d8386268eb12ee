"""vLLM's way to load format ``samestate``: an entry point of ``vllm.general_plugins``, loaded in every process of vLLM.

It imports nothing until vLLM imports its own loaders, and changes nothing for models that are loaded otherwise.
``VLLM_PLUGINS``, if set, must name ``samestate_weights``.
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """Arrange for the format to be known as soon as vLLM knows its own."""
    global _registered  # noqa: PLW0603 (vLLM may load a plugin twice)
    if _registered:
        return
    from samestate.instruments.budget_sources import when_imported

    when_imported("vllm.model_executor.model_loader", _add)
    _registered = True


def _add() -> None:
    from samestate.engines.children.in_place import add_to_vllm

    add_to_vllm()
