"""The README of a bundle (`samestate.reports.case`), as the text of an issue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.checks.analyzers import Judgement


def readme(about: dict[str, Any], judgement: Judgement, *, redact_tokens: bool) -> str:
    """The text; `about` is what `case.json` holds."""
    first = about["findings"][0]
    lines = [f"# {about['operation']}: {first['code']}", ""]
    if about["fault_injected"]:
        lines += [
            f"**The fault `{about['fault_injected']}` was injected: no fault was found in the wild.**",
            "",
        ]
    lines += [
        "## Expected",
        "",
        "A request that reuses state continues exactly as one that computes it. The restored prefix [0, B) ends at the",
        "last checkpoint before the last prompt token, B = C·⌊(N−1)/C⌋, p = B tokens are credited, and at least one is",
        "computed.",
        "",
        "## Seen",
        "",
        f"Operation `{about['operation']}` of arm `{about['arm']}`: N = {about['prompt_tokens']} prompt tokens,"
        f" C = {about['checkpoint_interval']}.",
        "",
        *(f"- `{one['check']}` {one['verdict']} `{one['code']}`: {one['message']}" for one in about["findings"]),
        "",
        "## With",
        "",
        *_with(about),
        "",
        "## Reproduce",
        "",
        "```console",
        f"$ {_command(about)}",
        "$ samestate check ARCHIVE",
        "```",
        "",
        *_differs(about),
        "## In this folder",
        "",
        "- `case.json`: plan, versions, settings and findings of this request, as data",
        "- `records.jsonl`: the records of this request, of those whose state it can reuse, and of the control's;",
        "  `where` names file and line of the sealed archive, whose hash chain an excerpt cannot keep",
    ]
    if redact_tokens:
        lines.append("- Token ids are left out; `tokens_sha256` and `prompt_sha256` are their digests")
    else:
        lines.append("- `tokens.json`: the prompts, token digest to token ids")
    seal = about["seal_sha256"]
    lines += ["", f"Sealed archive `{seal}`, analyzer `{judgement.analyzer}`. Engine request ids are renamed.", ""]
    return "\n".join(lines)


def _with(about: dict[str, Any]) -> Iterator[str]:
    yield f"- model `{about['model']['name']}`, sha256 `{about['model']['sha256']}`"
    for name, arm in about["arms"].items():
        versions = ", ".join(f"{what} {version}" for what, version in arm.get("versions", {}).items())
        yield f"- arm `{name}`: {arm.get('connector_class') or 'no connector'}, {arm['ranks']} rank(s); {versions}"


def _command(about: dict[str, Any]) -> str:
    model = "" if about["model"]["name"] != "external" else " --model CHECKPOINT"
    fault = f" --fault {about['fault_injected']}" if about["fault_injected"] else ""
    others = {arm.get("engine") for arm in about["arms"].values()} & {"sim", "transformers"}
    engine = "".join(f" --engine {name}" for name in sorted(others))
    plan = about["plan"]["shipped_as"] or "PLAN.yaml"
    return f"samestate run {plan}{model}{engine}{_connector(about['plan']['connector'])}{fault} --out ARCHIVE"


def _connector(asked: dict[str, Any] | None) -> str:
    if asked is None:
        return ""
    words = [f" --connector {asked['name']}"]
    words += [f" --lmcache-version {asked['release']}"] if asked["release"] else []
    words += [f" --connector-option {name}={_said(value)}" for name, value in asked["options"].items()]
    return "".join([*words, f" --repair {asked['repair']}"] if asked["repair"] else words)


def _said(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _differs(about: dict[str, Any]) -> list[str]:
    if about["plan"]["shipped_as"]:
        return []
    return ["The plan is no shipped one: `case.json` holds what of it may be shown.", ""]
