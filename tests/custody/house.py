"""A small serving house: two stub servers behind a real HAProxy, a model's folder, a package, and a SPEC.toml."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner, Result

from samestate.checks.base import CheckResult
from samestate.checks.custody_analyzer import CustodyJudgement, judge_custody
from samestate.cli.commands import samestate
from samestate.custody.processes import PlainProcess
from samestate.custody.spec import ProcessSpec
from samestate.evidence.canonical import sha256_hex

STUB = Path(__file__).with_name("stub_server.py")
HAPROXY = shutil.which("haproxy") or "/usr/sbin/haproxy"
SAMESTATE = Path(sys.executable).parent / "samestate"
LAYER = b"# a patch\n"
SCHEMA = (
    '{type = "object", required = ["answer"], properties = {answer = {type = "integer"}}, additionalProperties = false}'
)


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class House:
    """Everything that a swap needs, in one folder."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.root = root
        self.port, self.other, self.candidate, self.front = free_ports(4)
        self.records = root / "records"
        self.spec = root / "swap.toml"
        (root / "model").mkdir()
        (root / "model/config.json").write_text("{}")
        (root / "model/chat_template.jinja").write_text("{{ messages }}")
        shutil.copytree(root / "model", root / "copy")
        (root / "other").mkdir()
        (root / "other/config.json").write_text('{"another": 1}')
        (root / "package").mkdir()
        (root / "package/engine.py").write_text("VALUE = 1\n")
        (root / "mounted").mkdir()
        (root / "incumbent.env").write_text(f"PATH={os.environ['PATH']}\nOMP_NUM_THREADS=2\nAPI_TOKEN=s3cr3t-4711\n")
        (root / "patch.py").write_bytes(LAYER)
        shipped = files("samestate.plans").joinpath("shipped/boundary.yaml").read_text()
        (root / "probe.yaml").write_text(re.sub(r"^lengths: .*$", "lengths: [2C]", shipped, flags=re.M))
        self.launcher = root / "serve.sh"
        self.launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} {self.port} {" ".join(flags)} "$@"\n')
        self.launcher.chmod(0o755)
        self.config = root / "haproxy.cfg"
        self.config.write_text(self._haproxy())
        self.spec.write_text(self._spec())
        self._others: list[subprocess.Popen[bytes]] = []

    def _haproxy(self) -> str:
        return f"""global
    stats socket {self.root}/haproxy.sock mode 600 level admin
    stats timeout 10s
defaults
    mode http
    timeout connect 2s
    timeout client 20s
    timeout server 20s
    timeout check 10s
frontend front
    bind 127.0.0.1:{self.front}
    default_backend engines
backend engines
    balance roundrobin
    option httpchk GET /health
    server incumbent 127.0.0.1:{self.port} check inter 200ms fall 3 rise 1
    server second 127.0.0.1:{self.other} check inter 200ms fall 3 rise 1
"""

    def _spec(self) -> str:
        python, env = sys.executable, f'{{PATH = "{os.environ["PATH"]}", SAMESTATE_BUDGET_ARM = "candidate"}}'
        return f"""format = 1
name = "house"
records = "records"

[incumbent]
url = "http://127.0.0.1:{self.port}"
argv = ["./serve.sh"]
cwd = "."
environment_file = "incumbent.env"
pid_file = "incumbent.pid"
log = "incumbent.log"
start_seconds = 20
stop_seconds = 5

[identity]
model = "model"
sources = {{package = "package"}}
mounts = ["mounted"]

[policy]
expected_change = ["pid", "process_start"]

[router]
socket = "haproxy.sock"
backend = "engines"
server = "incumbent"
config = ["haproxy.cfg"]
drain_seconds = 10

[candidate]
kind = "process"
name = "traced"
base = "package"
sources = {{package = "package"}}
model = "model"
layers = [{{name = "marker-trace", file = "patch.py", sha256 = "{sha256_hex(LAYER)}"}}]
differs = ["pid", "process_start", "argv", "environment", "environment.*", "ports*", "config.models"]

[candidate.process]
url = "http://127.0.0.1:{self.candidate}"
argv = ["{python}", "{STUB}", "{self.candidate}", "--label", "traced"]
environment = {env}
pid_file = "candidate.pid"
log = "candidate.log"
start_seconds = 20
stop_seconds = 5

[reference]
name = "prior-image"
sha256 = "{"4" * 64}"

[probe]
plan = "{self.root}/probe.yaml"
engine = "sim"
model = "model"
required_before = ["router.config.haproxy.cfg", "smoke.strict"]

[observe]
period_seconds = 2.0
stable_samples = 3
idle_seconds = 0.02

[[smokes]]
name = "plain"
prompt = "three times three"

[[smokes]]
name = "strict"
kind = "strict-json"
prompt = "three times three, as JSON"
json_schema = {SCHEMA}
"""

    def process(self) -> PlainProcess:
        tree = tomllib.loads(self.spec.read_text())["incumbent"]
        rooted = {
            name: str(self.root / value) if name in ("cwd", "environment_file", "pid_file", "log") else value
            for name, value in tree.items()
        }
        return PlainProcess(ProcessSpec.model_validate(rooted))

    def change(self, old: str, new: str) -> None:
        """Change the spec."""
        text = self.spec.read_text()
        assert text.count(old) == 1, (old, text.count(old))
        self.spec.write_text(text.replace(old, new))

    def swap(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``samestate swap`` on the spec, in a process of its own."""
        command = [SAMESTATE, "swap", self.spec, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def call(self, *arguments: str) -> Result:
        """The same within this process, which has read the code already."""
        return CliRunner().invoke(samestate, ["swap", str(self.spec), *arguments])

    def judged(self) -> CustodyJudgement:
        return judge_custody(self.records)

    def result(self, check: str) -> CheckResult:
        return next(one for one in self.judged().results if one.check == check)

    def start(self) -> None:
        self.incumbent = self.process()
        self.incumbent.start()
        self._others.append(subprocess.Popen([sys.executable, STUB, str(self.other)], stderr=subprocess.DEVNULL))
        for port in (self.port, self.other):
            self.await_health(f"http://127.0.0.1:{port}/health")
        self._others.append(subprocess.Popen([HAPROXY, "-f", self.config], stderr=subprocess.DEVNULL))
        self.await_health(f"http://127.0.0.1:{self.front}/health")

    @staticmethod
    def await_health(url: str) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(url, trust_env=False, verify=False).status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{url} does not answer")

    def healthy(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        for pid_file in ("incumbent.pid", "candidate.pid"):
            with suppress(OSError, ValueError):
                os.kill(int((self.root / pid_file).read_text().partition("@")[0]), signal.SIGKILL)
        for one in self._others:
            one.kill()
            one.wait()


class Traffic:
    """Clients that never stop asking through the router; `failed` holds whatever was not a 200."""

    def __init__(self, house: House, clients: int = 3) -> None:
        self._url = f"http://127.0.0.1:{house.front}/v1/chat/completions"
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def _ask(self) -> None:
        body = {"model": "stub", "messages": [{"role": "user", "content": "go on"}]}
        with httpx.Client(trust_env=False, timeout=20) as client:
            while not self._over.is_set():
                try:
                    status = client.post(self._url, json=body).status_code
                    if status == 200:
                        self.answered += 1
                    else:
                        self.failed.append(str(status))
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                time.sleep(0.005)

    def __enter__(self) -> Traffic:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        for one in self._threads:
            one.join()


@contextmanager
def serving(root: Path, *flags: str) -> Iterator[House]:
    house = House(root, *flags)
    kept = os.environ.get("SAMESTATE_CACHE")
    os.environ["SAMESTATE_CACHE"] = str(root / "cache")  # locks by address: ports come again
    try:
        house.start()
        yield house
    finally:
        house.close()
        os.environ.pop("SAMESTATE_CACHE")
        if kept is not None:
            os.environ["SAMESTATE_CACHE"] = kept
