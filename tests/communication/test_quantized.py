"""Gathered shards of a quantised operand against the operand quantised whole: the same bits, or not allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_turbo_plugin.communication.quantized import all_gather_quantized, shards_align
from primus_turbo_plugin.functional.linear_kernels import operand_specs
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import Recipe
from tests.support.distributed import RankInfo, ranks

SPECS = [
    QuantSpec(format="mxfp4"),
    QuantSpec(format="mxfp4", block="32x32"),
    QuantSpec(format="mxfp4", hadamard=16),
    QuantSpec(format="mxfp4", hadamard=64, random_signs=True),
    QuantSpec(format="mxfp4", hadamard=128),
    QuantSpec(format="mxfp8", scale_rule="floor"),
    QuantSpec(format="mxfp8", block="32x32"),
    QuantSpec(format="fp8", block="tensorwise"),
    QuantSpec(format="fp8", block="rowwise"),
    QuantSpec(format="fp8", block="1x128"),
    QuantSpec(format="fp8", block="128x128"),
]


def _whole(seed: int, outer: int, contraction: int) -> torch.Tensor:
    """Rows and columns of very different size, so that a scale shared across a shard's edge shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(outer, contraction, generator=generator)
    return (
        x
        * torch.exp(3 * torch.randn(outer, 1, generator=generator))
        * torch.exp(torch.randn(contraction, generator=generator))
    )


def _shards(axis: Any, shard: tuple[int, int], size: int, seed: int) -> list[torch.Tensor]:
    shape = (size * shard[0], shard[1]) if axis == "outer" else (shard[0], size * shard[1])
    return list(_whole(seed, *shape).chunk(size, dim=0 if axis == "outer" else 1))


def _together(axis: Any, shards: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(shards, dim=0 if axis == "outer" else 1)


@ranks(world_size=[2, 3])
def test_gathered_shards_are_the_quantised_whole(rank_info: RankInfo) -> None:
    checked = 0
    for spec in SPECS:
        for axis in ("outer", "contraction"):
            for shard in ((128, 128), (64, 96), (32, 32), (7, 64), (3, 128)):
                if not shards_align(spec, shard, axis):
                    continue
                parts = _shards(axis, shard, rank_info.world_size, rank_info.seed)
                mine = quantize(parts[rank_info.rank], spec, signs_seed=3)
                gathered = all_gather_quantized(mine, dist.group.WORLD, axis).wait()
                whole = quantize(_together(axis, parts), spec, signs_seed=3)
                assert gathered.shape == whole.shape
                assert gathered.signs_seed == whole.signs_seed
                assert torch.equal(gathered.data, whole.data), (str(spec), axis, shard)
                assert torch.equal(gathered.block_scale, whole.block_scale), (str(spec), axis, shard)
                checked += 1
    assert checked > 30


TRAVELS = {  # what docs/communication.md says: x before fprop, x before wgrad, dy before dgrad, dy before wgrad
    "bf16": (False, False, False, False),
    "fp8_tensorwise": (False, False, False, False),
    "fp8_rowwise": (True, False, True, False),
    "fp8_block128": (True, True, True, True),
    "mxfp8": (True, True, True, True),
    "mxfp8_hybrid": (True, True, True, True),
    "mxfp4": (True, True, True, True),
}


@pytest.mark.parametrize("recipe", TRAVELS)
def test_every_recipe_sends_codes_wherever_their_scales_allow(recipe: str) -> None:
    linear = Recipe.preset(recipe).linear()
    found = []
    for operand in ("x", "dy"):
        specs = operand_specs(ModulePlan(precision=linear), operand)
        for spec, shard, axis in zip(specs, ((512, 4096), (4096, 512)), ("outer", "contraction")):
            found.append(spec is not None and shards_align(spec, shard, axis))  # type: ignore[arg-type]
    assert tuple(found) == TRAVELS[recipe]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis", ["outer", "contraction"])
def test_alignment_is_claimed_exactly_where_the_bits_agree(spec: QuantSpec, axis: Any) -> None:
    """Claimed too often, a shard's numbers silently differ from TP=1; too seldom, BF16 travels where codes could."""
    for shard in ((128, 128), (64, 128), (64, 96), (32, 64), (16, 48), (7, 33), (1, 1)):
        parts = _shards(axis, shard, 2, seed=shard[0] * 1000 + shard[1])
        apart = [quantize(part, spec, signs_seed=3).dequantize() for part in parts]
        whole = quantize(_together(axis, parts), spec, signs_seed=3).dequantize()
        agree = torch.equal(_together(axis, apart), whole)
        if shards_align(spec, shard, axis):
            assert agree, shard
        elif min(shard) > 16:  # tiny shards can agree by chance
            assert not agree, shard
