"""Controls and the variables that switch them: in the document, apart, and hashed by what they are made of."""

from __future__ import annotations

from pathlib import Path

from samestate.evidence import controls
from samestate.evidence.controls import CONTROLS, sources_sha256

DOCUMENT = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text(encoding="utf-8")


def test_the_document_names_every_control_and_every_variable_that_a_user_sets() -> None:
    inner = {controls.RECORD_VARIABLE, controls.RELEASE_VARIABLE, controls.OTHER_VARIABLE}  # `samestate profile` does
    variables = {value for name, value in vars(controls).items() if name.endswith("_VARIABLE")}
    assert [name for name in CONTROLS if f"`{name}`" not in DOCUMENT] == []
    assert [name for name in variables - inner if name not in DOCUMENT] == []


def test_a_hash_is_of_names_and_sources() -> None:
    one = sources_sha256({"a": "x = 1\n", "b": "y = 2\n"})
    assert one == sources_sha256({"b": "y = 2\n", "a": "x = 1\n"})
    assert len({one, sources_sha256({"a": "y = 2\n", "b": "x = 1\n"}), sources_sha256({"a": "x = 1\n"})}) == 3
