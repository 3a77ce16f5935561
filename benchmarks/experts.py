"""A layer's routed experts, forward and backward: grouped, one by one, and as Megatron's own local experts.

    python -m benchmarks.experts [--layers mixtral_8x7b ...] [--recipes bf16 mxfp4] [--json FILE]

What a layer runs between dispatch and combine: fc1, SwiGLU times the router's probabilities, fc2, with both dgrads and wgrads
into fp32 main_grad (Megatron's own linears without Apex add to .grad in bf16). Tokens arrive sorted by expert, with uneven loads.
They are known to the host, as Megatron's all-to-all dispatcher knows them; `--counts gpu` leaves them to the GPU, for grouped
experts alone. Eager launches, one at a time, the L2 cache overwritten before each: what is launched late is in the figures. FLOPs
are those of the six products, and the roof a large bf16 product's on this device. Weights are quantised once, as within a step;
activations and gradients every time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._timing import HEADER, Row, describe_machine, measure, measure_launches, report
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.recipe import Recipe

_SNR_DB = 40.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of one GPU.

    Attributes:
        name: The model.
        experts: On this GPU.
        hidden, ffn: Sizes of one.
        tokens: Rows that arrive: tokens times the experts each goes to.
    """

    name: str
    experts: int
    hidden: int
    ffn: int
    tokens: int

    def counts(self) -> Tensor:
        """Tokens of every expert: shares as of a softmax of normal numbers, the second expert's none."""
        share = torch.softmax(0.5 * torch.randn(self.experts, generator=torch.Generator().manual_seed(self.experts)), 0)
        share[1 % self.experts] *= self.experts == 1
        counts = (share / share.sum() * self.tokens).floor().long()
        counts[0] += self.tokens - counts.sum()
        return counts

    @property
    def flops(self) -> float:
        """Of fc1 (gate and up) and fc2, forward and twice backward."""
        return 3 * 2.0 * self.tokens * self.hidden * self.ffn * 3


LAYERS = (
    Layer(name="mixtral_8x7b", experts=8, hidden=4096, ffn=14336, tokens=8192 * 2),
    Layer(name="deepseek_v2_lite", experts=64, hidden=2048, ffn=1408, tokens=8192 * 6),
    Layer(name="qwen3_30b_a3b", experts=128, hidden=2048, ffn=768, tokens=8192 * 8),
)
KINDS = ("Megatron, one by one", "primus_turbo, one by one", "primus_turbo, grouped")


def build(layer: Layer, kind: str, recipe: str, device: torch.device) -> Any:
    """The experts, with gradient buffers as Megatron's DDP attaches them."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import ModuleSpec

    from primus_turbo_plugin import modules as ours

    plan = ModulePlan(precision=Recipe.preset(recipe).linear(), recipe=recipe)
    linears: dict[str, tuple[type, type]] = {
        KINDS[0]: (ColumnParallelLinear, RowParallelLinear),
        KINDS[1]: (ours.TurboColumnParallelLinear, ours.TurboRowParallelLinear),
        KINDS[2]: (ours.TurboColumnParallelGroupedLinear, ours.TurboRowParallelGroupedLinear),
    }
    slots = [
        linear if kind == KINDS[0] else ModuleSpec(module=linear, params={"plan": plan}) for linear in linears[kind]
    ]
    owner = ours.TurboGroupedMLP if kind == KINDS[2] else SequentialMLP
    submodules = MLPSubmodules(linear_fc1=slots[0], linear_fc2=slots[1])
    config = _config(layer, fused=kind != KINDS[0], device=device)
    experts = owner(layer.experts, config, submodules, get_default_pg_collection())
    for parameter in experts.parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.02)
        if kind != KINDS[0]:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
    return experts


def _config(layer: Layer, *, fused: bool, device: torch.device) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=layer.hidden,
        ffn_hidden_size=layer.ffn,
        num_attention_heads=1,
        num_moe_experts=layer.experts,
        moe_ffn_hidden_size=layer.ffn,
        moe_router_topk=1 + (layer.experts > 1),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=device.type != "cpu",
        gradient_accumulation_fusion=fused,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        expert_tensor_parallel_size=1,
    )


def step_of(experts: Any, layer: Layer, counts: Tensor, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward on the same inputs for everybody: (y, dx)."""
    generator = torch.Generator(device).manual_seed(1)
    shape, random = (layer.tokens, layer.hidden), {"generator": generator, "device": device}
    x, dy = (torch.randn(shape, dtype=torch.bfloat16, **random) for _ in range(2))
    probs = torch.rand(layer.tokens, **random)
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        for parameter in experts.parameters():
            parameter.grad = None
        x.grad = None
        y, _ = experts(x, counts, probs)
        y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad

    return step


