"""One digest from every implementation, and no accident that it misses."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

import numpy as np
import torch
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interpreted import Interpreter
from samestate.instruments import device_digests
from samestate.instruments.device_digests import DeviceDigester, host_mix128, page_facts, torch_sums
from samestate.instruments.digests import SENTINEL, HostDigester, digester_for

patient = settings(deadline=None)
contents = st.integers(1, 5000).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def page(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def digest(raw: bytes) -> str:
    return page_facts([page(raw)], torch_sums)[0].digest


def by_hand(raw: bytes) -> str:
    """mix128 as its definition reads, in plain integers and with constants of its own."""
    end = 1 << 64
    lanes = (
        (0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))),
        (0xD1B54A32D192ED03, ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), (33, 1))),
    )
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]

    def mix(word: int, steps: tuple[tuple[int, int], ...]) -> int:
        for shift, times in steps:
            word = (word ^ word >> shift) * times % end
        return word

    digits = ""
    for gamma, steps in lanes:
        total = sum(mix(word ^ gamma * i % end, steps) for i, word in enumerate(words, start=1)) % end
        digits += f"{mix(total ^ gamma * len(raw) % end, steps):016x}"
    return digits


@patient
@given(contents)
def test_torch_and_numpy_and_the_definition_agree(raw: bytes) -> None:
    assert digest(raw) == host_mix128(np.frombuffer(raw, np.uint8)) == by_hand(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\0", "0397ab29740681d95a7199860568a224"),
        (b"\0" * 8, "c2033be1b99f9e39e514820fc570d210"),
        (b"\0" * 4096, "0d7b50399b4822623b7a46a4706ee56c"),
        (b"samestate", "6563f2388b9277fa91ba709567e2e0df"),
        (bytes(range(256)), "dd271b14d8125c96293930bc834cf01b"),
        (b"\xff" * 1000, "0ece7a1b942d040ede20c2c379f476c3"),
    ],
    ids=["zero", "zero-word", "zero-page", "text", "ramp", "ones"],
)
def test_known_digests_stay(raw: bytes, expected: str) -> None:
    assert digest(raw) == host_mix128(np.frombuffer(raw, np.uint8)) == expected


@patient
@given(contents, st.integers(0))
def test_any_flipped_bit_shows(raw: bytes, bit: int) -> None:
    flipped = bytearray(raw)
    flipped[bit // 8 % len(raw)] ^= 1 << bit % 8
    assert digest(bytes(flipped)) != digest(raw)


@patient
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=600), st.integers(0), st.integers(0))
def test_any_two_swapped_words_show(words: list[bytes], one: int, other: int) -> None:
    one, other = one % len(words), other % len(words)
    assume(words[one] != words[other])
    swapped = list(words)
    swapped[one], swapped[other] = words[other], words[one]
    assert digest(b"".join(swapped)) != digest(b"".join(words))


@patient
@given(st.binary(max_size=400), st.integers(1, 40))
def test_zeros_before_and_after_show(raw: bytes, zeros: int) -> None:
    before, after = bytes(zeros) + raw, raw + bytes(zeros)
    assert len({digest(raw + b"\1"), digest(bytes(zeros) + raw + b"\1"), digest(raw + b"\1" + bytes(zeros))}) == 3
    assert (digest(before) == digest(after)) is (before == after)


@patient
@given(contents, st.integers(0), st.integers(1, 5000))
def test_a_run_left_behind_shows(raw: bytes, start: int, length: int) -> None:
    start %= len(raw)
    damaged = bytearray(raw)
    damaged[start : start + length] = bytes([SENTINEL]) * len(damaged[start : start + length])
    assume(damaged != raw)
    assert digest(bytes(damaged)) != digest(raw)


@patient
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12))
def test_a_page_has_the_same_facts_in_any_company(raws: list[bytes]) -> None:
    assert page_facts([page(raw) for raw in raws], torch_sums) == [
        page_facts([page(raw)], torch_sums)[0] for raw in raws
    ]


def test_swapped_pages_swap_their_digests() -> None:
    one, other = page(bytes(range(64))), page(bytes(range(64, 128)))
    first, second = page_facts([one, other], torch_sums)
    assert first.digest != second.digest
    assert page_facts([other, one], torch_sums) == [second, first]


def test_pages_beyond_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [page(bytes([value]) * (16 if value % 3 else 100)) for value in range(1, 20)]
    at_once = page_facts(pages, torch_sums)
    monkeypatch.setattr(device_digests, "_BATCH_BYTES", 50)
    assert page_facts(pages, torch_sums) == at_once


@patient
@given(
    st.lists(st.sampled_from([b"\0" * 8, bytes([SENTINEL]) * 8, b"A\0AAAAAA", b"\x80\x01" * 4]), max_size=20),
    st.binary(max_size=7),
    st.integers(0, 8),
)
def test_counts_are_those_of_the_host_at_any_alignment(words: list[bytes], rest: bytes, offset: int) -> None:
    raw = b"".join(words) + rest
    assume(raw)
    aligned = page(b"\xff" * offset + raw)[offset:]
    facts = page_facts([aligned], torch_sums)[0]
    assert facts.digest == digest(raw)
    assert facts.nonzero == len(raw) - raw.count(0)
    assert facts.sentinel == 8 * words.count(bytes([SENTINEL]) * 8)
    assert HostDigester().facts([aligned])[0][1:] == facts[1:]


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(16, dtype=torch.int8),
        torch.zeros((2, 8), dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
        torch.zeros(16, dtype=torch.uint8, device="meta"),
    ],
    ids=["type", "dimensions", "stride", "device"],
)
def test_what_is_no_page_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pass uint8 in one dimension, contiguous, all on cpu"):
        page_facts([page(b"right"), wrong], torch_sums)


def test_no_pages_no_facts() -> None:
    assert page_facts([], torch_sums) == []


def test_the_host_digests_by_xxh3() -> None:
    raw = bytes(1000) + bytes([SENTINEL]) * 24 + b"AAA"
    digester = digester_for(torch.device("cpu"))
    assert (type(digester), digester.algorithm) == (HostDigester, "xxh3-128")
    assert digester.facts([page(raw)]) == [(xxhash.xxh3_128_hexdigest(raw), 27, 24)]


def test_a_filled_page_is_all_sentinel() -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    digester = HostDigester()
    assert digester.fill([buffer[8:24], buffer[40:48]]) == 24
    assert [facts.sentinel for facts in digester.facts([buffer[8:24], buffer[40:48]])] == [16, 8]
    assert int(buffer.count_nonzero()) == 24


KERNEL = """
import numpy as np, torch
from samestate.instruments.device_digests import host_mix128, page_facts, torch_sums
from samestate.instruments.triton_digests import triton_sums
buffer = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 80_000, dtype=np.uint8))
buffer[1000:9000] = 0x41
buffer[20000:22000] = 0
spans = [(0, 16), (3, 16), (8, 1), (8, 7), (16, 100), (1000, 5000), (1001, 5001), (0, 32768), (0, 32769), (2, 70000)]
pages = [buffer[start : start + size] for start, size in spans]
facts = page_facts(pages, triton_sums)
assert facts == page_facts(pages, torch_sums)
assert [one.digest for one in facts] == [host_mix128(page.numpy()) for page in pages]
"""


def test_the_kernel_agrees_where_it_is_interpreted(interpreter: Interpreter) -> None:
    pytest.importorskip("triton")
    done = interpreter.run(KERNEL)
    assert done.returncode == 0, done.said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_facts() -> None:
    digester = digester_for(torch.device("cuda"))
    assert (type(digester), digester.algorithm) == (DeviceDigester, "mix128")
    raws = [bytes(range(256)) * 300, b"\0" * 17, b"AAAAAAAA" * 4]
    on_host = [page(raw) for raw in raws]
    assert digester.facts([raw.cuda() for raw in on_host]) == digester.facts(on_host)
    filled = on_host[0].cuda()
    assert digester.fill([filled]) == filled.numel()
    assert digester.facts([filled])[0].sentinel == filled.numel()
