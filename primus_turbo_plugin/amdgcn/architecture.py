"""The machines this tool knows: gfx942 (CDNA3), gfx950 (CDNA4) and gfx1250.

Sizes and rates are per compute unit (a work-group processor half on gfx1250) and come from AMD's public CDNA3 and CDNA4
instruction-set guides and white papers; gfx1250 figures come from LLVM's AMDGPU target description (processor model,
register counts) because no guide is public. Rates feed static estimates only, never a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from primus_turbo_plugin.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What the emulator and the static report need to know about one target.

    Attributes:
        name: LLVM processor name.
        wave: Lanes per wave.
        simds: SIMD units per compute unit.
        vgprs: Vector registers one lane of a SIMD can address (arch + accumulation on CDNA, unified file).
        vgpr_granule: Allocation granule of vector registers.
        max_waves: Waves a SIMD can hold.
        lds_bytes: LDS of one compute unit, also the most one work-group may allocate.
        lds_bytes_per_clock: Peak LDS bandwidth used by the static report.
        lds_banks: Banks of 4 bytes.
        valu_clocks: Clocks one plain vector instruction of a wave occupies its SIMD.
        accumulation_vgprs: Whether `a` registers exist.
    """

    name: str
    wave: int
    simds: int
    vgprs: int
    vgpr_granule: int
    max_waves: int
    lds_bytes: int
    lds_bytes_per_clock: int
    lds_banks: int
    valu_clocks: int
    accumulation_vgprs: bool

    @property
    def is_cdna(self) -> bool:
        """True for the gfx9 family: 64-lane waves, MFMA, one `vmcnt` for loads and stores."""
        return self.wave == 64


ARCHITECTURES: dict[str, Architecture] = {
    "gfx942": Architecture(
        name="gfx942", wave=64, simds=4, vgprs=512, vgpr_granule=8, max_waves=8, lds_bytes=65536,
        lds_bytes_per_clock=128, lds_banks=32, valu_clocks=4, accumulation_vgprs=True,
    ),
    "gfx950": Architecture(
        name="gfx950", wave=64, simds=4, vgprs=512, vgpr_granule=8, max_waves=8, lds_bytes=163840,
        lds_bytes_per_clock=128, lds_banks=64, valu_clocks=4, accumulation_vgprs=True,
    ),
    "gfx1250": Architecture(
        name="gfx1250", wave=32, simds=4, vgprs=1024, vgpr_granule=16, max_waves=16, lds_bytes=327680,
        lds_bytes_per_clock=256, lds_banks=64, valu_clocks=1, accumulation_vgprs=False,
    ),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """Look an architecture up by LLVM name; feature suffixes such as `:sramecc+` are ignored."""
    base = name.split(":")[0]
    if base not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"amdgcn: architecture must be one of {known}, got {name!r}.")
    return ARCHITECTURES[base]
