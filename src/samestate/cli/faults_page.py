"""The page of the catalogue, docs/faults.md: each fault, who reported it, what caught it when it was simulated."""

from __future__ import annotations

from collections.abc import Sequence

from samestate.cli.outcomes import Outcome, counts, named
from samestate.faults.catalogue import Fault, faults_on

_HEAD = """\
# Faults that can be injected

Kinds of faults that public systems had, each re-created in samestate's own code, to be caught by a check. This page is
made by `samestate faults --clean 0 --markdown`, which runs every fault on the simulated engine. With `--engine vllm`
those marked vLLM are armed in a running engine. Where a kind acts and which finding must name it lies in
`src/samestate/faults/catalogue.toml`. Rank, group and boundary are those of the small exercises on which the faults
run (`src/samestate/lab/exercises.py`).

{counts}

"""
_BUDGETS = """
## Reasoning budgets

Injected by `samestate run budget-grid --fault NAME`, into vLLM's own budget and sampling code or into the recorder that
watches it; the simulated engine has no such faults. Tests hold what must catch them, and what it must name
(`tests/instruments/test_budget_faults_vllm.py`). `rank-disagreement` needs `--tp 2`.

| fault | what it does | public reports | check that must fire | it must name |
|---|---|---|---|---|
{rows}
"""
_SNAPSHOTS = """
## Snapshots of transformers' cache

Injected by `samestate run boundary --engine transformers --model glm5-next-tiny --fault NAME`
([transformers.md](transformers.md)); `tests/engines/test_transformers.py` holds what must catch them. Of
the table above it takes {others}.

| fault | what it does | public reports | check that must fire | it must name |
|---|---|---|---|---|
{rows}
"""
_TAIL = """
Not re-created, because no plan asks the question: keys that leave a LoRA adapter out (vllm-project/vllm#44250), blocks
scaled by decode context parallelism (vllm-project/vllm#49962), and one chunk size for two models in one pool
(LMCache/LMCache#4782).
"""
_GITHUB = "https://github.com"


def page(outcomes: Sequence[Outcome]) -> str:
    """The page as Markdown. Two runs of the same faults make the same page: there are no times in it."""
    lines = [
        "| fault | what it does | public reports | first check that fired | it named | also fired | vLLM |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in outcomes]
    said = counts(outcomes, 0, 0).partition(";")[0] + "."
    budgets = "\n".join(map(_declared, faults_on("budget-grid").values()))
    snapshots = faults_on("transformers").values()
    own = "\n".join(_declared(fault) for fault in snapshots if fault.engines == {"transformers"})
    others = ", ".join(f"`{fault.name}`" for fault in snapshots if fault.engines != {"transformers"})
    more = _BUDGETS.format(rows=budgets) + _SNAPSHOTS.format(rows=own, others=others)
    return _HEAD.format(counts=said) + "\n".join(lines) + "\n" + more + _TAIL


def _declared(fault: Fault) -> str:
    """Of a fault that is not simulated: what must catch it."""
    reports = ", ".join(map(_link, fault.reports)) or "none: the recorder is ours"
    names = ", ".join(sorted(fault.names))
    return f"| `{fault.name}` | {fault.summary} | {reports} | `{fault.check}`: `{fault.code}` | {names} |"


def _row(one: Outcome) -> str:
    best = one.best
    found = f"`{best.check}`: `{best.finding.code}`" if best else "**not caught**"
    place = "only that tokens differ" if one.only_tokens else named(best.finding) if best else "–"
    reports = ", ".join(map(_link, one.fault.reports))
    others = ", ".join(f"`{check}`" for check in one.others)
    live = "yes" if "vllm" in one.fault.engines else ""
    summary = one.fault.summary.replace("|", "\\|")
    return f"| `{one.fault.name}` | {summary} | {reports} | {found} | {place} | {others} | {live} |"


def _link(report: str) -> str:
    """``vllm-project/vllm#51094`` as a link; GitHub leads from issues to pull requests by itself."""
    repository, _, number = report.partition("#")
    return f"[{repository.partition('/')[2]}#{number}]({_GITHUB}/{repository}/issues/{number})"
