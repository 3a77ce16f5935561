"""A Llama-style decoder in plain torch, every transformer linear of which is this package's.

    x [batch, seq, hidden] -> RMSNorm -> attention (rotary, grouped heads, causal) -> + x -> RMSNorm -> SwiGLU -> + x

Weights are fp32 and the autocast casts them to bf16, so a quantiser sees what it sees in mixed-precision training; weight
gradients come back in fp32. Embedding, norms, attention's products and the output layer are never quantised, as in the
package's presets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.mxfp4_study.fused import add_norm, cross_entropy, split_heads, swiglu
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, Rounding
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.attention import AttentionMask
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan

Attention = Literal["torch", "package"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes of the model; `ffn` is the width of the gated layer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Embedding (tied with the output layer) included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden


class StudyLinear(nn.Module):
    """y = x @ weight.T through `functional.linear`, with the plan of the cell.

    Attributes:
        taken: While a list, (x, dy) of every forward and backward are left in it, for the statistics.
    """

    def __init__(self, in_features: int, out_features: int, plan: ModulePlan, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features).normal_(std=std))
        self.plan = plan
        self.taken: list[tuple[Tensor, Tensor]] | None = None
        self._kernels: LinearKernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._kernels is None:
            self._kernels = LinearKernels.select(
                self.plan, x.device, torch.bfloat16, wgrad_dtype=torch.float32, accumulate=False
            )
        rows = x.flatten(0, -2)
        y = linear(
            rows, self.weight, None, LinearCall(plan=self.plan, kernels=self._kernels, rounding=self._rounding())
        )
        if self.taken is not None:
            taken, kept = self.taken, rows.detach()
            y.register_hook(lambda dy: taken.append((kept, dy.detach())))
        return y.view(*x.shape[:-1], -1)

    def _rounding(self) -> Rounding | None:
        if not self.plan.precision.is_stochastic:
            return None
        draw = int(
            torch.randint(2**62, ())
        )  # torch's CPU generator: checkpointed, so a resumed run draws what the first did
        return Rounding(seed=self.plan.precision.rounding_seed, draw=draw, rank=0, path=self.plan.path)


class _Layer(nn.Module):
    def __init__(self, size: ModelSize, number: int, config: TurboConfig, attention: Attention) -> None:
        super().__init__()
        self.size, self.attention = size, attention
        std, residual_std = 0.02, 0.02 / math.sqrt(2 * size.layers)

        def make(name: str, rows: int, columns: int, std: float) -> StudyLinear:
            plan = config.plan(f"decoder.layers.{number}.{name}", number, size.layers)
            return StudyLinear(rows, columns, plan, std)

        qkv = size.head_dim * (size.heads + 2 * size.kv_heads)
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden, eps=1e-5), nn.RMSNorm(size.hidden, eps=1e-5)
        self.linear_qkv = make("self_attention.linear_qkv", size.hidden, qkv, std)
        self.linear_proj = make("self_attention.linear_proj", size.heads * size.head_dim, size.hidden, residual_std)
        self.linear_fc1 = make("mlp.linear_fc1", size.hidden, 2 * size.ffn, std)
        self.linear_fc2 = make("mlp.linear_fc2", size.ffn, size.hidden, residual_std)

    def forward(self, x: Tensor, delta: Tensor | None, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The residual stream x and what is to be added to it; returns the same."""
        x, h = add_norm(x, delta, self.norm1.weight)
        x, h = add_norm(x, self.linear_proj(self._attend(self.linear_qkv(h), rotary)), self.norm2.weight)
        return x, self.linear_fc2(swiglu(self.linear_fc1(h)))

    def _attend(self, qkv: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        size = self.size
        q, k, v = split_heads(qkv, rotary, size.heads, size.kv_heads)
        if self.attention == "package":
            causal = AttentionMask(causal=True)
            return attention(q, k, v, layout="bshd", mask=causal, deterministic=True).flatten(2)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=size.heads != size.kv_heads)
        return y.transpose(1, 2).flatten(2)


class StudyModel(nn.Module):
    """The decoder; output layer tied to the embedding, attention torch's or this package's."""

    def __init__(self, size: ModelSize, config: TurboConfig, attention: Attention = "torch") -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Parameter(torch.empty(size.vocab, size.hidden).normal_(std=0.02))
        self.layers = nn.ModuleList(_Layer(size, number, config, attention) for number in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        angle = 10000.0 ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angle = torch.outer(torch.arange(size.seq), angle)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats a token, of tokens [batch, seq + 1]."""
        # Every weight is cast once a forward: nothing for autocast to keep, and a CUDA graph must not see what it kept.
        with torch.autocast(tokens.device.type, torch.bfloat16, cache_enabled=False):
            x, delta = F.embedding(tokens[:, :-1], self.embedding), None
            seq = x.shape[1]
            rotary = (self.cos[:seq], self.sin[:seq])
            for layer in self.layers:
                x, delta = layer(x, delta, rotary)
            _, h = add_norm(x, delta, self.norm.weight)
            logits = F.linear(h, self.embedding)
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @property
    def is_stochastic(self) -> bool:
        """Whether a linear rounds stochastically."""
        return any(module.plan.precision.is_stochastic for module in self.linears().values())

    def linears(self) -> dict[str, StudyLinear]:
        """Every quantised linear by its path, in order."""
        return {module.plan.path: module for module in self.modules() if isinstance(module, StudyLinear)}
