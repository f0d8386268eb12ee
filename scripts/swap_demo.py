"""Two tiny vLLM servers behind HAProxy under steady traffic: one is swapped for a traced build, probed, and restored.

Exit code 0 only when the swap passed on both axes, its probe passed, and no client request failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import httpx

from samestate.custody.base import CustodyError
from samestate.custody.observe import await_answer
from samestate.custody.processes import PlainProcess
from samestate.custody.spec import ProcessSpec
from samestate.evidence.canonical import file_sha256
from samestate.models.catalogue import ensure

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "demo-runs" / "swap"
SAMESTATE = Path(sys.executable).parent / "samestate"
MODEL = "qwen3-tiny"
GUARD = ROOT / "src/samestate/instruments/top_p_guard.py"
RECORDER = ROOT / "src/samestate/instruments/budget_plugin.py"
BETWEEN = 0.5
"""Seconds between two requests of the client."""
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": ["1085", "9567"]}},
    "required": ["sum"],
    "additionalProperties": False,
}
INHERITED = ("HOME", "LANG", "PATH", "TMPDIR")
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_SERVER_DEV_MODE": "1",
}


class Traffic(threading.Thread):
    """A client that asks through the router all the time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []

    def run(self) -> None:
        body = {"model": "served", "prompt": "What are the sums?", "max_tokens": 8, "temperature": 0}
        with httpx.Client(trust_env=False, timeout=60) as client:
            while not self._over.wait(BETWEEN):
                try:
                    status = client.post(self._url, json=body).status_code
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                if status == 200:
                    self.answered += 1
                else:
                    self.failed.append(f"status {status}")

    def stop(self) -> None:
        self._over.set()
        self.join()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def server(name: str, port: int, model: Path) -> ProcessSpec:
    """One tiny vLLM server."""
    inherited = {variable: os.environ[variable] for variable in INHERITED if variable in os.environ}
    return ProcessSpec(
        url=f"http://127.0.0.1:{port}",
        argv=[
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager", "--dtype", "bfloat16"),
            *("--num-gpu-blocks-override", "64", "--seed", "0", "--shutdown-timeout", "20"),
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ],
        cwd=str(RUNS),
        environment=inherited | ENVIRONMENT,
        pid_file=str(RUNS / f"{name}.pid"),
        log=str(RUNS / f"{name}.log"),
        start_seconds=300,
        stop_seconds=60,
    )


def haproxy(front: int, ports: dict[str, int]) -> str:
    """Its configuration."""
    servers = "".join(
        f"    server {name} 127.0.0.1:{port} check inter 500ms fall 2 rise 1\n" for name, port in ports.items()
    )
    return f"""global
    stats socket {RUNS}/haproxy.sock mode 600 level admin
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{front}
    default_backend engines
backend engines
    balance roundrobin
    option httpchk GET /health
{servers}"""


def toml(value: object) -> str:
    """Strings, lists and tables of strings as TOML has them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def spec(incumbent: ProcessSpec, model: Path, package: Path) -> str:
    """SPEC.toml of the swap."""
    layers = [("budget-recorder", RECORDER), ("split-top-p", GUARD)]
    told = ("url", "argv", "cwd", "environment", "pid_file", "log", "start_seconds", "stop_seconds")
    process = "\n".join(f"{name} = {toml(getattr(incumbent, name))}" for name in told)
    return f"""format = 1
name = "reasoning-close"
records = "records"

[incumbent]
{process}

[identity]
model = "{model}"
sources = {{vllm = "{package}"}}
mounts = ["{model}"]
configuration = "server_info"

[policy]
expected_change = ["pid", "process_start"]
ignore = ["config.instance_id"]

[router]
socket = "haproxy.sock"
backend = "engines"
server = "incumbent"
config = ["haproxy.cfg"]
drain_seconds = 60

