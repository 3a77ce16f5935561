"""Transformer layers, forward and backward, tensor- and sequence-parallel: with collectives under the GEMMs, and without.

Llama's layer of this package's linears: norm, qkv, attention (torch's), projection, norm, gate, up, SwiGLU, down. "Off" is what
the linears do without overlap, which already runs the library's collectives asynchronously under dgrad and wgrad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._ranks import Ranks, Row, relative_error
from primus_turbo_plugin.communication.overlap import Overlap
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, OverlapUse, TensorParallel
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.recipe import Recipe

HEAD = 128
TOLERANCE = 2e-2  # bf16, several roundings of sums of a few thousand terms
Step = Callable[[OverlapUse | None], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model's layer, over all ranks."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    def shrunk(self, scale: int) -> Sizes:
        return dataclasses.replace(self, hidden=self.hidden // scale, ffn=self.ffn // scale)


MODELS = (Sizes("Llama-3-8B", 4096, 14336, 32, 8), Sizes("Llama-3-70B", 8192, 28672, 64, 8))


class Layer:
    """The layer's weights on this rank, sharded as over `tp` ranks.

    Args:
        sizes: Of the whole layer.
        tp: Ranks that share it.
        head: Length of a head.
        sequence: Tokens that attend to each other.
        device, dtype: Of the weights.
    """

    def __init__(
        self, sizes: Sizes, tp: int, head: int, sequence: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.heads, self.kv_heads, self.head = sizes.heads // tp, max(1, sizes.kv_heads // tp), head
        self.sequence = sequence

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, device=device, dtype=dtype) * columns**-0.5).requires_grad_()

        qkv = (self.heads + 2 * self.kv_heads) * head
        self.norms = [torch.ones(sizes.hidden, device=device, dtype=dtype).requires_grad_() for _ in range(2)]
        self.qkv, self.proj = weight(qkv, sizes.hidden), weight(sizes.hidden, self.heads * head)
        self.fc1, self.fc2 = weight(2 * sizes.ffn // tp, sizes.hidden), weight(sizes.hidden, sizes.ffn // tp)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.norms, self.qkv, self.proj, self.fc1, self.fc2]

    def forward(self, x: Tensor, column: LinearCall, row: LinearCall) -> Tensor:
        """[tokens / ranks, hidden] -> the same."""
        normed = F.rms_norm(x, x.shape[-1:], self.norms[0], 1e-5)
        attended = self._attention(linear(normed, self.qkv, None, column))
        x = x + linear(attended, self.proj, None, row)
        normed = F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-5)
        gate, up = linear(normed, self.fc1, None, column).chunk(2, dim=-1)
        return x + linear(F.silu(gate) * up, self.fc2, None, row)

    def _attention(self, qkv: Tensor) -> Tensor:
        tokens, groups = qkv.shape[0], self.heads // self.kv_heads
        q, k, v = qkv.view(tokens, -1, self.head).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        shape = (tokens // self.sequence, self.sequence, self.heads, self.head)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))  # [batch, heads, sequence, head]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(tokens, -1)


def stack_step(
    ranks: Ranks,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    tp: int,
    layers: int,
    tokens: int,
    sequence: int,
    head: int,
    recipe: str = "bf16",
) -> Step:
    """Forward and backward of a stack of layers over all ranks; gives y, dx and the first layer's weight gradients."""
    plan = ModulePlan(precision=Recipe.preset(recipe).linear())
    kernels = LinearKernels.select(plan, ranks.device, dtype, wgrad_dtype=dtype, accumulate=False)
    stack = [Layer(sizes, tp, head, sequence, ranks.device, dtype) for _ in range(layers)]
    x = torch.randn(tokens // ranks.size, sizes.hidden, device=ranks.device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    parameters = [parameter for layer in stack for parameter in layer.parameters]

    def step(use: OverlapUse | None) -> list[Tensor]:
        column, row = (
            LinearCall(
                plan=plan,
                kernels=kernels,
                parallel=TensorParallel(mode=mode, group=ranks.group, sequence_parallel=True),  # type: ignore[arg-type]
                overlap=use,
            )
            for mode in ("column", "row")
        )
        y: Tensor = x
        for layer in stack:
            y = layer.forward(y, column, row)
        dx, *gradients = torch.autograd.grad(y, [x, *parameters], dy)
        return [y.detach(), dx, *gradients[2:6]]

    return step


def captured(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The step as a CUDA graph, captured now; its results are the graph's own tensors."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return found

    return replay


def compare(
    ranks: Ranks, kind: str, shape: str, variants: dict[str, Callable[[], Callable[[], list[Tensor]]]], iterations: int
) -> list[Row]:
    """A row a variant: the first is the baseline and the reference of all results. A variant is made when its turn comes."""
    rows: list[Row] = []
    reference: list[Tensor] = []
    for name, make in variants.items():
        problem, found, run = "", [], None
        try:
            run = make()
            found = run()
            ranks.synchronize()
        except (RuntimeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:140] if str(error) else ''}"
        if problem := ranks.agree(problem):
            rows.append(Row(kind=kind, shape=shape, variant=name, timing=None, ok=f"cannot: {problem}"))
            ranks.say(rows[-1].text())
            continue
        assert run is not None
        reference = reference or [t.clone() for t in found]
        error = max(relative_error(a, b) for a, b in zip(found, reference))
        wrong = ranks.agree("" if error < TOLERANCE else f"WRONG, relative error {error:.1e}")
        timing = ranks.timed(run, iterations)
        base = next((row.timing.ms for row in rows if row.timing is not None), timing.ms)
        rows.append(
            Row(
                kind=kind,
                shape=shape,
                variant=name,
                timing=timing,
                speedup=base / timing.ms,
                ok=wrong or f"err {error:.0e}",
            )
        )
        ranks.say(rows[-1].text())
    return rows


def variants_of(step: Step, overlap: Overlap | None) -> dict[str, Callable[[], Callable[[], list[Tensor]]]]:
    """Overlap off and on and, where it can be captured, on in a graph.

    The graph is of an overlap of its own: eager calls of one that has been captured begin with a handshake ever after.
    """
    found = {"overlap off": lambda: lambda: step(None)}
    if overlap is None:
        return found
    uses = {"overlap on": OverlapUse(overlap=overlap)}
    uses["overlap on, dx behind dgrad"] = OverlapUse(overlap=overlap, scatter_dgrad=True)
    for name, use in uses.items():
        found[name] = lambda use=use: lambda: step(use)
    if overlap.transport.capabilities.name == "sdma":
        own = OverlapUse(overlap=Overlap(overlap.transport, costs=overlap.costs))
        found["overlap on, captured"] = lambda: captured(lambda: step(own))
    return found


def layer_rows(
    ranks: Ranks, overlap: Overlap, dtype: torch.dtype, *, tokens: int, scale: int, iterations: int
) -> Iterator[list[Row]]:
    """Rows with overlap off and on: each model, sharded over the ranks there are and, on the same ranks, as over eight."""
    for sizes in MODELS:
        for tp in dict.fromkeys((ranks.size, 8)):
            shape = f"{sizes.name} as TP={tp}, {tokens} tokens"
            if not ranks.enough_time(30):
                ranks.say(f"\nlayer {shape}: no time left")
                continue
            ranks.say(f"\nlayer forward + backward, {shape}")
            step = stack_step(
                ranks, dtype, sizes.shrunk(scale), tp=tp, layers=1, tokens=tokens, sequence=tokens,
                head=max(2, HEAD // scale),
            )  # fmt: skip
            yield compare(ranks, "layer", shape, variants_of(step, overlap), iterations)
