"""Batches of the GPT job: Megatron's own datasets, handed to the ranks that need them.

Needs `megatron.training`. Shapes below are what one context-parallel rank sees: `batch` = micro batch size.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Megatron's argument -> GPTDatasetConfig's field, where the names differ.
_RENAMED_FIELDS = {
    "seed": "random_seed",
    "seq_length": "sequence_length",
    "data_cache_path": "path_to_cache",
    "create_attention_mask_in_dataloader": "create_attention_mask",
    "dataloader_fast_cache_load": "fast_cache_load",
    "dataloader_defer_npy_index_mmap": "defer_npy_index_mmap",
    "dataloader_inter_document_masking": "inter_document_masking",
}
_SAME_FIELDS = (
    "split",
    "multiple_validation_sets",
    "full_validation",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "object_storage_cache_path",
    "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "data_parallel_size",
)

_BATCH_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)


def stage_reads_data(args: Any, vp_stage: int | None = None) -> bool:
    """Whether this pipeline stage consumes tokens or labels: the first, the last, and those that hold MTP layers."""
    if is_first_or_last_pipeline_stage(vp_stage):
        return True
    return stage_has_mtp(args, vp_stage)


def stage_has_mtp(args: Any, vp_stage: int | None = None) -> bool:
    """Whether multi-token-prediction layers live on this pipeline stage."""
    if args.mtp_num_layers is None:
        return False
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    held: bool = mtp_on_this_rank(
        layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )
    return held


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's data arguments as the configuration of its GPT datasets."""
    values = {field: getattr(args, name) for name, field in _RENAMED_FIELDS.items()}
    values |= {name: getattr(args, name) for name in _SAME_FIELDS}
    values["blend"], values["blend_per_split"] = get_blend_and_blend_per_split(args)
    values["sequence_parallel_size"] = args.tensor_model_parallel_size if args.sequence_parallel else 0
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            values["sequences_per_dataset"] = json.load(file)
    return GPTDatasetConfig(tokenizer=get_tokenizer(), **values)


def train_valid_test_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the three datasets on the ranks that read data (`None` elsewhere).

    Args:
        num_samples: How many samples training, validation and test will ask for.
        vp_stage: Virtual pipeline stage.
    """
    args = get_args()

    def builds() -> bool:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return False
        return bool(args.dataloader_inter_document_masking) or stage_reads_data(args, vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building the train, validation and test datasets")
    built = BlendedMegatronDatasetBuilder(dataset, num_samples, builds, dataset_config(args)).build()
    print_rank_0("> the datasets are built")
    train, valid, test = built
    return train, valid, test


# Every rank calls the provider; those that build nothing still take part in the barriers.
train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]


@functools.cache
def _stage_role(vp_stage: int | None) -> tuple[bool, bool]:
    args = get_args()
    return stage_reads_data(args, vp_stage), stage_has_mtp(args, vp_stage)


def get_batch(data_iterator: Any, micro_batch_size: int, vp_stage: int | None = None) -> dict[str, Any]:
    """The next micro batch, broadcast over the tensor-parallel group and cut along the sequence for context parallelism.

    Args:
        data_iterator: Yields dictionaries of tensors on tensor-parallel rank 0; not read on the others.
        micro_batch_size: Sequences in it; validation may use another number than training.
        vp_stage: Virtual pipeline stage.

    Returns:
        `tokens`, `position_ids`, `labels`: int64 `[batch, seq / cp]`; `loss_mask`: fp32 of that shape; `attention_mask`:
        bool `[batch, 1, seq, seq]` or `None`; document boundaries `cu_seqlens*`, `max_seqlen`, or `None`. Whatever this
        pipeline stage doesn't need is `None` or missing.
    """
    args = get_args()
    packed = bool(args.dataloader_inter_document_masking)
    reads_data, has_mtp = _stage_role(vp_stage)
    if not reads_data and not packed:
        return {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        fresh = next(data_iterator)
        batch = {name: _to_device(fresh.get(name)) for name in _BATCH_FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if reads_data:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=packed,
        )
    return batch


def _to_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cuda(non_blocking=True)


def packed_sequences(batch: dict[str, Any], seq_length: int) -> PackedSeqParams | None:
    """Document boundaries inside the batch as Megatron's attention takes them; `None` unless documents are kept apart."""
    boundaries = batch.get("cu_seqlens")
    if boundaries is None:
        return None
    padded = batch.get("cu_seqlens_padded")
    boundaries = boundaries.squeeze(0)
    padded = None if padded is None else padded.squeeze(0)
    longest = int(batch["max_seqlen"].item())
    used = boundaries if padded is None else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=seq_length,
    )
