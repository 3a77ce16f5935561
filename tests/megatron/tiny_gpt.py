"""A GPT of a few thousand parameters, trained through Megatron's own schedules, DDP, optimizer and checkpoints.

    result = train(Job(tensor=2, pipeline=2, sequence_parallel=True))

Runs inside a `@ranks(..., megatron=True)` body; the data-parallel size is what the world leaves. Every job makes its process
groups anew, so that one launch of processes runs many.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCAB = 64
SEQ = 16
MICRO_BATCH = 2


@dataclass(frozen=True)
class Job:
    """What to train, and how.

    Attributes:
        spec: `turbo` (this package's spec), or `local` (Megatron's).
        turbo: A `TurboConfig` as YAML would hold it.
        model: Settings of `TransformerConfig` that differ from the tiny model's.
        steps, micro_batches: Optimizer steps, and micro batches a step.
        seed: Of weights and dropout; data do not depend on it.
        optimizer: Settings of `OptimizerConfig` that differ.
        ddp: Settings of `DistributedDataParallelConfig` that differ.
        load, save: Checkpoint folders; `optimizer_state`: whether they hold the optimizer.
        first_step: Steps whose data a resumed run skips.
        hybrid: Layer pattern of a hybrid model to train instead of a GPT.
        match_keys: Rename the loaded keys to those of the checkpoint (`match_checkpoint_keys`).
    """

    spec: str = "turbo"
    turbo: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    bf16: bool = False
    distributed_optimizer: bool = False
    steps: int = 20
    micro_batches: int = 2
    seed: int = 1234
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    load: str | None = None
    save: str | None = None
    optimizer_state: bool = True
    first_step: int = 0
    match_keys: bool = False
    hybrid: str | None = None
    on_model: Callable[[list[Any]], None] | None = None

    def but(self, **changes: Any) -> Job:
        """The same job with other settings."""
        return dataclasses.replace(self, **changes)


@dataclass
class Result:
    """What a rank saw.

    Attributes:
        losses: [step][micro batch], on the last pipeline stage; empty elsewhere.
        gradient_norms: [step][0], over the whole model.
        models: The model chunks, wrapped.
    """

    losses: list[list[float]]
    gradient_norms: list[list[float]]
    models: list[Any]
    optimizer: Any
    config: Any

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> value after the last step, of this rank's chunks."""
        return {f"{i}.{k}": v.detach().clone() for i, m in enumerate(self.models) for k, v in m.named_parameters()}


def train(job: Job) -> Result:
    """Trains the job on this rank; collective over all ranks."""
    start(job)
    config = make_config(job)
    models = build(job, config)
    if job.on_model is not None:
        job.on_model(models)
    models, optimizer = wrap(job, config, models)
    if job.load is not None:
        load(job, models, optimizer)
    losses, norms = run_steps(job, config, models, optimizer)
    if job.save is not None:
        save(job, models, optimizer)
    return Result(losses, norms, models, optimizer, config)


def start(job: Job) -> None:
    """Process groups and random states."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=job.virtual,
        context_parallel_size=job.context,
        expert_model_parallel_size=job.expert,
        expert_tensor_parallel_size=1 if job.expert > 1 else None,
    )
    torch.manual_seed(job.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(job.seed, force_reset_rng=True)


def make_config(job: Job) -> Any:
    """The tiny Llama: RMSNorm, SwiGLU, grouped queries."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if job.bf16 else torch.float32
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": job.tensor,
        "pipeline_model_parallel_size": job.pipeline,
        "virtual_pipeline_model_parallel_size": job.virtual,
        "context_parallel_size": job.context,
        "expert_model_parallel_size": job.expert,
        "expert_tensor_parallel_size": 1 if job.expert > 1 else None,
        "sequence_parallel": job.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": job.bf16,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "batch_p2p_sync": False,
        "attention_softmax_in_fp32": True,
        "transformer_impl": "local",
    }
    settings.update(job.model)
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(**settings)


