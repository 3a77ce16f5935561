"""Arguments that are neither arrays nor numbers: tensor descriptors made on the host, and tables of addresses.

A descriptor (`triton.tools.tensor_descriptor.TensorDescriptor`) reaches a kernel as base, shape and strides with two flags or, on
gfx1250, as what the tensor data mover reads; then shape and strides once more. Source: Triton's AMD driver (`driver.py`,
`driver.c`), field by field.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TDM_BYTES = 48
"""Groups 0 and 1; tensors of more dimensions have groups 2 and 3 as well."""
_TDM_BYTES_ALL = 80


@dataclass(frozen=True, slots=True)
class AddressTable:
    """A kernel's argument that holds the addresses of arrays, int64 `[arrays]`, as `torch.tensor([x.data_ptr() for x in ...])`.

    Attributes:
        arrays: Arrays or CPU tensors, written back after the launch like other arguments.
    """

    arrays: Sequence[Any]


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a tensor descriptor made on the host."""
    return all(hasattr(value, name) for name in ("base", "shape", "strides", "block_shape"))


def descriptor_type(value: Any, element: str) -> str:
    """Triton's name of a descriptor's type; `element`: that of its tensor."""
    return f"tensordesc<{element}[{', '.join(map(str, value.block_shape))}]>"


def descriptor_values(value: Any, address: int, facts: Mapping[str, Any] | None, num_warps: int) -> list[int | bytes]:
    """The kernel's arguments that stand for a descriptor.

    Args:
        value: The descriptor.
        address: Of its tensor, on the emulated device.
        facts: What Triton's compiler says of it where it is for the tensor data mover, else None.
        num_warps: Waves that share a transfer.
    """
    shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
    again = [*(struct.pack("<i", n) for n in shape), *(struct.pack("<q", n) for n in strides)]
    if facts is not None:
        return [_transfer_descriptor(shape, strides, address, facts, num_warps), *again]
    flags = (getattr(value, "padding", "zero") == "nan", bool(getattr(value, "round_f32_to_tf32", False)))
    return [
        address,
        *(struct.pack("<q", n) for n in (*shape, *strides)),
        *(struct.pack("<?", flag) for flag in flags),
        *again,
    ]


def _share(block: Sequence[int], waves: int) -> list[int]:
    """What one wave moves of a block: waves are dealt to the outer dimensions first."""
    shares = list(block)
    for i, size in enumerate(block):
        taken = 1
        while waves > 1 and taken * 2 <= size:
            taken, waves = taken * 2, waves // 2
        shares[i] = -(-size // taken)
    shares[-1] = -(-shares[-1] // waves)
    return shares


def _transfer_descriptor(
    shape: list[int], strides: list[int], address: int, facts: Mapping[str, Any], num_warps: int
) -> bytes:
    """What the tensor data mover reads: fields by their first bit, dimensions counted from the innermost."""
    element_bytes = facts["elem_bits"] // 8
    sizes = shape[::-1]
    tile = _share(list(facts["block_size"]), num_warps)[::-1]
    steps = strides[::-1]
    fields: dict[int, int] = {0: 1, 64: address & (1 << 57) - 1, 127: 1}
    one, two = 128, 384
    fields[one + 16] = element_bytes.bit_length() - 1
    for interval, amount in facts.get("interval_padding_pairs", ())[:1]:
        fields[one + 20] = 1
        fields[one + 22] = int(math.log2(interval * element_bytes // 4)) - 1
        fields[one + 25] = amount * element_bytes // 4 - 1
    places = {
        "size": (one + 48, one + 80, two, two + 32, two + 128 + 48),
        "tile": (one + 112, one + 128, one + 144, two + 112, two + 128 + 80),
        "step": (None, one + 160, one + 208, two + 64, two + 128),
    }
    for name, values in (("size", sizes), ("tile", tile), ("step", steps)):
        fields |= {place: value for place, value in zip(places[name], values) if place is not None}
    number = sum(value << place for place, value in fields.items())
    return number.to_bytes(_TDM_BYTES_ALL, "little")[: _TDM_BYTES if len(shape) < 3 else _TDM_BYTES_ALL]
