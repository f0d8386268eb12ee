"""Autotuned kernels on a GPU: does a recorded choice give the same bits again, and does another one change them?

    PYTHONPATH=src python scripts/gpu_profile_check.py --out DIR [--only kda|vllm]

Two subjects, each in processes of its own: FLA's ``chunk_kda`` and a short vLLM run of the tiny Qwen3-Next. One process
records what its kernels chose; a fresh one is held to that profile and must give the same state hash without a
measurement; then all kernels, and each kernel alone, are held to another of their configurations, and each alone is
released. A tuner that nobody recorded must be rejected before its launch.

Prints one JSON object, writes DIR/gpu_profile_check.json. Needs CUDA, Triton, vLLM 0.33 or later; ``chunk_kda`` is left
out where FLA is missing. Exit code 0: every expectation held; 1: one did not; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from samestate.evidence.controls import PROFILE_VARIABLE, RECORD_VARIABLE
from samestate.evidence.tuner_profile import installed, shown, write
from samestate.evidence.tuner_report import profile_of, read_reports
from samestate.instruments.tuner_plugin import register
from samestate.instruments.tuner_profile import ProfileViolation, Watch
from samestate.instruments.tuner_profile import watching as installed_watch
from samestate.instruments.tuners import device

TUNED, HELD = "record", "pin"
SUBJECTS = ("kda", "vllm")
PROMPT_TOKENS = 1000
ANSWER_TOKENS = 16
CHILD_SECONDS = 330.0
"""Of one process; kernels are compiled and measured in the first one."""
PLUGIN = "samestate_gpu_check-0.dist-info"


def main() -> int:
    parser = argparse.ArgumentParser(description="Tuner profiles on a GPU: recorded, held, replaced, released.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_profile_check.json, made if missing")
    parser.add_argument("--only", choices=SUBJECTS, help="one subject alone")
    parser.add_argument("--child", nargs=2, metavar=("SUBJECT", "STEP"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return child(chosen.out, *chosen.child)
    if not torch.cuda.is_available():
        print("no CUDA device: run this on a GPU machine with a torch built for CUDA", file=sys.stderr)
        return 2
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    subjects = [chosen.only] if chosen.only else list(SUBJECTS)
    if "kda" in subjects and find_spec("fla") is None:
        subjects.remove("kda")
    results: dict[str, Any] = {subject: {} for subject in subjects}
    for step in (TUNED, HELD):  # both subjects at a time: compiling is most of it
        running = {subject: start(out, subject, step) for subject in subjects}
        for subject, process in running.items():
            results[subject][step] = collect(out, subject, step, process)
    expectations = {f"{subject}: {name}": held for subject in subjects for name, held in expected(results[subject])}
    held = [result.get(HELD, {}) for result in results.values()]
    expectations["other configurations change a state"] = any(
        one["all_other"]["state"] != one["state"] for one in held if "all_other" in one
    )
    report = {
        "machine": machine(),
        "seconds": round(time.monotonic() - begun, 1),
        "expectations": expectations,
        "results": results,
    }
    (out / "gpu_profile_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if expectations and all(expectations.values()) else 1


def machine() -> dict[str, str]:
    """What every figure depends on."""
    return {"device": device(), "python": sys.version.split()[0], **installed()}


def expected(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What must have come out, by name."""
    recorded, held = result.get(TUNED, {}), result.get(HELD, {})
    if "state" not in recorded or "state" not in held:
        return [("both processes ran", False)]
    return [
        ("a profile was recorded", bool(recorded["choices"])),
        ("the recording process measured", recorded["benchmarks"] > 0),
        ("a fresh process under the profile has the same state hash", held["state"] == recorded["state"]),
        ("it repeats itself", held["again"] == held["state"]),
        ("it measured nothing", held["benchmarks"] == 0),
        ("it broke nothing", held["violations"] == []),
        ("under the profile again it is the same", held["after"] == held["state"]),
        ("an unrecorded tuner is rejected before its launch", held["rejected"]),
        ("every kernel has its row", {row["kernel"] for row in held["ablation"]} == set(held["kernels"])),
    ]


