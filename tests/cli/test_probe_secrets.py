"""What `samestate probe` once gave away, or spent unforeseen: each held shut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.answering import Answering, Conduct, answering
from engines.serving import Played, playing
from samestate.engines import black_box as box_module
from samestate.evidence.archive import Archive
from samestate.lab import black_box as lab_module

pytestmark = pytest.mark.regression

Command = Callable[..., Any]
Tree = dict[str, Any]
SHORT = ("--lengths", "C+1,2C,3C+7")
KEY = "s3cr3t-0123456789"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(box_module, "IDLE_POLL_SECONDS", 0.01)


# --- keys and addresses ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["refusal", "later refusal", "id", "text"])
def test_a_server_that_repeats_the_key_puts_it_nowhere(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    usual, asked = Answering.complete, []

    def complete(self: Answering, body: Tree) -> tuple[int, Tree]:
        asked.append(body)
        if where == "refusal" or (where == "later refusal" and len(asked) > 6):
            return 401, {"error": {"message": f"Incorrect API key provided: {KEY}."}}
        status, tree = usual(self, body)
        if where == "id":
            tree["id"] = f"cmpl-{KEY}-{len(asked)}"
        for choice in tree["choices"] if where == "text" else ():
            choice["text"] = f"Bearer {KEY}"
        return status, tree

    monkeypatch.setattr(Answering, "complete", complete)
    monkeypatch.setenv("PROBE_KEY", KEY)
    out = tmp_path / "archive"
    with answering(Conduct(key=KEY)) as server:
        result = samestate("probe", server.url, "--api-key-env", "PROBE_KEY", "--out", out, "--json", *SHORT)
    assert result.exit_code == (2 if "refusal" in where else 0)
    assert KEY not in result.output and ("***" in result.output) == ("refusal" in where)
    files = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert files and not [data for data in files if KEY.encode() in data]
    assert any(b"***" in data for data in files)


@pytest.mark.parametrize("command", [("probe",), ("watch", "--once")])
@pytest.mark.parametrize("value", [f"{KEY}\nmore", f"{KEY}é", f"{KEY}\x01"])
def test_what_is_no_key_is_refused_and_not_shown(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, command: Sequence[str], value: str
) -> None:
    monkeypatch.setenv("PROBE_KEY", value)
    with answering(Conduct(key=KEY)) as server:
        result = samestate(*command, server.url, "--api-key-env", "PROBE_KEY")
    assert result.exit_code == 2 and not server.paths
    assert result.stderr.startswith("samestate: --api-key-env: PROBE_KEY holds more than a key")
    assert len(result.stderr.splitlines()) == 1 and KEY not in result.output


@pytest.mark.parametrize("command", [("probe",), ("watch", "--once")])
def test_a_key_instead_of_its_variable_is_not_shown(samestate: Command, command: Sequence[str]) -> None:
    result = samestate(*command, "http://127.0.0.1:9", "--api-key-env", KEY)
    assert result.exit_code == 2 and "takes the name of a variable" in result.stderr and KEY not in result.output


def test_a_key_from_a_file_has_a_line_end_that_is_no_part_of_it(
    samestate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBE_KEY", f"{KEY}\n")
    with answering(Conduct(key=KEY)) as server:
        assert samestate("probe", server.url, "--api-key-env", "PROBE_KEY", *SHORT).exit_code == 0
    exposition = Played(body=b"vllm:num_requests_running 0.0\n", content_type="text/plain")
    with playing(exposition) as metrics:
        assert samestate("watch", metrics.url, "--once", "--api-key-env", "PROBE_KEY").exit_code == 0
    assert [one.headers["Authorization"] for one in metrics.seen] == [f"Bearer {KEY}"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_archive_of_a_broken_probe_says_why_and_not_where(
    samestate: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str
) -> None:
    """Also where a message names the address that was connected to, instead of the one that was said."""
    monkeypatch.setattr(Answering, "complete", lambda self, body: (500, {"error": {"message": "out of memory"}}))
    out = tmp_path / "archive"
    with answering() as server:
        port = server.url.rpartition(":")[2]
        result = samestate("probe", f"http://{host}:{port}", "--out", out)
    assert result.exit_code == 2 and f"{host}:{port}" in result.stderr
    files = {path.name: path.read_text() for path in out.rglob("*") if path.is_file()}
    assert "/v1/completions: answered 500 (out of memory)" in files["attempts.jsonl"]
    assert not [name for name, text in files.items() if f":{port}" in text]
    assert Archive.open(out).plan_json


# --- what it costs --------------------------------------------------------------------------------


def test_a_server_that_answers_more_than_was_asked_is_asked_no_more(
    samestate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Answering.generate
    monkeypatch.setattr(Answering, "generate", lambda self, state, tokens: usual(self, state, 20 * tokens))
    with answering() as server:
        result = samestate("probe", server.url, "--budget-tokens", "4000", *SHORT)
        spent = sum(20 * body["max_tokens"] for body in server.asked)
    assert result.exit_code == 2 and "--budget-tokens" in result.stderr
    last = 2 * 20 * 32 + 2 * 64
    assert spent <= 4000 + last


@pytest.mark.parametrize("conduct", [Conduct(), Conduct(interval=256), Conduct(outside=True, dev=True)])
def test_a_dry_run_counts_all_that_is_foreseen(samestate: Command, conduct: Conduct) -> None:
    means = ("--allow-reset",) if conduct.outside else ()
    with answering(conduct) as server:
        foreseen = json.loads(samestate("probe", server.url, "--dry-run", "--json", *means).stdout)
    with answering(conduct) as server:
        spent = json.loads(samestate("probe", server.url, "--json", *means).stdout)["probe"]["spent"]
    resets = len(means)
    assert spent["requests"] <= foreseen["requests"] + resets and spent["tokens"] <= foreseen["tokens"]
    assert means or (foreseen["requests"] - spent["requests"] <= 1 and foreseen["tokens"] - spent["tokens"] <= 300)
    assert any("reset" in line for line in foreseen["not_counted"]) == bool(resets)


def test_a_dry_run_says_that_the_search_for_c_is_not_counted(samestate: Command) -> None:
    with answering(Conduct(vllm=False, metrics=False)) as server:
        result = samestate("probe", server.url, "--dry-run", "--lengths", "129,257")
    assert "not counted, but within the budget: " in result.stdout and "the search for C" in result.stdout


def test_a_dry_run_counts_nothing_where_c_is_not_known(samestate: Command) -> None:
    with answering(Conduct(vllm=False, metrics=False)) as server:
        tree = json.loads(samestate("probe", server.url, "--dry-run", "--json").stdout)
    assert "requests" not in tree and any("all that is compared" in line for line in tree["not_counted"])
