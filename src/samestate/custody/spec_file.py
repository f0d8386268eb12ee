"""A SPEC.toml from its file: paths made absolute, contradictions refused, one clear line for what is wrong."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from samestate.custody.base import CustodyError
from samestate.custody.spec import (
    MUST_CHANGE,
    CandidateSpec,
    IdentitySpec,
    LayerSpec,
    ObserveSpec,
    PolicySpec,
    ProbeSpec,
    ProcessSpec,
    ReferenceSpec,
    RouterSpec,
    SmokeSpec,
    Spec,
    place,
)
from samestate.plans.errors import nearest, quoted

_PATHS = {
    "records",
    "cwd",
    "environment_file",
    "pid_file",
    "log",
    "model",
    "template",
    "socket",
    "file",
}
_MODELS = (
    Spec,
    ProcessSpec,
    IdentitySpec,
    PolicySpec,
    RouterSpec,
    LayerSpec,
    CandidateSpec,
    ReferenceSpec,
    ProbeSpec,
    ObserveSpec,
    SmokeSpec,
)
_PATH_LISTS = {"mounts", "config"}
_PATH_TABLES = {"sources"}
_UNLIKE = ("argv", "executable", "cgroup", "gpus")
"""Names of fields that a pattern has in common only if it says next to nothing."""


def load_spec(path: Path) -> Spec:
    """Read a spec; its paths become absolute, seen from its own folder. Raises `CustodyError`."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CustodyError(f"{path}: cannot be read ({error.strerror}); name a SPEC.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CustodyError(f"{path}: is no TOML ({error}); mend it there") from None
    try:
        spec = Spec.model_validate(tree)
    except ValidationError as error:
        raise CustodyError(f"{path}: {_mistake(error)}") from None
    rooted = Spec.model_validate(_rooted(spec.model_dump(), path.resolve().parent))
    try:
        _require(rooted)
    except CustodyError as error:
        raise CustodyError(f"{path}: {error}") from None
    return rooted


def _rooted(tree: Any, root: Path) -> Any:
    if isinstance(tree, list):
        return [_rooted(one, root) for one in tree]
    if not isinstance(tree, dict):
        return tree
    made: dict[str, Any] = {}
    for name, value in tree.items():
        if name in _PATHS and isinstance(value, str):
            made[name] = str(root / value)
        elif name in _PATH_LISTS and isinstance(value, list):
            made[name] = [str(root / one) for one in value]
        elif name in _PATH_TABLES:
            made[name] = {key: str(root / one) for key, one in value.items()}
        else:
            made[name] = _rooted(value, root)
    return made


def _mistake(error: ValidationError) -> str:
    mistakes = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first, more = mistakes[0], f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    match first["type"]:
        case "missing":
            words = "is missing; add it"
        case "extra_forbidden":
            words = f"is not a field of a spec; remove it{nearest(str(first['loc'][-1]), _names())}"
        case _:
            said = str(first["msg"]).removeprefix("Input ").removeprefix("Value error, ")
            words = f"{said}, not {quoted(first['input'])}"
    return f"{path or 'the spec'}: {words}{more}"


def _names() -> list[str]:
    return sorted({name for model in _MODELS for name in model.model_fields})


def _require(spec: Spec) -> None:
    """Raise `CustodyError` for a spec that contradicts itself."""
    _require_process("incumbent", spec.incumbent)
    for name in {"haproxy": ("socket", "backend", "server"), "vllm-router": ("url", "metrics_url", "pid_file")}[
        spec.router.kind
    ]:
        if getattr(spec.router, name) is None:
            raise CustodyError(f"router.{name}: is missing; kind {spec.router.kind} needs it")
    undeclared = [name for name in MUST_CHANGE if name not in [*spec.policy.expected_change, *spec.policy.ignore]]
    if undeclared:
        raise CustodyError(
            f"policy.expected_change: does not name {' and '.join(undeclared)}, which every restart changes; add it"
        )
    if whole := next((one for one in spec.policy.ignore if all(fnmatchcase(name, one) for name in _UNLIKE)), None):
        raise CustodyError(f"policy.ignore: {whole} leaves nothing to compare; name the fields")
    if spec.probe is not None and spec.candidate is None:
        raise CustodyError("candidate: is missing, and probe asks one; add it")
    if spec.candidate is not None:
        _require_candidate(spec, spec.candidate)
    _require_outside(spec)
    names = [smoke.name for smoke in spec.smokes]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise CustodyError(f"smokes: two are called {double}; name them apart")
    for index, smoke in enumerate(spec.smokes):
        if (smoke.kind == "strict-json") != (smoke.json_schema is not None):
            raise CustodyError(f"smokes[{index}].json_schema: goes with kind strict-json, and with no other")


def _require_process(where: str, process: ProcessSpec) -> None:
    needed = {"process": ("argv", "pid_file", "log"), "systemd": ("unit",), "docker": ("container",)}[
        process.supervisor
    ]
    for name in needed:
        if not getattr(process, name):
            raise CustodyError(f"{where}.{name}: is missing; supervisor {process.supervisor} needs it")


def _require_outside(spec: Spec) -> None:
    """Nothing that a swap writes lies where files are compared: it would differ from itself."""
    compared = {f"identity.sources.{name}": folder for name, folder in spec.identity.sources.items()}
    own = spec.candidate.model if spec.candidate is not None else None
    for name, folder in (("identity.model", spec.identity.model), ("candidate.model", own)):
        if folder is not None:
            compared[name] = folder
    written = {
        "records": spec.records,
        "incumbent.pid_file": spec.incumbent.pid_file,
        "incumbent.log": spec.incumbent.log,
    }
    if spec.candidate is not None and spec.candidate.process is not None:
        process = spec.candidate.process
        written |= {"candidate.process.pid_file": process.pid_file, "candidate.process.log": process.log}
    for name, path in written.items():
        for where, folder in compared.items():
            if path is not None and Path(path).resolve().is_relative_to(Path(folder).resolve()):
                raise CustodyError(f"{name}: lies within {where}, whose files are compared; put it elsewhere")


def _require_candidate(spec: Spec, candidate: CandidateSpec) -> None:
    if (candidate.kind == "process") != (candidate.process is not None):
        raise CustodyError("candidate.process: goes with kind process, and with no other")
    if candidate.kind == "plan" and spec.probe is None:
        raise CustodyError("probe: is missing, and its plan starts the candidate; add it")
    if candidate.base not in spec.identity.sources:
        raise CustodyError(
            f"candidate.base: {candidate.base} is no package of identity.sources, which say its hash; add it there"
        )
    if candidate.process is None:
        for name in ("model", "template"):
            if getattr(candidate, name) is not None:
                raise CustodyError(f"candidate.{name}: goes with kind process; a plan names its own")
        return
    _require_process("candidate.process", candidate.process)
    for name in ("url", "pid_file", "log", "unit", "container"):
        own, other = getattr(candidate.process, name), getattr(spec.incumbent, name)
        if own is not None and own == other:
            raise CustodyError(f"candidate.process.{name}: is the incumbent's; give the candidate its own")
    if place(candidate.process.url) == place(spec.incumbent.url):
        raise CustodyError("candidate.process.url: is the incumbent's place under another name; give it its own port")