# --- the processes ----------------------------------------------------------------------------------


def start(out: Path, subject: str, step: str) -> subprocess.Popen[bytes]:
    """A child process, its output in a log beside the result."""
    reports = out / f"{subject}-{step}-reports"
    reports.mkdir(exist_ok=True)
    environment = os.environ | {
        RECORD_VARIABLE: str(reports),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(plugin(out)), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if step == HELD:
        environment[PROFILE_VARIABLE] = str(out / f"{subject}-profile.json")
    command = [sys.executable, __file__, "--out", str(out), "--child", subject, step]
    with (out / f"{subject}-{step}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def plugin(out: Path) -> Path:
    """A folder through which vLLM finds the plug-in where samestate is only on ``PYTHONPATH``."""
    folder = out / "plugin"
    info = folder / PLUGIN
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samestate-gpu-check\nVersion: 0\n")
    entry = "samestate_tuners = samestate.instruments.tuner_plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return folder


def collect(out: Path, subject: str, step: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a child found, or the end of its log."""
    try:
        code = process.wait(CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    result = out / f"{subject}-{step}.json"
    if code == 0 and result.is_file():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    log = (out / f"{subject}-{step}.log").read_text(errors="replace")
    return {"failed": code, "log": log.splitlines()[-25:]}


def child(out: Path, subject: str, step: str) -> int:
    begun = time.monotonic()
    run = kda() if subject == "kda" else vllm(out, step)
    found = recorded(out, subject, run) if step == TUNED else held_to(run)
    found["seconds"] = round(time.monotonic() - begun, 1)
    (out / f"{subject}-{step}.json").write_text(json.dumps(found) + "\n")
    return 0


Run = Callable[[], dict[str, str]]
"""Runs the subject once from the same beginning; hashes by name, ``state`` among them."""


def recorded(out: Path, subject: str, run: Run) -> dict[str, Any]:
    """Tune, run again untuned, and write the profile."""
    first, again = run(), run()  # measuring may run a kernel many times over its own output
    watch = watching()
    watch.write()
    profile, otherwise = profile_of(read_reports(out / f"{subject}-{TUNED}-reports"))
    sha256 = write(out / f"{subject}-profile.json", profile)
    return {
        **again,
        "first": first["state"],
        "profile": sha256,
        "benchmarks": watch.benchmarks,
        "otherwise": otherwise,
        "choices": [{"kernel": one.kernel, "key": one.key, "config": one.config} for one in profile.ranks["0"]],
    }


def held_to(run: Run) -> dict[str, Any]:
    """Under the profile; then with all, and each, of its kernels on other configurations; then each released."""
    watch = watching()
    assert watch.profile is not None
    kernels = watch.profile.kernels
    baseline, again = run(), run()
    selected = watch.selected()
    found: dict[str, Any] = {
        **baseline,
        "again": again["state"],
        "kernels": kernels,
        "benchmarks": selected.benchmarks,
        "violations": selected.violations,
    }
    watch.replace(["*"])
    found["all_other"] = {**run(), "selections": selections(watch)}
    found["ablation"] = [ablated(watch, kernel, run, baseline) for kernel in kernels]
    watch.release(None)
    found["after"] = run()["state"]
    found["rejected"] = rejected(watch)
    return found


def ablated(watch: Watch, kernel: str, run: Run, baseline: dict[str, str]) -> dict[str, Any]:
    """One kernel's row: held to another configuration, then let go."""
    row: dict[str, Any] = {"kernel": kernel}
    for word in ("other", "released"):
        if word == "other":
            watch.replace([kernel])
        else:
            watch.release(kernel)
        begun = time.monotonic()
        if word == "released":
            run()  # measures
        hashes = run()
        row[word] = {
            "changed": sorted(name for name, value in hashes.items() if value != baseline[name]),
            "configurations": [one["config"] for one in selections(watch) if one["kernel"] == kernel],
            "benchmarks": watch.benchmarks,
            "seconds": round(time.monotonic() - begun, 2),
        }
    row["other_bits"] = bool(row["other"]["changed"])
    return row


def selections(watch: Watch) -> list[dict[str, Any]]:
    return [{"kernel": one.kernel, "key": one.key, "config": shown(one.config)} for one in watch.selected().selections]


def rejected(watch: Watch) -> bool:
    """Whether a kernel that nobody recorded is refused, and nothing of it runs."""
    out = torch.zeros(256, device="cuda")
    try:
        unrecorded[(1,)](out, 256)
    except ProfileViolation:
        return bool((out == 0).all()) and any("unrecorded" in line for line in watch.violations)
    return False


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def unrecorded(out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 1.0, mask=at < n)


def watching() -> Watch:
    """This process's watch, which the plug-in must have installed."""
    watch = installed_watch()
    assert watch is not None, "the plug-in was not loaded"
    return watch


# --- the subjects -----------------------------------------------------------------------------------


def kda() -> Run:
    """FLA's chunked Kimi delta attention over 1,000 tokens; final state and output are hashed."""
    chunk_kda = import_module("fla.ops.kda").chunk_kda
    register()  # no engine loads plug-ins here
    make = torch.Generator(device="cuda").manual_seed(1)
    shape = (1, PROMPT_TOKENS, 8, 128)

    def drawn(*of: int) -> torch.Tensor:
        return torch.randn(*of, generator=make, device="cuda")

    q, k, v = (drawn(*shape).to(torch.bfloat16) for _ in range(3))
    g = torch.nn.functional.logsigmoid(drawn(*shape))
    beta = drawn(*shape[:-1]).sigmoid().to(torch.bfloat16)

    def run() -> dict[str, str]:
        with torch.no_grad():
            output, state = chunk_kda(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return {"state": sha256(state), "output": sha256(output)}

    return run


def vllm(out: Path, step: str) -> Run:
    """The tiny Qwen3-Next in vLLM: one prompt, 16 greedy tokens. What every layer put out is hashed."""
    from samestate.models.build import build

    folder = out / f"model-{step}"
    if not folder.exists():
        build("qwen3-next-tiny", folder)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=str(folder),
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=1_000_000_000,
        gpu_memory_utilization=0.3,
        gdn_prefill_backend="triton",
        mamba_ssm_cache_dtype="float32",
        enable_flashinfer_autotune=False,
        enable_prefix_caching=True,
        seed=0,
    )
    layers = Hashed(engine)
    draw = random.Random(1)
    prompt = TokensPrompt(prompt_token_ids=[draw.randrange(10, 300) for _ in range(PROMPT_TOKENS)])
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=5, detokenize=False)

    def run() -> dict[str, str]:
        engine.reset_prefix_cache()
        layers.digest = hashlib.sha256()
        answer = engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        steps = [sorted((token, one.logprob) for token, one in of.items()) for of in answer.logprobs or []]
        return {
            "state": layers.digest.hexdigest(),
            "logprobs": hashlib.sha256(repr(steps).encode()).hexdigest(),
            "tokens": hashlib.sha256(repr(list(answer.token_ids)).encode()).hexdigest(),
        }

    return run


class Hashed:
    """Hashes what every decoder layer of an engine puts out, in order."""

    def __init__(self, engine: Any) -> None:
        self.digest = hashlib.sha256()
        worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = [
            module
            for name, module in worker.model_runner.get_model().named_modules()
            if name.rpartition(".")[0].endswith("layers") and name.rpartition(".")[2].isdigit()
        ]
        assert layers, "the model has no decoder layers under a name that ends in layers.N"
        for layer in layers:
            layer.register_forward_hook(self._take)

    def _take(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        for one in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if hasattr(one, "dtype"):
                self.digest.update(bytes_of(one))


def bytes_of(tensor: Any) -> bytes:
    """A tensor's values as they lie in memory, contiguous."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


def sha256(tensor: Any) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
