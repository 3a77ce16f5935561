"""One forward pass of the GPT job and its loss, as Megatron's training loop calls them. Needs `megatron.training`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers

from primus_turbo_plugin.training.gpt_data import get_batch, packed_sequences

SPIKE = 10.0  # with --check-for-spiky-loss: a loss this many times the largest seen so far is reported


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the token losses that count.

    Args:
        loss_mask: fp32 `[batch, seq]`; 0 where a token must not count.
        losses: Cross entropy of every token, `[batch, seq]`.

    Returns:
        The sum (scalar, with gradient), the number of tokens that count (int32 scalar), and what the training loop logs:
        `{"lm loss": [sum, tokens]}`, which it adds up over micro batches and ranks before dividing.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    _validate(total)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def _validate(loss: torch.Tensor) -> None:
    """Megatron's checks for NaN, Inf and spikes, through its rerun state machine so that a fault can be replayed."""
    args, machine = get_args(), get_rerun_state_machine()
    checks: list[tuple[Callable[..., Any], str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [
            (torch.isnan, "NaN in the local forward loss", True),
            (torch.isinf, "Inf in the local forward loss", True),
        ]
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks.append((spiky, "the loss jumped", False))
    for rejected, message, fatal in checks:
        machine.validate_result(result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=fatal)


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Callable[..., Any]]:
    """Run the model on the next micro batch.

    Args:
        data_iterator: Yields dictionaries of tensors on tensor-parallel rank 0, `None` on the others.
        model: This pipeline stage, possibly wrapped.
        return_schedule_plan: Megatron's expert-parallel overlap asks for a plan instead of the output.

    Returns:
        The stage's output (on the last stage: token losses `[batch, seq]`) and the function that reduces it.
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    micro_batch_size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    batch = get_batch(data_iterator, micro_batch_size, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    inputs = (batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"))
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    reduce_loss = partial(masked_loss, loss_mask)
    if return_schedule_plan:
        return model.build_schedule_plan(*inputs, labels=labels, loss_mask=loss_mask), reduce_loss
    packed = packed_sequences(batch, args.seq_length)
    return model(*inputs, labels=labels, loss_mask=loss_mask, packed_seq_params=packed), reduce_loss
