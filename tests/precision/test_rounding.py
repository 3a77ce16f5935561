"""Counter-based random bits: published answers of Philox4x32-10, and independence of chunking, rank, draw and tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.rounding import RoundingKey, philox4x32, philox4x32_scalar, random_words

KEY = RoundingKey(seed=(1 << 40) + 1234, draw=(2 << 40) + 99, tensor=(3 << 40) + 7, rank=3)
# Known answers published with Random123 (kat_vectors, "philox4x32 10"): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_scalar_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32_scalar(counter, key) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_tensor_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    low = counter[0] | counter[1] << 32
    low = low - (1 << 64) if low >= 1 << 63 else low  # int64 holds the same 64 bits
    words = philox4x32(torch.tensor([low]), *key, counter[2], counter[3])
    assert tuple(int(word) for word in words) == expected


def test_words_of_an_element_follow_the_documented_counter(rng: torch.Generator) -> None:
    """What another kernel must reproduce: word c % 4 of counter o * ceil(K / 4) + c // 4, in both orientations."""
    padded, mask = 37, 0xFFFFFFFF
    counter = (KEY.draw & mask, KEY.draw >> 32, KEY.tensor & mask, KEY.tensor >> 32)
    k0, k1, k2, _ = philox4x32_scalar(counter, (KEY.seed & mask, KEY.seed >> 32))
    row = random_words(KEY, range(50), range(padded), padded)
    col = random_words(KEY, range(50), range(padded), padded, columnwise=True)
    assert row.shape == (50, padded)
    assert col.shape == (padded, 50)
    for outer, contraction in torch.randint(0, 37, (20, 2), generator=rng).tolist():
        index = outer * 10 + contraction // 4
        for words, columnwise in ((row, 0), (col.t(), 1)):
            expected = philox4x32_scalar((index, 0, KEY.rank, k2 ^ columnwise), (k0, k1))[contraction % 4]
            assert words[outer, contraction] == expected


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("padded", [32, 50, 96])
def test_words_do_not_depend_on_the_piece_they_are_asked_for(padded: int, columnwise: bool) -> None:
    whole = random_words(KEY, range(40), range(padded), padded, columnwise=columnwise)
    whole = whole.t() if columnwise else whole
    piece = random_words(KEY, range(17, 31), range(12, 29), padded, columnwise=columnwise)
    assert torch.equal(piece.t() if columnwise else piece, whole[17:31, 12:29])


def test_an_operand_of_over_2_to_34_elements_still_has_distinct_counters() -> None:
    """The counter is 64 bits wide: rows far apart must not repeat each other's words."""
    padded = 1 << 20
    far = random_words(KEY, range(1 << 20, (1 << 20) + 1), range(64), padded)  # counter 2^38
    assert not torch.equal(far, random_words(KEY, range(1), range(64), padded))


@pytest.mark.parametrize("field", ["seed", "draw", "tensor", "rank"])
@pytest.mark.parametrize("other", [1, -1, 1 << 20, 1 << 31])
def test_changing_any_part_of_the_key_changes_the_words(field: str, other: int) -> None:
    changed = dataclasses.replace(KEY, **{field: getattr(KEY, field) + other})
    a = random_words(KEY, range(8), range(32), 32)
    b = random_words(changed, range(8), range(32), 32)
    assert (a == b).float().mean() < 0.01


def test_rows_columns_and_the_two_copies_do_not_share_words() -> None:
    """A fault seen elsewhere: random words shared between rows, column tiles and passes."""
    row = random_words(KEY, range(256), range(256), 256)
    col = random_words(KEY, range(256), range(256), 256, columnwise=True)
    assert row.unique().numel() > 65536 - 10
    assert torch.cat((row.flatten(), col.flatten())).unique().numel() > 131072 - 20


def test_words_are_uniform_in_every_bit() -> None:
    words = random_words(KEY, range(1024), range(256), 256).flatten()
    assert words.min() >= 0
    assert words.max() < 1 << 32
    for bit in range(32):
        share = ((words >> bit) & 1).float().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / words.numel() ** 0.5, bit  # five standard deviations
    pairs = torch.corrcoef(torch.stack((words[:-1].double(), words[1:].double())))[0, 1]
    assert abs(pairs) < 5 / words.numel() ** 0.5


@pytest.mark.parametrize("value", [1.5, True, None, "7"])
def test_a_key_of_something_else_than_ints_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="draw must be an int"):
        RoundingKey(seed=1, draw=value, tensor=2, rank=0)  # type: ignore[arg-type]
