"""The rules of `samestate doctor`: each looks at one thing and says what it found, or nothing where it has no place."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.engines.releases import KnownFault
from samestate.lab.doctor_report import Case, Finding, Fit, Tier
from samestate.models.cache_shape import Pages

UPSTREAM_CHUNK = 256
"""LMCache's default chunk_size (lmcache/v1/multiprocess/config.py of 0.5.6)."""
OURS = ("samestate-memory", "samestate-disk", "samestate-valkey", "samestate-object")
"""Connectors of samestate's own cache."""
CONNECTORS = ("native", "dictionary", "lmcache", *OURS)
SOUND_HASHES = ("sha256", "sha256_cbor")
"""Whose keys our stores take (`samestate.cache.identity`)."""
RESET = "block-size-reset"
"""The fault in the data of releases that vLLM itself was asked about."""


def findings(case: Case) -> list[Finding]:
    """What all rules say, in the order in which it matters."""
    rules = (_caching, _context, _drafts, _reset, _chunk_size, _keys, _tier, _steps, _state_type)
    found = [finding for rule in rules for finding in rule(case)]
    return found + [finding for name, fault in case.faults for finding in _known(case, name, fault)]


def tier(case: Case) -> Tier | None:
    """What fits into the external tier; None where C is not known, or nothing is kept."""
    if case.interval is None or not case.prefix_caching:
        return None
    positional = [pages for pages in case.pages if pages.in_prefix and pages.kind != "recurrent"]
    states = [pages for pages in case.pages if pages.kind == "recurrent"]
    grow = sum(_blocks(pages, case.interval) * pages.layers * pages.page_bytes for pages in positional) * case.ranks
    fixed = sum(pages.layers * pages.page_bytes for pages in states) * case.ranks
    if not grow + fixed:
        return None
    moved = sum(_blocks(pages, case.interval) * pages.layers * pages.effective_bytes for pages in positional)
    moved += sum(pages.layers * pages.effective_bytes for pages in states)
    size = case.external_cache_bytes
    return Tier(
        bytes=size,
        prefix_bytes=grow + fixed,
        moved_bytes=moved * case.ranks,
        prefixes=size // (grow + fixed),
        longest_prefix=max(0, size - fixed) // grow * case.interval if grow else None,
    )


