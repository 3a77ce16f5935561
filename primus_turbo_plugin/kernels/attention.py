"""What every attention kernel is asked for: which query sees which key, as data.

Tensors are `[batch, seq, heads, dim]` views with any strides: Megatron's `[seq, batch, heads, dim]` comes transposed,
packed `[tokens, heads, dim]` with a batch of one. Head h of q shares the key and value group h // (heads / groups).

Partial calls (ring attention): the keys at hand are some of each row's. The forward writes an fp32 `out`, normalised by its own
`lse`, and the caller merges several by their lse (a row that sees nothing: out 0, lse -inf). The backward is given the whole
row's `out`, `lse` and `delta`, and returns dq, dk and dv in fp32 for the caller to sum. Sinks and zigzag are the caller's affair:
a partial call has neither. Keys and queries are then slices of a chunk, with windows and packed lengths to match. A counter
of dropout must be told where they stand: `Dropout.query_places` and `key_places`, int32 `[queries]` and `[keys]`, each token's
place among all ranks' tokens in their natural order (None: counted from 0), and `first_head`, where heads are split (all-to-all).
Under FP8 the caller takes delta from a decoded dout (`attention_decoded`), which then quantises to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.requests import Request
from primus_turbo_plugin.precision.attention import AttentionPrecision


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Sequences laid end to end along the tokens, possibly with padding behind each of them.

    Attributes:
        cu_seqlens_q: int32 `[sequences + 1]`, cumulative lengths of the queries' sequences, padding not counted.
        cu_seqlens_k: The same for keys and values.
        cu_seqlens_q_padded: int32 `[sequences + 1]`, where each sequence starts; None: no padding, as `cu_seqlens_q`.
        cu_seqlens_k_padded: The same for keys and values.
        max_seqlen_q: The longest sequence, where known; no kernel here needs it.
        max_seqlen_k: The same for keys and values.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_k_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def starts_q(self) -> Tensor:
        """Where each sequence of queries starts, and behind the last."""
        return self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded

    @property
    def starts_k(self) -> Tensor:
        """The same for keys and values."""
        return self.cu_seqlens_k if self.cu_seqlens_k_padded is None else self.cu_seqlens_k_padded


@dataclass(frozen=True, kw_only=True, slots=True)
class ZigZag:
    """Which part of every sequence the queries at hand are: chunks `rank` and `2 * size - 1 - rank` of `2 * size`."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionMask:
    """Which query sees which key. A key must pass every condition.

    Positions count in keys. The last query of a sequence stands at its last key (bottom-right alignment), so that with
    more keys than queries, as with a key-value cache, the queries are the newest tokens.

    Attributes:
        causal: A query sees no key behind its own position.
        window: (left, right): how many keys before and behind its position a query sees; -1 is no limit.
        masked: bool `[batch | 1, heads | 1, queries | 1, keys | 1]`, True where a key is NOT seen, as Megatron has it.
        packing: Packed sequences; None for a dense batch.
        zigzag: The part of a context-parallel sequence that the queries are; None for all of it.
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    masked: Tensor | None = None
    packing: Packing | None = None
    zigzag: ZigZag | None = None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """(left, right) reach around a query's position, causality included; None is no limit."""
        left, right = (None if reach < 0 else reach for reach in self.window)
        return left, 0 if self.causal else right


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dropout:
    """Dropout of attention probabilities, drawn by a counter: see kernels/attention_dropout.py.

    Attributes:
        probability: Of dropping; kept probabilities are scaled by 1 / (1 - probability).
        seed: int64 `[1]`, on the device of q. A tensor, so that a CUDA graph can be replayed with another.
        query_places: int32 `[queries]`, each query's place among all ranks' tokens in their natural order; None: counted.
        key_places: int32 `[keys]`, the same for keys.
        first_head: Number of the first head at hand, where heads are split.
    """

    probability: float
    seed: Tensor
    query_places: Tensor | None = None
    key_places: Tensor | None = None
    first_head: int = 0

    @property
    def scale(self) -> float:
        """The factor on what is kept."""
        return 1.0 / (1.0 - self.probability) if self.probability < 1.0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionOptions:
    """Everything of an attention call that is not differentiated.

    Attributes:
        scale: On q @ k.T.
        mask: Which query sees which key.
        softcap: scores become softcap * tanh(scores / softcap), before bias and mask; 0 is off.
        dropout: None for none.
        deterministic: Only kernels that give the same bits every run will do.
        precision: In which numbers q, k, v, probabilities and dout are multiplied.
    """

    scale: float
    mask: AttentionMask = field(default_factory=AttentionMask)
    softcap: float = 0.0
    dropout: Dropout | None = None
    deterministic: bool = False
    precision: AttentionPrecision = field(default_factory=AttentionPrecision)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRequest(Request):
    """softmax(scale * q @ k.T + bias, sinks) @ v and its gradients.

    Attributes:
        dtype: dtype of q, k and v.
        heads: Query heads.
        groups: Key and value heads.
        head_dim: Of q and k.
        v_head_dim: Of v.
        window: As in `AttentionMask`.
        causal: As in `AttentionMask`.
        unequal_lengths: Whether there are not as many keys as queries.
        masked: Whether there is a mask tensor.
        packed: Whether sequences are packed.
        context_parallel: Whether the queries are a rank's zig-zag share of them.
        bias: Whether a bias is added to the scores.
        sinks: Whether each head has a sink logit in its softmax's denominator.
        softcap: Whether scores are soft-capped.
        dropout: Whether probabilities are dropped.
        deterministic: Whether the same bits are wanted every run.
        partial: Whether the keys at hand may be only some of each row's; see the top of this file.
        fp8: Whether q, k, v and probabilities are multiplied in FP8.
    """

    op: ClassVar[str] = "attention"
    functions: ClassVar[tuple[str, ...]] = ("attention_fwd", "attention_bwd", "attention_decoded")

    dtype: torch.dtype
    heads: int
    groups: int
    head_dim: int
    v_head_dim: int
    window: tuple[int, int] = (-1, -1)
    causal: bool = False
    unequal_lengths: bool = False
    masked: bool = False
    packed: bool = False
    context_parallel: bool = False
    bias: bool = False
    sinks: bool = False
    softcap: bool = False
    dropout: bool = False
    deterministic: bool = False
    partial: bool = False
    fp8: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, bias: Tensor | None, sinks: Tensor | None
    ) -> AttentionRequest:
        """The request of a call with these `[batch, seq, heads, dim]`, k and v as this rank has them."""
        return cls(**cls.facts(q, k, v, options, bias=bias, sinks=sinks))

    @staticmethod
    def facts(
        q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, bias: Tensor | None, sinks: Tensor | None,
        tokens: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        """The fields of that request: plain values, which torch.compile can take for constants.

        Dimension `tokens` holds the tokens, the last two heads and dim; the batch does not matter.
        """
        mask = options.mask
        return {
            "device": q.device.type,
            "dtype": q.dtype,
            "heads": q.shape[-2],
            "groups": k.shape[-2],
            "head_dim": q.shape[-1],
            "v_head_dim": v.shape[-1],
            "window": tuple(mask.window),
            "causal": mask.causal,
            "unequal_lengths": True if q.shape[tokens] != k.shape[tokens] else False,  # noqa: SIM210
            "masked": mask.masked is not None,
            "packed": mask.packing is not None,
            "context_parallel": mask.zigzag is not None,
            "bias": bias is not None,
            "sinks": sinks is not None,
            "softcap": options.softcap != 0.0,
            "dropout": options.dropout is not None,
            "deterministic": options.deterministic,
            "fp8": options.precision.is_quantized,
        }

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        llama: dict[str, Any] = {"heads": 32, "groups": 8, "head_dim": 128, "v_head_dim": 128, "causal": True}
        variations: list[dict[str, Any]] = [{}, {"packed": True}, {"window": (1024, 0)}, {"sinks": True}]
        variations += [{"groups": 32, "head_dim": 192}, {"fp8": True}]  # multi-head latent attention; FP8
        return tuple(cls(device=device, dtype=torch.bfloat16, **(llama | variation)) for variation in variations)

    def __str__(self) -> str:
        flags = [f.name.replace("_", " ") for f in fields(self) if getattr(self, f.name) is True]
        flags += [f"window {self.window}"] if self.window != (-1, -1) else []
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        shape = f"heads {self.heads}/{self.groups} dim {dims}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"attention {dtype} {shape} on {self.device}: {', '.join(flags) or 'every key seen'}"
