"""What benchmarks/host_time.py times: each op by a user's alternative first, then by this package, on the same small inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import experts as moe
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.norm import rms_norm
from primus_turbo_plugin.kernels.attention import AttentionMask
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import Recipe

OURS = "primus_turbo"
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Small enough that a GPU is done before the host is: the host's time does not depend on them.

    Attributes:
        tokens, hidden, ffn: Of a layer.
        heads: Of attention, 128 wide unless hidden is smaller; half as many of keys in the layer.
        experts: Of a layer of experts, `hidden` wide and `ffn` deep.
    """

    tokens: int = 256
    hidden: int = 512
    ffn: int = 1024
    heads: int = 4
    experts: int = 4

    @property
    def head(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        op: What is done; the first case of an op is what the others are compared with, in time and in result.
        backend: By whom.
        call: The call.
        result: What it computes, to be compared; None where there is nothing to compare.
        leaves: Whose gradients are dropped before every call.
        modules: Those at work, whose quantised weights are kept between calls or not.
    """

    op: str
    backend: str
    call: Callable[[], Any]
    result: Callable[[], Tensor] | None = None
    leaves: tuple[Tensor, ...] = ()
    modules: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Where and in which sizes and recipes."""

    device: torch.device
    sizes: Sizes
    recipes: tuple[str, ...]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def megatron(self, *, fused: bool) -> Any:
        """A `TransformerConfig` of one Llama layer; `fused`: wgrads are added to main_grad."""
        from megatron.core.transformer import TransformerConfig

        s = self.sizes
        return TransformerConfig(
            num_layers=1, hidden_size=s.hidden, ffn_hidden_size=s.ffn, num_attention_heads=s.heads,
            num_query_groups=max(1, s.heads // 2), params_dtype=torch.bfloat16, bf16=True, normalization="RMSNorm",
            layernorm_epsilon=_EPS, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
            bias_activation_fusion=self.device.type != "cpu", masked_softmax_fusion=False, attention_dropout=0.0,
            hidden_dropout=0.0, gradient_accumulation_fusion=fused, use_cpu_initialization=self.device.type == "cpu",
        )  # fmt: skip


def every_case(setting: Setting) -> Iterator[Case]:
    """All cases, cheapest first; captured graphs last, since a capture that fails may spoil what follows."""
    for cases in (_one_launch, _quantize, _norm, _attention, _linear, _norm_linear, _experts, _layer):
        yield from cases(setting)


def _one_launch(setting: Setting) -> Iterator[Case]:
    x = setting.random(setting.sizes.tokens, setting.sizes.hidden)
    yield Case(op="one launch", backend="torch.clone", call=x.clone)


def _quantize(setting: Setting) -> Iterator[Case]:
    """Both copies of an activation, as a linear makes them."""
    x = setting.random(setting.sizes.tokens, setting.sizes.hidden)
    for name, row, column in (
        ("mxfp8", QuantSpec(format=Format.MXFP8), QuantSpec(format=Format.MXFP8)),
        ("mxfp4", QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP4, hadamard=16)),
    ):
        if name in setting.recipes:
            kernels = default_registry().select("quantize", QuantizeRequest.of(x, row, column)).kernels

            def both(kernels: Any = kernels, row: QuantSpec = row, column: QuantSpec = column) -> Any:
                return kernels.quantize_both(x, row, column)

            yield Case(op=f"quantize {name}", backend=OURS, call=both)


def _norm(setting: Setting) -> Iterator[Case]:
    x, dy = (setting.random(setting.sizes.tokens, setting.sizes.hidden) for _ in range(2))
    weight = setting.random(setting.sizes.hidden).requires_grad_()
    x.requires_grad_()
    functions: dict[str, Callable[[], Tensor]] = {
        "F.rms_norm": lambda: F.rms_norm(x, x.shape[-1:], weight, _EPS),
        OURS: lambda: rms_norm(x, weight, _EPS),
    }
    yield from _passes("rms_norm", functions, dy, x, (weight,))


def _attention(setting: Setting) -> Iterator[Case]:
    s = setting.sizes
    q, k, v, dout = (setting.random(s.tokens, 1, s.heads, s.head) for _ in range(4))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))
    mask = AttentionMask(causal=True)

    def sdpa() -> Tensor:
        turned = (t.permute(1, 2, 0, 3) for t in leaves)
        return F.scaled_dot_product_attention(*turned, is_causal=True).permute(2, 0, 1, 3)

    functions: dict[str, Callable[[], Tensor]] = {"SDPA": sdpa, OURS: lambda: attention(*leaves, mask=mask)}
    yield from _passes("attention", functions, dout, q, leaves[1:])


