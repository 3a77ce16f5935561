"""RMSNorm and LayerNorm with the constructor, attributes and checkpoint keys that Megatron expects of a norm."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.norm import NormChoice, layer_norm, rms_norm, rms_norm_residual
from primus_turbo_plugin.modules.megatron_contract import check_keywords
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboNorm(torch.nn.Module):
    """The norm that `config.normalization` names, over the last dimension.

    Serves every place of Megatron's layers: in front of attention and MLP, at the end of the block, and on the queries'
    and keys' head dimension (`[seq, batch, heads, dim]`). Inside is fp32 and the result is rounded once, to the input's
    dtype, whatever the weight's.

    Of Megatron's settings:
        layernorm_zero_centered_gamma: The weight is stored as gamma - 1 and starts at zero.
        sequence_parallel: Marks the parameters, so that `finalize_model_grads` sums their gradients over the
            tensor-parallel group.
        fused_residual_rmsnorm: With `has_residual`, `forward` also returns its input for the residual branch, whose
            gradient is added inside the norm's backward. Megatron's layer takes the pair as it is.
        persist_layer_norm: Nothing to choose: the norm is one fused kernel at every hidden size.
        memory_efficient_layer_norm: Refused for LayerNorm; Megatron ignores it for RMSNorm.

    Checkpoints hold `weight` and, for LayerNorm, `bias`, as those of `torch.nn` and of Transformer Engine do. The
    `_extra_state` that Transformer Engine writes beside them carries nothing for a norm; it is taken and dropped.

    Args:
        config: Megatron's configuration.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square or variance.
        has_residual: Whether a residual branch starts at this norm's input.
        plan: Which kernels may serve it.
        name: Megatron's name for the module, from 0.19.

    Raises:
        ConfigError: An unknown normalization, or a setting that is refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        has_residual: bool = False,
        *,
        plan: ModulePlan | None = None,
        name: str | None = None,
        **newer: Any,
    ) -> None:
        super().__init__()
        self.plan = plan or ModulePlan.default()
        where = self.plan.path or name or "norm"
        check_keywords(where, newer)
        _check(config, where)
        self.hidden_size = hidden_size
        self.eps = eps
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.returns_residual = has_residual and getattr(config, "fused_residual_rmsnorm", False)  # from 0.17
        factory: dict[str, Any] = {"device": _device(config), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, **factory))
        self.bias = None if self.rms else torch.nn.Parameter(torch.empty(hidden_size, **factory))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._kernels = NormChoice(self.plan.kernels.get("norm"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma = 1, bias = 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x `[..., hidden_size]` in x's dtype; with a fused residual also x."""
        options: dict[str, Any] = {
            "zero_centered_gamma": self.zero_centered_gamma,
            "kernels": self._kernels,
        }
        if not self.rms:
            return layer_norm(x, self.weight, self.bias, self.eps, **options)
        if self.returns_residual:
            return rms_norm_residual(x, self.weight, self.eps, **options)
        return rms_norm(x, self.weight, self.eps, **options)

    def extra_repr(self) -> str:
        kind = "RMSNorm" if self.rms else "LayerNorm"
        return f"{kind}, {self.hidden_size}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _device(config: TransformerConfig) -> torch.device | str | int:
    """Where Megatron wants new parameters."""
    if config.use_cpu_initialization:
        return "cpu"
    if config.init_model_with_meta_device:
        return "meta"
    return torch.cuda.current_device()


def _check(config: TransformerConfig, where: str) -> None:
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        raise ConfigError(f"{where}: normalization must be RMSNorm or LayerNorm, got {config.normalization!r}.")
    if config.normalization == "LayerNorm" and config.memory_efficient_layer_norm:
        raise ConfigError(
            f"{where}: memory_efficient_layer_norm=True rebuilds the norm's input from its output, which this norm does not "
            "do (it saves the input that the layer before it keeps anyway). Unset it, or set 'norm: megatron'."
        )
