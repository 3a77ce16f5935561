"""One table: what each architecture this package knows can do.

Sources, by row:
    gfx942   AMD CDNA 3 ISA guide; LLVM AMDGPU backend (feature sets); Instinct MI300X and MI325X data sheets
    gfx950   AMD CDNA 4 ISA guide and white paper; LLVM AMDGPU backend; Instinct MI350X and MI355X data sheets
    gfx1250  LLVM AMDGPU backend and Triton's AMD backend (TDM, ds_load_tr, v_cvt_scalef32_pk8_fp4); AMD's MI455X announcement
    sm80, sm90, sm100   CUDA C++ Programming Guide (compute capabilities), PTX ISA (cvt, mma, tcgen05); A100 and HGX B200
             data sheets, H100 white paper
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: The operand formats a GEMM may have; the same names as `precision.formats.Format`, which lies above this layer.
FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A published dense peak of one product.

    Attributes:
        product: As the vendor names it.
        tflops: Format -> dense TFLOPS, without sparsity.
        source: Where it is published.
    """

    product: str
    tflops: tuple[tuple[str, float], ...]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an architecture can do.

    Attributes:
        arch: `gfx950`, `sm90`, `cpu`.
        vendor: Who makes it.
        family: The architecture's name.
        torch_device: What torch calls the device: `cuda` for ROCm as well.
        wave_size: Threads that execute together; 0 on a CPU.
        lds_bytes: Shared memory of a compute unit (AMD: LDS of a CU or WGP, NVIDIA: of an SM); 0 on a CPU.
        native_formats: Formats that the matrix units multiply in the encoding this package stores (OCP).
        fp8_encoding: What the FP8 units read: `ocp`, `fnuz` (gfx942: other exponent bias, largest E4M3 value 240), or None.
        tensor_dma: Engine that copies tiles by descriptor: TDM, TMA or None.
        transpose_loads: Loads from shared memory that transpose on the way into matrix operands.
        direct_to_lds: Copies from global to shared memory that bypass registers.
        fp4_conversion: Instructions that round to E2M1.
        peaks: Published peaks, none where nothing is published.
        known: False for an architecture that is not in the table: then only what every GPU has is assumed.
    """

    arch: str
    vendor: Literal["amd", "nvidia", "cpu"]
    family: str
    torch_device: Literal["cpu", "cuda"] = "cuda"
    wave_size: int = 32
    lds_bytes: int = 0
    native_formats: tuple[str, ...] = ("bf16",)
    fp8_encoding: Literal["ocp", "fnuz"] | None = None
    tensor_dma: Literal["TDM", "TMA"] | None = None
    transpose_loads: bool = False
    direct_to_lds: bool = False
    fp4_conversion: bool = False
    peaks: tuple[Peak, ...] = ()
    known: bool = True

    def emulation(self, format_name: str) -> str | None:
        """None where the matrix units multiply `format_name`, else why it is emulated here."""
        assert format_name in FORMATS, format_name
        if format_name in self.native_formats:
            return None
        if format_name == "fp8" and self.fp8_encoding == "fnuz":
            return f"the FP8 units of {self.arch} read the FNUZ encoding, not OCP"
        if not self.known:
            return f"{self.arch} is not in this package's table of devices"
        return f"{self.arch} has no {format_name.upper()} matrix units"


_KIB = 1024

_TABLE = (
    Capabilities(arch="cpu", vendor="cpu", family="CPU", torch_device="cpu", wave_size=0),
    Capabilities(
        arch="sm80",
        vendor="nvidia",
        family="Ampere",
        lds_bytes=164 * _KIB,
        transpose_loads=True,  # ldmatrix.trans
        direct_to_lds=True,  # cp.async
        peaks=(Peak(product="A100", tflops=(("bf16", 312.0),), source="NVIDIA A100 data sheet"),),
    ),
    Capabilities(
        arch="sm90",
        vendor="nvidia",
        family="Hopper",
        lds_bytes=228 * _KIB,
        native_formats=("bf16", "fp8"),
        fp8_encoding="ocp",
        tensor_dma="TMA",
        transpose_loads=True,
        direct_to_lds=True,
        peaks=(
            Peak(
                product="H100 SXM, H200 SXM",
                tflops=(("bf16", 989.4), ("fp8", 1978.9)),
                source="NVIDIA H100 Tensor Core GPU architecture white paper",
            ),
        ),
    ),
    Capabilities(
        arch="sm100",
        vendor="nvidia",
        family="Blackwell",
        lds_bytes=228 * _KIB,
        native_formats=("bf16", "fp8", "mxfp8", "mxfp4"),
        fp8_encoding="ocp",
        tensor_dma="TMA",
        transpose_loads=True,
        direct_to_lds=True,
        fp4_conversion=True,  # cvt.rn.satfinite.e2m1x2.f32
        peaks=(
            Peak(
                product="B200 (HGX)",
                tflops=(("bf16", 2250.0), ("fp8", 4500.0), ("mxfp8", 4500.0), ("mxfp4", 9000.0)),
                source="NVIDIA HGX B200 data sheet, halved where it counts sparsity",
            ),
        ),
    ),
    Capabilities(
        arch="gfx942",
        vendor="amd",
        family="CDNA 3",
        wave_size=64,
        lds_bytes=64 * _KIB,
        fp8_encoding="fnuz",
        direct_to_lds=True,  # 4 bytes a lane
        peaks=(
            Peak(
                product="MI300X, MI325X",
                tflops=(("bf16", 1307.4), ("fp8", 2614.9)),
                source="AMD Instinct MI300X data sheet",
            ),
        ),
    ),
    Capabilities(
        arch="gfx950",
        vendor="amd",
        family="CDNA 4",
        wave_size=64,
        lds_bytes=160 * _KIB,
        native_formats=("bf16", "fp8", "mxfp8", "mxfp4"),
        fp8_encoding="ocp",
        transpose_loads=True,  # ds_read_b64_tr_b16, _b8, _b4
        direct_to_lds=True,  # 16 bytes a lane
        fp4_conversion=True,  # v_cvt_scalef32_pk_fp4_f32
        peaks=(
            Peak(
                product="MI355X",
                tflops=(("bf16", 2500.0), ("fp8", 5000.0), ("mxfp8", 5000.0), ("mxfp4", 10100.0)),
                source="AMD Instinct MI355X data sheet, rounded",
            ),
        ),
    ),
    Capabilities(
        arch="gfx1250",
        vendor="amd",
        family="CDNA 5",
        wave_size=32,
        lds_bytes=320 * _KIB,
        native_formats=("bf16", "fp8", "mxfp8", "mxfp4"),
        fp8_encoding="ocp",
        tensor_dma="TDM",
        transpose_loads=True,  # ds_load_tr16_b128, _tr8, _tr4
        direct_to_lds=True,  # global_load_async_to_lds
        fp4_conversion=True,  # v_cvt_scalef32_pk8_fp4_f32
        peaks=(
            Peak(
                product="MI455X",
                tflops=(("fp8", 20000.0), ("mxfp8", 20000.0), ("mxfp4", 40000.0)),
                source="AMD's announcement of the MI455X (2026)",
            ),
        ),
    ),
)

#: Architecture -> row.
CAPABILITIES: Mapping[str, Capabilities] = {row.arch: row for row in _TABLE}


def capabilities_of(arch: str) -> Capabilities:
    """The row of `arch`, or a cautious one, marked `known=False`, for an architecture that is not in the table."""
    if arch in CAPABILITIES:
        return CAPABILITIES[arch]
    vendor: Literal["amd", "nvidia"] = "amd" if arch.startswith("gfx") else "nvidia"
    wave_size = 64 if arch.startswith("gfx9") else 32  # GCN and CDNA have waves of 64, RDNA and gfx12 of 32
    return Capabilities(arch=arch, vendor=vendor, family="unknown", wave_size=wave_size, known=False)
