"""One transformer layer, forward and backward, tensor- and sequence-parallel: with collectives under the GEMMs, and without.

Llama's layer of this package's linears: norm, qkv, attention (torch's), projection, norm, gate, up, SwiGLU, down. "Off" is what
the linears do without overlap, which already runs the library's collectives asynchronously under dgrad and wgrad.
"""

from __future__ import annotations

import dataclasses
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model's layer, over all ranks."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int


MODELS = (Sizes("Llama-3-8B", 4096, 14336, 32, 8), Sizes("Llama-3-70B", 8192, 28672, 64, 8))


class Layer:
    """The layer's weights on this rank, sharded as over `tp` ranks."""

    def __init__(self, sizes: Sizes, tp: int, head: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head = sizes.heads // tp, max(1, sizes.kv_heads // tp), head

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
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # [1, heads, tokens, head]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.squeeze(0).transpose(0, 1).reshape(tokens, -1)


def layer_rows(
    ranks: Ranks, overlap: Overlap, dtype: torch.dtype, *, tokens: int, scale: int, iterations: int
) -> list[Row]:
    """Rows with overlap off and on: each model, sharded over the ranks there are and, on the same ranks, as over eight."""
    rows: list[Row] = []
    for sizes in MODELS:
        for tp in dict.fromkeys((ranks.size, 8)):
            if not ranks.enough_time(40):
                ranks.say(f"\nlayer {sizes.name} as TP={tp}: no time left")
                continue
            shrunk = dataclasses.replace(sizes, hidden=sizes.hidden // scale, ffn=sizes.ffn // scale)
            rows += _rows_of(ranks, overlap, dtype, shrunk, tp, max(2, HEAD // scale), tokens, iterations)
    return rows


def _rows_of(
    ranks: Ranks,
    overlap: Overlap,
    dtype: torch.dtype,
    sizes: Sizes,
    tp: int,
    head: int,
    tokens: int,
    iterations: int,
) -> list[Row]:
    plan = ModulePlan(precision=Recipe.preset("bf16").linear())
    kernels = LinearKernels.select(plan, ranks.device, dtype, wgrad_dtype=dtype, accumulate=False)
    layer = Layer(sizes, tp, head, ranks.device, dtype)
    x = torch.randn(tokens // ranks.size, sizes.hidden, device=ranks.device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    shape = f"{sizes.name} as TP={tp}, {tokens} tokens"
    ranks.say(f"\nlayer forward + backward, {shape}")

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
        x.grad = None
        for parameter in layer.parameters:
            parameter.grad = None
        y = layer.forward(x, column, row)
        y.backward(dy)
        return [y.detach(), x.grad, layer.qkv.grad, layer.fc1.grad, layer.fc2.grad]  # type: ignore[list-item]

    uses = {"overlap off": None, "overlap on": OverlapUse(overlap=overlap)}
    uses["overlap on, dx behind dgrad"] = OverlapUse(overlap=overlap, scatter_dgrad=True)
    rows: list[Row] = []
    reference: list[Tensor] = []
    for name, use in uses.items():
        problem = ""
        try:
            found = step(use)
            ranks.synchronize()
        except RuntimeError as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:140]}"
        if problem := ranks.agree(problem):
            rows.append(Row(kind="layer", shape=shape, variant=name, timing=None, ok=f"cannot: {problem}"))
            ranks.say(rows[-1].text())
            continue
        reference = reference or [t.clone() for t in found]
        error = max(relative_error(a, b) for a, b in zip(found, reference))
        wrong = ranks.agree("" if error < 2e-2 else f"WRONG, relative error {error:.1e}")
        timing = ranks.timed(lambda use=use: step(use), iterations)
        base = next((row.timing.ms for row in rows if row.timing is not None), timing.ms)
        rows.append(
            Row(
                kind="layer",
                shape=shape,
                variant=name,
                timing=timing,
                speedup=base / timing.ms,
                ok=wrong or f"err {error:.0e}",
            )
        )
        ranks.say(rows[-1].text())
    return rows
