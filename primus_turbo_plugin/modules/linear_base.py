"""What the turbo linears share: plan, kernels, weight cache, gradient accumulation, delayed wgrad."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import group_size
from primus_turbo_plugin.communication.opening import note_not_overlapped, overlap_of
from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.autocast import compute_dtype
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, OverlapUse, Rounding, TensorParallel
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.functional.weight_cache import WeightCache
from primus_turbo_plugin.functional.wgrad import WgradQueue
from primus_turbo_plugin.modules.main_grad import (
    MainGradSink,
    add_to_grad,
    move_grad_to_main_grad,
    refuse_fsdp,
    wgrad_dtype,
)
from primus_turbo_plugin.modules.megatron_contract import REFUSED_KEYWORDS, check_settings
from primus_turbo_plugin.precision.module_plan import ModulePlan, check_shapes


class TurboLinearMixin:
    """Runs `functional.linear` with a module's plan. A class that uses it calls `setup_turbo` at the end of its constructor.

    Attributes:
        plan: What the module runs.
        path: Its name in messages.
        tp_comm_buffer_name: Megatron's name for layers of this kind: qkv, proj, fc1, fc2.
        kernel_choice: Who chooses its kernels: `LinearKernels`, or that of grouped linears.
    """

    # Of the torch.nn.Module and the Megatron linear it is mixed into.
    config: Any
    weight: Any
    tp_group: Any
    training: bool
    gradient_accumulation_fusion: bool
    tp_comm_buffer_name: str | None = None
    kernel_choice: Any = LinearKernels

    def setup_turbo(
        self, plan: ModulePlan | None, in_features: int, out_features: int, *, split: Literal["in", "out"] | None
    ) -> None:
        """Takes the plan and checks sizes and Megatron's settings against it.

        Args:
            plan: None for BF16.
            in_features: K of the whole layer.
            out_features: N of the whole layer.
            split: Which of the two is spread over `self.tp_group`; None for neither.

        Raises:
            ShapeError: A size needs padding that the plan refuses.
            UnsupportedError: A setting that is not implemented.
        """
        self.plan = plan or ModulePlan.default()
        self.path = self.plan.path or type(self).__name__
        ranks = group_size(self.tp_group) if split else 1
        check_settings(self.path, self.config, plan, tensor_parallel=ranks > 1)
        check_shapes(self.plan, in_features, out_features, tp=ranks, split=split)
        if getattr(self, "gtp_remat_size", 1) > 1:
            raise UnsupportedError(f"{self.path}: gtp_remat_group: {REFUSED_KEYWORDS['gtp_remat_group']}.")
        self._weight_cache = WeightCache() if self._quantizes_weight else None
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._parallel: dict[tuple[Any, ...], TensorParallel] = {}
        self._is_stochastic = self.plan.precision.is_stochastic
        self._wgrad_queue = WgradQueue()
        self._wgrad_hooks: list[Callable[[], None]] = []
        self._first_microbatch = True
        if self.config.delay_wgrad_compute and self.weight is not None:
            self.weight.skip_backward_post_hook = True  # DDP then hands its hook to this module, see below

    def run_linear(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        parallel: TensorParallel,
        *,
        fused: bool,
        defer: Callable[[Tensor], bool] | None = None,
        front: Callable[[Tensor, Any, LinearCall], tuple[Tensor, LinearCall]] | None = None,
    ) -> Tensor:
        """y = x @ weight.T + bias over any leading dimensions of x.

        Args:
            x: [..., in] of this rank; the first dimension is the one that sequence parallelism splits.
            weight: [out, in] of this rank.
            bias: [out] or None.
            parallel: Split and collectives.
            fused: Whether dw goes to `weight.main_grad`.
            defer: Asked in backward, with dy as it came: whether to leave dw to the caller.
            front: Makes x from what is passed as x: (x [tokens, in], weight, call) to the x and the call that are run.

        Returns:
            [..., out]; the first dimension is as many times longer or shorter as `parallel` gathers or scatters.
        """
        refuse_fsdp(weight, self.path)
        self._check_sequence(x, parallel)
        sink = MainGradSink(weight, self.path) if fused else None
        first, leading = self._first_dim(x, parallel), x.shape[1:-1]
        call = LinearCall(
            plan=self.plan,
            kernels=self._select_kernels(x, weight, fused=sink is not None),
            parallel=parallel,
            overlap=self._overlap_use(parallel, x.device),
            sink=sink,
            delay=partial(self._delay, weight, sink) if self.config.delay_wgrad_compute else None,
            defer=None if defer is None else lambda dy: defer(dy.reshape(first, *leading, dy.shape[-1])),
            cache=self._cache_of(weight),
            transpose_weight=self.training,
            rounding=self._draw_rounding(),
        )
        x = x if x.dim() == 2 else x.flatten(0, -2)
        if front is not None:
            x, call = front(x, weight, call)
        y = linear(x, weight, bias, call)
        if self._first_microbatch:  # assigning to a module's attribute takes longer than looking
            self._first_microbatch = False
        return y.view(first, *leading, y.shape[-1])

    def tensor_parallel(
        self, mode: Literal["column", "row"], group: Any, *, sequence_parallel: bool, reduce: bool
    ) -> TensorParallel:
        """The split that these arguments say, made once."""
        key = (mode, group, sequence_parallel, reduce)
        if key not in self._parallel:
            self._parallel[key] = TensorParallel(
                mode=mode, group=group, sequence_parallel=sequence_parallel, reduce=reduce
            )
        return self._parallel[key]

    def _overlap_use(self, parallel: TensorParallel, device: torch.device) -> OverlapUse | None:
        """Which collectives of this layer run under its GEMMs, as the plan says; None where there are none to hide."""
        chosen = self.plan.communication
        if not chosen.tp_overlap or not (parallel.gathers_input or parallel.scatters_output):
            return None
        if self.tp_comm_buffer_name in chosen.except_for:
            return None
        assert parallel.group is not None
        return OverlapUse(
            overlap=overlap_of(parallel.group, device, chosen),
            gather=chosen.gather,
            scatter=chosen.scatter,
            bulk_gather=chosen.bulk_gather,
            bulk_scatter=chosen.bulk_scatter,
            scatter_dgrad=chosen.scatter_dgrad,
            note=self._note_not_overlapped,
        )

    def _note_not_overlapped(self, what: str, why: str) -> None:
        """Once for layers that differ in nothing but their number."""
        note_not_overlapped(f"{what} of {re.sub(r'[.]layers[.][0-9]+[.]', '.layers.*.', self.path)}", why)

    def _check_sequence(self, x: Tensor, parallel: TensorParallel) -> None:
        if parallel.scatters_output and x.shape[0] % parallel.size:
            raise ShapeError(
                f"{self.path}: with sequence parallelism the sequence must divide by the tensor-parallel size {parallel.size}, "
                f"got {x.shape[0]} of {list(x.shape)}. Pad the sequence, or turn sequence parallelism off."
            )

    @staticmethod
    def _first_dim(x: Tensor, parallel: TensorParallel) -> int:
        if parallel.scatters_output:
            return x.shape[0] // parallel.size
        return x.shape[0] * (parallel.size if parallel.gathers_input else 1)

    def _select_kernels(self, x: Tensor, weight: Any, *, fused: bool) -> Any:
        """The kernels for tensors like these, chosen once."""
        dtype = compute_dtype(x)
        dw_dtype, accumulate = wgrad_dtype(weight, fused=fused)
        key = (x.device, dtype, dw_dtype, accumulate)
        if key not in self._kernels:
            self._kernels[key] = self.kernel_choice.select(
                self.plan, x.device, dtype, wgrad_dtype=dw_dtype, accumulate=accumulate
            )
        return self._kernels[key]

    @property
    def _quantizes_weight(self) -> bool:
        precision = self.plan.precision
        return precision.fprop_w.is_quantized or precision.dgrad_w.is_quantized

    def _cache_of(self, weight: Any) -> WeightCache | None:
        """The weight's cache, where every change of the weight is known to reach it."""
        cache = self._weight_cache
        if cache is None:
            return None
        under_ddp = getattr(weight, "main_grad", None) is not None  # which DDP gives it
        if cache.covers(training=self.training, under_ddp=under_ddp):
            return cache
        cache.clear()
        return None

    def _draw_rounding(self) -> Rounding | None:
        """Random bits for this forward. Megatron checkpoints and replays the generator: so do resumption and recomputation.

        Raises:
            UnsupportedError: A CUDA graph is being captured, which would replay this one draw for ever.
        """
        if not self._is_stochastic:
            return None
        precision = self.plan.precision
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not (self.training or torch.is_grad_enabled() or self._rounds_in_fprop):
            return Rounding(seed=precision.rounding_seed, draw=0, rank=rank, path=self.path)  # of no use, so not drawn
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{self.path}: recipe '{self.plan.recipe}' rounds stochastically, and a CUDA graph would replay the same "
                "random bits in every step. Turn CUDA graphs off, or set rounding: nearest."
            )
        draw = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
        return Rounding(seed=precision.rounding_seed, draw=draw, rank=rank, path=self.path)

    @property
    def _rounds_in_fprop(self) -> bool:
        """Whether evaluation rounds stochastically too. Where it does not it draws nothing, so it changes no training."""
        return "stochastic" in (self.plan.precision.fprop_x.rounding, self.plan.precision.fprop_w.rounding)

    def _delay(self, weight: Any, sink: MainGradSink | None, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Leaves dw to `backward_dw`. A DDP that left its hook here expects a gradient to be there by then."""

        def deliver(dw: Tensor) -> None:
            add_to_grad(weight, dw)
            if not self._wgrad_hooks:
                move_grad_to_main_grad(weight)

        self._wgrad_queue.put(compute, deliver)
        return sink.delivered() if sink is not None and self._wgrad_hooks else None

    def backward_dw(self) -> None:
        """Computes the weight gradients that backward passes have left since the last call (`config.delay_wgrad_compute`)."""
        if not len(self._wgrad_queue):
            return
        self._wgrad_queue.run()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """DDP's hook for a weight marked `skip_backward_post_hook`: called when its delayed gradient is there."""
        self._wgrad_hooks.append(hook)

    def finish_init(self, quantization_config: Any) -> None:
        """Megatron hands each module what `config.quant_recipe` says of it.

        Raises:
            ConfigError: It says anything: turbo modules take their precision from their plan.
        """
        if quantization_config is not None:
            raise ConfigError(
                f"{self.path}: quant_recipe (--te-precision-config-file) configures this module, but turbo modules take their "
                f"precision from TurboConfig. Remove the match, or set linear: transformer_engine. Got {quantization_config!r}."
            )

    @property
    def is_first_microbatch(self) -> bool:
        """Whether a step's first microbatch is still to come.

        Megatron's schedules set this where `config.fp8`, `fp4` or a quantisation recipe is set; `TurboTransformerLayer` does
        wherever a schedule begins. Setting it makes the weight's quantised copies stale. They are also dropped when an optimizer
        steps or the weight changes in a way torch records; see `functional/weight_cache.py`.
        """
        return self._first_microbatch

    @is_first_microbatch.setter
    def is_first_microbatch(self, value: bool) -> None:
        self._first_microbatch = value
        if value and self._weight_cache is not None:
            self._weight_cache.begin_step(training=self.training)
