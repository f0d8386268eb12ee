"""What a swap is told: the fields of a SPEC.toml, strict. `spec_file` reads it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic import Field as Limits

from samestate.engines.openai_client import ClientError, address

MUST_CHANGE = ("pid", "process_start")
"""Fields that no restart keeps: a spec must say that it knows."""
ENVIRONMENT = ["CUDA_*", "HF_HOME", "LD_*", "LMCACHE_*", "NCCL_*", "OMP_*", "PATH", "PYTHON*", "SAMESTATE_*", "VLLM_*"]
"""Names of variables that are compared one by one, as hashes; the environment as a whole always is."""


def _url(text: str) -> str:
    try:
        return address(text)
    except ClientError as error:
        raise ValueError(str(error)) from None


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("must be letters, digits, '.', '_' and '-', at most 64 of them")
    return text


def place(url: str) -> tuple[str, int]:
    """Host and port, whatever way they are said: all names of this machine's loopback are one."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower().rstrip(".")
    if host in ("localhost", "::1", "::", "0.0.0.0") or re.fullmatch(r"127(\.\d+){1,3}", host):
        host = "localhost"
    return host, parts.port or {"https": 443}.get(parts.scheme, 80)


Name = Annotated[str, AfterValidator(_name)]
Url = Annotated[str, AfterValidator(_url)]
Words = Annotated[list[str], Limits(min_length=1)]
Seconds = Annotated[float, Limits(gt=0, le=86_400)]
Digest = Annotated[str, Limits(pattern=r"^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ProcessSpec(_Model):
    """A serving process and who keeps it."""

    url: Url
    """Where it answers itself, not through the router."""
    supervisor: Literal["process", "systemd", "docker"] = "process"
    argv: list[str] = []
    cwd: str = "."
    environment: dict[str, str] = {}
    """All of its environment, with that in `environment_file`: nothing is inherited."""
    environment_file: str | None = None
    """Lines NAME=VALUE; read at every start, never kept."""
    pid_file: str | None = None
    log: str | None = None
    unit: str | None = None
    """Of systemd."""
    container: str | None = None
    """Of a container engine: its name or id."""
    api_key_env: str | None = None
    """Variable in `environment` or `environment_file` whose value clients must send; never kept."""
    start_seconds: Seconds = 600.0
    stop_seconds: Seconds = 60.0


class IdentitySpec(_Model):
    """What is recorded of a serving process beside what the kernel says."""

    model: str | None = None
    """Folder of the checkpoint."""
    template: str | None = None
    """File of the chat template; default: the one in the model's folder."""
    sources: dict[Name, str] = {}
    """Folder of installed source by package."""
    mounts: list[str] = []
    environment: list[str] = ENVIRONMENT
    configuration: Literal["server_info", "models"] = "models"
    """Effective configuration: vLLM's ``/server_info`` (VLLM_SERVER_DEV_MODE=1), or what ``/v1/models`` says."""


class PolicySpec(_Model):
    """Fields that may differ; all others must be equal."""

    expected_change: list[str]
    ignore: list[str] = []


class RouterSpec(_Model):
    """The router before the incumbent."""

    kind: Literal["haproxy", "vllm-router"] = "haproxy"
    socket: str | None = None
    """HAProxy's stats socket, level admin."""
    backend: Name | None = None
    server: Name | None = None
    config: list[str] = []
    """Files of its configuration, by whose bytes parity is claimed."""
    url: Url | None = None
    """Of a vllm-router, whose worker is ``incumbent.url``."""
    metrics_url: Url | None = None
    pid_file: str | None = None
    container: str | None = None
    """The container that it runs in, whose image, id, restarts and mounts are then recorded."""
    drain_seconds: Seconds = 120.0


class LayerSpec(_Model):
    """A layer or patch of the candidate."""

    name: Name
    file: str
    sha256: Digest


class CandidateSpec(_Model):
    """The diagnostic build: a process of its own, or the engine that the probe's plan starts."""

    kind: Literal["process", "plan"]
    process: ProcessSpec | None = None
    name: Name
    base: Name
    """What it is built on: a package of `identity.sources`, whose hash must be the incumbent's."""
    sources: dict[Name, str] = {}
    """Folder of the candidate's own installed source by package; its `base` must be among them to be compared."""
    model: str | None = None
    """Folder of the checkpoint that its process serves; default: as its command line says. A plan names its own."""
    template: str | None = None
    """File of its chat template; default: as its command line says, else the one in its model's folder."""
    layers: list[LayerSpec] = []
    differs: list[str]
    """All fields in which it may differ from the incumbent; patterns as of a shell."""


class ReferenceSpec(_Model):
    """A build that is compared with, and that nothing is built on."""

    name: Name
    sha256: Digest


class ProbeSpec(_Model):
    """What the candidate is asked."""

    plan: str
    engine: Literal["vllm", "sim"] = "vllm"
    model: str | None = None
    serve_args: list[str] = []
    required_before: list[str] = []
    """Artefacts that must exist from before the swap: names of fields, and ``smoke.NAME``."""


class ObserveSpec(_Model):
    """How closely the window is watched."""

    period_seconds: Annotated[float, Limits(ge=0.1, le=60)] = 2.0
    """The longest gap between two observations of the host."""
    stable_samples: Annotated[int, Limits(ge=2, le=1000)] = 3
    idle_seconds: Seconds = 0.5
    """Between two readings of the engine's counters."""


class SmokeSpec(_Model):
    """One functional request, sent once before and once after."""

    name: Name
    kind: Literal["text", "strict-json"] = "text"
    prompt: str
    max_tokens: Annotated[int, Limits(ge=1, le=100_000)] = 64
    json_schema: dict[str, Any] | None = None
    """What a strict-json smoke asks for through ``response_format``."""
    raw: bool = True
    """Keep the raw responses."""


class Spec(_Model):
    """A whole SPEC.toml."""

    format: Literal[1]
    name: Name
    records: str
    """Folder of the swap's records; must not hold any."""
    incumbent: ProcessSpec
    identity: IdentitySpec = IdentitySpec()
    policy: PolicySpec
    router: RouterSpec
    candidate: CandidateSpec | None = None
    reference: ReferenceSpec | None = None
    probe: ProbeSpec | None = None
    observe: ObserveSpec = ObserveSpec()
    smokes: list[SmokeSpec] = []
