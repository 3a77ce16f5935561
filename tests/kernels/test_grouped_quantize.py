"""Quantisation of experts' tokens: every expert's copies are those that the dense reference makes of its rows alone."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.grouped_operands import depth_multiple, repeat_scale, rows_spec, stack_weights
from primus_turbo_plugin.kernels.reference import grouped_quantize as reference
from primus_turbo_plugin.kernels.reference import quantize as dense
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import GroupedQuantizeRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.support.grouped import LOADS, on_device, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = default_registry().names("grouped_quantize")
SPECS = {
    "mxfp4": QuantSpec(format="mxfp4"),
    "mxfp4 squares": QuantSpec(format="mxfp4", block="32x32"),
    "mxfp4 H16 signs": QuantSpec(format="mxfp4", hadamard=16, random_signs=True),
    "mxfp4 H128": QuantSpec(format="mxfp4", hadamard=128),
    "mxfp8 floor e5m2": QuantSpec(format="mxfp8", element="e5m2", scale_rule="floor"),
    "fp8 tensorwise": QuantSpec(format="fp8", block="tensorwise"),
    "fp8 rowwise": QuantSpec(format="fp8", block="rowwise"),
    "fp8 rowwise H32": QuantSpec(format="fp8", block="rowwise", hadamard=32),
    "fp8 blocks": QuantSpec(format="fp8", block="1x128"),
    "fp8 squares": QuantSpec(format="fp8", block="128x128"),
}
KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=0)


def _kernels(backend: str, spec: QuantSpec):
    found = default_registry().backend("grouped_quantize", backend)
    reason = found.supports(GroupedQuantizeRequest(device=DEVICE, dtype=torch.bfloat16, row_spec=spec, col_spec=spec))
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return found.kernels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("load", LOADS)
def test_copies_are_those_of_every_expert_alone(backend, name, load, rng) -> None:
    """Values bit for bit, padding zero; an expert next to one 64 times as large keeps its own scales."""
    counts, spec = LOADS[load], SPECS[name]
    x = tokens(rng, counts, 68)
    groups = on_device(counts, DEVICE)
    padded = groups.padded(depth_multiple(spec))
    row, column = _kernels(backend, spec).grouped_quantize(x.to(DEVICE), spec, spec, groups, padded, signs_seed=5)
    assert row.shape == (sum(counts), 68)
    assert column.shape == (68, padded.total)
    alone = [dense.quantize_both(piece, spec, spec, signs_seed=5) for piece in x.split(list(counts))]
    if sum(counts):
        assert torch.equal(row.decode().cpu(), torch.cat([copy.decode() for copy, _ in alone]))
    values, starts = column.decode().cpu(), padded.offsets.tolist()
    for start, stop, (_, copy) in zip(starts, starts[1:], alone):
        want = copy.decode()
        assert torch.equal(values[:, start : start + want.shape[1]], want)
        assert not values[:, start + want.shape[1] : stop].any()
    assert not values[:, starts[-1] :].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mxfp4 squares", "mxfp4 H16 signs", "fp8 rowwise", "fp8 tensorwise"])
def test_stochastic_rounding_gives_the_references_bits_and_no_two_experts_the_same(backend, name, rng) -> None:
    spec = QuantSpec(
        format=SPECS[name].format,
        block=SPECS[name].block,
        hadamard=SPECS[name].hadamard,
        rounding="stochastic",
    )
    piece = torch.randn(64, 68, generator=rng).bfloat16()
    x, groups = torch.cat([piece, piece]), on_device((64, 64), DEVICE)
    padded = groups.padded(depth_multiple(spec))
    kernels = _kernels(backend, spec)
    got = kernels.grouped_quantize(x.to(DEVICE), spec, spec, groups, padded, key=KEY)
    cpu = on_device((64, 64), "cpu")
    want = reference.grouped_quantize(x, spec, spec, cpu, cpu.padded(depth_multiple(spec)), key=KEY)
    for mine, theirs in zip(got, want):
        assert torch.equal(mine.data.cpu(), theirs.data)
        assert torch.equal(mine.block_scale.cpu(), theirs.block_scale)
    row = want[0].decode()
    assert not torch.equal(row[:64], row[64:])
    start = int(padded.offsets[1])
    column = want[1].decode()
    assert not torch.equal(column[:, :64], column[:, start : start + 64])


def test_stochastic_rounding_without_random_bits_is_refused(rng) -> None:
    spec = QuantSpec(format="mxfp4", rounding="stochastic")
    groups = on_device((3,), "cpu")
    with pytest.raises(ConfigError, match="needs a RoundingKey, got none"):
        reference.grouped_quantize(tokens(rng, (3,), 32), spec, None, groups, groups)


@pytest.mark.parametrize("name", [*SPECS])
@pytest.mark.parametrize("rows", [96, 65])
def test_stacked_weights_decode_to_every_experts_own_values(name, rows, rng) -> None:
    """Also where two experts' rows would share a square block."""
    spec = SPECS[name]
    copies = [dense.quantize(8.0**i * torch.randn(rows, 68, generator=rng), spec, signs_seed=5) for i in range(3)]
    stacked = stack_weights(copies)
    assert stacked.shape == (3 * rows, 68)
    assert torch.equal(stacked.decode(), torch.cat([copy.decode() for copy in copies]))


def test_a_scale_is_repeated_for_every_row_it_covers(rng) -> None:
    copy = dense.quantize(torch.randn(70, 64, generator=rng), SPECS["mxfp4 squares"])
    scale = repeat_scale(copy, rows_spec(copy.spec))
    assert scale.shape == (70, 2)
    assert torch.equal(scale[:32], copy.block_scale[0].expand(32, -1))
    assert torch.equal(scale[64:], copy.block_scale[2].expand(6, -1))
