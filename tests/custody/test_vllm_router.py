"""A swap behind a real ``vllm-router``, where that program is: it is no part of samestate's environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from custody.house import House, Traffic, free_ports, serving
from samestate.checks.base import Verdict

PROGRAM = os.environ.get("SAMESTATE_VLLM_ROUTER") or shutil.which("vllm-router")


@pytest.mark.skipif(PROGRAM is None, reason="vllm-router is not installed")
def test_a_swap_behind_vllm_router(tmp_path: Path) -> None:
    with serving(tmp_path) as house:
        port, metrics = free_ports(2)
        workers = [f"http://127.0.0.1:{one}" for one in (house.port, house.other)]
        command = [PROGRAM, "--worker-urls", *workers, "--port", str(port), "--policy", "round_robin"]
        command += ["--prometheus-port", str(metrics), "--health-check-interval-secs", "1"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
            try:
                (tmp_path / "router.pid").write_text(str(router.pid))
                house.await_health(f"http://127.0.0.1:{port}/health")
                behind(house, port, metrics)
                house.front = port
                with Traffic(house) as traffic:
                    done = house.call()
                assert done.exit_code == 0, done.output
                assert traffic.answered > 20 and traffic.failed == []
                assert house.judged().operational is Verdict.PASS
                urls = httpx.get(f"http://127.0.0.1:{port}/list_workers", trust_env=False, verify=False).json()["urls"]
                assert sorted(urls) == sorted(workers)
            finally:
                router.terminate()


def behind(house: House, port: int, metrics: int) -> None:
    """The spec names this router."""
    text = house.spec.read_text()
    head, rest = text.split("[router]\n")
    tail = rest.partition("[candidate]\n")[2]
    router = f"""[router]
kind = "vllm-router"
url = "http://127.0.0.1:{port}"
metrics_url = "http://127.0.0.1:{metrics}"
pid_file = "router.pid"
drain_seconds = 10

[candidate]
"""
    house.spec.write_text(head + router + tail.replace("router.config.haproxy.cfg", "router.config.argv"))