def _linear(setting: Setting) -> Iterator[Case]:
    """A column-parallel linear of one rank."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    s = setting.sizes
    x, dy = setting.random(s.tokens, 1, s.hidden).requires_grad_(), setting.random(s.tokens, 1, s.ffn)
    weight = (setting.random(s.ffn, s.hidden) * s.hidden**-0.5).requires_grad_()
    megatron = _column(setting, ColumnParallelLinear, weight, fused=False)
    functions: dict[str, Callable[[], Tensor]] = {
        "F.linear": lambda: F.linear(x, weight),
        "Megatron": lambda: megatron(x)[0],
    }
    ours = _columns_by_recipe(setting, TurboColumnParallelLinear, weight)
    functions |= {name: lambda module=module: module(x)[0] for name, module in ours.items()}  # type: ignore[misc]
    yield from _passes("linear", functions, dy, x, [weight, *megatron.parameters()], ours.values())


def _norm_linear(setting: Setting) -> Iterator[Case]:
    """RMS norm and a column-parallel linear: two modules of Megatron's, one of ours."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from primus_turbo_plugin.modules import TurboLayerNormColumnParallelLinear

    s = setting.sizes
    x, dy = setting.random(s.tokens, 1, s.hidden).requires_grad_(), setting.random(s.tokens, 1, s.ffn)
    weight = (setting.random(s.ffn, s.hidden) * s.hidden**-0.5).requires_grad_()
    gamma = torch.ones(s.hidden, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    megatron = _column(setting, ColumnParallelLinear, weight, fused=False)

    def normed() -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gamma, _EPS)

    functions: dict[str, Callable[[], Tensor]] = {
        "F.rms_norm, F.linear": lambda: F.linear(normed(), weight),
        "F.rms_norm, Megatron": lambda: megatron(normed())[0],
    }
    ours = _columns_by_recipe(setting, TurboLayerNormColumnParallelLinear, weight)
    functions |= {name: lambda module=module: module(x)[0] for name, module in ours.items()}  # type: ignore[misc]
    yield from _passes("norm + linear", functions, dy, x, [weight, gamma, *megatron.parameters()], ours.values())


def _experts(setting: Setting) -> Iterator[Case]:
    """A layer's routed experts, forward and backward, their tokens known to the host; grouped ones also if only to the GPU."""
    s, device = setting.sizes, setting.device
    layer = moe.Layer(name="small", experts=s.experts, hidden=s.hidden, ffn=s.ffn, tokens=s.tokens)
    counts, probs = layer.counts(), torch.rand(s.tokens, device=device)
    x, dy = setting.random(s.tokens, s.hidden).requires_grad_(), setting.random(s.tokens, s.hidden)
    megatron = moe.build(layer, moe.KINDS[0], "bf16", device)
    made = [("Megatron, one by one", megatron, counts)]
    for recipe in setting.recipes:
        grouped = moe.build(layer, moe.KINDS[2], recipe, device)
        moe.same_weights(grouped, megatron)
        made.append((f"{OURS} grouped {recipe}", grouped, counts))
        if device.type != "cpu":
            made.append((f"{OURS} grouped {recipe}, counts on GPU", grouped, counts.to(device)))
    for backend, module, there in made:

        def step(module: Any = module, there: Tensor = there) -> None:
            module(x, there, probs)[0].backward(dy)

        yield Case(
            op="experts fwd+bwd", backend=backend, call=step, result=lambda step=step: _gradient(step, x),
            leaves=(x, *module.parameters()), modules=(module,),
        )  # fmt: skip