def specs(job: Job, config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """(decoder spec, MTP spec) of one model chunk."""
    from megatron.core.models.gpt import gpt_layer_specs as megatrons

    if job.spec == "turbo":
        from primus_turbo_plugin.precision.config import TurboConfig
        from primus_turbo_plugin.specs.checkpoint import checkpoint_to_read
        from primus_turbo_plugin.specs.gpt import gpt_layer_spec, gpt_mtp_spec

        turbo = TurboConfig.from_dict(job.turbo)
        keys = checkpoint_to_read(job.load)
        mtp = gpt_mtp_spec(config, turbo, vp_stage, checkpoint=keys) if config.mtp_num_layers else None
        return gpt_layer_spec(config, turbo, vp_stage, checkpoint=keys), mtp
    options = {
        "use_transformer_engine": False,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }
    spec = megatrons.get_gpt_decoder_block_spec(config, **options, vp_stage=vp_stage)
    if config.normalization == "RMSNorm":
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        spec.layer_norm = WrappedTorchNorm  # Megatron names FusedLayerNorm where Apex is, which has no RMSNorm
    if config.multi_latent_attention:  # Megatron's local core attention does not take MLA's head sizes
        from primus_turbo_plugin.modules import TurboDotProductAttention

        for layer in spec.layer_specs or ():
            layer.submodules.self_attention.submodules.core_attention = TurboDotProductAttention
    if not config.mtp_num_layers:
        return spec, None
    layers = megatrons.get_gpt_decoder_layer_specs(config, **options)
    return spec, megatrons.get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage)


def build(job: Job, config: Any) -> list[Any]:
    """This rank's model chunks."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    models = []
    for chunk in range(job.virtual or 1):
        vp_stage = chunk if job.virtual else None
        if job.hybrid is not None:
            models.append(_hybrid(job, config))
            continue
        first = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        spec, mtp = specs(job, config, vp_stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            mtp_block_spec=mtp,
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            position_embedding_type="rope",
            pre_process=ps.is_pipeline_first_stage(**first),
            post_process=ps.is_pipeline_last_stage(**first),
            vp_stage=vp_stage,
        )
        models.append(Float16Module(config, model) if job.bf16 else model)
    return models


def _hybrid(job: Job, config: Any) -> Any:
    from megatron.core import parallel_state as ps

    from primus_turbo_plugin.precision.config import TurboConfig
    from primus_turbo_plugin.specs import compat
    from primus_turbo_plugin.specs.hybrid import hybrid_stack_spec

    spec = hybrid_stack_spec(config, TurboConfig.from_dict(job.turbo))
    options: dict[str, Any] = {
        "config": config,
        "vocab_size": VOCAB,
        "max_sequence_length": SEQ,
        "position_embedding_type": "rope",
        "pre_process": ps.is_pipeline_first_stage(),
        "post_process": ps.is_pipeline_last_stage(),
    }
    minor = compat.facts().version.minor
    if minor >= 18:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=job.hybrid, **options)
    from megatron.core.models.mamba import MambaModel

    pattern = "hybrid_override_pattern" if minor < 17 else "hybrid_layer_pattern"
    return MambaModel(mamba_stack_spec=spec, **{pattern: job.hybrid}, **options)


def wrap(job: Job, config: Any, models: list[Any]) -> tuple[list[Any], Any]:
    """Data parallelism and the optimizer around the chunks."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": job.distributed_optimizer, **job.ddp}
    ddp_config = DistributedDataParallelConfig(**ddp)
    models = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0) for i, model in enumerate(models)
    ]
    for model in models:
        model.broadcast_params()
    settings = {
        "optimizer": "adam",
        "lr": 3e-3,
        "weight_decay": 0.01,
        "adam_eps": 1e-4,  # or rounding errors of gradients near zero are blown up into whole steps
        "clip_grad": 1.0,
        "bf16": job.bf16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": job.distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
        **job.optimizer,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), models)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        syncs = [model.no_sync for model in models]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        gathers = [model.start_param_sync for model in models]
        config.param_sync_func = gathers if len(gathers) > 1 else gathers[0]
    return models, optimizer


def batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Arithmetic progressions modulo the vocabulary: learnable. Jobs with equal global batches see the same data, however
    these are spread over data-parallel ranks and micro batches.
    """
    from megatron.core import parallel_state as ps

    ranks, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    size, part = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    positions = torch.arange(SEQ)[None].expand(MICRO_BATCH, -1)
    for step in itertools.count(job.first_step):
        for micro in range(job.micro_batches):
            sample = (step * ranks + rank) * job.micro_batches + micro
            first = torch.randint(0, VOCAB, (MICRO_BATCH, 1), generator=torch.Generator().manual_seed(sample))
            tokens = (first + 7 * torch.arange(SEQ + 1)) % VOCAB
            batch = (tokens[:, :-1], positions, tokens[:, 1:])
            if size > 1:  # Megatron's order under context parallelism: chunk r and chunk 2 * size - 1 - r
                chunks = (part, 2 * size - 1 - part)
                batch = tuple(torch.cat([x.chunk(2 * size, dim=1)[i] for i in chunks], dim=1) for x in batch)  # type: ignore[assignment]
            yield batch


def run_steps(job: Job, config: Any, models: list[Any], optimizer: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Optimizer steps through Megatron's schedule: losses and gradient norms."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [batches(job) for _ in models]
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1) if job.context == 1 else None

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens, positions, labels = next(iterator)
        output = model(tokens, positions, mask, labels=labels)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            # Megatron multiplies by the context-parallel size, for losses that are summed over the group.
            return loss / job.context, {"loss": loss.detach().clone()}

        return output, loss_of

    history: list[list[float]] = []
    norms: list[list[float]] = []
    for _ in range(job.steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        seen = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=job.micro_batches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        ok, norm, _ = optimizer.step()
        assert ok
        norms.append([float(norm)])
        if seen:
            history.append([float(item["loss"]) for item in seen])
    return history, norms


def bare(model: Any) -> Any:
    """The GPTModel inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _sharded(job: Job, models: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    metadata = {**_METADATA, "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        f"model{i if len(models) > 1 else ''}": bare(model).sharded_state_dict(metadata=metadata)
        for i, model in enumerate(models)
    }
    if job.optimizer_state:
        weights = state if len(models) > 1 else state["model"]
        state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return state


def save(job: Job, models: list[Any], optimizer: Any) -> None:
    """A torch_dist checkpoint, as Megatron's training loop writes it."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(job.save or "").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    _write_in_this_process()
    dist_checkpointing.save(_sharded(job, models, optimizer, loading=False), job.save)
    torch.save(_random_states(), Path(job.save or "") / f"random_{dist.get_rank()}.pt")
    dist.barrier()


def _write_in_this_process() -> None:
    """Megatron's writer collects its results through a server process, which a test's (daemonic) process may not have and
    would leave behind; a saver that waits needs none.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    for name in ("get_write_results_queue", "_get_write_results_queue"):  # from 0.17, and before
        if name in vars(filesystem_async):
            setattr(filesystem_async, name, lambda *_, **__: results)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _random_states() -> dict[str, Any]:
    """What Megatron's training loop saves of a rank's random state."""
    from megatron.core import tensor_parallel

    return {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}


def load(job: Job, models: list[Any], optimizer: Any) -> None:
    """Loads weights, and the optimizer's state if the job says so."""
    from megatron.core import dist_checkpointing

    from primus_turbo_plugin.specs.checkpoint import match_checkpoint_keys

    wanted = _sharded(job, models, optimizer, loading=True)
    if job.match_keys:
        match_checkpoint_keys(wanted, job.load or "")
    state = dist_checkpointing.load(wanted, job.load)
    for i, model in enumerate(models):
        bare(model).load_state_dict(state[f"model{i if len(models) > 1 else ''}"])
    if job.optimizer_state:
        optimizer.load_state_dict(state["optimizer"])
    else:
        optimizer.reload_model_params()
    random_states = Path(job.load or "") / f"random_{dist.get_rank()}.pt"
    if random_states.exists():
        from megatron.core import tensor_parallel

        states = torch.load(random_states)
        torch.set_rng_state(states["cpu"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def relative_difference(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest |a - b| / |b| over steps and micro batches."""
    first, second = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert first.shape == second.shape, (first.shape, second.shape)
    if not first.numel():
        return 0.0
    return float(((first - second).abs() / second.abs()).max())
