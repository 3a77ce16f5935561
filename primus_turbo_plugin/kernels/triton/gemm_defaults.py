"""The shipped configuration of a product on each GPU, and what a tuner should look at beside it.

Hopper's were timed on an H200 (docs/performance.md). AMD's were chosen by what the compiler makes of them: no spills, no scratch,
matrix instructions the limit of the static estimate; none has been timed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey

_SCRATCH_FLOPS = 2.0e9
"""From here on, decoding each operand once costs less than decoding it again in every tile that reads it."""
_COMPUTE_UNITS_PER_XCD = {"gfx942": 38, "gfx950": 32}
_FULL = 0.75
"""Share of the compute units that a tile size should keep busy before a smaller one is taken."""
_SMALL_TILE = 64 * 64
_PROGRAMS_PER_UNIT = 2
_MAX_SHARES = 16
_MIN_STEPS_OF_A_SHARE = 4

_DEEP_BYTES = 160 << 10
"""Shared memory in which four steps of 128x128x64 fit: A100's, H100's and B200's."""
_DIRECT_COPIES = (3, 8)
"""Triton that copies straight into LDS on gfx950 by default: 3.8 and 3.9 do, 3.6 does not, 3.7 was not looked at."""

Options = Mapping[str, Any]


@functools.cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton; the newest where there is none and nothing will be compiled."""
    try:
        import triton
    except ImportError:
        return 99, 0
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def default_config(key: GemmKey) -> GemmConfig:
    """The shipped configuration of a product: a pure function, never refused."""
    options = [*_preferred(key), *_portable(key)]
    for config in options:
        if refusal(key, config) is None and _fills(key, config):
            return _shared(key, config)
    return next(_shared(key, config) for config in reversed(options) if refusal(key, config) is None)


def _preferred(key: GemmKey) -> list[GemmConfig]:
    """Configurations made for this architecture, largest tile first."""
    units = _units(key)
    if key.arch == "sm90":
        return _hopper(key, units)
    amd = {"matrix_instr_nonkdim": 16, "num_xcds": _num_xcds(key)}
    if key.arch == "gfx942":
        return _gfx942(key, {**units, **amd})
    if key.arch == "gfx950":
        # without direct copies the last step is in registers, of which 4 waves then have too few
        return _wide_lds(key, {**units, **amd}, half_step=64, warps=4 if triton_version() >= _DIRECT_COPIES else 8)
    if key.arch == "gfx1250":
        return _wide_lds(key, units, half_step=64, warps=8)
    return []


def _gfx942(key: GemmKey, units: Options) -> list[GemmConfig]:
    """64 KiB of LDS, filled through registers."""
    if units["units"] == "fp8":
        return [
            _config(256, 256, 64, units, num_warps=8, num_stages=3, epilogue_parts=2),
            _config(256, 128, 128, units, num_warps=8, num_stages=2),
            _config(128, 128, 128, units, num_warps=4, num_stages=2),
        ]
    if units["decode"] == "tile" and not _plain(key):
        return [_config(128, 128, 128, units, num_warps=8, num_stages=2)]
    return [
        _config(256, 256, 32, units, num_warps=8, num_stages=3, epilogue_parts=2),
        _config(128, 128, 64, units, num_warps=4, num_stages=2),
    ]


def _wide_lds(key: GemmKey, units: Options, *, half_step: int, warps: int) -> list[GemmConfig]:
    """gfx950 and gfx1250: LDS for two steps of 256x256, filled directly. Scales of FP8 blocks need registers: a smaller tile."""
    both_fp4 = key.a.bits == key.b.bits == 4
    step = {"half": half_step, "fp8": 128, "mx": 256 if both_fp4 else 128}[units["units"]]
    if _blocked(key):
        first = _config(
            256, 128, 128, units, num_warps=4 if key.arch == "gfx950" else warps, num_stages=2, epilogue_parts=2
        )
    else:
        first = _config(
            256, 256, step, units, num_warps=warps, num_stages=2, epilogue_parts=4 if units["units"] == "mx" else 2
        )
    return [first, _config(128, 128, 128 if _blocked(key) else step, units, num_warps=4, num_stages=2)]


def _hopper(key: GemmKey, units: Options) -> list[GemmConfig]:
    tma: dict[str, Any] = {"loads": "descriptors", "persistent": True}
    if units["units"] == "fp8":
        parts = {"epilogue_parts": 4 if key.out == "fp32" else 1}
        small = _config(64, 128, 128, units, num_warps=4, num_stages=4, **parts, **tma)
        if key.a.block == key.b.block == "1x128":  # a scale a row of both: no registers for a larger tile
            return [replace(small, num_stages=3, persistent=False)]
        return [_config(128, 128, 128, units, num_warps=8, num_stages=4, **parts, **tma), small]
    parts = {"num_stages": 3, "epilogue_parts": 4} if key.out == "fp32" else {"num_stages": 4, "epilogue_parts": 2}
    return [
        _config(128, 256, 64, units, num_warps=8, **parts, **tma),
        _config(64, 256, 64, units, num_warps=4, **parts, **tma),
        _config(128, 128, 64, units, num_warps=4, num_stages=3, epilogue_parts=2, **tma),
        _config(64, 128, 64, units, num_warps=4, num_stages=5, **{**tma, "persistent": False}),
        _config(128, 256, 64, units, num_warps=8, num_stages=3, epilogue_parts=2),
    ]


def _portable(key: GemmKey) -> list[GemmConfig]:
    """Pointers and small steps: these run everywhere, whatever the alignment."""
    units, gpu = _units(key), key.capabilities
    step = 64 if _plain(key) or (units["decode"] == "scratch" and units["units"] == "half") else 128
    deep = step == 64 and gpu.vendor == "nvidia" and gpu.lds_bytes >= _DEEP_BYTES
    sizes = [(128, 8), (64, 4), (32, 4)] if min(key.rows, key.cols) <= 32 else [(128, 8), (64, 4)]
    return [_config(size, size, step, units, num_warps=warps, num_stages=4 if deep else 2) for size, warps in sizes]


def _config(block_m: int, block_n: int, block_k: int, units: Options, **options: Any) -> GemmConfig:
    return GemmConfig(block_m=block_m, block_n=block_n, block_k=block_k, **{**options, **units})


def _plain(key: GemmKey) -> bool:
    return key.a.is_plain and key.b.is_plain


def _blocked(key: GemmKey) -> bool:
    """An operand has fp32 scales of blocks along the contraction."""
    return any(kind.block.endswith("x128") for kind in (key.a, key.b))


def _units(key: GemmKey) -> Options:
    """What multiplies, and where operands are decoded for it."""
    for units, decode in (("mx", "tile"), ("fp8", "tile"), ("fp8", "scratch")):
        native = {"units": units, "decode": decode}
        if refusal(key, _config(64, 64, 128, native, num_stages=2)) is None:
            return native
    large = 2.0 * key.rows * key.cols * key.contraction >= _SCRATCH_FLOPS
    return {"units": "half", "decode": "scratch" if large and not _blocked(key) and not _plain(key) else "tile"}


def _num_xcds(key: GemmKey) -> int:
    per_xcd = _COMPUTE_UNITS_PER_XCD.get(key.arch)
    return max(key.compute_units // per_xcd, 1) if per_xcd else 1


def _fills(key: GemmKey, config: GemmConfig) -> bool:
    """Whether a tile size gives most compute units something to do, and is not mostly beyond an edge."""
    fits = config.block_m < 2 * key.rows and config.block_n < 2 * key.cols
    return fits and config.tiles(key) >= _FULL * key.compute_units


def _shared(key: GemmKey, config: GemmConfig) -> GemmConfig:
    """The configuration with the contraction shared among programs where small tiles leave compute units idle."""
    tiles, steps = config.tiles(key), -(-key.contraction // config.block_k)
    if tiles >= key.compute_units or config.block_m * config.block_n > _SMALL_TILE:
        return config
    shares = min(_PROGRAMS_PER_UNIT * key.compute_units // tiles, steps // _MIN_STEPS_OF_A_SHARE, _MAX_SHARES)
    shared = replace(config, split_k=max(shares, 1), persistent=False)
    return shared if shares > 1 and refusal(key, shared) is None else config


def considered(key: GemmKey) -> list[GemmConfig]:
    """What a tuner should look at for a product, whether or not it can serve it: the default, what is nearest to it, the rest.

    So a search that is cut short (`--max-candidates`) has seen the likely ones.
    """
    base = default_config(key)
    families = [base, *_preferred(key), *_portable(key)]
    tiles = [(256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64)]
    if key.capabilities.vendor == "amd":
        tiles = [(256, 256), *tiles]
    found = [base]
    found += [replace(base, group_m=group_m) for group_m in (4, 16)]
    found += [replace(base, block_m=base.block_n, block_n=base.block_m)]
    found += [replace(base, persistent=not base.persistent)]
    found += [replace(base, epilogue_parts=parts) for parts in (1, 2, 4)]
    found += [replace(base, num_stages=max(base.num_stages + step, 2)) for step in (-1, 1)]
    for family in dict.fromkeys((c.loads, c.units, c.decode) for c in families):
        like = next(c for c in families if (c.loads, c.units, c.decode) == family)
        for (block_m, block_n), num_warps, num_stages in product(tiles, (4, 8), (2, 3, 4)):
            tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
            found.append(replace(like, split_k=1, **tile))  # type: ignore[arg-type]
    found += [replace(base, split_k=shares, loads="pointers", persistent=False) for shares in (2, 4, 8)]
    return list(dict.fromkeys(found))


def candidates(key: GemmKey) -> list[GemmConfig]:
    """Configurations that can serve a product, the shipped default first; `struck_out` has the others."""
    return [config for config in considered(key) if refusal(key, config) is None]


def struck_out(key: GemmKey) -> list[tuple[GemmConfig, str]]:
    """Configurations that were considered and cannot serve a product, each with the reason."""
    reasons = ((config, refusal(key, config)) for config in considered(key))
    return [(config, reason) for config, reason in reasons if reason is not None]
