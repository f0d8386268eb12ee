"""`samestate watch`: what is read of an exposition, what is shown, and names that vLLM and our code really export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from samestate.reports.watch import AUDIT, NAMES, View, facts, read, table, view

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples/grafana/samestate.json"

FIRST = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 600.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 400.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 1000.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 400.0
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 10.0
process_cpu_seconds_total 3.0
this is no line of metrics {
vllm:num_requests_running{engine="1",model_name="tiny"} NaN
"""
AUDITED = """\
vllm:samestate_audit_interval_tokens{engine="0",model_name="tiny"} 1792.0
vllm:samestate_audit_lookups_total{engine="0",model_name="tiny",result="hit"} 3.0
vllm:samestate_audit_lookups_total{engine="0",model_name="tiny",result="miss"} 7.0
vllm:samestate_audit_reloads_total{engine="0",model_name="tiny"} 3.0
vllm:samestate_audit_reloaded_tokens_total{engine="0",model_name="tiny"} 5376.0
vllm:samestate_audit_boundary_faults_total{engine="0",model_name="tiny"} 0.0
vllm:samestate_audit_waits_total{engine="0",model_name="tiny"} 2.0
vllm:samestate_audit_wait_seconds_total{engine="0",model_name="tiny"} 0.25
vllm:kv_offload_tier_misses_total{engine="0",model_name="tiny",reason="absent",tier="1:samestate-disk"} 5.0
vllm:kv_offload_tier_unstored_pages_total{engine="0",model_name="tiny",reason="no-room",tier="1:samestate-disk"} 2.0
"""


LATER = {
    "prompt_tokens_total": 3000,
    "local_compute": 1100,
    "external_kv_transfer": 1900,
    "external_prefix_cache_queries_total": 3000,
    "external_prefix_cache_hits_total": 1900,
    "seconds_sum": 5,
    "seconds_count": 20,
}


def later(text: str) -> str:
    """The same server, some requests on."""
    lines = []
    for line in text.splitlines():
        new = [value for word, value in LATER.items() if word in line and "#" not in line and ":prefix" not in line]
        lines.append(f"{line.rpartition(' ')[0]} {new[-1]}" if new else line)
    return "\n".join(lines)