def _layer(setting: Setting) -> Iterator[Case]:
    """A Llama layer: Megatron's local spec against ours; forward, forward and backward, and the latter as a replayed graph."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from primus_turbo_plugin import TurboConfig, gpt_layer_spec

    s, device = setting.sizes, setting.device
    x, dy = (setting.random(s.tokens, 1, s.hidden) for _ in range(2))
    x.requires_grad_()
    rotary = RotaryEmbedding(s.head, 1.0, use_cpu_initialization=device.type == "cpu")(s.tokens).to(device)
    config = setting.megatron(fused=False)
    local = build_module(get_gpt_layer_local_spec(normalization="RMSNorm"), config=config, layer_number=1)
    local = local.to(device).bfloat16()  # as Megatron's Float16Module does; its norms are built in fp32
    layers = {"Megatron's local spec": local}
    weights = {name: t for name, t in local.state_dict().items() if name.endswith("weight")}
    for recipe in setting.recipes:
        config = setting.megatron(fused=True)
        spec = gpt_layer_spec(config, TurboConfig(precision=Recipe.preset(recipe)))
        ours = build_module(spec.layer_specs[0], config=config, layer_number=1)
        ours = ours.to(device).bfloat16()
        ours.load_state_dict(weights, strict=False)  # but the norms', which are ones in both and named otherwise
        layers[f"{OURS} {recipe}"] = _with_main_grads(ours)
    functions: dict[str, Callable[[], Tensor]] = {
        name: lambda layer=layer: layer(x, None, rotary_pos_emb=rotary)[0]  # type: ignore[misc]
        for name, layer in layers.items()
    }
    leaves = [parameter for layer in layers.values() for parameter in layer.parameters()]
    yield from _passes("layer", functions, dy, x, leaves, list(layers.values()))
    if device.type != "cpu":
        for name, forward in reversed(functions.items()):
            mine = (x, *layers[name].parameters())

            def step(forward: Callable[[], Tensor] = forward) -> None:
                forward().backward(dy)

            yield Case(op="layer fwd+bwd, graph", backend=name, call=_Graph(step, mine))


class _Graph:
    """A step as a CUDA graph, captured at the first call, and replayed."""

    def __init__(self, step: Callable[[], None], leaves: tuple[Tensor, ...]) -> None:
        self.step, self.leaves = step, leaves
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None:
            from megatron.core.tensor_parallel.random import get_all_rng_states

            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # torch's way to make what must exist before a capture
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(aside)
            for leaf in self.leaves:
                leaf.grad = None
            graph = torch.cuda.CUDAGraph()
            for state in get_all_rng_states().values():  # Megatron's layers switch to them, even for a dropout of 0
                graph.register_generator_state(state)
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph
        self.graph.replay()


def _passes(
    op: str,
    functions: dict[str, Callable[[], Tensor]],
    dy: Tensor,
    x: Tensor,
    others: Any,
    modules: Any = (),
) -> Iterator[Case]:
    """Forward without autograd, with it, and with the backward pass, of each function."""
    leaves, modules = (x, *others), tuple(modules)
    for backend, function in functions.items():

        def without(function: Callable[[], Tensor] = function) -> Tensor:
            with torch.no_grad():
                return function()

        yield Case(op=f"{op} fwd, no grad", backend=backend, call=without, result=without, modules=modules)
    for backend, function in functions.items():
        yield Case(op=f"{op} fwd", backend=backend, call=function, result=function, modules=modules)
    for backend, function in functions.items():

        def both(function: Callable[[], Tensor] = function) -> None:
            function().backward(dy)

        yield Case(
            op=f"{op} fwd+bwd", backend=backend, call=both, result=lambda both=both: _gradient(both, x), leaves=leaves,
            modules=modules,
        )  # fmt: skip


def _gradient(step: Callable[[], None], x: Tensor) -> Tensor:
    x.grad = None
    step()
    assert x.grad is not None
    return x.grad


def _plan(recipe: str) -> ModulePlan:
    return ModulePlan(precision=Recipe.preset(recipe).linear(), recipe=recipe)


def _column(setting: Setting, kind: Any, weight: Tensor, *, fused: bool, **options: Any) -> Any:
    """A column-parallel linear of a class with a given weight."""
    s = setting.sizes
    module = kind(
        s.hidden, s.ffn, config=setting.megatron(fused=fused), init_method=torch.nn.init.zeros_, gather_output=False,
        bias=False, skip_bias_add=False, is_expert=False, **options,
    ).to(setting.device)  # fmt: skip
    with torch.no_grad():
        module.weight.copy_(weight)
    return _with_main_grads(module) if fused else module


def _columns_by_recipe(setting: Setting, kind: Any, weight: Tensor) -> dict[str, Any]:
    """Name of the backend -> this package's linear of that class."""
    return {
        f"{OURS} {recipe}": _column(setting, kind, weight, fused=True, plan=_plan(recipe)) for recipe in setting.recipes
    }


def _with_main_grads(module: Any) -> Any:
    """With the buffers that Megatron's DDP attaches."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.grad_added_to_main_grad = False
    return module
