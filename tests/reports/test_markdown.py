from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.evidence.archive import Archive
from samestate.reports.markdown import MAX_BYTES, markdown

from . import made


def text(archive: Archive, judgement: Judgement | None = None) -> str:
    return markdown(made.report_of(archive, judgement))


def tokens(said: str) -> Iterator[Token]:
    """All tokens of the tables and the text, those within lines included."""

    def flat(some: Iterable[Token]) -> Iterator[Token]:
        for token in some:
            yield token
            yield from flat(token.children or ())

    return flat(MarkdownIt("commonmark").enable("table").parse(said))


def test_verdict_table_findings_and_the_rest_folded(faulted: Archive) -> None:
    said = text(faulted)
    assert said.startswith("## ❌ fail: boundary\n")
    assert "**Fault injected: full-lookup.** Not a normal run." in said
    assert "| N | first difference | B | p | scheduled | suffix | bytes per rank | verdict |" in said
    row = next(line for line in said.splitlines() if line.startswith("| 32 | 0 | 32 | 31 | 1 | 0 |"))
    assert "| ❌ fail by boundary, " in row and "paired-equality" in row
    fold = said.index("<details>")
    assert said.index("**boundary**") < fold < said.index("(not required)")
    assert said.count("<details>") == said.count("</details>") == 2
    assert "**Not shown**" in said[fold:]


def test_a_pass_says_so_first(clean: Archive) -> None:
    assert text(clean).startswith("## ✅ pass: boundary\n\nall required checks pass\n")


def test_findings_beyond_the_first_are_folded_and_then_counted(clean: Archive) -> None:
    findings = [Finding(code="c", verdict=Verdict.FAIL, message=f"finding {i}") for i in range(100)]
    result = CheckResult(check="one", verdict=Verdict.FAIL, summary="s", unit="u", examined=1, findings=findings)
    said = text(clean, made.judgement(results=[result], required=["one"], verdict=Verdict.FAIL))
    assert said.index("finding 2 ") < said.index("More findings") < said.index("finding 3 ")
    assert "57 more findings of one are left out" in said
    assert "finding 43 " not in said


def test_a_large_judgement_stays_under_the_limit(clean: Archive) -> None:
    findings = [Finding(code="c", verdict=Verdict.FAIL, message="m" * 5000) for _ in range(50)]
    results = [
        CheckResult(check=f"c{i}", verdict=Verdict.FAIL, summary="s", unit="u", examined=1, findings=findings)
        for i in range(50)
    ]
    said = text(clean, made.judgement(results=results, table=[made.row(n) for n in range(1, 1000)]))
    assert len(said.encode()) < MAX_BYTES
    assert said.count("<details>") == said.count("</details>")
    assert "more findings of c49 are left out" in said


@pytest.mark.parametrize(
    "evil",
    [
        made.EVIL,
        "# head",
        "- item",
        "1. item",
        "= under",
        "> quote",
        "`code` *em* _em_ ~~gone~~ **b**",
        "[l](http://x) ![i](y) <http://z> <b>",
        "a | b | c",
        "&amp; &lt;script&gt;",
        "back\\slash \\| \\[",
        "$x$ :smile: @all #1 http://a.b www.a.b",
    ],
)
def test_text_stays_text(clean: Archive, evil: str) -> None:
    said, harmless = text(clean, saying(evil)), text(clean, saying("word"))
    assert [token.type for token in tokens(said)] == [token.type for token in tokens(harmless)]


def saying(word: str) -> Judgement:
    """A judgement whose every text is `word`."""
    finding = Finding(code=word, verdict=Verdict.FAIL, message=word, evidence=[word])
    result = CheckResult(check=word, verdict=Verdict.FAIL, summary=word, unit=word, examined=1, findings=[finding])
    texts = {"scope": word, "not_shown": [word], "limitations": [word], "fault": word}
    return made.judgement(results=[result], required=[word], verdict=Verdict.FAIL, **texts)