def same_weights(grouped: Any, one_by_one: Any) -> None:
    """Gives grouped experts the weights of a SequentialMLP."""
    grouped.load_state_dict(one_by_one.state_dict())


def snr_db(value: Tensor, reference: Tensor) -> float:
    """10 log10 |reference|^2 / |value - reference|^2."""
    error = (value.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / error.clamp_min(1e-300)))


def rows(layer: Layer, recipes: list[str], device: torch.device, *, counts_on_gpu: bool, roof: float) -> Iterator[Row]:
    """One row a kind and recipe; every result is compared with this package's experts one by one in that recipe."""
    shape = f"{layer.name} {layer.tokens}x{layer.hidden}x{layer.ffn}/{layer.experts}"
    known = layer.counts()
    for recipe in recipes:
        one_by_one = build(layer, KINDS[1], recipe, device)
        expected = step_of(one_by_one, layer, known, device)()
        for kind in KINDS if recipe == "bf16" else KINDS[1:]:
            experts = one_by_one if kind == KINDS[1] else build(layer, kind, recipe, device)
            if experts is not one_by_one:
                same_weights(experts, one_by_one)
            _quantise_once(experts)
            counts = known.to(device) if kind == KINDS[2] and counts_on_gpu else known
            step = step_of(experts, layer, counts, device)
            quality = min(snr_db(ours, theirs) for ours, theirs in zip(step(), expected))
            us, low, high = measure_launches(step)
            ok = f"{quality:.0f} dB" if quality >= _SNR_DB else f"WRONG: {quality:.0f} dB"
            yield Row(
                op=f"experts {recipe}", shape=shape, backend=kind, us=us, us_p20=low, us_p80=high, bytes=0, flops=layer.flops,
                roof=roof, ok=ok,
            )  # fmt: skip
            if experts is not one_by_one:
                del experts, step
                torch.cuda.empty_cache()


def _quantise_once(experts: Any) -> None:
    """As Megatron's schedules announce a step: copies of the weights are made at the first forward, and kept."""
    for module in experts.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True


def bf16_rate(size: int = 8192) -> float:
    """FLOP/s of a square product by torch."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us, _, _ = measure(lambda _: a @ b, 1)
    return 2.0 * size**3 / (us * 1e-6)


def start(backend: str) -> None:
    """Process groups of one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = f"file://{tempfile.mktemp()}"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=[layer.name for layer in LAYERS])
    parser.add_argument("--recipes", nargs="+", default=["bf16", "mxfp8", "mxfp4", "fp8_tensorwise"])
    parser.add_argument("--counts", choices=("host", "gpu"), default="host", help="who knows each expert's tokens")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    start("nccl")
    print(describe_machine().rpartition(", cold")[0] + ", eager launches, cold L2, median", flush=True)
    print(HEADER)
    roof = bf16_rate()
    for layer in LAYERS:
        if not args.layers or layer.name in args.layers:
            on_gpu, device = args.counts == "gpu", torch.device("cuda")
            report(rows(layer, args.recipes, device, counts_on_gpu=on_gpu, roof=roof), args.json)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
