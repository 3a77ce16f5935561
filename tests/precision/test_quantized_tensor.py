"""QuantizedTensor: validation, decoding by rows, dequantising through a rotation, size in bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision import quantized_tensor
from primus_turbo_plugin.precision.formats import decode_code, decode_e8m0
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.kernels.quantize_cases import ALL_BLOCKS, every_spec, gaussian, spec, wide_rows

KEY = RoundingKey(seed=1, draw=1, tensor=1, rank=0)
each_block = pytest.mark.parametrize(("fmt", "block"), ALL_BLOCKS, ids=lambda value: value)


@each_block
def test_dequantised_value_is_code_times_scale(fmt: str, block: str, rng: torch.Generator) -> None:
    q = quantize(wide_rows(rng, 40, 200), spec(fmt, block=block))
    values, element = q.dequantize(), q.spec.element_type
    height, width = (size or 10_000 for size in q.spec.block_shape)
    for row, col in zip(*(torch.randint(0, size, (100,), generator=rng).tolist() for size in q.shape)):
        byte = int(q.data[row, col // element.codes_per_byte])
        code = byte if element.bits == 8 else (byte >> 4 * (col % 2)) & 0xF
        scale = q.block_scale[row // height, col // width].item()
        factor = decode_e8m0(int(scale)) if q.spec.is_mx else scale
        assert values[row, col].item() == torch.tensor(decode_code(element, code) * factor).float().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("any_spec", every_spec(), ids=str)
def test_dequantize_approximates_the_source_through_any_rotation(
    any_spec: QuantSpec, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """The rotation is undone: what comes back stands for x itself, with x's shape."""
    x = gaussian(rng, 70, 150)
    values = quantize(x, any_spec, key=KEY, signs_seed=3).dequantize(dtype)
    assert values.dtype == dtype
    assert values.shape == x.shape
    assert (values.float() - x).norm() / x.norm() < (0.27 if any_spec.element == "e2m1" else 0.05)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_bf16_holds_every_dequantised_mx_value_exactly(fmt: str, rng: torch.Generator) -> None:
    """Why emulation on BF16 units is exact: at most 4 significant bits times a power of two."""
    q = quantize(wide_rows(rng, 64, 256), spec(fmt))
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize(torch.float32))


@each_block
def test_decoding_some_rows_is_a_part_of_decoding_all(fmt: str, block: str, rng: torch.Generator) -> None:
    q = quantize(gaussian(rng, 150, 70), spec(fmt, block=block))
    whole = q.decode()
    assert whole.shape == (150, q.padded_contraction)
    for start, stop in ((0, 150), (31, 33), (100, 150), (7, 7)):
        assert torch.equal(q.decode(start, stop), whole[start:stop])


def test_decoding_in_chunks_gives_the_same_values(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantize(gaussian(rng, 50, 100), spec("mxfp4", hadamard=16))
    decoded, dequantized = q.decode(), q.dequantize()
    monkeypatch.setattr(quantized_tensor, "_CHUNK_ELEMENTS", 7 * 128)
    assert torch.equal(q.decode(), decoded)
    assert torch.equal(q.dequantize(), dequantized)


@pytest.mark.parametrize(
    ("any_spec", "nbytes"),
    [
        (spec("mxfp4"), 64 * 128 // 2 + 64 * 4),
        (spec("mxfp4", block="32x32"), 64 * 128 // 2 + 2 * 4),
        (spec("mxfp8"), 64 * 128 + 64 * 4),
        (spec("fp8"), 64 * 128 + 4),
        (spec("fp8", block="rowwise"), 64 * 128 + 64 * 4),
    ],
    ids=str,
)
def test_nbytes_counts_codes_and_scales(any_spec: QuantSpec, nbytes: int) -> None:
    """MXFP4 takes 4.25 bits an element: the memory that peers reported as lost would show here."""
    q = quantize(torch.ones(64, 128), any_spec)
    assert q.nbytes == nbytes
    assert q.data.untyped_storage().nbytes() + q.block_scale.untyped_storage().nbytes() == nbytes


def test_tensors_that_do_not_fit_the_spec_are_refused() -> None:
    q = quantize(torch.ones(4, 64), spec("mxfp4"))
    for data, scale, shape in [
        (q.data[:3], q.block_scale, (4, 64)),
        (q.data, q.block_scale[:, :1], (4, 64)),
        (q.data, q.block_scale, (4, 65)),
        (q.data.int(), q.block_scale, (4, 64)),
        (q.data, q.block_scale.float(), (4, 64)),
        (q.data, q.block_scale.to("meta"), (4, 64)),
    ]:
        with pytest.raises(ShapeError, match="QuantizedTensor"):
            QuantizedTensor(data, scale, q.spec, shape)
    with pytest.raises(ShapeError, match="bf16"):
        QuantizedTensor(q.data, q.block_scale, QuantSpec.bf16(), (4, 64))


def test_a_quantised_tensor_cannot_be_changed_by_accident() -> None:
    q = quantize(torch.ones(4, 64), spec("mxfp4"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.shape = (1, 1)  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        q.extra = 1  # type: ignore[attr-defined]


def test_signs_seed_is_kept_only_where_it_matters() -> None:
    x = torch.ones(4, 64)
    assert quantize(x, spec("mxfp4", hadamard=16), signs_seed=5).signs_seed == 0
    assert quantize(x, spec("mxfp4", hadamard=16, random_signs=True), signs_seed=5).signs_seed == 5