def _blocks(pages: Pages, interval: int) -> int:
    return -(-interval // pages.tokens_per_block)


# --- rules ----------------------------------------------------------------------------------------


def _caching(case: Case) -> Iterator[Finding]:
    if case.prefix_caching:
        yield Finding("prefix-caching", "ok", "on")
        return
    said = case.serving.prefix_caching is False
    yield Finding(
        "prefix-caching",
        "wrong",
        "off: nothing is found again, here or outside" + ("" if said else "; vLLM turns it off for this model here"),
        "leave --no-enable-prefix-caching out" if said else "serve on another platform (--platform cuda shows it)",
    )


def _context(case: Case) -> Iterator[Finding]:
    smallest = case.smallest_prompt
    if smallest is None or not case.prefix_caching:
        return
    if case.max_model_len is None:
        yield Finding(
            "context", "unknown", "the model's config states no context", "say --max-model-len in --serve-args"
        )
    elif smallest > case.max_model_len:
        yield Finding(
            "context",
            "wrong",
            f"C = {case.interval:,} is too large for a context of {case.max_model_len:,} tokens: the smallest prompt "
            f"that can hit has {smallest:,}, so none ever does, and vLLM says nothing",
            f"--max-model-len {smallest + 1} or more; or a smaller C: "
            + (
                "leave --block-size out"
                if case.serving.block_size
                else "more ranks, or a narrower --mamba-ssm-cache-dtype"
            ),
            ["https://github.com/vllm-project/vllm/issues/48401"],
        )
    else:
        yield Finding(
            "context", "ok", f"prompts below {smallest:,} tokens can never hit; the context is {case.max_model_len:,}"
        )


def _drafts(case: Case) -> Iterator[Finding]:
    if case.drops_block and case.hit_step is not None:
        yield Finding(
            "drafts",
            "note",
            f"drafts from the model's own hidden states give the last {case.hit_step:,} tokens of every hit back",
            sources=["use_eagle_block_drop in vllm/config/speculative.py"],
        )


def _reset(case: Case) -> Iterator[Finding]:
    """Asked of vLLM itself, whatever its release."""
    answer = case.answer
    if answer is None or case.interval is None or not case.recurrent:
        return
    if answer.block_size_restarted == answer.block_size:
        yield Finding("block-size", "ok", "is kept when the engine core starts in a process of its own")
        return
    sources = [source for _, fault in case.faults if fault.id == RESET for source in fault.sources]
    yield Finding(
        "block-size",
        "wrong",
        f"vLLM {answer.version} takes the block size from {answer.block_size:,} to {answer.block_size_restarted:,} "
        f"once its core runs in a process of its own, while states are kept at multiples of C = {case.interval:,}: a "
        "repeated prompt misses, or continues wrongly (seen: samestate run local-hit)",
        f"--block-size {case.interval}",
        sources,
    )


def _chunk_size(case: Case) -> Iterator[Finding]:
    if case.interval is None or not case.prefix_caching or case.connector != "lmcache":
        return
    stated = case.options.get("chunk_size")
    size = stated if isinstance(stated, int) else UPSTREAM_CHUNK
    whose = "" if size == stated else " (LMCache's default)"
    sources = ["https://github.com/LMCache/LMCache/issues/4782"]
    if size % case.interval == 0:
        says = f"{size:,}{whose} is a multiple of C = {case.interval:,}; prefixes are stored in steps of {size:,}"
        yield Finding("chunk-size", "ok", says, sources=sources)
        return
    up = -(-size // case.interval) * case.interval
    yield Finding(
        "chunk-size",
        "wrong",
        f"{size:,}{whose} is no multiple of C = {case.interval:,}, which LMCache's connector demands; a server has one "
        "chunk size for all its models",
        f"LMCache's --chunk-size {up}; one server for several models needs a common multiple of their C, or one each",
        sources,
    )


def _keys(case: Case) -> Iterator[Finding]:
    if case.connector not in OURS or not case.prefix_caching:
        return
    if _unsound(case, case.connector):
        yield Finding(
            "keys",
            "wrong",
            f"keys by {case.serving.hash_algorithm} can be made to collide, and a store keeps pages for others: "
            "the connector refuses to start",
            "--prefix-caching-hash-algo sha256, or leave it out",
        )
    else:
        yield Finding("keys", "ok", "the connector takes them")


def _unsound(case: Case, connector: str) -> bool:
    """Whether our cache refuses the keys. Its memory alone takes any: nobody else finds what lies there."""
    algorithm = case.serving.hash_algorithm
    return connector != "samestate-memory" and algorithm is not None and algorithm not in SOUND_HASHES


def _tier(case: Case) -> Iterator[Finding]:
    held = tier(case)
    if held is None:
        return
    if held.prefixes:
        yield Finding("external-tier", "ok", f"holds at most {held.prefixes:,} prefixes of C tokens")
        return
    yield Finding(
        "external-tier",
        "wrong",
        f"{held.bytes:,} bytes hold no prefix: one of C = {case.interval:,} tokens takes {held.prefix_bytes:,} bytes",
        f"--external-cache-bytes {held.prefix_bytes} or more",
    )


def _steps(case: Case) -> Iterator[Finding]:
    """A state is kept where a step ended, so long steps leave boundaries without one."""
    if case.chunk_tokens is None or case.interval is None or not case.recurrent or not case.prefix_caching:
        return
    if case.chunk_tokens >= 2 * case.interval:
        yield Finding(
            "steps",
            "note",
            f"steps of up to {case.chunk_tokens:,} tokens pass boundaries of C = {case.interval:,} without leaving a "
            "state: a shorter prompt that shares the prefix may find none",
            f"--max-num-batched-tokens {case.interval} leaves one at each, and is slower",
        )


def _state_type(case: Case) -> Iterator[Finding]:
    if case.state_dtype in ("bfloat16", "float16"):
        yield Finding(
            "state-dtype",
            "note",
            f"recurrent state is {case.state_dtype}: a cold run and a hit may differ in bits though both are right",
            "--mamba-ssm-cache-dtype float32 where outputs are compared; C changes with it",
        )


def _known(case: Case, name: str, fault: KnownFault) -> Iterator[Finding]:
    """A fault of a release whose conditions hold here. What no setting tells is pointed at."""
    said = case.serving.said
    if (
        (fault.model_types and case.model_type not in fault.model_types)
        or (fault.recurrent and case.pages and not case.recurrent)
        or (fault.connectors and case.connector not in fault.connectors)
        or any(case.options.get(name, value) != value for name, value in fault.settings.items())
        or any(setting not in said for setting in fault.said)
        or any(setting in said for setting in fault.unless_said)
        or (fault.unless_interval is not None and fault.unless_interval == case.interval)
        or (fault.id == RESET and case.answer is not None)
        or not case.prefix_caching
    ):
        return
    how = {"run": "seen in a run", "read": "by its source", "report": "publicly reported"}[fault.known_by]
    shown = f" Shown by: {fault.shown_by}" if fault.shown_by else ""
    condition = f" {fault.beyond_settings}" if fault.beyond_settings else ""
    yield Finding(
        f"{name.partition(' ')[0]}/{fault.id}",
        "note" if fault.beyond_settings else "wrong",
        f"{name} ({how}): {fault.what}{condition}{shown}",
        fault.avoided_by,
        fault.sources,
    )


# --- connectors -----------------------------------------------------------------------------------


def fits(case: Case) -> list[Fit]:
    """Which connectors can carry this model there."""
    if not case.prefix_caching:
        return [Fit(name, "no", "prefix caching is off") for name in CONNECTORS]
    if case.interval is None:
        return [Fit(name, "unknown", "the cache's shape is unknown") for name in CONNECTORS]
    ours = [_ours(case, name) for name in OURS]
    return [_native(case), _dictionary(case), _lmcache(case), *ours, *_vllms_own(case)]


def _native(case: Case) -> Fit:
    if case.platform == "cpu":
        return Fit("native", "yes", "with samestate's HostOffloadingSpec; vLLM's own spec refuses CPUs")
    return Fit("native", "yes", "vLLM's OffloadingConnector, with its own spec or HostOffloadingSpec")


def _dictionary(case: Case) -> Fit:
    rings = sorted({pages.kind for pages in case.pages} - {"attention", "recurrent"})
    if rings:
        return Fit("dictionary", "unknown", f"never run with layers of kind {', '.join(rings)}")
    if case.serving.pipeline_parallel > 1 or case.serving.decode_context_parallel > 1:
        return Fit("dictionary", "no", "refuses pipeline and decode context parallelism")
    return Fit("dictionary", "yes", "attention and recurrent state; small, to be read, not for production")


def _lmcache(case: Case) -> Fit:
    step = f"server's chunk_size a multiple of C = {case.interval:,}"
    if case.platform == "cpu":
        return Fit("lmcache", "yes", f"0.5.5 and 0.5.6 inside HostLMCacheConnector; {step}")
    return Fit(
        "lmcache",
        "unknown",
        f"{step}; not seen to work on {case.platform} yet: its kernels must load beside your torch",
    )


def _ours(case: Case, name: str) -> Fit:
    rings = sorted({pages.kind for pages in case.pages} - {"attention", "recurrent"})
    if _unsound(case, name):
        return Fit(name, "no", "refuses keys that can be made to collide: --prefix-caching-hash-algo sha256")
    if rings:
        return Fit(name, "unknown", f"never run with layers of kind {', '.join(rings)}")
    if case.serving.pipeline_parallel > 1 or case.serving.decode_context_parallel > 1:
        return Fit(name, "unknown", "never run with pipeline or decode context parallelism")
    if case.platform != "cpu":
        return Fit(name, "unknown", f"copies are vLLM's own worker's; not seen to work on {case.platform} yet")
    return Fit(name, "yes", "families of pages and state; samestate.cache.connector")


def _vllms_own(case: Case) -> list[Fit]:
    """As vLLM says of the connectors that it brings. With several cache groups `SupportsHMA` is needed."""
    if case.answer is None or not case.recurrent:
        return []
    failed = {name: fault.what for _, fault in case.faults for name in fault.connectors}
    fits = []
    for name, several in case.answer.hybrid_connectors.items():
        if name == "OffloadingConnector":
            continue
        if name in failed:
            fits.append(Fit(name, "no", failed[name]))
        elif several:
            fits.append(Fit(name, "unknown", "keeps several cache groups (SupportsHMA); not run here"))
        else:
            fits.append(Fit(name, "no", "gives up cache groups (no SupportsHMA), which recurrent state needs"))
    return fits