def shown(made: View, note: str = "") -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (the console's own)
    console.print(table(made, "http://host:8000", note))
    return console.export_text()


def test_what_is_there_is_read() -> None:
    made = view(read(FIRST, 0.0))
    assert made.models == ["tiny"]
    assert (made.running, made.waiting, made.prompt_tokens) == (2.0, 1.0, 1000.0)
    assert made.sources == {"local_compute": 600.0, "external_kv_transfer": 400.0}
    assert made.rates == {"local": 0.0, "external": 0.4}
    assert made.audit is None
    assert made.interval is None
    assert not made.alarms
    text = shown(made)
    assert "local compute 60.0 % · external kv transfer 40.0 %" in text
    assert "not attached: boundaries, faults and waits are not seen" in text


def test_a_window_shows_what_came_between() -> None:
    made = view(read(later(FIRST), 12.0), read(FIRST, 2.0))
    assert made.seconds == 10.0
    assert made.window["prompt_tokens_per_second"] == 200.0
    assert made.window["sources"] == {"local_compute": 500.0, "external_kv_transfer": 1500.0}
    assert made.window["rates"] == {"local": None, "external": 0.75}
    assert made.window["mean_ttft_seconds"] == 0.1
    text = shown(made)
    assert "external kv transfer 75.0 %" in text
    assert "100 ms on average" in text


def test_a_server_that_began_anew_is_no_negative_rate() -> None:
    made = view(read(FIRST, 12.0), read(later(FIRST), 2.0))
    assert made.window["prompt_tokens_per_second"] == 100.0
    assert made.window["sources"]["external_kv_transfer"] == 400.0


def test_the_audit_is_shown_and_a_right_server_raises_no_alarm() -> None:
    made = view(read(FIRST + AUDITED, 0.0))
    assert made.interval == 1792
    assert made.lookups == {"hit": 3.0, "miss": 7.0}
    assert not made.alarms
    assert not made.wrong
    text = shown(made)
    assert "C = 1,792; 3 reloads, 0 with a boundary that no state has" in text
    assert "2 for saves, 0.250 s" in text
    assert "loads: absent 5 · saves: no-room 2" in text


@pytest.mark.parametrize(
    ("line", "alarm", "wrong"),
    [
        (
            'vllm:samestate_audit_boundary_faults_total{engine="1"} 2.0',
            "2 reloads with a boundary that no state has",
            True,
        ),
        ('vllm:kv_offload_tier_damaged_pages_total{tier="1:samestate-disk"} 4.0', "4 damaged pages found", False),
        ('vllm:samestate_audit_failed_transfers_total{direction="load"} 1.0', "1 transfers reported as failed", False),
        ('vllm:samestate_audit_errors_total{side="worker"} 3.0', "3 observations of the audit that failed", False),
        ('vllm:kv_offload_tier_paused{tier="1:samestate-disk"} 1.0', "1 stores left alone", False),
    ],
)
def test_what_must_not_be_is_an_alarm(line: str, alarm: str, wrong: bool) -> None:
    made = view(read(FIRST + AUDITED + line + "\n", 0.0))
    assert len(made.alarms) == 1
    assert made.alarms[0].startswith(alarm)
    assert made.wrong is wrong
    assert f"alarm: {alarm}" in shown(made)
    assert facts(made)["alarms"] == made.alarms


def test_a_name_from_the_server_is_shown_and_obeyed_by_nobody() -> None:
    text = 'vllm:num_requests_running{model_name="a\\"b \x1b[31m[bold]"} 1.0\n'
    made = shown(view(read(text, 0.0)), note="silent [red]\x1b[0m")
    assert "\x1b" not in made
    assert "[bold]" in made
    assert "[red]" in made


def test_nothing_of_vllms_is_nothing() -> None:
    assert read("<html>\nprocess_cpu_seconds_total 3.0\n", 0.0).samples == {}


# --- names ------------------------------------------------------------------------------------------


def exported() -> set[str]:
    """Names that vLLM's source and ours give to metrics, without what Prometheus adds."""
    vllm = pytest.importorskip("vllm")
    from samestate.cache.tier_metrics import definitions
    from samestate.instruments.audit_metrics import DEFINITIONS

    folder = Path(vllm.__file__).parent
    text = "".join((folder / name).read_text() for name in ("v1/metrics/loggers.py",))
    return set(re.findall(r'"(vllm:[a-z_]+)"', text)) | set(definitions()) | set(DEFINITIONS)


def unknown(expressions: str) -> list[str]:
    """Names in Prometheus' expressions that nobody exports."""
    known = exported()
    found = set(re.findall(r"vllm:[a-z_]+", expressions))
    return sorted(
        name for name in found if re.sub(r"_(total|bucket|sum|count)$", "", name) not in known and name not in known
    )


def test_everything_that_is_watched_is_exported() -> None:
    assert unknown(" ".join(NAMES)) == []
    assert len(AUDIT) == 5


def test_everything_on_the_dashboard_is_exported() -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(expressions) > 15
    assert unknown(" ".join([*expressions, *queries])) == []
    assert unknown("rate(vllm:samestate_audit_nothing_total[5m])") == ["vllm:samestate_audit_nothing_total"]


def test_counters_on_the_dashboard_are_rates_and_gauges_are_not() -> None:
    from samestate.instruments.audit_metrics import DEFINITIONS

    pytest.importorskip("vllm")
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for expression in (target["expr"] for target in panel["targets"]):
            for name in re.findall(r"vllm:samestate_[a-z_]+", expression):
                gauge = DEFINITIONS[name.removesuffix("_total")].gauge
                assert name.endswith("_total") is not gauge
                assert gauge or re.search(rf"(rate|increase)\({name}", expression)


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
