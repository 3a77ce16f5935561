"""A view that is about to be saved for backward, given a storage of its own where it would keep a larger one alive."""

from __future__ import annotations

import torch
from torch import Tensor


def in_own_storage(t: Tensor, *saved: Tensor) -> Tensor:
    """t, copied if it is the only tensor kept of a storage at least twice its size.

    Attention's values are such a view: into the output of qkv, of which queries and keys have been replaced by rotated copies. A
    Llama-3-8B layer keeps 12 KiB a token for 2 KiB of values. The copy costs one read and one write of t.

    Args:
        t: About to be saved.
        saved: Tensors that are saved as well; where one shares t's storage, that is kept anyway.
    """
    storage = t.untyped_storage()
    if not torch.is_grad_enabled() or not t.requires_grad or storage.nbytes() < 2 * t.numel() * t.element_size():
        return t
    if any(other.untyped_storage().data_ptr() == storage.data_ptr() for other in saved):
        return t
    return t.clone(memory_format=torch.contiguous_format)
