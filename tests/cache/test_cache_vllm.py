"""Our cache in real engines: what outlives them, who may have it, and what becomes of damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from samestate.cache.envelope import HEADER_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHILD = Path(__file__).with_name("engine_child.py")
LONG = 3 * 256 + 5
"""A prompt of which B = 3C at C = 256."""
SHARED_MEMORY = Path("/dev/shm")


class Served(NamedTuple):
    tokens: list[list[int]]
    cached: list[int]
    """By request, tokens that were not computed."""
    metrics: dict[str, float]
    log: str

    def count(self, metric: str, *labels: str) -> float:
        return self.metrics.get(" ".join([f"vllm:kv_offload_tier_{metric}", *labels]), 0.0)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Serve:
    def serve(requests: list[tuple[int, int, str | None]], *, model: Path = tiny_model, **orders: Any) -> Served:
        asked = {"model": str(model), "type": "samestate-disk", "url": f"file://{tmp_path / 'pages'}", **orders}
        done = subprocess.run(
            [sys.executable, str(CHILD), json.dumps(asked | {"requests": requests})],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        said = json.loads(lines[0])
        tokens, cached = zip(*said["answers"], strict=True)
        return Served(list(tokens), list(cached), said["metrics"], done.stdout + done.stderr)

    return serve


def pages(tmp_path: Path) -> list[Path]:
    """Of the first boundaries too; the store's own files and notes are left out."""
    return [path for path in (tmp_path / "pages").rglob("*.page") if path.stat().st_size != HEADER_BYTES + 64 * 1024]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_what_a_killed_engine_stored_the_next_one_finds(serve: Serve, ranks: int) -> None:
    settings = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    request = (1, LONG, None)
    regions = set(SHARED_MEMORY.glob("vllm_offload_*"))
    cold = serve([request], settings=settings, kill=True)
    again = serve([request], settings=settings)
    assert (cold.cached, again.cached) == ([0], [768])
    assert again.tokens == cold.tokens
    assert again.count("loaded_pages", "1:samestate-disk") > 0
    assert again.count("damaged_pages", "1:samestate-disk") == 0
    assert set(SHARED_MEMORY.glob("vllm_offload_*")) <= regions, "a killed engine leaves its memory tier behind"


@pytest.mark.deep
def test_what_an_engine_put_into_a_bucket_the_next_one_finds(serve: Serve, tmp_path: Path) -> None:
    """Through fsspec, whose local driver stands for a bucket."""
    pytest.importorskip("fsspec")
    place = {"type": "samestate-object", "url": f"object+file://{tmp_path / 'pages'}"}
    cold = serve([(1, LONG, None)], **place)
    again = serve([(1, LONG, None)], **place)
    assert (cold.cached, again.cached) == ([0], [768])
    assert again.tokens == cold.tokens
    assert again.count("loaded_pages", "1:samestate-object") > 0
    assert again.count("damaged_pages", "1:samestate-object") == 0


@pytest.mark.deep
def test_salts_share_nothing_and_a_reset_of_the_external_cache_leaves_nothing(serve: Serve) -> None:
    first = serve([(1, LONG, "a"), (1, LONG, "b"), (1, LONG, None)])
    assert first.cached == [0, 0, 0]
    second = serve([(1, LONG, "b"), (1, LONG, "c")], reset="external")
    assert second.cached == [768, 0]
    third = serve([(1, LONG, "a"), (1, LONG, None)])
    assert third.cached == [0, 0]


@pytest.mark.deep
def test_other_weights_and_another_layout_never_hit_and_one_line_says_why(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    request = (1, LONG, None)
    cold = serve([request])
    other = tmp_path / "other" / tiny_model.name
    shutil.copytree(tiny_model, other)
    weights = max(other.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[-2:] = bytes([data[-2] ^ 1, data[-1]])
    weights.write_bytes(data)
    wrong = serve([request], model=other)
    assert wrong.cached == [0]
    assert "model.weights: " in only_line(wrong.log, "are misses")
    assert serve([request]).tokens == cold.tokens, "the first model's pages are still its own"
    changed = serve([request], settings={"block_size": 512})
    assert changed.cached == [0]
    assert "rank0.group0.tokens_per_block: 256 → 512" in only_line(changed.log, "are misses")


@pytest.mark.deep
def test_a_damaged_page_is_counted_and_computed_again(serve: Serve, tmp_path: Path) -> None:
    request = (1, LONG, None)
    cold = serve([request])
    found = pages(tmp_path)
    assert found
    for path in found:
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 11)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))
    again = serve([request])
    assert again.cached == [0]
    assert again.tokens == cold.tokens
    assert again.count("damaged_pages", "1:samestate-disk") >= 1
    # What was computed again was stored again.
    assert serve([request]).cached == [768]


@pytest.mark.deep
def test_what_a_folder_lost_while_memory_has_it_is_written_again(serve: Serve, tmp_path: Path) -> None:
    """With the next request for it. Whether it is what was lost, a fresh engine says."""
    request = (1, LONG, None)
    # Requests after it: an engine hears in its next step that one is over, and orders what the store lacks later.
    first = serve([request, request, (2, LONG, None), (3, LONG, None)], lose=1)
    assert first.cached == [0, 768, 0, 0]
    there = len(list((tmp_path / "pages").rglob("*.page")))
    a_prompt = there // 3
    assert there == 3 * a_prompt > 0
    assert first.count("stored_pages", "1:samestate-disk") == 4 * a_prompt, "one prompt's pages were written twice"
    again = serve([request])
    assert again.cached == [768]
    assert again.tokens == first.tokens[:1]
    assert again.count("loaded_pages", "1:samestate-disk") > 0
    assert again.count("damaged_pages", "1:samestate-disk") == 0


@pytest.mark.deep
def test_a_folder_that_cannot_be_used_costs_hits_and_nothing_else(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    served = serve([(1, LONG, None), (2, LONG, None)], url=f"file://{tmp_path / 'file' / 'pages'}")
    assert served.cached == [0, 0]
    assert served.tokens == serve([(1, LONG, None), (2, LONG, None)]).tokens
    assert "cannot be used, requests go on without it" in served.log


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_folder_with_a_budget_goes_by_families(serve: Serve, tmp_path: Path) -> None:
    """Room for two prompts, and two there: what belongs together, the next engine knows from the folder alone."""
    requests = [(seed, LONG, None) for seed in (1, 2, 3, 4)]
    serve(requests[:2])
    room = sum(path.stat().st_size for path in (tmp_path / "pages").rglob("*.page"))
    url = f"file://{tmp_path / 'pages'}?budget={room}"
    second = serve(requests[2:], url=url)
    third = serve(requests[2:], url=url)
    orphans = "vllm:kv_offload_tier_orphan_bytes 1:samestate-disk"
    assert (second.metrics[orphans], third.metrics[orphans]) == (0, 0)
    assert (second.cached, third.cached) == ([0, 0], [768, 768])
    assert third.tokens == second.tokens
    assert sum(path.stat().st_size for path in (tmp_path / "pages").rglob("*.page")) <= room


def only_line(log: str, word: str) -> str:
    """The one line of the log that has this word; twice where a logger prints to both streams."""
    (line,) = {line.partition("WARNING")[2] for line in log.splitlines() if word in line}
    return line
