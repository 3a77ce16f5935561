"""What a kernel must know at compile time about one quantised copy: a `QuantSpec` as plain numbers.

A `CopyMeta` is passed to a Triton kernel as one `tl.constexpr`; a copy that is not wanted is None.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from primus_turbo_plugin.precision.formats import ScaleRule
from primus_turbo_plugin.precision.quant_spec import QuantSpec


class CopyMeta(NamedTuple):
    """Compile-time description of one copy.

    Attributes:
        codes_per_byte: 2 for E2M1, 1 for the FP8 elements.
        mantissa: Mantissa bits of the element.
        emin: fp32 exponent field of the element's smallest normal number.
        emax: Exponent of the element's largest number.
        max_value: Largest element.
        is_mx: E8M0 scales; otherwise fp32 scales.
        rceil: The RCEIL rule (a division); the other rules add `round_up` to the bits of the amax.
        round_up: See `rceil`.
        bf16_round_up: What the rule adds to the bits of an amax that is a bf16 number. RCEIL has one too: amax / max passes a
            power of two exactly where the mantissa of amax passes that of max (1.5 for E2M1, 1.75 for the FP8 elements).
        block_outer: Rows that share a scale; 0 stands for all.
        block_contraction: Elements of a row that share a scale; 0 stands for all.
        multiple: The contraction axis is padded to a multiple of this.
        hadamard: Size of the rotation, 0 for none.
        log2_hadamard: Its logarithm, 0 for none.
        rotation_factor: 1 / sqrt(hadamard), 1 for none.
        random_signs: Signs in front of the rotation.
        stochastic: Stochastic rounding.
    """

    codes_per_byte: int
    mantissa: int
    emin: int
    emax: int
    max_value: float
    is_mx: bool
    rceil: bool
    round_up: int
    bf16_round_up: int
    block_outer: int
    block_contraction: int
    multiple: int
    hadamard: int
    log2_hadamard: int
    rotation_factor: float
    random_signs: bool
    stochastic: bool

    @property
    def needs_amax(self) -> bool:
        """The scale spans more than one tile, so that the amax takes a pass of its own."""
        return self.block_contraction == 0

    @classmethod
    @functools.cache
    def of(cls, spec: QuantSpec) -> CopyMeta:
        """The numbers of a quantised spec."""
        element = spec.element_type
        round_up = {
            ScaleRule.FLOOR: 0,
            ScaleRule.EVEN: 1 << (22 - element.mantissa_bits),
            ScaleRule.CEIL: 0x7FFFFF,
        }
        rule_adds = round_up.get(spec.scale_rule, 0) if spec.scale_rule else 0
        rceil = spec.scale_rule is ScaleRule.RCEIL
        block_outer, block_contraction = spec.block_shape
        return cls(
            codes_per_byte=element.codes_per_byte,
            mantissa=element.mantissa_bits,
            emin=128 - element.bias,
            emax=element.emax,
            max_value=element.max_value,
            is_mx=spec.is_mx,
            rceil=rceil,
            round_up=rule_adds,
            bf16_round_up=_below_mantissa(element.max_value) if rceil else rule_adds >> 16,
            block_outer=block_outer,
            block_contraction=block_contraction,
            multiple=spec.contraction_multiple,
            hadamard=spec.hadamard,
            log2_hadamard=max(spec.hadamard, 1).bit_length() - 1,
            rotation_factor=1.0 / math.sqrt(max(spec.hadamard, 1)),
            random_signs=spec.random_signs,
            stochastic=spec.rounding == "stochastic",
        )


def _below_mantissa(value: float) -> int:
    """What carries out of the 7 mantissa bits of a bf16 number exactly when they exceed those of `value`."""
    return 0x7F - int((math.frexp(value)[0] * 2 - 1) * 128)
