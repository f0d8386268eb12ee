"""Every template: exactly N tokens, parting early, the question whole."""

import pytest

from samestate.models.templates import TEMPLATES, PromptParts, render

TAGS = [
    f"N{n}.{role}"
    for n in (3583, 3584, 3585, 3587, 3588, 3589, 5375, 5376, 5377)
    for role in ("target", "interposer-1", "interposer-2")
]


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokens", [3583, 3584, 3585, 3587, 3588, 3589, 5375, 5376, 5377])
def test_renders_exactly_as_many_tokens(name: str, tokens: int) -> None:
    parts = TEMPLATES[name].parts("N1.target")
    ids = render(parts, encode, tokens)
    assert len(ids) == tokens
    assert bytes(ids).startswith((parts.head + parts.filler[:100]).encode())
    assert bytes(ids).endswith(parts.tail.encode())


@pytest.mark.parametrize("name", TEMPLATES)
def test_shortest_prompt_and_one_less(name: str) -> None:
    parts = TEMPLATES[name].parts("t")
    least = len(encode(parts.head)) + len(encode(parts.tail)) + 1
    assert len(render(parts, encode, least)) == least
    with pytest.raises(ValueError, match=f"at least {least}"):
        render(parts, encode, least - 1)


def test_filler_repeats_where_it_runs_out() -> None:
    assert render(PromptParts("h", "abc", "t"), encode, 9) == list(b"habcabcat")


def test_filler_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        render(PromptParts("h", "", "t"), encode, 9)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tags_part_within_the_first_tokens(name: str) -> None:
    rendered = [bytes(render(TEMPLATES[name].parts(tag), encode, 3584)) for tag in TAGS]
    assert len(set(rendered)) == len(TAGS)
    assert len({prompt[:5] for prompt in rendered}) == len(TAGS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_deterministic_and_the_filler_no_loop(name: str) -> None:
    template = TEMPLATES[name]
    assert template.parts("a") == template.parts("a")
    assert template.parts("a").filler == template.parts("b").filler
    paragraphs = template.parts("a").filler.splitlines()
    assert len(paragraphs) == len(set(paragraphs)) >= 100


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_placeholder_is_filled(name: str) -> None:
    assert not any("$" in part for part in TEMPLATES[name].parts("t"))


def test_the_ledger_asks_for_137_58_and_29() -> None:
    head = TEMPLATES["ledger-en"].parts("t").head
    assert all(number in head for number in ("137", "58", "29"))
