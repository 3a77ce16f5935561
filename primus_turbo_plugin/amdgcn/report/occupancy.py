"""How many work-groups a compute unit can hold."""

from __future__ import annotations

from dataclasses import dataclass

from primus_turbo_plugin.amdgcn.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Work-groups per compute unit, waves per SIMD, and the resource that limits them."""

    workgroups: int
    waves_per_simd: float
    limited_by: str


def occupancy(arch: Architecture, vgprs: int, lds_bytes: int, num_warps: int) -> Occupancy:
    """Estimate occupancy from registers, LDS and wave slots.

    Args:
        arch: The target.
        vgprs: Vector registers of a wave, accumulation registers included.
        lds_bytes: LDS of a work-group.
        num_warps: Waves of a work-group.
    """
    granule = arch.vgpr_granule
    allocated = max(-(-vgprs // granule) * granule, granule)
    waves_by_vgpr = arch.vgprs // allocated
    limits = {
        "VGPR": waves_by_vgpr * arch.simds // num_warps,
        "wave slots": arch.max_waves * arch.simds // num_warps,
        "LDS": arch.lds_bytes // lds_bytes if lds_bytes else arch.max_waves * arch.simds,
    }
    limiter = min(limits, key=lambda name: limits[name])
    groups = limits[limiter]
    return Occupancy(groups, groups * num_warps / arch.simds, limiter)
