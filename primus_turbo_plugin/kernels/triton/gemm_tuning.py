"""What `primus-turbo tune` and the tuning table need to know of the Triton GEMM."""

from __future__ import annotations

from primus_turbo_plugin.kernels.triton import gemm_defaults
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey
from primus_turbo_plugin.kernels.tuning.tunable import Tunable

TUNABLE = Tunable(
    op="triton.gemm_nt",
    version=1,
    key_type=GemmKey,
    config_type=GemmConfig,
    default=gemm_defaults.default_config,
    candidates=gemm_defaults.candidates,
    struck_out=gemm_defaults.struck_out,
    refusal=refusal,
)
"""`version`: raise it with every change of gemm_kernel.py's code, of GemmConfig's meaning or of GemmKey's fields."""
