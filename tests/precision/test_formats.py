"""Formats: the code tables of the element types and of E8M0, against independent tables."""

from __future__ import annotations

import math

import pytest
import torch

from primus_turbo_plugin.precision.formats import (
    E2M1,
    E2M1_VALUES,
    E4M3,
    E5M2,
    ELEMENT_TYPES,
    FORMAT_BLOCKS,
    FORMAT_ELEMENTS,
    ElementType,
    Format,
    decode_code,
    decode_e8m0,
    e8m0_table,
    element_table,
)
from tests.support import exact_mx

ELEMENTS = [E2M1, E4M3, E5M2]


def test_e2m1_codes_have_the_values_of_the_law() -> None:
    values = [decode_code(E2M1, code) for code in range(16)]
    assert values[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6] == list(E2M1_VALUES)
    assert values[8:] == [-value for value in values[:8]]
    assert math.copysign(1, values[8]) == -1  # code 8 is -0


@pytest.mark.parametrize(
    ("element", "bits", "max_value", "emax"), [(E2M1, 4, 6.0, 2), (E4M3, 8, 448.0, 8), (E5M2, 8, 57344.0, 15)]
)
def test_element_types_have_the_largest_values_of_the_law(
    element: ElementType, bits: int, max_value: float, emax: int
) -> None:
    assert (element.bits, element.max_value, element.emax) == (bits, max_value, emax)
    assert decode_code(element, element.max_code) == max_value
    assert math.floor(math.log2(max_value)) == emax
    assert ELEMENT_TYPES[element.name] is element


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_fp8_table_equals_torch_float8(element: ElementType) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(element.torch_dtype).float()
    torch.testing.assert_close(element_table(element)[:, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_element_table_equals_ml_dtypes(element: ElementType) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    np = pytest.importorskip("numpy")
    dtype = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    expected = codes.view(dtype[element.name]).astype(np.float32)
    ours = np.array([decode_code(element, int(code)) for code in codes], dtype=np.float32)
    np.testing.assert_array_equal(ours, expected)
    signs_matter = ~np.isnan(expected)
    assert np.array_equal(np.signbit(ours)[signs_matter], np.signbit(expected)[signs_matter])


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_element_table_equals_gfloat(element: ElementType) -> None:
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    formats = pytest.importorskip("gfloat.formats")
    info = {
        "e2m1": formats.format_info_ocp_e2m1,
        "e4m3": formats.format_info_ocp_e4m3,
        "e5m2": formats.format_info_ocp_e5m2,
    }[element.name]
    for code in range(1 << element.bits):
        expected, ours = gfloat.decode_float(info, code).fval, decode_code(element, code)
        assert ours == expected or (math.isnan(ours) and math.isnan(expected)), code


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_exact_oracle_has_the_same_values(element: ElementType) -> None:
    """Guards the oracle the other tests lean on."""
    ours = [decode_code(element, code) for code in range(element.max_code + 1)]
    assert ours == [float(value) for value in exact_mx.VALUES[element.name]]


def test_packed_fp4_byte_0x26_is_4_then_1() -> None:
    """The packing example of the law: the even element is in the low nibble."""
    assert element_table(E2M1)[0x26].tolist() == [4.0, 1.0]


def test_e8m0_bytes_are_powers_of_two_and_0xff_is_nan() -> None:
    table = e8m0_table()
    assert table.dtype == torch.float32
    assert [decode_e8m0(byte) for byte in (0, 1, 127, 128, 254)] == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
    assert math.isnan(decode_e8m0(0xFF))
    assert table[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert table[255].isnan()


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu")
def test_e8m0_table_equals_torch_float8_e8m0fnu() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(e8m0_table(), expected, rtol=0, atol=0, equal_nan=True)


def test_every_format_has_elements_and_blocks_except_bf16() -> None:
    for fmt in Format:
        assert bool(FORMAT_ELEMENTS[fmt]) == bool(FORMAT_BLOCKS[fmt]) == (fmt is not Format.BF16)


def test_a_table_can_be_written_to_without_changing_the_next_one() -> None:
    element_table(E2M1).fill_(7)
    assert element_table(E2M1)[0].tolist() == [0.0, 0.0]