[candidate]
kind = "plan"
name = "marker-trace"
base = "vllm"
layers = [{", ".join(toml({"name": name, "file": str(file), "sha256": file_sha256(file)}) for name, file in layers)}]
# The plan's engine: its own arguments, variables, port and drafts; model, template and sources are the incumbent's.
differs = ["pid", "process_start", "argv", "cwd", "environment", "environment.*", "ports*", "config.*"]

[probe]
plan = "reasoning-close"
required_before = ["router.config.haproxy.cfg", "smoke.plain", "smoke.strict-json", "model.revision", "sources.vllm"]

[observe]
period_seconds = 5.0
stable_samples = 3

[[smokes]]
name = "plain"
prompt = "What are the sums?"

[[smokes]]
name = "strict-json"
kind = "strict-json"
prompt = "What are the sums?"
max_tokens = 64
json_schema = {toml(SCHEMA)}
"""


def main() -> int:
    """The demonstration; its exit code."""
    package, program = find_spec("vllm"), shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
    if package is None or package.origin is None:
        print("swap-demo: vLLM is not installed; run `make setup`", file=sys.stderr)
        return 2
    if program is None:
        print("swap-demo: HAProxy is not installed; apt-get install haproxy", file=sys.stderr)
        return 2
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    model = ensure(MODEL)
    front = free_port()
    servers = {name: server(name, free_port(), model) for name in ("incumbent", "second")}
    ports = {name: int(one.url.rpartition(":")[2]) for name, one in servers.items()}
    (RUNS / "haproxy.cfg").write_text(haproxy(front, ports))
    (RUNS / "swap.toml").write_text(spec(servers["incumbent"], model, Path(package.origin).parent))
    began = time.monotonic()
    with ExitStack() as closing:
        kept = {name: PlainProcess(one) for name, one in servers.items()}
        for process in kept.values():
            closing.callback(process.stop)
            process.start()
        for name, process in kept.items():
            await_answer(process, servers[name].url, servers[name].start_seconds, name)
            print(f"{name}: vLLM answers after {time.monotonic() - began:.1f} s", flush=True)
        log = closing.enter_context((RUNS / "haproxy.log").open("ab"))
        router = subprocess.Popen([program, "-f", RUNS / "haproxy.cfg"], stderr=log)
        closing.callback(router.wait)
        closing.callback(router.terminate)
        traffic = Traffic(f"http://127.0.0.1:{front}")
        time.sleep(2)  # the router's first health checks
        traffic.start()
        print("$ samestate swap swap.toml", flush=True)
        code = subprocess.run([SAMESTATE, "swap", RUNS / "swap.toml"], check=False).returncode
        time.sleep(2)
        traffic.stop()
        again = subprocess.run([SAMESTATE, "report", RUNS / "records", "--reproduce"], check=False).returncode
    return verdict(code, again, traffic, time.monotonic() - began)


def verdict(code: int, again: int, traffic: Traffic, seconds: float) -> int:
    """Say what came out; 0 only when all of it is as it must be."""
    decision = RUNS / "records" / "decision.json"
    said = json.loads(decision.read_text()) if decision.is_file() else {}
    probe = (said.get("probe") or {}).get("verdict")
    print(f"\nclient requests: {traffic.answered} answered, {len(traffic.failed)} failed; {seconds:.0f} s in all")
    for line in traffic.failed[:5]:
        print(f"    {line}")
    wrong = []
    if (code, said.get("operational"), said.get("functional")) != (0, "pass", "pass"):
        wrong.append(f"swap: exit code {code}, {said.get('operational')} and {said.get('functional')}")
    if probe != "pass":
        wrong.append(f"probe: {probe}")
    if traffic.failed or traffic.answered < 10:
        wrong.append("traffic: requests failed, or there were too few")
    if again:
        wrong.append("documents: are not what the records give")
    print("\n".join(wrong) or "The incumbent is back, exactly, and no client noticed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is stopped then, too
    try:
        sys.exit(main())
    except CustodyError as error:
        sys.exit(f"swap-demo: {error}")
    except KeyboardInterrupt:
        sys.exit("swap-demo: stopped")
