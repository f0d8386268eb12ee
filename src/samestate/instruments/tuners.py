"""Triton's autotuners: where they are, what they select by, what they selected.

Read from Triton 3.6 and 3.9 (triton/runtime/autotuner.py), FLA 0.6 (fla/ops/utils/cache.py, a subclass whose ``run``
ends in Triton's) and vLLM 0.33, whose vendored FLA, KDA and Mamba kernels are plain ``triton.autotune``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from samestate.evidence.record_base import Scalar

_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "ir_override")
"""Fields of a `triton.Config` besides its keyword arguments."""
_DECLARED = "_samestate_declared"
"""Attribute of a tuner: the configurations that it was made with."""
_DEEPEST = 8
"""Wrappers around a tuner (heuristics, warm-up owners) that are looked through."""


def tuner_class() -> type | None:
    """`triton.runtime.autotuner.Autotuner`, or None where Triton cannot be imported."""
    try:
        from triton.runtime.autotuner import Autotuner
    except Exception:  # Triton without a driver may fail in many ways
        return None
    found: type = Autotuner
    return found


def find(kind: type) -> Iterator[Any]:
    """Every tuner of class `kind` that a loaded module, or a wrapper in one, holds; each once."""
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for value in list(namespace.values()):
            for tuner in _within(value, kind):
                if id(tuner) not in seen:
                    seen.add(id(tuner))
                    yield tuner


def _within(value: Any, kind: type) -> Iterator[Any]:
    """The tuners in a value: itself, and behind ``fn`` or ``kernel`` of its own dictionary (no attribute hook runs)."""
    for _ in range(_DEEPEST):
        if issubclass(type(value), kind):
            yield value
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        value = own.get("fn", own.get("kernel")) if isinstance(own, dict) else None
        if value is None:
            return


def declare(tuner: Any) -> None:
    """Keep what a tuner was made with: FLA puts one configuration from a file in its place before the first call."""
    setattr(tuner, _DECLARED, list(tuner.configs))


def declared(tuner: Any) -> list[Any]:
    """The configurations that a tuner was made with; of one that nobody saw being made, those that it has."""
    return list(getattr(tuner, _DECLARED, tuner.configs))


def name_of(tuner: Any) -> str:
    """``module.function`` of the kernel that it tunes."""
    function = tuner.base_fn
    return f"{function.__module__}.{function.__qualname__}"


def key_of(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What `Autotuner.run` looks its selection up by: values of the key arguments, then every argument's dtype."""
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    key += [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
    return tuple(key)


def key_words(key: tuple[Any, ...]) -> tuple[str, ...]:
    """A key as text, the same in every process: ``64``, ``True``, ``torch.bfloat16``."""
    return tuple(str(part) for part in key)


def config_of(config: Any) -> dict[str, Scalar]:
    """A `triton.Config` as plain values."""
    plain: dict[str, Scalar] = {}
    for name, value in config.kwargs.items():
        plain[name] = value if value is None or isinstance(value, str | int | float | bool) else str(value)
    plain.update({name: getattr(config, name, None) for name in _OPTIONS})
    return plain


def config_for(tuner: Any, configs: list[Any], recorded: dict[str, Scalar]) -> Any:
    """The tuner's own configuration with these values, hooks included; else a new one of the same class.

    FLA loads configurations from files that the decorator does not list.
    """
    for config in configs:
        if config_of(config) == recorded:
            return config
    kwargs = {name: value for name, value in recorded.items() if name not in _OPTIONS}
    options = {name: value for name, value in recorded.items() if name in _OPTIONS and value is not None}
    return type(configs[0])(kwargs, **options)


def device() -> str:
    """The device of this process as its driver names it; ``cpu`` without one. Initialises CUDA."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def own_rank() -> int:
    """This process's rank in its engine; 0 where nothing is distributed (yet)."""
    import torch

    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_rank()) if spread else 0
