"""The small number formats against ml_dtypes, and conversion instructions that use them."""

from __future__ import annotations

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.emulator.isa import formats
from primus_turbo_plugin.amdgcn.emulator.isa.values import bf16_to_f32, f32_to_bf16
from tests.amdgcn.single import run_lines

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the independent reference for number formats")

FORMATS = {
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "E4M3_FNUZ": "float8_e4m3fnuz",
    "E5M2_FNUZ": "float8_e5m2fnuz",
    "E2M3": "float6_e2m3fn",
    "E3M2": "float6_e3m2fn",
    "E2M1": "float4_e2m1fn",
}


def reference(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, FORMATS[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_value(name: str) -> None:
    layout = getattr(formats, name)
    codes = np.arange(1 << layout.bits, dtype=np.uint8)
    want = codes.view(reference(name)).astype(np.float32)
    np.testing.assert_array_equal(layout.decode(codes), want)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_nearest_even_and_saturates_or_overflows(name: str, numbers: np.random.Generator) -> None:
    layout = getattr(formats, name)
    values = numbers.standard_normal(4000).astype(np.float32) * np.exp2(numbers.integers(-20, 18, 4000)).astype(
        np.float32
    )
    finite = np.sort(layout.table[np.isfinite(layout.table)])
    ties = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    values = np.concatenate([values, ties.astype(np.float32), [np.inf, -np.inf, 0.0, -0.0]]).astype(np.float32)
    want = values.astype(reference(name)).view(np.uint8)
    got = layout.encode(values)
    beyond = np.abs(values) > layout.largest  # saturating formats: ml_dtypes agrees only below the end
    within = ~beyond if layout.overflow is None else np.ones(len(values), bool)
    np.testing.assert_array_equal(got[within], want[within])
    if layout.overflow is None:
        np.testing.assert_array_equal(layout.decode(got[beyond]), np.copysign(layout.largest, values[beyond]))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan(numbers: np.random.Generator) -> None:
    values = numbers.standard_normal(1000).astype(np.float32)
    values[:7] = [
        np.nan,
        np.inf,
        3.4e38,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        -1 - 2.0**-8,
        2.0**-130 + 2.0**-138,
    ]  # four are ties
    want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = f32_to_bf16(values).astype(np.uint16)
    np.testing.assert_array_equal(got[1:], want[1:])
    assert np.isnan(bf16_to_f32(got[:1]))[0]


@pytest.mark.parametrize(("bits", "elements"), [(4, 8), (6, 16), (8, 4)])
def test_unpacking_takes_elements_lowest_bits_first(bits: int, elements: int, numbers: np.random.Generator) -> None:
    codes = [int(code) for code in numbers.integers(0, 1 << bits, elements)]
    whole = sum(code << bits * i for i, code in enumerate(codes))
    words = np.array([whole >> 32 * i & 0xFFFFFFFF for i in range(bits * elements // 32)], np.uint32)
    assert formats.unpack(words, bits).tolist() == codes


def test_packing_conversion_writes_only_its_byte(numbers: np.random.Generator) -> None:
    """v_cvt_scalef32_pk_fp4_f32 into byte 2: values are divided by the power of two in the scale."""
    a, b = (numbers.standard_normal(64).astype(np.float32) * 8 for _ in range(2))
    vector = {0: np.full(64, 0x11223344, np.uint32), 1: a.view(np.uint32), 2: b.view(np.uint32),
              3: np.full(64, 4.0, np.float32).view(np.uint32)}  # fmt: skip
    waves = run_lines("gfx950", "v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:[0,0,0,1]", vector=vector)
    grid = ml_dtypes.float4_e2m1fn
    low, high = ((np.clip(v / 4, -6, 6)).astype(grid).view(np.uint8).astype(np.uint32) for v in (a, b))
    want = np.uint32(0x11003344) | ((low | high << np.uint32(4)) << np.uint32(16))
    assert waves.vgpr[0, 0].tolist() == want.tolist()


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")])
def test_fp8_means_the_targets_own_format(arch: str, dtype: str, numbers: np.random.Generator) -> None:
    a, b = (numbers.standard_normal(64).astype(np.float32) * 30 for _ in range(2))
    vector = {0: np.full(64, 0xAAAABBBB, np.uint32), 1: a.view(np.uint32), 2: b.view(np.uint32)}
    waves = run_lines(arch, "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", vector=vector)
    kind = np.dtype(getattr(ml_dtypes, dtype))
    codes = [v.astype(kind).view(np.uint8).astype(np.uint32) for v in (a, b)]
    assert waves.vgpr[0, 0].tolist() == (np.uint32(0xBBBB) | codes[0] << 16 | codes[1] << 24).tolist()


def test_eight_values_convert_at_once_on_gfx1250(numbers: np.random.Generator) -> None:
    values = numbers.standard_normal((8, 32)).astype(np.float32)
    vector = {8 + i: values[i].view(np.uint32) for i in range(8)}
    lines = "v_cvt_scalef32_pk8_fp8_f32 v[0:1], v[8:15], 1.0\nv_cvt_scale_pk8_f32_fp8 v[16:23], v[0:1], 0x80"
    waves = run_lines("gfx1250", lines, vector=vector)
    want = values.astype(ml_dtypes.float8_e4m3fn)
    codes = waves.vgpr[0:2, 0].T.copy().view(np.uint8)
    np.testing.assert_array_equal(codes, want.view(np.uint8).T)
    np.testing.assert_array_equal(waves.vgpr[16:24, 0].view(np.float32), want.astype(np.float32) * 2)
