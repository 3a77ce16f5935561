"""Core attention with the constructor, forward and checkpoint contracts of Megatron's own two core attention modules."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_size
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.context_parallel import ContextParallel
from primus_turbo_plugin.functional.own_storage import in_own_storage
from primus_turbo_plugin.kernels.attention import AttentionMask, Dropout, Packing
from primus_turbo_plugin.modules.attention_settings import CAUSAL, PADDING, read_settings
from primus_turbo_plugin.modules.context_parallel import context_parallel, for_batch
from primus_turbo_plugin.modules.megatron_contract import check_keywords
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboDotProductAttention(MegatronModule):
    """softmax(scale * q @ k.T) @ v for Megatron's attention layers: heads split over the tensor-parallel group,
    sequences over the context-parallel one.

    A key is seen where every condition allows it: the mask type's causality (with fewer queries than keys, the queries
    are the last tokens), the layer's sliding window, and the mask tensor. Where Megatron's own two modules differ from
    each other or from this:
        - Its local module lets a mask tensor replace causality, and a window replace both. Transformer Engine's ignores
          the tensor under `causal` and aligns `causal` to the first key. All agree on square causal masks, with or
          without blocks for packed documents.
        - A row that sees no key gives 0 here; in the local module the mean of all values, masked ones too.
        - Packed (`thd`) tokens outside every sequence give 0.

    Dropout is drawn by a counter (kernels/attention_dropout.py) under a seed that each call takes from the tensor-parallel
    generator: activation recompute and CUDA graphs replay it, ranks of a context-parallel group agree on it, and no
    mask is stored. The positions are not those that Megatron's local module would drop.

    Context parallelism: `cp_comm_type` as Megatron has it, in Megatron's zig-zag order (functional/context_parallel/).

    Args:
        config: Megatron's configuration.
        layer_number: From 1.
        attn_mask_type: Used where forward is given none.
        attention_type: "self" or "cross".
        attention_dropout: None for `config.attention_dropout`.
        softmax_scale: None for 1 / sqrt(dim).
        k_channels: dim of q and k where it is not `config.kv_channels` (multi-head latent attention).
        v_channels: dim of v, likewise; the tensors decide.
        num_splits: Refused; a setting of another library's kernel.
        cp_comm_type: How context parallelism moves keys and values: `p2p` (None), `all_gather`, `a2a` or `a2a+p2p`.
        pg_collection: Process groups; None for Megatron's global ones.
        plan: In which numbers it multiplies, and which kernels may serve it; None: as `config.fp8_dot_product_attention` says,
            and any.
        name: Megatron's name for the module, from 0.19.

    Raises:
        ConfigError: A setting is refused, contradictory or impossible.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        plan: ModulePlan | None = None,
        name: str | None = None,
        **newer: Any,
    ) -> None:
        super().__init__(config=config)
        self.plan = plan or ModulePlan(attention=_asked_of_megatron(config))
        self.where = self.plan.path or name or f"layer {layer_number}: core_attention"
        check_keywords(self.where, newer)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        _refuse_num_splits(num_splits, self.where)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "hcp"])
        self.pg_collection = groups
        self.tp_group = groups.tp
        self.settings = read_settings(
            config,
            self.where,
            layer_number=layer_number,
            mask_type=attn_mask_type,
            tp_size=get_pg_size(groups.tp),
            dropout=attention_dropout,
            scale=softmax_scale,
            k_channels=k_channels,
        )
        self.context: ContextParallel | None = None
        if config.context_parallel_size > 1:  # a model part may switch it off while the group exists
            self.context = context_parallel(cp_comm_type, groups, self.settings, self.where)
        self._make_softmax_offset()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query: [seq, batch, heads, dim], or packed [tokens, heads, dim]; any strides. Under context parallelism this
                rank's chunks.
            key: Likewise with `groups` heads.
            value: Likewise with `groups` heads and any dim.
            attention_mask: bool, broadcastable to [batch, heads, queries, keys], True where a key is not seen; keys
                count over the whole sequence.
            attn_mask_type: None for the constructor's.
            attention_bias: Added to the scaled scores; broadcastable as the mask.
            packed_seq_params: Lengths of packed sequences, format `thd`.
            num_splits: Refused.
            **unknown: Arguments that a newer Megatron passes; refused unless None.

        Returns:
            [seq, batch, heads * v_dim], or packed [tokens, heads * v_dim].

        Raises:
            ShapeError: Shapes, dtypes or lengths do not fit each other.
            UnsupportedError: No kernel can do what is asked.
        """
        _refuse_num_splits(num_splits, self.where)
        for name, argument in unknown.items():
            if argument is not None:
                raise UnsupportedError(
                    f"{self.where}: does not know what to do with the argument {name!r}. Set 'attention: megatron'."
                )
        self._check_heads(query, key)
        mask_type = attn_mask_type or self.attn_mask_type
        context = for_batch(self.context, packed_seq_params, self.where)
        size = 1 if context is None else context.size
        packing, masked = self._packing(packed_seq_params), _four_dims(attention_mask)
        if packed_seq_params is not None and packing is None and mask_type in PADDING:
            masked = _either(masked, _behind(packed_seq_params.cu_seqlens_kv, key.shape[0] * size))
        mask = AttentionMask(causal=mask_type in CAUSAL, window=self.settings.window, masked=masked, packing=packing)
        if not (self.config.qk_layernorm or self.config.qk_l2_norm):  # their norms keep qkv's output in any case
            value = in_own_storage(value, query, key)
        out = attention(
            query,
            key,
            value,
            layout="sbhd" if packing is None else "thd",
            mask=mask,
            scale=self.settings.scale,
            bias=_four_dims(attention_bias),
            sinks=None if self.softmax_offset is None else self.softmax_offset.to(query.device),
            dropout=self._dropout(query),
            deterministic=self.config.deterministic_mode,
            precision=self.plan.attention,
            context=context,
            kernels=self.plan.kernels.get("attention"),
        )
        return out.flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The learned sinks, split over the tensor-parallel group along the heads; nothing otherwise."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _make_softmax_offset(self) -> None:
        """A logit for each head of this rank: 0 for off-by-one, a parameter where learnable, initialised as Megatron's."""
        kind, config = self.config.softmax_type, self.config
        if kind == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        offset = torch.zeros(self.settings.heads, device=device, dtype=config.params_dtype)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(offset)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        # Each rank has its own heads: without the mark the gradient norm would count rank 0's only.
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _packing(self, packed: PackedSeqParams | None) -> Packing | None:
        if packed is None or packed.qkv_format == "sbhd":
            return None
        if packed.qkv_format != "thd":
            raise ShapeError(
                f"{self.where}: packed_seq_params.qkv_format must be thd or sbhd, got {packed.qkv_format!r}."
            )
        return Packing(
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_k=packed.cu_seqlens_kv,
            cu_seqlens_q_padded=packed.cu_seqlens_q_padded,
            cu_seqlens_k_padded=packed.cu_seqlens_kv_padded,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_k=packed.max_seqlen_kv,
        )

    def _dropout(self, query: Tensor) -> Dropout | None:
        """A new seed a call, from the tensor-parallel generator: ranks with other heads draw others.

        With sequence parallelism Megatron's transformer block runs under that generator already. Entering it again would start
        from the state it had before the block, so that every layer, and its recomputation, drew the same.
        """
        probability = self.settings.dropout if self.training else 0.0
        if probability == 0.0:
            return None
        own_stream = nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork()
        with own_stream:
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=query.device)
        return Dropout(probability=probability, seed=seed)

    def _check_heads(self, query: Tensor, key: Tensor) -> None:
        heads, groups = query.shape[-2], key.shape[-2]
        if (heads, groups) != (self.settings.heads, self.settings.groups):
            raise ShapeError(
                f"{self.where}: this rank has {self.settings.heads} query heads and {self.settings.groups} key heads, "
                f"got {heads} and {groups}."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # Transformer Engine's fp8 state
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _asked_of_megatron(config: TransformerConfig) -> AttentionPrecision:
    return AttentionPrecision(format="fp8" if config.fp8_dot_product_attention else "bf16")


def _refuse_num_splits(num_splits: int | None, where: str) -> None:
    if num_splits is not None:
        raise ConfigError(f"{where}: num_splits={num_splits} is a setting of another library's kernel. Leave it unset.")


def _four_dims(x: Tensor | None) -> Tensor | None:
    """As [batch | 1, heads | 1, queries | 1, keys | 1]."""
    return x if x is None or x.dim() >= 4 else x.view((1,) * (4 - x.dim()) + x.shape)


def _either(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a | b


def _behind(cu_seqlens: Tensor, num_keys: int) -> Tensor:
    """bool [batch, 1, 1, keys], True behind the end of each sequence of an unpacked batch."""
    lengths = cu_seqlens.diff().view(-1, 1, 1, 1)
    return torch.arange(num_keys, device=cu_seqlens.device) >= lengths
